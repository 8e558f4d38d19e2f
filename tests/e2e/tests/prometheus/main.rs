//! Metrics, aliases and alerts in a real Prometheus that scrapes the cluster.
//!
//! The alerts are those of the chart without their waiting times, which `tests/alerts` covers.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::prometheus::Prometheus;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

mod alerts;

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

/// Metrics without series in this test, which the driver's own tests check: of shares that violate their limits, burst, lend, are spatial
/// or are suspended.
const OF_FEW_SHARES: [&str; 6] = [
    "drava_share_violation_info",
    "drava_share_burst_bytes",
    "drava_share_lent_bytes",
    "drava_share_multiprocessors_ratio",
    "drava_share_suspended_bytes",
    "drava_share_suspended_seconds",
];

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
    for name in OF_FEW_SHARES {
        ensure!(missing.remove(name), "{name} is not documented");
    }
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

/// Checks that `kubectl drava cost` shows what pod `small` has requested and used.
fn check_costs(
    cluster: &TestCluster,
    prometheus: &Prometheus,
    tenant: &Namespace<'_>,
) -> Result<()> {
    let address = prometheus.url();
    let command = ["cost", "--prometheus", &address, "--since", "1h"];
    let document = ["-o", "json", "-n", tenant.name()];
    // Prometheus sees a use between two samples only.
    let launch = ["cuda-probe", "launch", "--ms", "5", "--seconds", "1"];
    wait("the share has a cost", || {
        tenant.exec("small", "app", &launch)?.success()?;
        let report = cluster.drava(&[&command[..], &document].concat())?.json()?;
        let amount = |name: &str| report["costs"][0][name].as_f64().unwrap_or_default();
        let (requested, used) = (amount("requestedGpuHours"), amount("usedGpuHours"));
        let is_sound =
            requested > 0.0 && used > 0.0 && amount("requestedMemoryGibHours") > requested;
        Ok(is_sound.then_some(()))
    })
}

/// Checks that `kubectl drava recommend` shows a memory for pod `small` between what it has used and what it has.
fn check_recommendation(
    cluster: &TestCluster,
    prometheus: &Prometheus,
    tenant: &Namespace<'_>,
) -> Result<()> {
    let address = prometheus.url();
    let command = ["recommend", "--prometheus", &address, "--since", "1h"];
    let document = ["-o", "json", "-n", tenant.name()];
    wait("the share has a recommendation", || {
        let report = cluster.drava(&[&command[..], &document].concat())?.json()?;
        let one = &report["recommendations"][0];
        let mib = |name: &str| one["memoryMib"][name].as_u64();
        let (Some(current), Some(used)) = (mib("current"), mib("used")) else {
            return Ok(None);
        };
        let is_sound = one["name"] == "small"
            && current == 1024
            && (used + 1..current).contains(&mib("recommended").unwrap_or_default());
        ensure!(is_sound, "{report}");
        Ok(Some(()))
    })
}

#[test]
fn prometheus_has_metrics_and_fires_alerts() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("prometheus")?;
    set_aliases(&cluster, true)?;
    let checked = (|| {
        let prometheus = Prometheus::start(&cluster)?;
        with_pods(&tenant)?;
        // XID 31 is the fault of a program, not of the GPU; the fault of GPU 1 is over before its alert is expected.
        let xid = ["xid", "--gpu", "1", "--code", "31"];
        cluster.first_node().simulator(&xid)?;
        alerts::set_faults(&cluster, "1", &["--lost"])?;
        prometheus.wait_for_alert("DravaGpuUnhealthy", "reason", "lost")?;
        alerts::set_faults(&cluster, "1", &[])?;
        prometheus.wait_for_silence("DravaGpuUnhealthy")?;
        check_metrics(&prometheus, &tenant)?;
        check_costs(&cluster, &prometheus, &tenant)?;
        check_recommendation(&cluster, &prometheus, &tenant)?;
        alerts::check(&cluster, &prometheus, &tenant)?;
        alerts::check_faults(&cluster, &prometheus, &tenant)
    })();
    // As before, whatever has failed.
    for gpu in ["0", "1"] {
        alerts::set_faults(&cluster, gpu, &[])?;
    }
    cluster.kubectl(["delete", "gpuquota", tenant.name(), "--ignore-not-found"])?;
    set_aliases(&cluster, false)?;
    checked
}
