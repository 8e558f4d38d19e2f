//! Shares that are suspended and resumed while their programs are on the GPU.

use std::thread::{Scope, ScopedJoinHandle};

use anyhow::{Context, Result, ensure};
use drava_e2e::exporter::DRIVER_PORT;
use drava_e2e::manifest::{pod_with_request, pod_with_share};
use drava_e2e::{Namespace, ProgramOutput, TestCluster, wait};
use serde_json::Value;

/// More than half of a GPU, of which the cluster has two.
const MOST: &str = "50Gi";
const REQUEST: &str = "{deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 50Gi}}}";
const CONFIG: &str = "[{opaque: {driver: gpu.drava.dev, parameters: {apiVersion: gpu.drava.dev/v1alpha1, kind: VgpuConfig, \
     suspend: {allowed: true}}}}]";

/// Starts a pod that may be suspended, and another one on the other GPU.
fn start(tenant: &Namespace<'_>) -> Result<()> {
    tenant.apply(&pod_with_request("low", REQUEST, CONFIG))?;
    tenant.running("low")?;
    tenant.apply(&pod_with_share(
        "other",
        "vgpu.drava.dev",
        &format!("{{memory: {MOST}}}"),
    ))?;
    tenant.running("other")
}

type Holder<'scope> = ScopedJoinHandle<'scope, Result<ProgramOutput>>;

/// Starts a program of the pod `low` that holds memory for a while, and waits until it has it.
fn hold<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    tenant: &'env Namespace<'_>,
) -> Result<Holder<'scope>> {
    let holder = scope.spawn(|| {
        let probe = [
            "cuda-probe",
            "alloc",
            "--mib",
            "600",
            "--hold",
            "45",
            "-o",
            "json",
        ];
        tenant.exec("low", "app", &probe)
    });
    wait("the program uses its memory", || {
        let probe = ["cuda-probe", "alloc", "--mib", "1", "-o", "json"];
        let seen = tenant.exec("low", "app", &probe)?.json()?;
        let before = &seen["before"];
        let (free, total) = (before["freeBytes"].as_u64(), before["totalBytes"].as_u64());
        let used = total.context("totalBytes")? - free.context("freeBytes")?;
        Ok((used > 600 << 20).then_some(()))
    })?;
    Ok(holder)
}

/// Checks that the program has ended well and that its container was never restarted.
fn ends_well(tenant: &Namespace<'_>, holder: Holder<'_>) -> Result<()> {
    let held = holder.join();
    let held = held.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
    ensure!(held.code == 0, "{held:?}");
    let low = tenant.find("pod", "low")?.context("the pod is gone")?;
    let restarts = &low["status"]["containerStatuses"][0]["restartCount"];
    ensure!(restarts == 0, "restarted: {low}");
    Ok(())
}

/// Returns a manifest with a pod of this priority class.
fn with_priority(manifest: &str, class: &str) -> String {
    let field = "terminationGracePeriodSeconds: 1\n";
    manifest.replace(field, &format!("{field}  priorityClassName: {class}\n"))
}

fn suspended(tenant: &Namespace<'_>) -> Result<Option<Value>> {
    suspended_of(tenant, "low")
}

/// Returns the condition of the claim of a pod.
fn suspended_of(tenant: &Namespace<'_>, pod: &str) -> Result<Option<Value>> {
    let claim = tenant.claim_of(pod)?;
    let claim = tenant.find("resourceclaim", &claim)?.context("no claim")?;
    let devices = claim["status"]["devices"].as_array();
    let conditions = devices.into_iter().flatten();
    let conditions = conditions.filter_map(|device| device["conditions"].as_array());
    let mut conditions = conditions.flatten();
    Ok(conditions
        .find(|condition| condition["type"] == "Suspended")
        .cloned())
}

#[test]
fn share_is_suspended_and_resumed() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("suspend")?;
    start(&tenant)?;
    let drava = |command: &str, timeout: &str| {
        let pod = "pod/low";
        cluster.drava(&["-n", tenant.name(), command, pod, "--timeout", timeout])
    };
    std::thread::scope(|scope| -> Result<()> {
        let holder = hold(scope, &tenant)?;
        tenant.apply(&pod_with_share(
            "third",
            "vgpu.drava.dev",
            &format!("{{memory: {MOST}}}"),
        ))?;
        tenant.event("third", "InsufficientMemory")?;
        let done = drava("suspend", "60")?;
        ensure!(
            done.code == 0 && done.stdout.contains("suspended"),
            "{done:?}"
        );
        // Its memory is used by another pod, all of it.
        tenant.running("third")?;
        cluster.check_allocations()?;
        ensure!(
            tenant.fill("third", 0)? > 50_000,
            "the pod does not get its memory"
        );
        let top = cluster.drava(&["top", "-o", "wide"])?.success()?;
        ensure!(top.contains("(low, suspended)"), "{top}");
        wait("the metric of the suspended share", || {
            let text = cluster.metrics("driver", DRIVER_PORT)?;
            let mut metrics = ["bytes", "seconds"].into_iter();
            let has = |metric: &str| {
                let namespace = tenant.name();
                text.contains(&format!(
                    "drava_share_suspended_{metric}{{namespace=\"{namespace}\""
                ))
            };
            Ok(metrics.all(has).then_some(()))
        })?;
        // The owner of the claim cannot take the memory back.
        let claim = tenant.claim_of("low")?;
        let forged = cluster.kubectl([
            "label",
            "-n",
            tenant.name(),
            "resourceclaim",
            &claim,
            "gpu.drava.dev/suspend-",
        ]);
        let refusal = forged.err().context("the label was removed")?.to_string();
        ensure!(
            refusal.contains("only drava-controller may write"),
            "{refusal}"
        );
        // A value that means nothing is no silent wish.
        let wrong = cluster.kubectl([
            "annotate",
            "--overwrite",
            "-n",
            tenant.name(),
            "resourceclaim",
            &claim,
            "gpu.drava.dev/suspend-requested=yes",
        ]);
        let refusal = wrong.err().context("the value was accepted")?.to_string();
        ensure!(refusal.contains("no other value than"), "{refusal}");
        let explained = cluster.drava(&["-n", tenant.name(), "explain", "pod", "low"])?;
        let explained = explained.success()?;
        ensure!(
            explained.contains("its share is suspended as its annotation"),
            "{explained}"
        );
        let low = tenant.find("pod", "low")?.context("the pod is gone")?;
        let conditions = low["status"]["conditions"].as_array();
        let stopped = conditions.into_iter().flatten().any(|condition| {
            condition["type"] == "gpu.drava.dev/Running" && condition["status"] == "False"
        });
        ensure!(stopped, "{low}");
        // A restart of the node driver changes nothing.
        ensure!(
            cluster.kill_processes("drava-dra-driver")? > 0,
            "no driver process on the node"
        );
        cluster.drava_ready()?;
        let waiting = drava("resume", "3")?;
        ensure!(
            waiting.code == 1 && waiting.stderr.contains("not resumed in time"),
            "{waiting:?}"
        );
        let condition = suspended(&tenant)?.context("no condition")?;
        ensure!(condition["status"] == "True", "{condition}");
        tenant.delete_pods(&["third"])?;
        let resumed = drava("resume", "60")?;
        ensure!(
            resumed.code == 0 && resumed.stdout.contains("running"),
            "{resumed:?}"
        );
        cluster.check_allocations()?;
        ends_well(&tenant, holder)
    })
}

#[test]
fn deleted_pod_of_suspended_share_leaves_nothing() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("suspend-deleted")?;
    let node = cluster.first_node();
    start(&tenant)?;
    std::thread::scope(|scope| -> Result<()> {
        let holder = hold(scope, &tenant)?;
        let suspend = ["-n", tenant.name(), "suspend", "pod/low", "--timeout", "60"];
        cluster.drava(&suspend)?.success()?;
        tenant.delete_pods(&["low"])?;
        // Its program ends with the pod, while it stands still.
        let held = holder.join();
        let held = held.map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        ensure!(
            held.as_ref().map_or(true, |held| held.code != 0),
            "{held:?}"
        );
        Ok(())
    })?;
    // No claim counts any more, for the controller and for the node.
    wait("the claim is gone", || {
        Ok((tenant.list("resourceclaims")?.len() == 1).then_some(()))
    })?;
    tenant.apply(&pod_with_share(
        "next",
        "vgpu.drava.dev",
        &format!("{{memory: {MOST}}}"),
    ))?;
    tenant.running("next")?;
    ensure!(
        tenant.fill("next", 0)? > 50_000,
        "the pod does not get its memory"
    );
    cluster.check_allocations()?;
    // The node driver looks for unprepared claims every five seconds.
    let series = format!(
        "drava_share_suspended_bytes{{namespace=\"{}\"",
        tenant.name()
    );
    wait("the share has no series", || {
        let text = cluster.metrics("driver", DRIVER_PORT)?;
        Ok((!text.contains(&series)).then_some(()))
    })?;
    tenant.delete_pods(&["next", "other"])?;
    node.wait_until_clean()?;
    node.wait_until_unused()
}

#[test]
fn notebook_of_the_example_is_suspended_for_urgent_pod() -> Result<()> {
    const NOTEBOOKS: (&str, &str) = ("app", "notebook");
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("notebooks")?;
    tenant.example("suspend")?;
    let before = tenant.wait_for_pods(NOTEBOOKS, 2)?;
    let _policy = cluster.deletes("gpupolicy", "drava-example-idle");
    tenant.example_file("suspend", "idle")?;
    tenant.example_file("suspend", "urgent")?;
    tenant.running("urgent")?;
    ensure!(
        tenant.running_pods(NOTEBOOKS)? == before,
        "a notebook was evicted"
    );
    let suspended = before.iter().filter(|pod| {
        let event = tenant.events(pod);
        event.is_ok_and(|events| {
            let mut events = events.iter();
            events.any(|event| event.contains("is being suspended for pod"))
        })
    });
    ensure!(suspended.count() == 1, "events of {before:?}");
    cluster.check_allocations()
}

#[test]
fn share_is_suspended_instead_of_evicted() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("suspend-for")?;
    tenant.apply(
        "{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: suspend-for}, value: 1000}",
    )?;
    start(&tenant)?;
    let before = tenant.find("pod", "low")?.context("no pod")?;
    std::thread::scope(|scope| -> Result<()> {
        let holder = hold(scope, &tenant)?;
        let urgent = pod_with_share("urgent", "vgpu.drava.dev", &format!("{{memory: {MOST}}}"));
        tenant.apply(&with_priority(&urgent, "suspend-for"))?;
        tenant.running("urgent")?;
        let why = tenant.event("low", "ShareSuspended")?;
        ensure!(why.contains("urgent (priority 1000)"), "{why}");
        for pod in ["low", "other"] {
            let pod = tenant.find("pod", pod)?.context("a pod was evicted")?;
            ensure!(pod["metadata"]["deletionTimestamp"].is_null(), "{pod}");
        }
        cluster.check_allocations()?;
        ensure!(
            tenant.fill("urgent", 0)? > 50_000,
            "the pod does not get its memory"
        );
        tenant.delete_pods(&["urgent"])?;
        wait("the share is resumed", || {
            let condition = suspended(&tenant)?;
            Ok(condition.filter(|condition| condition["reason"] == "Resumed"))
        })?;
        cluster.check_allocations()?;
        ends_well(&tenant, holder)
    })?;
    let after = tenant.find("pod", "low")?.context("no pod")?;
    ensure!(
        before["metadata"]["uid"] == after["metadata"]["uid"],
        "another pod"
    );
    Ok(())
}

/// A PodDisruptionBudget that allows no eviction forbids no suspension: no pod ends. The share of the highest priority comes back first,
/// whatever its age.
#[test]
fn shares_are_suspended_beside_a_budget_and_resumed_by_priority() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("suspend-order")?;
    for (name, value) in [("suspend-urgent", 1000), ("suspend-first", 10)] {
        tenant.apply(&format!(
            "{{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {{name: {name}}}, value: {value}}}"
        ))?;
    }
    tenant.apply(
        "{apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: all}, spec: {minAvailable: 100, selector: {}}}",
    )?;
    let share = |name: &str, memory: &str| {
        let capacity = format!("{{memory: {memory}}}");
        pod_with_share(name, "vgpu.drava.dev", &capacity)
    };
    tenant.apply(&with_priority(&share("other", MOST), "suspend-urgent"))?;
    tenant.running("other")?;
    // Both are on the other GPU, and the older one has the lower priority.
    let request = REQUEST.replace(MOST, "35Gi");
    let lower = pod_with_request("lower", &request, CONFIG);
    tenant.apply(&lower)?;
    tenant.running("lower")?;
    let low = pod_with_request("low", &request, CONFIG);
    tenant.apply(&with_priority(&low, "suspend-first"))?;
    tenant.running("low")?;
    let reason = |pod: &str| -> Result<Option<String>> {
        let condition = suspended_of(&tenant, pod)?;
        let reason = condition.map(|condition| condition["reason"].as_str().map(str::to_owned));
        Ok(reason.flatten())
    };
    let is = |pod: &str, expected: &str| -> Result<Option<()>> {
        Ok((reason(pod)?.as_deref() == Some(expected)).then_some(()))
    };
    std::thread::scope(|scope| -> Result<()> {
        let holder = hold(scope, &tenant)?;
        tenant.apply(&with_priority(&share("urgent", "70Gi"), "suspend-urgent"))?;
        tenant.running("urgent")?;
        for pod in ["low", "lower"] {
            ensure!(is(pod, "Suspended")?.is_some(), "{pod}: {:?}", reason(pod)?);
            let pod = tenant.find("pod", pod)?.context("a pod was evicted")?;
            ensure!(pod["metadata"]["deletionTimestamp"].is_null(), "{pod}");
        }
        // With the next pod there is room for one of them.
        tenant.apply(&with_priority(&share("next", "35Gi"), "suspend-urgent"))?;
        tenant.event("next", "InsufficientMemory")?;
        tenant.delete_pods(&["urgent"])?;
        tenant.running("next")?;
        wait("the first share is resumed", || is("low", "Resumed"))?;
        cluster.check_allocations()?;
        let waiting = cluster.drava(&["-n", tenant.name(), "explain", "pod", "lower"])?;
        let waiting = waiting.success()?;
        ensure!(waiting.contains("is suspended"), "{waiting}");
        ensure!(
            is("lower", "Suspended")?.is_some(),
            "{:?}",
            reason("lower")?
        );
        ends_well(&tenant, holder)?;
        ensure!(
            is("lower", "Suspended")?.is_some(),
            "{:?}",
            reason("lower")?
        );
        tenant.delete_pods(&["next"])?;
        wait("the second share is resumed", || is("lower", "Resumed"))?;
        cluster.check_allocations()
    })
}
