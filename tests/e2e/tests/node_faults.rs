//! Faults of a node under running and starting pods: restarts of its services, a reboot, an outage of the API server, a full
//! disk, a read-only directory, a hung GPU, a forged share, and a claim deleted by force.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use drava_cluster::Component;
use drava_e2e::manifest::{pod_with_request, pod_with_share, pod_without_claim};
use drava_e2e::{Namespace, TestCluster, TestNode, wait};

const CLASS: &str = "vgpu.drava.dev";

/// Length of the outage of the API server.
const OUTAGE: Duration = Duration::from_secs(60);

/// Returns a pod with 1 GiB of the GPU with this index.
fn pod_on_gpu(name: &str, index: u32, memory: &str) -> String {
    let expression = format!("device.attributes['gpu.drava.dev'].index == {index}");
    let exactly = format!(
        r#"{{deviceClassName: {CLASS}, capacity: {{requests: {{memory: {memory}}}}}, selectors: [{{cel: {{expression: "{expression}"}}}}]}}"#
    );
    pod_with_request(name, &exactly, "")
}

/// Returns how often the container of a pod was restarted.
fn restarts(tenant: &Namespace<'_>, pod: &str) -> Result<u64> {
    let found = tenant.find("pod", pod)?.context("the pod is gone")?;
    let count = found["status"]["containerStatuses"][0]["restartCount"].as_u64();
    count.context("restartCount")
}

/// Checks that a pod sees its share of 2 GiB and cannot exceed it.
fn is_limited(tenant: &Namespace<'_>, pod: &str) -> Result<()> {
    ensure!(tenant.total_mib(pod)? == "2048", "{pod} has another limit");
    let denied = tenant.exec(pod, "app", &["cuda-probe", "alloc", "--mib", "2049"])?;
    ensure!(denied.code == 2, "{denied:?}");
    tenant.fill(pod, 0)?;
    Ok(())
}

/// Runs a script on the node.
fn script(node: &TestNode, script: &str) -> Result<String> {
    node.run("sh", &["-euc", script])
}

/// Returns the PID of the node driver in the namespaces of the node.
fn driver_pid(node: &TestNode) -> Result<String> {
    wait("a process of the node driver", || {
        Ok(node.pids("drava-dra-driver")?.into_iter().next())
    })
}

#[test]
fn running_pods_survive_containerd_restart() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("containerd")?;
    tenant.apply(&pod_with_share("before", CLASS, "{memory: 2Gi}"))?;
    tenant.running("before")?;
    let node = cluster.kubernetes().control_plane();
    node.stop(Component::Containerd)?;
    let created = tenant.apply(&pod_with_share("during", CLASS, "{memory: 2Gi}"));
    node.start(Component::Containerd)?;
    created?;
    tenant.running("during")?;
    for pod in ["before", "during"] {
        is_limited(&tenant, pod)?;
        ensure!(restarts(&tenant, pod)? == 0, "{pod} was restarted");
    }
    // Then kubelet watches pods again, which can take a minute after an outage.
    tenant.apply(&pod_without_claim("after"))?;
    tenant.running("after")?;
    tenant.delete_pods(&["before", "during", "after"])?;
    cluster.first_node().wait_until_clean()
}

/// What a reboot takes from the node: all processes, mounts and files of memory file systems.
const REBOOT: &str = "
    for mount in $(grep -o ' /run/drava/usage/[^ ]*' /proc/mounts); do umount -l $mount; done
    rm -rf /run/drava/usage/* /run/cdi/gpu.drava.dev-claim-*";

#[test]
fn pods_keep_their_limits_over_a_reboot() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("reboot")?;
    tenant.apply(&pod_with_share("app", CLASS, "{memory: 2Gi}"))?;
    tenant.running("app")?;
    let devices = tenant.devices_of("app")?;
    let (node, kubernetes) = (cluster.first_node(), cluster.kubernetes().control_plane());
    kubernetes.stop(Component::Kubelet)?;
    let rebooted = (|| {
        ensure!(node.signal_pod("app", "KILL")? > 0, "no process of the pod");
        ensure!(node.signal("drava-dra-driver", "KILL")? > 0, "no driver");
        script(&node, REBOOT)?;
        kubernetes.restart(Component::Containerd)
    })();
    kubernetes.start(Component::Kubelet)?;
    rebooted?;
    wait("the container of the pod is restarted", || {
        let is_restarted = restarts(&tenant, "app")? > 0;
        let runs = || tenant.exec("app", "app", &["nvidia-smi", "-L"]);
        Ok((is_restarted && runs()?.code == 0).then_some(()))
    })?;
    is_limited(&tenant, "app")?;
    ensure!(tenant.devices_of("app")? == devices, "another device");
    cluster.drava_ready()?;
    tenant.delete_pods(&["app"])?;
    node.wait_until_clean()
}

#[test]
fn api_server_outage_delays_prepare_only() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("api-outage")?;
    tenant.apply(&pod_with_share("before", CLASS, "{memory: 2Gi}"))?;
    tenant.running("before")?;
    let (node, kubernetes) = (cluster.first_node(), cluster.kubernetes().control_plane());
    // The driver gets kubelet's call for the pod when the API server is gone.
    ensure!(node.signal("drava-dra-driver", "STOP")? > 0, "no driver");
    let bound = tenant
        .apply(&pod_with_share("during", CLASS, "{memory: 2Gi}"))
        .and_then(|()| {
            wait("the pod is bound", || {
                let pod = tenant.find("pod", "during")?;
                let node = pod.map(|pod| pod["spec"]["nodeName"].clone());
                Ok(node.filter(serde_json::Value::is_string).map(drop))
            })
        });
    let outage = bound.and_then(|()| kubernetes.stop(Component::KubeApiserver));
    node.signal("drava-dra-driver", "CONT")?;
    outage?;
    sleep(OUTAGE);
    kubernetes.start(Component::KubeApiserver)?;
    wait("the API server responds", || {
        Ok(tenant.list("pods").ok().map(drop))
    })?;
    tenant.running("during")?;
    for pod in ["before", "during"] {
        is_limited(&tenant, pod)?;
        ensure!(restarts(&tenant, pod)? == 0, "{pod} was restarted");
    }
    tenant.delete_pods(&["before", "during"])?;
    node.wait_until_clean()
}

/// Applies `fault` in the mount namespace of the node driver, checks that a pod reports `texts`, and that the pod starts
/// after `repair`.
fn pod_reports(
    name: &'static str,
    fault: impl Fn(&str) -> String,
    repair: impl Fn(&str) -> String,
    texts: &[&str],
) -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace(name)?;
    let node = cluster.first_node();
    node.wait_until_clean()?;
    let pid = driver_pid(&node)?;
    script(&node, &fault(&pid))?;
    let reported = tenant
        .apply(&pod_with_share(name, CLASS, "{memory: 2Gi}"))
        .and_then(|()| tenant.event(name, texts[0]));
    script(&node, &repair(&pid))?;
    let reported = reported?;
    for text in texts {
        ensure!(reported.contains(text), "no {text:?} in {reported}");
    }
    tenant.running(name)?;
    is_limited(&tenant, name)?;
    tenant.delete_pods(&[name])?;
    node.wait_until_clean()
}

#[test]
fn full_disk_is_reported_and_leaves_nothing() -> Result<()> {
    pod_reports(
        "full",
        |pid| {
            format!(
                "mount -N {pid} -t tmpfs -o size=4k none /var/lib/drava/claims; \
                 head -c 4096 /dev/zero > /proc/{pid}/root/var/lib/drava/claims/.full"
            )
        },
        |pid| format!("umount -N {pid} /var/lib/drava/claims"),
        &["No space left on device", "/var/lib/drava/claims/", "full"],
    )
}

#[test]
fn read_only_cdi_directory_is_reported() -> Result<()> {
    let remount = |mode: &'static str| {
        move |pid: &str| format!("mount -N {pid} -o remount,bind,{mode} /var/run/cdi")
    };
    pod_reports(
        "read-only",
        remount("ro"),
        remount("rw"),
        &[
            "cannot use the CDI directory /var/run/cdi",
            "Read-only file system",
        ],
    )
}

#[test]
fn prepares_64_claims_at_once() -> Result<()> {
    const PODS: usize = 8;
    const CONTAINERS: usize = 8;
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("many")?;
    let profile = "{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuNodeProfile, metadata: {name: e2e-many}, spec: {splitCount: 64}}";
    tenant.apply(profile)?;
    let run = (|| {
        tenant.apply(&format!(
            "{{apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {{name: small}}, spec: {{spec: {{devices: {{requests: [{{name: gpu, exactly: {{deviceClassName: {CLASS}, capacity: {{requests: {{memory: 1Gi}}}}}}}}]}}}}}}}}"
        ))?;
        let range = 0..CONTAINERS;
        let claims: Vec<String> = range
            .clone()
            .map(|index| format!("{{name: gpu-{index}, resourceClaimTemplateName: small}}"))
            .collect();
        let containers: Vec<String> = range
            .map(|index| {
                let name = if index == 0 { "app".to_owned() } else { format!("app-{index}") };
                format!(
                    "{{name: {name}, image: 'localhost/drava-demo:dev', imagePullPolicy: IfNotPresent, command: [sleep, infinity], resources: {{claims: [{{name: gpu-{index}}}]}}}}"
                )
            })
            .collect();
        let pods: Vec<String> = (0..PODS)
            .map(|pod| {
                format!(
                    "{{apiVersion: v1, kind: Pod, metadata: {{name: many-{pod}}}, spec: {{terminationGracePeriodSeconds: 1, resourceClaims: [{}], containers: [{}]}}}}",
                    claims.join(", "),
                    containers.join(", ")
                )
            })
            .collect();
        tenant.apply(&pods.join("\n---\n"))?;
        for pod in 0..PODS {
            tenant.running(&format!("many-{pod}"))?;
        }
        cluster.check_allocations()?;
        let last = format!("app-{}", CONTAINERS - 1);
        let query = [
            "nvidia-smi",
            "--query-gpu=memory.total",
            "--format=csv,noheader,nounits",
        ];
        let total = tenant.exec("many-7", &last, &query)?.success()?;
        ensure!(total.trim() == "1024", "{total}");
        tenant.kubectl(&[
            "delete",
            "pods",
            "--all",
            "--grace-period=1",
            "--timeout=120s",
        ])?;
        cluster.first_node().wait_until_clean()
    })();
    cluster.kubectl(["delete", "gpunodeprofile", "e2e-many", "--ignore-not-found"])?;
    run
}

#[test]
fn hung_gpu_delays_no_pod_of_another() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("hung")?;
    let node = cluster.first_node();
    let delay = |milliseconds: &str| {
        node.simulator(&["break", "--gpu", "0", "--delay-milliseconds", milliseconds])
    };
    delay("10000")?;
    let started = (|| {
        let start = Instant::now();
        let pods = ["first", "second", "third"];
        for pod in pods {
            tenant.apply(&pod_on_gpu(pod, 1, "1Gi"))?;
        }
        for pod in pods {
            tenant.running(pod)?;
        }
        // Each call of NVML about the other GPU takes 10 s.
        ensure!(
            start.elapsed() < Duration::from_secs(60),
            "the pods took {:?}",
            start.elapsed()
        );
        Ok(())
    })();
    delay("0")?;
    started?;
    cluster.wait_for_faults(&[])?;
    tenant.apply(&pod_on_gpu("hung", 0, "1Gi"))?;
    tenant.running("hung")
}

#[test]
fn volume_cannot_forge_membership_in_share() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("forged")?;
    let victim = pod_on_gpu("victim", 0, "2Gi");
    tenant.apply(&victim)?;
    tenant.running("victim")?;
    let claim = tenant.claim_of("victim")?;
    let found = tenant.find("resourceclaim", &claim)?.context("claim")?;
    let share = &found["status"]["allocation"]["devices"]["results"][0]["shareID"];
    let share = share.as_str().context("shareID")?;
    // A share of its own, and the directory of the victim's share as a volume.
    let own = "resources: {claims: [{name: gpu}]}";
    let forger = pod_on_gpu("forger", 0, "30Gi")
        .replace(
            own,
            &format!(
                "{own}\n    volumeMounts: [{{name: forged, mountPath: /run/drava/{share}/limits}}, {{name: forged, mountPath: /run/drava/{share}/usage}}]"
            ),
        )
        .replace(
            "terminationGracePeriodSeconds: 1",
            "terminationGracePeriodSeconds: 1\n  volumes: [{name: forged, emptyDir: {}}]",
        )
        .replace("[sleep, infinity]", "[cuda-probe, alloc, --mib, \"20000\", --hold, \"3600\"]");
    ensure!(
        forger.contains("emptyDir") && forger.contains(share),
        "{forger}"
    );
    tenant.apply(&forger)?;
    tenant.running("forger")?;
    wait("the forger uses the GPU", || {
        let status: serde_json::Value = serde_json::from_str(&node_status(&cluster)?)?;
        let used = status["gpus"][0]["usedBytes"].as_u64();
        Ok(used.is_some_and(|used| used >> 20 >= 20_000).then_some(()))
    })?;
    // Longer than the agent takes to confirm a violation.
    let watched = Instant::now();
    while watched.elapsed() < Duration::from_secs(8) {
        is_limited(&tenant, "victim")?;
    }
    let enforced = tenant.find("resourceclaim", &claim)?.context("claim")?;
    let conditions = &enforced["status"]["devices"][0]["conditions"];
    let is_enforced = |condition: &serde_json::Value| {
        condition["type"] == "Enforced" && condition["status"] == "True"
    };
    ensure!(
        conditions
            .as_array()
            .is_some_and(|all| all.iter().any(is_enforced)),
        "{conditions}"
    );
    for event in tenant.events("victim")? {
        ensure!(!event.contains("limit 2048 MiB"), "{event}");
    }
    ensure!(restarts(&tenant, "victim")? == 0, "the victim was killed");
    Ok(())
}

fn node_status(cluster: &TestCluster) -> Result<String> {
    cluster.first_node().simulator(&["status"])
}

#[test]
fn forced_deletion_of_claim_frees_nothing_in_use() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("forced")?;
    let (node, kubernetes) = (cluster.first_node(), cluster.kubernetes().control_plane());
    let program = "[cuda-probe, alloc, --mib, \"40000\", --hold, \"3600\"]";
    let victim = pod_on_gpu("victim", 0, "45Gi").replace("[sleep, infinity]", program);
    tenant.apply(&victim)?;
    tenant.running("victim")?;
    let claim = tenant.claim_of("victim")?;
    let found = tenant.find("resourceclaim", &claim)?.context("claim")?;
    let uid = found["metadata"]["uid"].as_str().context("uid")?.to_owned();
    let used_mib = || -> Result<u64> {
        let status: serde_json::Value = serde_json::from_str(&node.simulator(&["status"])?)?;
        Ok(status["gpus"][0]["usedBytes"]
            .as_u64()
            .context("usedBytes")?
            >> 20)
    };
    wait("the program holds its memory", || {
        Ok((used_mib()? >= 40_000).then_some(()))
    })?;
    kubernetes.stop(Component::Kubelet)?;
    let deleted = (|| {
        tenant.kubectl(&["delete", "pod", "victim", "--grace-period=0", "--force"])?;
        // Kubernetes may have removed the claim of the template meanwhile.
        let finalizers = r#"{"metadata": {"finalizers": null}}"#;
        let patch = [
            "patch",
            "resourceclaim",
            &claim,
            "--type=merge",
            "-p",
            finalizers,
        ];
        wait("the claim is gone", || {
            if tenant.find("resourceclaim", &claim)?.is_none() {
                return Ok(Some(()));
            }
            let _ = tenant.kubectl(&patch);
            tenant.kubectl(&["delete", "resourceclaim", &claim, "--ignore-not-found"])?;
            Ok(None)
        })?;
        // The controller sees free memory.
        tenant.apply(&pod_on_gpu("next", 0, "45Gi"))?;
        tenant.devices_of("next")?;
        ensure!(used_mib()? >= 40_000, "the program has ended");
        let pages = script(
            &node,
            &format!("find /var/lib/drava/claims/{uid} -name page | wc -l"),
        )?;
        ensure!(pages.trim() == "1", "{pages} limits pages");
        Ok(())
    })();
    kubernetes.start(Component::Kubelet)?;
    deleted?;
    tenant.running("next")?;
    ensure!(used_mib()? < 40_000, "both programs use the GPU");
    ensure!(tenant.fill("next", 0)? > 44_000, "the share is not usable");
    tenant.delete_pods(&["next"])?;
    node.wait_until_clean()
}
