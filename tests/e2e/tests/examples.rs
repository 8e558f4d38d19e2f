//! The examples of `deploy/examples` that no other test runs: each does what its README promises.

use anyhow::{Context as _, Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{TestCluster, wait};
use serde_json::json;

#[test]
fn spreads_shares_over_gpus() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("spread")?;
    tenant.example("spread")?;
    tenant.running("spread-1")?;
    tenant.running("spread-2")?;
    let (first, second) = (
        tenant.devices_of("spread-1")?,
        tenant.devices_of("spread-2")?,
    );
    ensure!(first != second, "both are on {first:?}");
    Ok(())
}

#[test]
fn packs_shares_on_one_gpu() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("binpack")?;
    tenant.example("binpack")?;
    tenant.running("packed-1")?;
    tenant.running("packed-2")?;
    let (first, second) = (
        tenant.devices_of("packed-1")?,
        tenant.devices_of("packed-2")?,
    );
    ensure!(first == second, "on {first:?} and {second:?}");
    Ok(())
}

#[test]
fn divides_multiprocessors_of_one_gpu() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("halves")?;
    tenant.example("spatial")?;
    tenant.kubectl(&["rollout", "status", "deployment/decode", "--timeout=120s"])?;
    let claims = tenant.list("resourceclaims")?;
    let devices: Vec<_> = claims
        .iter()
        .map(|claim| &claim["status"]["allocation"]["devices"]["results"][0]["device"])
        .collect();
    ensure!(
        devices.len() == 2 && devices[0] == devices[1],
        "{devices:?}"
    );
    for claim in &claims {
        let conditions = claim["status"]["devices"][0]["conditions"].to_string();
        ensure!(
            conditions.contains("50% of the multiprocessors"),
            "{conditions}"
        );
    }
    Ok(())
}

#[test]
fn policy_of_namespace_applies_live() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("policy")?;
    let share = |name: &str| pod_with_share(name, "vgpu.drava.dev", "{memory: 4Gi}");
    for pod in ["packed-1", "packed-2"] {
        tenant.apply(&share(pod))?;
        tenant.running(pod)?;
    }
    let packed = tenant.devices_of("packed-1")?;
    ensure!(tenant.devices_of("packed-2")? == packed, "not packed");
    cluster.kubectl(["label", "namespace", tenant.name(), "workload=inference"])?;
    tenant.example("policy")?;
    let applied = wait("the policy applies", || {
        let policy = cluster.get(&["gpupolicy", "inference"])?;
        let condition = &policy["status"]["conditions"][0];
        Ok((condition["status"] == "True").then_some(()))
    })
    .and_then(|()| tenant.apply(&share("spread")))
    .and_then(|()| tenant.running("spread"))
    .and_then(|()| tenant.devices_of("spread"));
    cluster.kubectl(["delete", "gpupolicy", "inference"])?;
    ensure!(applied? != packed, "the policy has no effect");
    Ok(())
}

#[test]
fn fraction_gets_share_of_gpu_without_mig() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("either")?;
    tenant.example("share-or-partition")?;
    tenant.running("either")?;
    let devices = tenant.devices_of("either")?;
    ensure!(devices[0].ends_with("-vgpu"), "{devices:?}");
    ensure!(tenant.total_mib("either")? == "4096", "no limit");
    Ok(())
}

#[test]
fn notebook_is_replaced_by_its_update() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("notebook")?;
    tenant.example("notebook")?;
    let rollout = ["rollout", "status", "deployment/notebook", "--timeout=120s"];
    tenant.kubectl(&rollout)?;
    tenant.kubectl(&["rollout", "restart", "deployment/notebook"])?;
    tenant.kubectl(&rollout)?;
    let table = tenant.kubectl(&["exec", "deployment/notebook", "--", "nvidia-smi"])?;
    ensure!(table.contains("/   4096MiB"), "{table}");
    Ok(())
}

#[test]
fn tenant_cannot_widen_its_own_access() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("tenant-access")?;
    tenant.example("tenant-access")?;
    let can = |verb: &str, group: &str, resource: &str, namespace: &str| -> Result<bool> {
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let attributes = json!({
            "namespace": namespace, "verb": verb, "group": group,
            "resource": resource, "subresource": subresource,
        });
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
            "spec": {"user": "alice", "resourceAttributes": attributes},
        });
        let answer = tenant.dry_run(&review.to_string())?;
        let allowed = answer["status"]["allowed"].as_bool();
        allowed.with_context(|| format!("no answer: {answer}"))
    };
    const DRA: &str = "resource.k8s.io";
    const DRAVA: &str = "gpu.drava.dev";
    for (group, resource) in [
        ("", "pods"),
        (DRA, "resourceclaims"),
        (DRA, "resourceclaimtemplates"),
        (DRAVA, "placementexplanations"),
    ] {
        ensure!(can("create", group, resource, tenant.name())?, "{resource}");
        ensure!(
            !can("create", group, resource, "default")?,
            "{resource} elsewhere"
        );
    }
    for (group, resource) in [
        (DRAVA, "gpuquotas"),
        (DRAVA, "gpunodeprofiles"),
        (DRAVA, "gpupolicies"),
        (DRAVA, "gpucontrollerleaders"),
        (DRAVA, "placementexplanations/status"),
        (DRA, "deviceclasses"),
        (DRA, "resourceslices"),
        (DRA, "resourceclaims/status"),
        (DRA, "resourceclaims/binding"),
        ("", "pods/binding"),
        ("", "resourcequotas"),
        ("", "limitranges"),
    ] {
        for verb in ["create", "update", "patch", "delete"] {
            ensure!(
                !can(verb, group, resource, tenant.name())?,
                "{verb} {resource}"
            );
        }
    }
    // The rights are enough for a pod with a GPU, whose allocation is the controller's.
    tenant.apply(&pod_with_share("first", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running("first")?;
    let claim = tenant.claim_of("first")?;
    let forged = r#"{"status": {"allocation": null}}"#;
    let patch = ["patch", "resourceclaim", &claim, "--subresource=status"];
    let as_alice = ["--type=merge", "-p", forged, "--as", "alice"];
    let denied = tenant.kubectl(&[patch.as_slice(), as_alice.as_slice()].concat());
    let denied = denied.err().map(|error| format!("{error:#}"));
    ensure!(
        denied
            .as_ref()
            .is_some_and(|text| text.contains("forbidden")),
        "{denied:?}"
    );
    Ok(())
}

#[test]
fn allocates_percentage_of_memory() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("percentage")?;
    tenant.example("memory-percentage")?;
    let pods = ["first-half", "second-half"];
    for pod in pods {
        tenant.running(pod)?;
    }
    ensure!(
        tenant.devices_of(pods[0])? == tenant.devices_of(pods[1])?,
        "two halves of one GPU are on two GPUs"
    );
    // A share of the default amount has all memory of a GPU.
    tenant.apply(&pod_with_share("all", "vgpu.drava.dev", ""))?;
    tenant.running("all")?;
    let all: u64 = tenant.total_mib("all")?.parse()?;
    for pod in pods {
        let half: u64 = tenant.total_mib(pod)?.parse()?;
        ensure!(half == all / 2, "{pod} has {half} MiB of {all} MiB");
    }
    Ok(())
}

#[test]
fn allocates_shares_of_several_gpus() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("several")?;
    tenant.example("several-gpus")?;
    tenant.running("parallel")?;
    let total = tenant.total_mib("parallel")?;
    ensure!(total == "8192\n8192", "{total}");
    let mut devices = tenant.devices_of("parallel")?;
    devices.dedup();
    ensure!(devices.len() == 2, "{devices:?}");
    Ok(())
}

#[test]
fn explains_topology_of_gpus() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("topology")?;
    tenant.example("topology")?;
    tenant.running("close")?;
    // The two GPUs of the node are on different NUMA nodes, and NVSwitch connects them.
    tenant.event("close", "topology: the GPUs share an NVLink domain")?;
    Ok(())
}

#[test]
fn shows_each_container_its_own_share() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("pipeline")?;
    tenant.example("several-containers")?;
    tenant.running("pipeline")?;
    for (container, mib) in [("decode", "2048MiB |"), ("infer", "8192MiB |")] {
        let table = tenant
            .exec("pipeline", container, &["nvidia-smi"])?
            .success()?;
        ensure!(table.contains(mib), "{container} sees\n{table}");
        ensure!(
            table.matches("MiB /").count() == 1,
            "{container} sees\n{table}"
        );
    }
    Ok(())
}

#[test]
fn init_container_uses_share_first() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("warm-up")?;
    tenant.example("init-container")?;
    tenant.running("warmed-up")?;
    let log = tenant.kubectl(&["logs", "warmed-up", "-c", "warm-up"])?;
    ensure!(log.contains("allocated 3000 MiB"), "{log}");
    let free = tenant.fill("warmed-up", 0)?;
    ensure!(
        free > 3000,
        "the init container kept memory: {free} MiB are free"
    );
    Ok(())
}

#[test]
fn falls_back_to_second_alternative() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("alternatives")?;
    tenant.example("first-available")?;
    let mut totals = Vec::new();
    for pod in ["pod-1", "pod-2", "pod-3"] {
        tenant.running(pod)?;
        totals.push(tenant.total_mib(pod)?);
    }
    totals.sort();
    ensure!(totals == ["15360", "61440", "61440"], "{totals:?}");
    Ok(())
}

#[test]
fn replicas_run_whose_need_is_recommended() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("recommendation")?;
    tenant.example("recommendation")?;
    let status = ["rollout", "status", "deployment/chat", "--timeout=120s"];
    tenant.kubectl(&status)?;
    Ok(())
}

#[test]
fn gives_each_replica_a_share() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("deployment")?;
    tenant.example("deployment")?;
    tenant.kubectl(&["scale", "deployment/inference", "--replicas=3"])?;
    let status = [
        "rollout",
        "status",
        "deployment/inference",
        "--timeout=120s",
    ];
    tenant.kubectl(&status)?;
    let mut shares = Vec::new();
    for claim in tenant.list("resourceclaims")? {
        let result = &claim["status"]["allocation"]["devices"]["results"][0];
        ensure!(result["consumedCapacity"]["memory"] == "4Gi", "{claim}");
        shares.push(result["shareID"].to_string());
    }
    shares.sort();
    shares.dedup();
    ensure!(shares.len() == 3, "{shares:?}");
    Ok(())
}

#[test]
fn admin_access_sees_gpus_in_use() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("admin-tenant")?;
    tenant.apply(&pod_with_share("share", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running("share")?;

    let monitoring = cluster.namespace("admin-access")?;
    let denied = monitoring.example("admin-access");
    ensure!(
        denied.is_err_and(|error| format!("{error:#}").contains("admin-access")),
        "admin access without the label of the namespace"
    );
    let label = "resource.kubernetes.io/admin-access=true";
    cluster.kubectl(["label", "namespace", monitoring.name(), label])?;
    monitoring.example("admin-access")?;
    monitoring.running("monitor")?;
    let total = monitoring.total_mib("monitor")?;
    ensure!(total == "81559\n81559", "{total}");
    Ok(())
}

/// Deletes the namespaces and quotas of the example.
struct QuotaExample<'c>(&'c TestCluster);

impl Drop for QuotaExample<'_> {
    fn drop(&mut self) {
        let delete = ["delete", "--ignore-not-found", "--timeout=90s", "-f"];
        let path = example_file("quota", "quota.yaml");
        if let Err(error) = self.0.kubectl(delete.into_iter().chain([path.as_str()])) {
            eprintln!("cannot delete the example quota: {error:#}");
        }
    }
}

fn example_file(example: &str, file: &str) -> String {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/examples");
    format!("{root}/{example}/{file}")
}

#[test]
fn takes_borrowed_quota_back() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let (research, production) = ("drava-example-research", "drava-example-production");
    let example = QuotaExample(&cluster);
    cluster.kubectl(["apply", "-f", &example_file("quota", "quota.yaml")])?;
    let training = ["rollout", "status", "deployment/training", "--timeout=120s"];
    cluster.kubectl(["-n", research].into_iter().chain(training))?;
    wait("research has borrowed a GPU", || {
        let quota = cluster.get(&["gpuquota", research])?;
        Ok((quota["status"]["borrowed"]["devices"] == 1).then_some(()))
    })?;
    cluster.kubectl(["apply", "-f", &example_file("quota", "production.yaml")])?;
    wait("production has its GPU", || {
        let pod = cluster.get(&["-n", production, "pod", "inference"])?;
        Ok((pod["status"]["phase"] == "Running").then_some(()))
    })?;
    let events = cluster.get(&["-n", research, "events"])?;
    let events = events["items"].as_array().into_iter().flatten();
    let preempted = events.filter(|event| event["reason"] == "Preempted");
    let messages: Vec<&str> = preempted
        .filter_map(|event| event["message"].as_str())
        .collect();
    ensure!(messages.len() == 1, "{messages:?}");
    ensure!(
        messages[0].contains("within the guarantee of its quota"),
        "{messages:?}"
    );
    drop(example);
    Ok(())
}

#[test]
fn node_profile_oversubscribes_the_nodes_of_a_pool() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("node-profile")?;
    let label = |value: &str| {
        let nodes = ["label", "nodes", "--all", "--overwrite"];
        cluster.kubectl(nodes.into_iter().chain([value]))
    };
    label("example.com/gpu-pool=notebooks")?;
    tenant.example("node-profile")?;
    let applied = wait("the profile is applied", || {
        let profile = cluster.get(&["gpunodeprofile", "notebooks"])?;
        Ok((profile["status"]["nodes"][0]["state"] == "Applied").then_some(()))
    });
    let devices = cluster.kubectl([
        "get",
        "resourceslices",
        "-o",
        "jsonpath={range .items[*].spec.devices[*]}{.name}={.capacity.slots.value} {end}",
    ]);
    cluster.kubectl(["delete", "gpunodeprofile", "notebooks"])?;
    label("example.com/gpu-pool-")?;
    applied?;
    let devices = devices?;
    ensure!(devices == "gpu-0-vgpu=20 gpu-1-vgpu=20 ", "{devices}");
    // The other tests use the default.
    wait("the node offers its default again", || {
        let slices = cluster.kubectl(["get", "resourceslices", "-o", "json"])?;
        let is_default = slices.matches("gpu.drava.dev/unhealthy").count() == 0
            && slices.matches("\"slots\"").count() == 2
            && !slices.contains("\"value\": \"20\"");
        Ok(is_default.then_some(()))
    })
}
