//! A real Prometheus that scrapes drava on the cluster, with the alerts of the chart.
//!
//! The alerts have no waiting times, which `tests/alerts` covers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use drava_cluster::http;
use serde_json::{Value, json};

use crate::{TestCluster, wait};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const SYSTEM: &str = "drava-system";

/// A running Prometheus.
pub struct Prometheus {
    child: Child,
    host: String,
    directory: PathBuf,
}

impl Prometheus {
    /// Starts the server, with the pods of drava as targets.
    ///
    /// # Errors
    /// When the server cannot be built or does not start.
    pub fn start(cluster: &TestCluster) -> Result<Self> {
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

    /// Returns the address of the server.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.host)
    }

    /// Reads the pods of drava again, after a change.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn follow_pods(&self, cluster: &TestCluster) -> Result<()> {
        write_targets(cluster, &self.directory)
    }

    /// Returns the result of an instant query.
    ///
    /// # Errors
    /// When the server does not answer, or rejects the query.
    pub fn query(&self, expression: &str) -> Result<Vec<Value>> {
        let query: String = form_urlencoded::byte_serialize(expression.as_bytes()).collect();
        let path = format!("/api/v1/query?query={query}");
        let response: Value = serde_json::from_str(&http::get(&self.host, &path)?)?;
        let result = response["data"]["result"].as_array().cloned();
        result.with_context(|| format!("{expression}: {response}"))
    }

    /// Returns the labels of the firing alerts with this name.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn firing(&self, alert: &str) -> Result<Vec<Value>> {
        let response: Value = serde_json::from_str(&http::get(&self.host, "/api/v1/alerts")?)?;
        let alerts = response["data"]["alerts"].as_array().context("alerts")?;
        let firing = alerts
            .iter()
            .filter(|one| one["labels"]["alertname"] == alert && one["state"] == "firing");
        Ok(firing.map(|one| one["labels"].clone()).collect())
    }

    /// Waits until an alert fires with this label.
    ///
    /// # Errors
    /// When it does not fire in time.
    pub fn wait_for_alert(&self, alert: &str, label: &str, value: &str) -> Result<()> {
        wait(&format!("{alert} with {label}={value}"), || {
            let firing = self.firing(alert)?;
            let found = firing.iter().any(|labels| labels[label] == value);
            Ok(found.then_some(()))
        })
    }

    /// Waits until no alert with this name fires.
    ///
    /// # Errors
    /// When it still fires then.
    pub fn wait_for_silence(&self, alert: &str) -> Result<()> {
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

/// Writes the alerts of the chart without their waiting times, of which one is a threshold.
fn write_rules(directory: &Path) -> Result<()> {
    for file in ["driver.yaml", "controller.yaml"] {
        let path = format!("{ROOT}/deploy/helm/drava/files/alerts/{file}");
        let rules = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let lines = rules
            .lines()
            .filter(|line| !line.trim().starts_with("for:"));
        let rules = lines.collect::<Vec<_>>().join("\n");
        let rules = rules.replace("drift_seconds > 60", "drift_seconds > 3");
        fs::write(directory.join(format!("rules-{file}")), rules)?;
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
