//! Each alert fires for its cause, and is silent after it.

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use drava_cluster::Component;
use drava_e2e::doctor::patch;
use drava_e2e::manifest::{claim_template, pod_with_request, pod_with_share};
use drava_e2e::prometheus::Prometheus;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::{Value, json};

use super::{CONTROLLER, SYSTEM};

/// Sets the faults of a simulated GPU.
pub(super) fn set_faults(cluster: &TestCluster, gpu: &str, faults: &[&str]) -> Result<()> {
    let arguments = [&["break", "--gpu", gpu], faults].concat();
    cluster.first_node().simulator(&arguments).map(drop)
}

/// Lets alerts fire by the pods of the test, by faults of a GPU, and without controller.
pub(super) fn check(
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
    prometheus.follow_pods(cluster)?;
    prometheus.wait_for_silence("DravaControllerWithoutLeader")
}

/// Lets alerts fire by faults of pods and of drava. Pods of `tenant` are `small`, which runs, and `large`, which its quota
/// rejects.
pub(super) fn check_faults(
    cluster: &TestCluster,
    prometheus: &Prometheus,
    tenant: &Namespace<'_>,
) -> Result<()> {
    let other = cluster.namespace("prometheus-faults")?;
    full_gpu(&other)?;
    overcommit(&other)?;
    escape(cluster, tenant)?;
    certificate_near_end(cluster, prometheus)?;
    prometheus.wait_for_alert("DravaGpuMemoryHigh", "node", "node-0")?;
    prometheus.wait_for_alert("DravaGpuOvercommitted", "node", "node-0")?;
    prometheus.wait_for_alert("DravaProcessEscaped", "namespace", tenant.name())?;
    other.delete_pods(&["full", "shared"])?;
    // Its finalizer, which claims have from their creation, keeps it while the pod is there that it names.
    other.kubectl(&["delete", "resourceclaim", "forged"])?;
    failed_prepare(cluster, prometheus, &other)?;
    driver_not_registered(cluster, prometheus)?;
    ledger_drift(cluster, prometheus, tenant)?;
    tenant.delete_pods(&["small"])?;
    for alert in [
        "DravaGpuMemoryHigh",
        "DravaGpuOvercommitted",
        "DravaProcessEscaped",
        "DravaWebhookCertificateExpiring",
        "DravaDriverNotReady",
        "DravaLedgerDrift",
    ] {
        prometheus.wait_for_silence(alert)?;
    }
    Ok(())
}

/// Fills a GPU.
fn full_gpu(tenant: &Namespace<'_>) -> Result<()> {
    let pod = pod_with_request("full", "{deviceClassName: gpu.drava.dev}", "");
    let fill = "[cuda-probe, fill, --hold, \"3600\"]";
    tenant.apply(&pod.replace("[sleep, infinity]", fill))?;
    tenant.running("full")
}

/// Gives a second claim more of a GPU than it has, as another allocator would.
fn overcommit(tenant: &Namespace<'_>) -> Result<()> {
    tenant.apply(&pod_with_share("shared", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running("shared")?;
    let claim = tenant.claim_of("shared")?;
    let claim = tenant.find("resourceclaim", &claim)?.context("claim")?;
    let forged = claim_template("forged", "{deviceClassName: vgpu.drava.dev}", "")
        .replace("ResourceClaimTemplate", "ResourceClaim")
        .replace("spec:\n  spec:\n    devices:", "spec:\n    devices:");
    tenant.apply(&forged)?;
    // In use by the pod, so the controller cannot repair it.
    let mut status = json!({
        "allocation": claim["status"]["allocation"], "reservedFor": claim["status"]["reservedFor"],
    });
    let result = &mut status["allocation"]["devices"]["results"][0];
    result["shareID"] = json!("11111111-1111-4111-8111-111111111111");
    result["consumedCapacity"]["memory"] = json!("200Gi");
    let status = json!({"status": status}).to_string();
    let patch = ["patch", "resourceclaim", "forged", "--subresource=status"];
    tenant.kubectl(&[&patch[..], &["--type=merge", "-p", &status]].concat())?;
    Ok(())
}

/// Starts a program in the pod `small` by a loader that preloads nothing.
fn escape(cluster: &TestCluster, tenant: &Namespace<'_>) -> Result<()> {
    let script = "for d in /proc/[0-9]*; do \
        if grep -qzxF HOSTNAME=small $d/environ && [ \"$(cat $d/comm)\" = sleep ]; then \
        mkdir -p $d/root/tmp; \
        sed s#/etc/ld.so.preload#/etc/ld.so.nothing# /lib64/ld-linux-x86-64.so.2 > $d/root/tmp/loader; \
        chmod 755 $d/root/tmp/loader; fi; done";
    cluster.on_node("sh", &["-c", script])?;
    let program = "/tmp/loader /usr/bin/cuda-probe alloc --mib 100 --hold 600 > /dev/null 2>&1 &";
    let started = tenant.exec("small", "app", &["sh", "-c", program])?;
    started.success().map(drop)
}

/// Replaces the certificate of the webhook by one that ends soon. The leader rotates it, at the earliest after the five seconds
/// that API servers have to trust the next one.
fn certificate_near_end(cluster: &TestCluster, prometheus: &Prometheus) -> Result<()> {
    let mut params =
        rcgen::CertificateParams::new(vec!["drava-webhook.drava-system.svc".to_owned()])?;
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after =
        (std::time::SystemTime::now() + std::time::Duration::from_secs(86_400)).into();
    let key = rcgen::KeyPair::generate()?;
    let certificate = STANDARD.encode(params.self_signed(&key)?.pem());
    let key = STANDARD.encode(key.serialize_pem());
    let data = json!({"data": {"tls.crt": certificate, "tls.key": key}});
    patch(cluster, &["secret", "drava-webhook"], "merge", &data)?;
    prometheus.wait_for_alert("DravaWebhookCertificateExpiring", "severity", "warning")
}

/// Makes the directory of CDI specs read-only for the node driver.
fn failed_prepare(
    cluster: &TestCluster,
    prometheus: &Prometheus,
    tenant: &Namespace<'_>,
) -> Result<()> {
    let remount = |mode: &str| {
        let script = format!(
            "for d in /proc/[0-9]*; do if [ \"$(cat $d/comm)\" = drava-dra-drive ]; then \
             mount -N ${{d#/proc/}} -o remount,bind,{mode} /var/run/cdi; fi; done 2>/dev/null; true"
        );
        cluster.on_node("sh", &["-c", &script]).map(drop)
    };
    remount("ro")?;
    let fired = tenant
        .apply(&pod_with_share("waits", "vgpu.drava.dev", "{memory: 1Gi}"))
        .and_then(|()| prometheus.wait_for_alert("DravaPrepareFailed", "operation", "prepare"));
    remount("rw")?;
    fired?;
    tenant.running("waits")
}

/// Puts a directory in the place of the registration socket.
fn driver_not_registered(cluster: &TestCluster, prometheus: &Prometheus) -> Result<()> {
    let script =
        "for f in /var/lib/kubelet/plugins_registry/gpu.drava.dev*; do rm $f; mkdir $f; done";
    cluster.on_node("sh", &["-ec", script])?;
    let fired = prometheus.wait_for_alert("DravaDriverNotReady", "condition", "registered");
    cluster.on_node(
        "sh",
        &[
            "-ec",
            "rmdir /var/lib/kubelet/plugins_registry/gpu.drava.dev*",
        ],
    )?;
    fired?;
    cluster.drava_ready()
}

/// Ends the watch of claims while the controller may still write them.
fn ledger_drift(
    cluster: &TestCluster,
    prometheus: &Prometheus,
    tenant: &Namespace<'_>,
) -> Result<()> {
    let object = ["clusterrole", "drava-controller"];
    let role = cluster.get(&object)?;
    let mut rules = role["rules"].clone();
    let of_claims = |rule: &&mut Value| rule["resources"] == json!(["resourceclaims"]);
    let rule = rules
        .as_array_mut()
        .context("rules")?
        .iter_mut()
        .find(of_claims);
    rule.context("no rule of claims")?["verbs"] = json!(["get", "update", "patch"]);
    patch(cluster, &object, "merge", &json!({"rules": rules}))?;
    let fired = (|| {
        // An open watch goes on. A stop in order takes longer than the lease of the leader.
        let node = cluster.kubernetes().control_plane();
        node.kill(Component::KubeApiserver)?;
        wait("the watch of claims fails", || {
            let failures =
                r#"increase(drava_controller_watch_failures_total{kind="resourceclaims"}[1m]) > 0"#;
            Ok((!prometheus.query(failures)?.is_empty()).then_some(()))
        })?;
        wait("the API server is ready", || {
            Ok(cluster.kubectl(["get", "--raw", "/readyz"]).ok())
        })?;
        let quota = json!({"spec": {"guarantee": {"memory": "8Gi"}, "limit": {"memory": "8Gi"}}});
        patch(cluster, &["gpuquota", tenant.name()], "merge", &quota)?;
        prometheus.wait_for_alert("DravaLedgerDrift", "severity", "warning")
    })();
    patch(cluster, &object, "merge", &json!({"rules": role["rules"]}))?;
    fired?;
    tenant.running("large")
}
