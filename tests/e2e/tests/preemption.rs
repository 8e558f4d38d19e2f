//! Evictions for pods of higher priority.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod_with_request, pod_with_share};
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

/// Pods of the Deployment in the example.
const BATCH: (&str, &str) = ("app", "batch");

/// Waits until one of the pods has the condition of a disruption by the Eviction API.
fn has_disruption_condition(tenant: &Namespace<'_>, pods: &[String]) -> Result<()> {
    wait("a pod has the condition DisruptionTarget", || {
        let all = tenant.list("pods")?;
        let is_target = |pod: &Value| {
            let conditions = pod["status"]["conditions"].as_array();
            let mut conditions = conditions.into_iter().flatten();
            conditions.any(|condition| {
                condition["type"] == "DisruptionTarget"
                    && condition["status"] == "True"
                    && condition["reason"] == "EvictionByEvictionAPI"
            })
        };
        let mut victims = all.iter().filter(|pod| is_target(pod));
        let is_known = |pod: &Value| {
            pods.iter()
                .any(|name| pod["metadata"]["name"] == name.as_str())
        };
        Ok(victims.any(is_known).then_some(()))
    })
}

/// Returns a priority class of this value, which is named by the test.
fn priority_class(name: &str, value: i32) -> String {
    format!(
        "{{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {{name: {name}}}, value: {value}}}"
    )
}

/// Returns the manifest of a pod with more fields in its spec, such as `priorityClassName: a`.
fn with_fields(manifest: &str, fields: &str) -> Result<String> {
    const FIELD: &str = "terminationGracePeriodSeconds: 1\n";
    ensure!(manifest.contains(FIELD), "{manifest}");
    Ok(manifest.replace(FIELD, &format!("{FIELD}  {fields}\n")))
}

#[test]
fn schedules_urgent_pod_by_eviction() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("preemption")?;
    tenant.example("preemption")?;
    let before = tenant.wait_for_pods(BATCH, 2)?;
    tenant.example_file("preemption", "urgent")?;
    has_disruption_condition(&tenant, &before)?;
    tenant.running("urgent")?;
    let after = tenant.running_pods(BATCH)?;
    let kept: Vec<_> = before.iter().filter(|pod| after.contains(pod)).collect();
    ensure!(kept.len() == 1, "of {before:?} run {after:?}");
    let victim = before.iter().find(|pod| !after.contains(pod));
    let victim = victim.context("no pod was evicted")?;
    let preempting = tenant.event("urgent", "Preempting: evicted")?;
    ensure!(preempting.contains(victim), "{preempting}");
    let preempted = tenant.event(victim, "Preempted: evicted for pod")?;
    ensure!(preempted.contains("urgent (priority 1000)"), "{preempted}");
    // The Deployment creates another pod, which stays pending: no pod has a lower priority.
    let waiting = wait("the replacement waits", || {
        let pods = tenant.list("pods")?;
        let pending = pods.iter().find(|pod| {
            pod["metadata"]["labels"]["app"] == "batch" && pod["status"]["phase"] == "Pending"
        });
        Ok(pending.and_then(|pod| pod["metadata"]["name"].as_str().map(str::to_owned)))
    })?;
    tenant.event(&waiting, "ExclusiveConflict")?;
    Ok(())
}

#[test]
fn schedules_no_eviction_against_budget() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("budget")?;
    tenant.example("preemption")?;
    tenant.apply(
        "
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: batch}
spec: {minAvailable: 2, selector: {matchLabels: {app: batch}}}
",
    )?;
    let before = tenant.wait_for_pods(BATCH, 2)?;
    wait("the budget allows no disruption", || {
        let budget = tenant.find("pdb", "batch")?.context("no budget")?;
        let status = &budget["status"];
        Ok((status["currentHealthy"] == 2 && status["disruptionsAllowed"] == 0).then_some(()))
    })?;
    tenant.example_file("preemption", "urgent")?;
    let blocked = tenant.event("urgent", "PreemptionBlocked: cannot evict pod")?;
    ensure!(blocked.contains("disruption budget"), "{blocked}");
    tenant.event("urgent", "GpuUnschedulable: 0/1 nodes")?;
    ensure!(
        tenant.running_pods(BATCH)? == before,
        "a protected pod was evicted"
    );
    tenant.kubectl(&["delete", "pdb", "batch"])?;
    // The pods count as protected for a minute.
    tenant.running("urgent")
}

#[test]
fn job_evicts_exactly_the_job_that_it_needs() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("priority-preemption")?;
    tenant.example("priority-preemption")?;
    let job = |name| ("job", name);
    tenant.wait_for_pods(job("medium"), 3)?;
    tenant.wait_for_pods(("app", "bystander"), 1)?;
    tenant.wait_for_reason("low", "WaitingForGang")?;
    let bystander = tenant.running_pods(("app", "bystander"))?;
    tenant.example_file("priority-preemption", "high")?;
    tenant.wait_for_pods(job("high"), 3)?;
    tenant.has_no_running_pods(job("medium"))?;
    tenant.has_no_running_pods(job("low"))?;
    ensure!(
        tenant.running_pods(("app", "bystander"))? == bystander,
        "the bystander of lower priority was evicted in vain"
    );
    let events = tenant.list("events")?;
    // Medium evicts low if all pods of low were created first.
    let preempted: Vec<&str> = events
        .iter()
        .filter(|event| event["reason"] == "Preempted")
        .filter(|event| {
            let message = event["message"].as_str();
            message.is_some_and(|message| message.contains("/high-"))
        })
        .filter_map(|event| event["involvedObject"]["name"].as_str())
        .collect();
    ensure!(
        preempted.len() == 3 && preempted.iter().all(|pod| pod.starts_with("medium-")),
        "{preempted:?}"
    );
    Ok(())
}

/// A Deployment of three pods, each with a share of `memory`.
fn three_batch_pods(memory: &str) -> String {
    format!(
        "
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {{name: batch}}
spec:
  spec:
    devices:
      requests: [{{name: gpu, exactly: {{deviceClassName: vgpu.drava.dev, capacity: {{requests: {{memory: {memory}}}}}}}}}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: batch}}
spec:
  replicas: 3
  selector: {{matchLabels: {{app: batch}}}}
  template:
    metadata: {{labels: {{app: batch}}}}
    spec:
      terminationGracePeriodSeconds: 1
      resourceClaims: [{{name: gpu, resourceClaimTemplateName: batch}}]
      containers:
      - name: app
        image: localhost/drava-demo:dev
        imagePullPolicy: IfNotPresent
        command: [sleep, infinity]
        resources: {{claims: [{{name: gpu}}]}}
"
    )
}

#[test]
fn gives_devices_back_when_third_victim_is_protected() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("third-victim")?;
    // Three of four places, and a pod that needs both GPUs.
    tenant.apply(&three_batch_pods("36Gi"))?;
    tenant.wait_for_pods(BATCH, 3)?;
    tenant.apply(
        "
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: batch}
spec: {maxUnavailable: 2, selector: {matchLabels: {app: batch}}}
",
    )?;
    wait("the budget allows two disruptions", || {
        let budget = tenant.find("pdb", "batch")?.context("no budget")?;
        Ok((budget["status"]["disruptionsAllowed"] == 2).then_some(()))
    })?;
    tenant.apply(&priority_class("e2e-third-victim", 1000))?;
    let urgent = pod_with_request("urgent", "{deviceClassName: gpu.drava.dev, count: 2}", "");
    tenant.apply(&with_fields(
        &urgent,
        "priorityClassName: e2e-third-victim",
    )?)?;
    // The dry runs of three evictions succeed; the third eviction does not.
    let outcome = tenant
        .event("urgent", "PreemptionBlocked: cannot evict pod")
        .and_then(|blocked| {
            ensure!(blocked.contains("disruption budget"), "{blocked}");
            tenant.wait_for_pods(BATCH, 3)
        });
    tenant.kubectl(&["delete", "priorityclass", "e2e-third-victim"])?;
    outcome?;
    let found = tenant.find("pod", "urgent")?.context("no pod")?;
    ensure!(found["status"]["phase"] == "Pending", "{found}");
    Ok(())
}

/// Waits until the leader shows whether it reserves devices for the pod because others end for it.
fn shows_reservation(tenant: &Namespace<'_>, pod: &str, is_expected: bool) -> Result<()> {
    wait(
        &format!("devices are reserved for {pod}: {is_expected}"),
        || {
            let leader = tenant.find("gpucontrollerleader", "drava-controller")?;
            let leader = leader.context("no GpuControllerLeader")?;
            let reservations = leader["status"]["reservations"].as_array();
            let mut reservations = reservations.into_iter().flatten();
            let is_shown = reservations.any(|reserved| {
                reserved["namespace"] == tenant.name()
                    && reserved["pod"] == pod
                    && reserved["purpose"] == "Preemption"
                    && reserved["devices"]
                        .as_array()
                        .is_some_and(|devices| devices.len() == 2)
            });
            Ok((is_shown == is_expected).then_some(()))
        },
    )
}

#[test]
fn keeps_freed_devices_across_change_of_leader() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("leader-eviction")?;
    let whole = |name: &str| pod_with_share(name, "gpu.drava.dev", "");
    tenant.apply(&whole("quick"))?;
    // The container ignores SIGTERM.
    let slow = whole("slow").replace(
        "terminationGracePeriodSeconds: 1\n",
        "terminationGracePeriodSeconds: 25\n",
    );
    tenant.apply(&slow)?;
    tenant.running("quick")?;
    tenant.running("slow")?;
    tenant.apply(&whole("thief"))?;
    tenant.event("thief", "GpuUnschedulable")?;
    tenant.apply(&priority_class("e2e-leader-eviction", 1000))?;
    let urgent = pod_with_request("urgent", "{deviceClassName: gpu.drava.dev, count: 2}", "");
    tenant.apply(&with_fields(
        &urgent,
        "priorityClassName: e2e-leader-eviction",
    )?)?;
    let outcome = tenant
        .event("urgent", "Preempting: evicted")
        .and_then(|_| {
            shows_reservation(&tenant, "urgent", true)?;
            cluster.kill_processes("drava-controller")?;
            wait("the quick victim is gone", || {
                Ok(tenant.find("pod", "quick")?.is_none().then_some(()))
            })
        })
        .and_then(|()| tenant.running("urgent"))
        .and_then(|()| shows_reservation(&tenant, "urgent", false));
    tenant.kubectl(&["delete", "priorityclass", "e2e-leader-eviction"])?;
    outcome?;
    let thief = tenant.claim_of("thief")?;
    let claim = tenant.find("resourceclaim", &thief)?.context("no claim")?;
    ensure!(claim["status"]["allocation"].is_null(), "{claim}");
    let events = tenant.events("thief")?;
    ensure!(
        !events
            .iter()
            .any(|event| event.starts_with("Allocated") || event.starts_with("Preempted")),
        "the thief had a GPU meanwhile: {events:?}"
    );
    cluster.drava_ready()
}

#[test]
fn uses_devices_that_kube_scheduler_frees_by_preemption() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("default-preemption")?;
    let nodes = cluster.get(&["nodes"])?;
    let cpus = nodes["items"][0]["status"]["allocatable"]["cpu"].as_str();
    let cpus: u32 = cpus.context("CPUs of the node")?.parse()?;
    // More than half of the node.
    let cpu = format!("resources: {{requests: {{cpu: {}m}}}}", cpus * 600);
    let low = pod_with_request("low", "{deviceClassName: gpu.drava.dev, count: 2}", "");
    let claims = "resources: {claims: [{name: gpu}]}";
    let with_cpu = format!(
        "resources: {{claims: [{{name: gpu}}], requests: {{cpu: {}m}}}}",
        cpus * 600
    );
    tenant.apply(&low.replace(claims, &with_cpu))?;
    tenant.running("low")?;
    tenant.apply(&pod_with_share(
        "waiting",
        "vgpu.drava.dev",
        "{memory: 1Gi}",
    ))?;
    tenant.event("waiting", "GpuUnschedulable")?;
    tenant.apply(&priority_class("e2e-default-preemption", 1000))?;
    // A pod without a GPU, for which kube-scheduler preempts the one with both GPUs.
    let vip = drava_e2e::manifest::pod_without_claim("vip");
    let vip = vip.replace(
        "command: [sleep, infinity]\n",
        &format!("command: [sleep, infinity]\n    {cpu}\n"),
    );
    let outcome = tenant
        .apply(&with_fields(
            &vip,
            "priorityClassName: e2e-default-preemption",
        )?)
        .and_then(|()| tenant.running("vip"))
        .and_then(|()| tenant.running("waiting"));
    tenant.kubectl(&["delete", "priorityclass", "e2e-default-preemption"])?;
    outcome?;
    let events = tenant.list("events")?;
    let preempted: Vec<&Value> = events
        .iter()
        .filter(|event| event["reason"] == "Preempted")
        .collect();
    let by_drava = |event: &&&Value| event["reportingComponent"] == "drava-controller";
    ensure!(
        !preempted.is_empty() && !preempted.iter().any(|event| by_drava(&event)),
        "{preempted:?}"
    );
    Ok(())
}

/// Deletes a GpuPolicy with the value.
struct Policy<'c>(&'c TestCluster, &'static str);

impl Drop for Policy<'_> {
    fn drop(&mut self) {
        let delete = ["delete", "gpupolicy", self.1, "--ignore-not-found"];
        if let Err(error) = self.0.kubectl(delete) {
            eprintln!("cannot delete policy {}: {error:#}", self.1);
        }
    }
}

#[test]
fn policy_keeps_victims_until_their_minimum_runtime() -> Result<()> {
    const SECONDS: i64 = 20;
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("runtime")?;
    let _policy = Policy(&cluster, "e2e-runtime");
    tenant.apply(&format!(
        "{{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuPolicy, metadata: {{name: e2e-runtime}}, spec: {{namespaceSelector: \
         {{matchLabels: {{kubernetes.io/metadata.name: {}}}}}, preemption: {{minimumRuntimeSeconds: {SECONDS}}}}}}}",
        tenant.name()
    ))?;
    wait("the policy applies", || {
        let policy = cluster.get(&["gpupolicy", "e2e-runtime"])?;
        Ok((policy["status"]["conditions"][0]["status"] == "True").then_some(()))
    })?;
    tenant.example("preemption")?;
    tenant.wait_for_pods(BATCH, 2)?;
    let bound_at = |pod: &Value| -> Option<jiff::Timestamp> {
        let conditions = pod["status"]["conditions"].as_array()?;
        let scheduled = conditions
            .iter()
            .find(|one| one["type"] == "PodScheduled")?;
        scheduled["lastTransitionTime"].as_str()?.parse().ok()
    };
    let pods = tenant.list("pods")?;
    let first = pods.iter().filter_map(bound_at).min().context("bound")?;
    tenant.example_file("preemption", "urgent")?;
    tenant.running("urgent")?;
    let events = tenant.list("events")?;
    let preempting = events.iter().find(|event| event["reason"] == "Preempting");
    let time = preempting.context("no event")?;
    let time = time["eventTime"]
        .as_str()
        .or(time["firstTimestamp"].as_str());
    let time: jiff::Timestamp = time.context("no time")?.parse()?;
    // The condition has whole seconds.
    let after = time.duration_since(first).as_secs();
    ensure!(after >= SECONDS - 1, "evicted after {after} s");
    Ok(())
}

#[test]
fn reports_eviction_that_admission_rejects() -> Result<()> {
    const POLICY: &str = "e2e-no-eviction";
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("rejected-eviction")?;
    tenant.example("preemption")?;
    let before = tenant.wait_for_pods(BATCH, 2)?;
    tenant.apply(&format!(
        "
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {{name: {POLICY}}}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules: [{{apiGroups: [''], apiVersions: [v1], operations: [CREATE], resources: [pods/eviction]}}]
  validations: [{{expression: 'false', message: maintenance window}}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {{name: {POLICY}}}
spec:
  policyName: {POLICY}
  validationActions: [Deny]
  matchResources: {{namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {}}}}}}}
",
        tenant.name()
    ))?;
    let evict = format!(
        "/api/v1/namespaces/{}/pods/{}/eviction?dryRun=All",
        tenant.name(),
        before[0]
    );
    let body = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("eviction.json");
    std::fs::write(
        &body,
        serde_json::json!({"apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": {"name": before[0], "namespace": tenant.name()}})
        .to_string(),
    )?;
    let body = body.display().to_string();
    let outcome = wait("the API server applies the policy", || {
        let create = ["create", "--raw", &evict, "-f", &body];
        Ok(cluster.kubectl(create).is_err().then_some(()))
    })
    .and_then(|()| tenant.example_file("preemption", "urgent"))
    .and_then(|()| tenant.event("urgent", "PreemptionBlocked: cannot evict pod"))
    .and_then(|blocked| {
        ensure!(blocked.contains("maintenance window"), "{blocked}");
        ensure!(tenant.running_pods(BATCH)? == before, "a pod was evicted");
        Ok(())
    });
    for kind in [
        "validatingadmissionpolicybinding",
        "validatingadmissionpolicy",
    ] {
        cluster.kubectl(["delete", kind, POLICY])?;
    }
    outcome?;
    // The pods are tried again a minute later.
    tenant.running("urgent")
}

#[test]
fn urgent_pod_takes_both_gpus_of_the_quickstart() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("quickstart-priority")?;
    tenant.example("quickstart")?;
    tenant.running("inference")?;
    tenant.running("training")?;
    tenant.event("distributed", "ExclusiveConflict")?;
    tenant.example("quickstart-priority")?;
    tenant.running("urgent")?;
    let preempting = tenant.event("urgent", "Preempting: evicted")?;
    ensure!(
        preempting.contains("inference") && preempting.contains("training"),
        "{preempting}"
    );
    let explain = ["explain", "pod", "distributed", "-n", tenant.name()];
    let text = cluster.drava(&explain)?.success()?;
    let end = format!("end {}/urgent (priority 1000)", tenant.name());
    ensure!(text.contains(&end), "{text}");
    tenant.delete_pods(&["urgent"])?;
    tenant.running("distributed")
}
