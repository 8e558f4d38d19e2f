//! Security contexts: Pod Security `restricted`, several users, user namespaces, privileged containers.

use anyhow::{Context as _, Result, ensure};
use drava_e2e::manifest::pod_without_claim;
use drava_e2e::{Namespace, TestCluster, wait};

use super::{
    HELD_MIB, SHARE, SHARE_MIB, SLEEP, USES_SHARE, container, free_mib, hold, is_limited,
    is_limited_on, pod, run, skip,
};

/// What Pod Security `restricted` demands of a container, and a root file system that cannot be written.
const RESTRICTED: &str =
    "allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}";

/// What it demands of a pod.
const RESTRICTED_POD: &str =
    "securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}";

/// Returns a restricted container of this user.
fn restricted(name: &str, user: u32, command: &str) -> String {
    let fields = format!(
        "{USES_SHARE}, securityContext: {{runAsUser: {user}, runAsGroup: {user}, {RESTRICTED}}}"
    );
    container(name, command, &fields)
}

#[test]
fn restricted_containers_of_two_users_have_one_limit() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("restricted")?;
    let enforce = "pod-security.kubernetes.io/enforce=restricted";
    cluster.kubectl(["label", "namespace", tenant.name(), enforce])?;
    tenant.apply(SHARE)?;
    let open = pod(
        "open",
        &format!("containers: [{}]", container("app", SLEEP, USES_SHARE)),
    );
    let rejected = tenant.apply(&open).err().context("Pod Security is off")?;
    ensure!(
        format!("{rejected:#}").contains("violates PodSecurity"),
        "{rejected:#}"
    );

    let first = restricted("first", 1000, &hold());
    let second = restricted("second", 2000, SLEEP);
    run(
        &tenant,
        "app",
        &format!("{RESTRICTED_POD}, containers: [{first}, {second}]"),
    )?;
    for (name, user) in [("first", "1000"), ("second", "2000")] {
        let id = tenant.exec("app", name, &["id", "-u"])?.success()?;
        ensure!(id.trim() == user, "{name} runs as {id}");
        let write = tenant.exec("app", name, &["touch", "/etc/file"])?;
        ensure!(
            write.code != 0,
            "the root file system of {name} can be written"
        );
        is_limited(&tenant, "app", name)?;
    }
    wait("the memory of the first user is charged", || {
        let free = free_mib(&tenant, "app", "second")?;
        Ok((free <= SHARE_MIB - HELD_MIB).then_some(()))
    })
}

/// Returns whether an event says that the host refuses user namespaces: the feature, id-mapped mounts, or the mount of `/proc`
/// in a nested container.
fn refuses_user_namespaces(event: &str) -> bool {
    let event = event.to_lowercase();
    event.starts_with("failed")
        && (event.contains("user namespace")
            || event.contains("idmap")
            || (event.contains("mount") && event.contains("/proc")))
}

#[test]
fn tells_refused_user_namespace_from_other_failures() {
    let sandbox = "FailedCreatePodSandBox: Failed to create pod sandbox: rpc error: code = Unknown desc = failed to";
    for reason in [
        r#"start sandbox: runc create failed: unable to start container process: error mounting "proc" to rootfs at "/proc": mount src=proc, dst=/proc: operation not permitted"#,
        "create containerd task: the runtime does not support user namespaces",
        "mount rootfs: idmap mounts are not supported by the file system",
    ] {
        assert!(refuses_user_namespaces(&format!("{sandbox} {reason}")));
    }
    for event in [
        "FailedScheduling: 0/1 nodes are available: 1 node has a taint of a user",
        "FailedCreatePodSandBox: Failed to create pod sandbox: cni plugin not initialized",
        "FailedPrepareDynamicResources: cannot mount the usage region",
        "Pulled: image of a user namespace",
    ] {
        assert!(!refuses_user_namespaces(event), "{event}");
    }
}

/// Waits until the pod runs, or until an event reports that the host refuses its user namespace, and returns the event.
fn refusal_to_start(tenant: &Namespace<'_>, pod: &str) -> Result<Option<String>> {
    wait(
        &format!("pod {pod} runs or its user namespace is refused"),
        || {
            let found = tenant.find("pod", pod)?.context("the pod is gone")?;
            if found["status"]["phase"] == "Running" {
                return Ok(Some(None));
            }
            let refused = tenant
                .events(pod)?
                .into_iter()
                .find(|event| refuses_user_namespaces(event));
            Ok(refused.map(Some))
        },
    )
}

#[test]
fn limits_pod_in_its_own_user_namespace() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("user-namespace")?;
    // A pod without claim tells whether this machine can have such pods.
    let other = pod_without_claim("other").replace("spec:\n", "spec:\n  hostUsers: false\n");
    ensure!(other.contains("hostUsers"), "{other}");
    tenant.apply(&other)?;
    if let Some(reason) = refusal_to_start(&tenant, "other")? {
        return skip("limits_pod_in_its_own_user_namespace", &reason);
    }
    let app = container("app", SLEEP, USES_SHARE);
    run(
        &tenant,
        "app",
        &format!("hostUsers: false, containers: [{app}]"),
    )?;
    let map = tenant
        .exec("app", "app", &["cat", "/proc/self/uid_map"])?
        .success()?;
    let root = map.split_whitespace().nth(1).context("uid_map")?;
    ensure!(root != "0", "root of the pod is root of the node: {map}");
    is_limited(&tenant, "app", "app")
}

/// A privileged container has the device files of all GPUs, as this container has by a volume: the files of the simulated
/// GPUs are not in `/dev` of the node.
#[test]
fn limits_privileged_container_and_reports_its_use_of_other_gpu() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("privileged")?;
    // The other GPU is that of another claim.
    for (name, index) in [("share", 0), ("neighbor-share", 1)] {
        let on_gpu = format!(
            "selectors: [{{cel: {{expression: \"device.attributes['gpu.drava.dev'].index == {index}\"}}}}], capacity"
        );
        let template = SHARE.replace("name: share", &format!("name: {name}"));
        tenant.apply(&template.replace("capacity", &on_gpu))?;
    }
    let neighbor = container("app", SLEEP, USES_SHARE);
    let neighbor = pod("neighbor", &format!("containers: [{neighbor}]"));
    let template = "resourceClaimTemplateName: share";
    ensure!(neighbor.contains(template), "{neighbor}");
    tenant.apply(&neighbor.replace(template, "resourceClaimTemplateName: neighbor-share"))?;
    tenant.running("neighbor")?;
    let fields = format!(
        "{USES_SHARE}, securityContext: {{privileged: true}}, volumeMounts: [{{name: other, mountPath: /dev/nvidia1}}]"
    );
    let volumes = "volumes: [{name: other, hostPath: {path: /opt/drava-sim/dev/nvidia1}}]";
    let app = container("app", SLEEP, &fields);
    tenant.apply(&pod("app", &format!("{volumes}, containers: [{app}]")))?;
    tenant.running("app")?;
    let info = ["cuda-probe", "info", "-o", "json"];
    let info = tenant.exec("app", "app", &info)?.json()?;
    let devices = info["devices"].as_array().context("devices")?;
    let is_share = |device: &serde_json::Value| device["totalBytes"] == SHARE_MIB << 20;
    let share = devices.iter().position(is_share);
    let share = share.with_context(|| format!("no device with the share's memory: {info}"))?;
    is_limited_on(&tenant, "app", "app", share)?;

    let other = (0..devices.len()).find(|index| *index != share);
    let other = other
        .with_context(|| format!("one device only: {info}"))?
        .to_string();
    let use_it = [
        "cuda-probe",
        "alloc",
        "--device",
        &other,
        "--mib",
        "500",
        "--hold",
        "10",
    ];
    tenant.exec("app", "app", &use_it)?.success()?;
    tenant.event("app", "OtherGpuUsed")?;
    is_limited(&tenant, "neighbor", "app")
}

/// Runtimes with a kernel of their own do not give containers the devices and limits of claims. The handler decides, not the
/// name of the class.
#[test]
fn refuses_runtime_with_its_own_kernel() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("runtime")?;
    let sandboxes = [("e2e-gvisor", "runsc"), ("e2e-other", "kata-qemu")];
    let classes = [sandboxes[0], sandboxes[1], ("e2e-performance", "runc")];
    for (class, handler) in classes {
        tenant.apply(&format!(
            "{{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {{name: {class}}}, handler: {handler}}}"
        ))?;
    }
    let with_class = |class: &str| {
        let app = container("app", SLEEP, USES_SHARE);
        pod(
            class,
            &format!("runtimeClassName: {class}, containers: [{app}]"),
        )
    };
    let tested = (|| {
        tenant.apply(SHARE)?;
        for (class, handler) in sandboxes {
            tenant.apply(&with_class(class))?;
            let event = tenant.event(class, "has the RuntimeClass")?;
            let names = format!("the RuntimeClass \"{class}\" with the handler \"{handler}\"");
            for word in [
                names.as_str(),
                "use another RuntimeClass",
                "driver.runtimeClasses",
            ] {
                ensure!(event.contains(word), "no {word:?} in {event}");
            }
            ensure!(
                event.starts_with("FailedPrepareDynamicResources"),
                "{event}"
            );
        }
        tenant.apply(&with_class("e2e-performance"))?;
        tenant.running("e2e-performance")?;
        is_limited(&tenant, "e2e-performance", "app")
    })();
    for (class, _) in classes {
        cluster.kubectl(["delete", "runtimeclass", class, "--ignore-not-found"])?;
    }
    tested
}
