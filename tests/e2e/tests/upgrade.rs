//! `helm upgrade` from the previous chart, which replaces all pods of drava while a program computes on a share, `helm test`,
//! and a downgrade that cannot read the state of the node.

use anyhow::{Context, Result, ensure};
use drava_cluster::workspace_root;
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

/// The previous chart: that of commit e3d40cf.
const PREVIOUS: &str = "tests/e2e/charts/drava-previous.tgz";
/// The chart under test.
const PRESENT: &str = "deploy/helm/drava";

/// Upgrades drava to a chart so that Kubernetes replaces all of its pods.
fn upgrade(cluster: &TestCluster, chart: &str) -> Result<()> {
    let build = chart.rsplit('/').next().unwrap_or_default();
    let chart = workspace_root().join(chart);
    let chart = chart.to_str().context("the path of the chart")?;
    let mut helm = vec!["upgrade", "drava", chart, "--namespace", "drava-system"];
    // Other tests have changed objects with kubectl.
    helm.extend(["--force-conflicts", "--wait", "--timeout", "3m"]);
    helm.extend([
        "--reset-then-reuse-values",
        "--set",
        "test.image=localhost/drava-demo:dev",
    ]);
    let annotations = ["driver", "controller"]
        .map(|component| format!("{component}.podAnnotations.example\\.com/build={build}"));
    for annotation in &annotations {
        helm.extend(["--set-string", annotation]);
    }
    cluster.helm(helm)?;
    cluster.drava_ready()
}

/// Names of the pods of drava that are not being deleted.
fn pods_of_drava(cluster: &TestCluster) -> Result<Vec<String>> {
    let pods = cluster.get(&["pods", "-n", "drava-system"])?;
    let pods = pods["items"].as_array().context("pods")?;
    Ok(pods
        .iter()
        .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null())
        .filter_map(|pod| Some(pod["metadata"]["name"].as_str()?.to_owned()))
        .collect())
}

/// The container of a pod, after a check that the limit of 2 GiB holds in it.
fn limited_container(tenant: &Namespace<'_>, pod: &str) -> Result<Value> {
    ensure!(tenant.total_mib(pod)? == "2048", "the limit changed");
    let denied = tenant.exec(pod, "app", &["cuda-probe", "alloc", "--mib", "2049"])?;
    ensure!(denied.code == 2, "{denied:?}");
    let pod = tenant.find("pod", pod)?.context("the pod is gone")?;
    let status = &pod["status"]["containerStatuses"][0];
    Ok(serde_json::json!([
        status["containerID"],
        status["restartCount"]
    ]))
}

#[test]
fn upgrade_leaves_computing_program_alone() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("upgrade")?;
    upgrade(&cluster, PREVIOUS)?;
    // The container ends, and is restarted, if a kernel fails.
    let pod = pod_with_share("busy", "vgpu.drava.dev", "{memory: 2Gi, cores: \"20\"}").replace(
        "[sleep, infinity]",
        "[cuda-probe, launch, --ms, \"5\", --seconds, \"3600\"]",
    );
    tenant.apply(&pod)?;
    tenant.running("busy")?;
    let container = limited_container(&tenant, "busy")?;
    let before = pods_of_drava(&cluster)?;
    upgrade(&cluster, PRESENT)?;
    let after = pods_of_drava(&cluster)?;
    ensure!(
        after.iter().all(|pod| !before.contains(pod)),
        "not all pods of drava were replaced: {before:?}, {after:?}"
    );
    let now = limited_container(&tenant, "busy")?;
    ensure!(now == container, "was {container}, is {now}");

    // A new share, on the upgraded drava; nothing of the test remains.
    cluster.helm(["test", "drava", "--namespace", "drava-system"])?;
    let left = cluster.kubectl([
        "get",
        "pods,resourceclaimtemplates",
        "-n",
        "drava-system",
        "--field-selector",
        "metadata.name=drava-test",
        "-o",
        "name",
    ])?;
    ensure!(left.is_empty(), "left: {left}");
    Ok(())
}

/// Header of a record in format version 99, after its CRC-32, as a newer build would leave it.
const NEWER_RECORD: &str = r#"935bc135 {"version":99,"gpus":[],"crc32":"00000000"}"#;

#[test]
fn downgrade_without_knowledge_of_the_state_is_refused() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("downgrade")?;
    let file = "/var/lib/drava/claims/22222222-2222-4222-8222-222222222222.json";
    let write = format!("printf '%s\\n{{}}\\n' '{NEWER_RECORD}' > {file}");
    cluster.on_node("sh", &["-ec", &write])?;
    let refused = (|| {
        // Replaces the pods of the node driver, as a downgrade does.
        let restart = ["rollout", "restart", "daemonset/drava-dra-driver"];
        cluster.kubectl(["-n", "drava-system"].iter().chain(&restart))?;
        let message = wait("an event on the node that names the record", || {
            let events = cluster.get(&["events", "-A"])?;
            let messages = events["items"].as_array().into_iter().flatten();
            let mut messages = messages.filter(|event| event["involvedObject"]["kind"] == "Node");
            Ok(messages.find_map(|event| {
                let message = event["message"].as_str()?;
                message.starts_with("records: ").then(|| message.to_owned())
            }))
        })?;
        ensure!(
            message.contains("format version 99")
                && message.contains("run the node driver that wrote the records"),
            "{message}"
        );
        // GPUs without such a record still serve.
        tenant.apply(&pod_with_share("served", "vgpu.drava.dev", "{memory: 1Gi}"))?;
        tenant.running("served")
    })();
    cluster.on_node("rm", &[file])?;
    cluster.drava_ready()?;
    refused
}
