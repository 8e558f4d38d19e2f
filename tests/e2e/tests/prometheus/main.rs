//! Metrics, aliases and alerts in a real Prometheus that scrapes the cluster.
//!
//! The alerts are those of the chart without their waiting times, which `tests/alerts` covers.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, TestCluster, http, wait};
use serde_json::{Value, json};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const SYSTEM: &str = "drava-system";
const CONTROLLER: &str = "deployment/drava-controller";

/// Reference of all metrics.
const REFERENCE: &str = "docs/reference/metrics.md";

/// Expressions of dashboards of HAMi and Volcano, with the namespace, pod and node of the test.
const ALIAS_EXPRESSIONS: [&str; 10] = [
    r#"sum(vGPU_device_memory_usage_in_bytes{podnamespace="NAMESPACE"}) by (podname)"#,
    r#"sum(vGPU_device_memory_usage_in_bytes) / sum(vGPU_device_memory_limit_in_bytes)"#,
    r#"sum(Device_memory_desc_of_container{podname=~"small"}) by (podname)"#,
    r#"avg by (podname) (Device_utilization_desc_of_container)"#,
    r#"HostCoreUtilization{nodeid="node-0"}"#,
    r#"sum(volcano_vgpu_device_allocated_memory) / sum(volcano_vgpu_device_memory_limit)"#,
    r#"sum by (podName) (volcano_vgpu_device_memory_allocation_for_a_certain_pod{NodeName="node-0"})"#,
    r#"hami_gpu_memory_allocated_bytes{node=~"node-0"} - on (device_uuid) hami_host_gpu_memory_used_bytes"#,
    r#"topk(10, hami_vgpu_memory_used_bytes{namespace="NAMESPACE"} / hami_vgpu_memory_limit_bytes)"#,
    r#"sum(hami_gpu_core_allocated_ratio) / sum(hami_gpu_core_limit_ratio)"#,
];

/// A running Prometheus.
struct Prometheus {
    child: Child,
    host: String,
    directory: PathBuf,
}

impl Prometheus {
    /// Starts the server, with the pods of drava as targets.
    fn start(cluster: &TestCluster) -> Result<Self> {
        let program = drava_cluster::prometheus().context("build Prometheus")?;
        let directory = cluster.kubernetes().state().join("prometheus");
        // Series of a previous run.
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory)?;
        write_rules(&directory)?;
        write_targets(cluster, &directory)?;
        fs::write(
            directory.join("prometheus.yml"),
            configuration(cluster, &directory)?.to_string(),
        )?;
        let host = format!("127.0.0.1:{}", http::free_port()?);
        let log = fs::File::create(directory.join("log"))?;
        let child = Command::new(program)
            .current_dir(&directory)
            .arg("--config.file=prometheus.yml")
            .arg("--storage.tsdb.path=data")
            .arg(format!("--web.listen-address={host}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        let prometheus = Self {
            child,
            host,
            directory,
        };
        wait("Prometheus is ready", || {
            Ok(http::get(&prometheus.host, "/-/ready").ok().map(drop))
        })?;
        Ok(prometheus)
    }

    /// Returns the result of an instant query.
    fn query(&self, expression: &str) -> Result<Vec<Value>> {
        let path = format!("/api/v1/query?query={}", http::encoded(expression));
        let response: Value = serde_json::from_str(&http::get(&self.host, &path)?)?;
        let result = response["data"]["result"].as_array().cloned();
        result.with_context(|| format!("{expression}: {response}"))
    }

    /// Returns the labels of the firing alerts with this name.
    fn firing(&self, alert: &str) -> Result<Vec<Value>> {
        let response: Value = serde_json::from_str(&http::get(&self.host, "/api/v1/alerts")?)?;
        let alerts = response["data"]["alerts"].as_array().context("alerts")?;
        let firing = alerts
            .iter()
            .filter(|one| one["labels"]["alertname"] == alert && one["state"] == "firing");
        Ok(firing.map(|one| one["labels"].clone()).collect())
    }

    /// Waits until an alert fires with this label.
    fn wait_for_alert(&self, alert: &str, label: &str, value: &str) -> Result<()> {
        wait(&format!("{alert} with {label}={value}"), || {
            let firing = self.firing(alert)?;
            let found = firing.iter().any(|labels| labels[label] == value);
            Ok(found.then_some(()))
        })
    }

    /// Waits until no alert with this name fires.
    fn wait_for_silence(&self, alert: &str) -> Result<()> {
        wait(&format!("{alert} is silent"), || {
            Ok(self.firing(alert)?.is_empty().then_some(()))
        })
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes the alerts of the chart without their waiting times.
fn write_rules(directory: &Path) -> Result<()> {
    for file in ["driver.yaml", "controller.yaml"] {
        let path = format!("{ROOT}/deploy/helm/drava/files/alerts/{file}");
        let rules = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let lines = rules
            .lines()
            .filter(|line| !line.trim().starts_with("for:"));
        let rules: Vec<&str> = lines.collect();
        fs::write(directory.join(format!("rules-{file}")), rules.join("\n"))?;
    }
    Ok(())
}

/// Writes the pods of drava as targets, which Prometheus reads again after a change. It reaches them by the API server.
fn write_targets(cluster: &TestCluster, directory: &Path) -> Result<()> {
    let config = cluster.kubectl(["config", "view", "--raw", "-o", "json"])?;
    let config: Value = serde_json::from_str(&config)?;
    let server = config["clusters"][0]["cluster"]["server"].as_str();
    let server = server.context("server")?.trim_start_matches("https://");
    for (component, port) in [("driver", 9394), ("controller", 8080)] {
        let selector = format!("app.kubernetes.io/component={component}");
        let pods = cluster.get(&["pods", "-n", SYSTEM, "-l", &selector])?;
        let pods = pods["items"].as_array().context("pods")?;
        let running = pods
            .iter()
            .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        let target = |pod: &Value| {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            let path = format!("/api/v1/namespaces/{SYSTEM}/pods/{name}:{port}/proxy/metrics");
            let mut labels = json!({"__metrics_path__": path, "instance": name});
            if component == "driver" {
                labels["node"] = pod["spec"]["nodeName"].clone();
            }
            json!({"targets": [server], "labels": labels})
        };
        let targets: Vec<Value> = running.map(target).collect();
        let file = directory.join(format!("{component}.json"));
        fs::write(file, Value::from(targets).to_string())?;
    }
    Ok(())
}

/// Returns the configuration, which is that of the PodMonitors except for the way to the pods.
fn configuration(cluster: &TestCluster, directory: &Path) -> Result<Value> {
    let config = cluster.kubectl(["config", "view", "--raw", "-o", "json"])?;
    let config: Value = serde_json::from_str(&config)?;
    let (cluster, user) = (
        &config["clusters"][0]["cluster"],
        &config["users"][0]["user"],
    );
    for (file, data) in [
        ("ca.crt", &cluster["certificate-authority-data"]),
        ("user.crt", &user["client-certificate-data"]),
        ("user.key", &user["client-key-data"]),
    ] {
        let data = data
            .as_str()
            .with_context(|| format!("no data of {file}"))?;
        fs::write(directory.join(file), STANDARD.decode(data)?)?;
    }
    let job = |component: &str| {
        json!({
            "job_name": component,
            "scheme": "https",
            "honor_labels": component == "driver",
            "file_sd_configs": [{"files": [format!("{component}.json")], "refresh_interval": "1s"}],
            "tls_config": {"ca_file": "ca.crt", "cert_file": "user.crt", "key_file": "user.key"},
        })
    };
    Ok(json!({
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules-*.yaml"],
        "scrape_configs": [job("driver"), job("controller")],
    }))
}

/// Returns the names of the metrics in the reference; those of histograms with the suffix of a series.
fn documented_metrics() -> Result<BTreeSet<String>> {
    let text = fs::read_to_string(format!("{ROOT}/{REFERENCE}"))?;
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
    let name = |row: &str| {
        let (name, rest) = row.split_once("` | ")?;
        let suffix = if rest.starts_with("histogram") {
            "_count"
        } else {
            ""
        };
        Some(format!("{name}{suffix}"))
    };
    Ok(rows.filter_map(name).collect())
}

fn set_aliases(cluster: &TestCluster, enabled: bool) -> Result<()> {
    let chart = format!("{ROOT}/deploy/helm/drava");
    let value = format!("metrics.aliases={enabled}");
    let upgrade = ["-n", SYSTEM, "upgrade", "drava", &chart, "--reuse-values"];
    cluster.helm(upgrade.iter().chain(&["--set", &value]))?;
    cluster.drava_ready()
}

/// Sets the faults of a simulated GPU.
fn set_faults(cluster: &TestCluster, card: &str, faults: &[&str]) -> Result<()> {
    let arguments = [&["break", "--card", card], faults].concat();
    cluster.first_node().simulator(&arguments).map(drop)
}

/// Creates a quota of the namespace that its pods use up, a pod that uses its GPU, and one that is pending.
fn with_pods(tenant: &Namespace<'_>) -> Result<()> {
    tenant.apply(&format!(
        "{{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuQuota, metadata: {{name: {0}}}, spec: {{namespaces: [{0}], \
         guarantee: {{memory: 1Gi}}, limit: {{memory: 1Gi}}}}}}",
        tenant.name()
    ))?;
    let capacity = "{memory: 1Gi, cores: 20}";
    tenant.apply(&pod_with_share("small", "vgpu.drava.dev", capacity))?;
    tenant.running("small")?;
    tenant.apply(&pod_with_share("large", "vgpu.drava.dev", "{memory: 2Gi}"))?;
    let launch = ["cuda-probe", "launch", "--ms", "5", "--seconds", "2"];
    tenant.exec("small", "app", &launch)?.success()?;
    Ok(())
}

/// Checks that all metrics of the reference have series, and that the expressions of the aliases return data.
fn check_metrics(prometheus: &Prometheus, tenant: &Namespace<'_>) -> Result<()> {
    let mut missing = documented_metrics()?;
    ensure!(missing.len() > 80, "metrics of the reference: {missing:?}");
    let found = wait("all metrics of the reference", || {
        let names = prometheus.query(r#"count by (__name__) (last_over_time({job=~".+"}[5m]))"#)?;
        for name in &names {
            missing.remove(name["metric"]["__name__"].as_str().unwrap_or_default());
        }
        Ok(missing.is_empty().then_some(()))
    });
    found.with_context(|| format!("without series: {missing:?}"))?;
    for expression in ALIAS_EXPRESSIONS {
        let expression = expression.replace("NAMESPACE", tenant.name());
        let result = prometheus.query(&expression)?;
        ensure!(!result.is_empty(), "no data for {expression}");
        let is_number = |one: &Value| {
            let value = one["value"][1].as_str().unwrap_or_default();
            value.parse::<f64>().is_ok_and(f64::is_finite)
        };
        ensure!(result.iter().all(is_number), "{expression}: {result:?}");
    }
    Ok(())
}

/// Lets alerts fire by their causes.
fn check_alerts(
    cluster: &TestCluster,
    prometheus: &Prometheus,
    tenant: &Namespace<'_>,
) -> Result<()> {
    let name = tenant.name();
    // The pods of the test are the causes.
    prometheus.wait_for_alert("DravaPodsPending", "reason", "QuotaExceeded")?;
    prometheus.wait_for_alert("DravaQuotaAlmostUsed", "quota", name)?;
    prometheus.wait_for_alert("DravaGpuUnderused", "node", "node-0")?;
    let too_much = ["cuda-probe", "alloc", "--mib", "4096"];
    let denied = tenant.exec("small", "app", &too_much)?;
    ensure!(denied.code != 0, "an allocation beyond the limit succeeds");
    prometheus.wait_for_alert("DravaMemoryDenied", "namespace", name)?;

    for alert in ["DravaGpuTemperatureHigh", "DravaGpuUnhealthy"] {
        let firing = prometheus.firing(alert)?;
        ensure!(firing.is_empty(), "{alert} without a cause: {firing:?}");
    }
    set_faults(cluster, "0", &["--temperature-celsius", "85"])?;
    wait("85 °C", || {
        let hot = prometheus.query("drava_gpu_temperature_celsius == 85")?;
        Ok((!hot.is_empty()).then_some(()))
    })?;
    let firing = prometheus.firing("DravaGpuTemperatureHigh")?;
    ensure!(firing.is_empty(), "85 °C: {firing:?}");
    set_faults(cluster, "0", &["--temperature-celsius", "86"])?;
    prometheus.wait_for_alert("DravaGpuTemperatureHigh", "node", "node-0")?;
    set_faults(cluster, "0", &["--lost"])?;
    prometheus.wait_for_alert("DravaGpuUnhealthy", "reason", "lost")?;
    set_faults(cluster, "0", &[])?;
    for alert in ["DravaGpuTemperatureHigh", "DravaGpuUnhealthy"] {
        prometheus.wait_for_silence(alert)?;
    }

    cluster.kubectl(["-n", SYSTEM, "scale", CONTROLLER, "--replicas=0"])?;
    let fired = prometheus.wait_for_alert("DravaControllerWithoutLeader", "severity", "critical");
    cluster.kubectl(["-n", SYSTEM, "scale", CONTROLLER, "--replicas=2"])?;
    fired?;
    cluster.drava_ready()?;
    write_targets(cluster, &prometheus.directory)?;
    prometheus.wait_for_silence("DravaControllerWithoutLeader")
}

#[test]
fn prometheus_has_metrics_and_fires_alerts() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("prometheus")?;
    set_aliases(&cluster, true)?;
    let checked = (|| {
        let prometheus = Prometheus::start(&cluster)?;
        with_pods(&tenant)?;
        // XID 31 is the fault of a program, not of the GPU; the fault of card 1 is over before its alert is expected.
        let xid = ["xid", "--card", "1", "--code", "31"];
        cluster.first_node().simulator(&xid)?;
        set_faults(&cluster, "1", &["--lost"])?;
        prometheus.wait_for_alert("DravaGpuUnhealthy", "reason", "lost")?;
        set_faults(&cluster, "1", &[])?;
        prometheus.wait_for_silence("DravaGpuUnhealthy")?;
        check_metrics(&prometheus, &tenant)?;
        check_alerts(&cluster, &prometheus, &tenant)
    })();
    // As before, whatever has failed.
    for card in ["0", "1"] {
        set_faults(&cluster, card, &[])?;
    }
    cluster.kubectl(["delete", "gpuquota", tenant.name(), "--ignore-not-found"])?;
    set_aliases(&cluster, false)?;
    checked
}
