//! Shares that grow and shrink while their programs run.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use drava_cluster::Component;
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, ProgramOutput, TestCluster, wait};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// Time without an API server.
const OUTAGE: Duration = Duration::from_secs(60);

/// Returns the limit that a program of the pod sees, MiB.
fn total_mib(tenant: &Namespace<'_>, pod: &str) -> Result<u64> {
    total_mib_in(tenant, pod, "app")
}

fn total_mib_in(tenant: &Namespace<'_>, pod: &str, container: &str) -> Result<u64> {
    let info = tenant
        .exec(pod, container, &["cuda-probe", "info", "-o", "json"])?
        .json()?;
    let bytes = info["devices"][0]["totalBytes"]
        .as_u64()
        .context("totalBytes")?;
    Ok(bytes / MIB)
}

/// Returns the companions in the namespace.
fn companions(tenant: &Namespace<'_>) -> Result<Vec<Value>> {
    let mut claims = tenant.list("resourceclaims")?;
    claims.retain(|claim| !claim["metadata"]["labels"]["gpu.drava.dev/companion-of"].is_null());
    Ok(claims)
}

fn start(tenant: &Namespace<'_>, pod: &str, memory: &str) -> Result<()> {
    tenant.apply(&pod_with_share(
        pod,
        "vgpu.drava.dev",
        &format!("{{memory: {memory}}}"),
    ))?;
    tenant.running(pod)
}

/// Starts the pod `grow`, whose share has no cores, beside `other`, which has 20 of the same GPU.
fn start_beside_other(tenant: &Namespace<'_>) -> Result<()> {
    for (pod, cores) in [("grow", 0), ("other", 20)] {
        let capacity = format!("{{memory: 2Gi, cores: \"{cores}\"}}");
        tenant.apply(&pod_with_share(pod, "vgpu.drava.dev", &capacity))?;
        tenant.running(pod)?;
    }
    let (grow, other) = (tenant.devices_of("grow")?, tenant.devices_of("other")?);
    ensure!(grow == other, "pods use several GPUs: {grow:?}, {other:?}");
    Ok(())
}

#[test]
fn running_share_grows_and_gives_back() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("growth")?;
    start(&tenant, "grow", "3Gi")?;
    let resize = |memory: &str, timeout: &str| {
        cluster.drava(&[
            "-n",
            tenant.name(),
            "resize",
            "pod/grow",
            "--memory",
            memory,
            "--timeout",
            timeout,
        ])
    };
    let dry_run = cluster.drava(&[
        "-n",
        tenant.name(),
        "resize",
        "grow",
        "--memory",
        "5Gi",
        "--dry-run",
    ])?;
    ensure!(
        dry_run.code == 0 && dry_run.stdout.contains("would have 5120 MiB"),
        "{dry_run:?}"
    );
    ensure!(companions(&tenant)?.is_empty(), "a dry run created a claim");

    let grown = resize("5Gi", "60")?;
    ensure!(
        grown.code == 0 && grown.stdout.contains("has 5120 MiB"),
        "{grown:?}"
    );
    ensure!(
        total_mib(&tenant, "grow")? == 5120,
        "the program does not see its new limit"
    );
    let claim = tenant.claim_of("grow")?;
    let described = tenant.kubectl(&["describe", "resourceclaim", &claim])?;
    ensure!(
        described.contains("libvgpu limits memory to 5120 MiB (3072 + 2048 of claim"),
        "{described}"
    );
    cluster.check_allocations()?;

    // A restart of the node driver shrinks nothing.
    ensure!(
        cluster.kill_processes("drava-dra-driver")? > 0,
        "no driver process on the node"
    );
    cluster.drava_ready()?;
    ensure!(
        total_mib(&tenant, "grow")? == 5120,
        "the restart of the driver shrank the share"
    );

    // What is in use is not given back.
    let kept = std::thread::scope(|scope| -> Result<()> {
        let holder = scope.spawn(|| {
            tenant.exec(
                "grow",
                "app",
                &["cuda-probe", "alloc", "--mib", "3500", "--hold", "20"],
            )
        });
        wait("the program uses its new memory", || {
            let probe = ["cuda-probe", "alloc", "--mib", "1", "-o", "json"];
            let seen = tenant.exec("grow", "app", &probe)?.json()?;
            let free = seen["before"]["freeBytes"].as_u64().context("freeBytes")?;
            Ok((free < 1600 * MIB).then_some(()))
        })?;
        let refused = resize("3Gi", "3")?;
        ensure!(
            refused.code == 1 && refused.stderr.contains("3072 MiB that it keeps"),
            "{refused:?}"
        );
        ensure!(total_mib(&tenant, "grow")? == 5120, "a share in use shrank");
        let held = holder
            .join()
            .map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        ensure!(held.code == 0, "{held:?}");
        Ok(())
    });
    kept?;
    wait("the capacity is given back", || {
        Ok(companions(&tenant)?.is_empty().then_some(()))
    })?;
    ensure!(
        total_mib(&tenant, "grow")? == 3072,
        "the limit was not lowered"
    );
    cluster.check_allocations()?;
    let pod = tenant.find("pod", "grow")?.context("the pod is gone")?;
    ensure!(
        pod["status"]["containerStatuses"][0]["restartCount"] == 0,
        "the container was restarted"
    );
    Ok(())
}

#[test]
fn share_of_two_containers_grows_for_both() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("growth-pair")?;
    let second = "  - name: second
    image: localhost/drava-demo:dev
    imagePullPolicy: IfNotPresent
    command: [sleep, infinity]
    resources: {claims: [{name: gpu}]}
";
    let pair = pod_with_share("pair", "vgpu.drava.dev", "{memory: 3Gi}");
    tenant.apply(&pair.replace("  containers:\n", &format!("  containers:\n{second}")))?;
    tenant.running("pair")?;
    let resize = |memory: &str| {
        let grown = cluster.drava(&["-n", tenant.name(), "resize", "pair", "--memory", memory])?;
        ensure!(grown.code == 0, "{grown:?}");
        Ok(())
    };
    let see = |mib: u64| {
        for container in ["app", "second"] {
            let total = total_mib_in(&tenant, "pair", container)?;
            ensure!(total == mib, "{container} sees {total} MiB");
        }
        Ok(())
    };
    see(3072)?;
    resize("5Gi")?;
    see(5120)?;
    // What one of them uses the other one does not have.
    std::thread::scope(|scope| -> Result<()> {
        let holder = scope.spawn(|| {
            // Beside it, the other one has room for its context.
            let probe = ["cuda-probe", "alloc", "--mib", "3000", "--hold", "10"];
            tenant.exec("pair", "second", &probe)
        });
        wait("the other container has the rest", || {
            let probe = ["cuda-probe", "alloc", "--mib", "1", "-o", "json"];
            let seen = tenant.exec("pair", "app", &probe)?.json()?;
            let free = seen["before"]["freeBytes"].as_u64().context("freeBytes")?;
            Ok((free < 2000 * MIB).then_some(()))
        })?;
        let held = holder
            .join()
            .map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        ensure!(held.code == 0, "{held:?}");
        Ok(())
    })?;
    resize("3Gi")?;
    see(3072)?;
    cluster.check_allocations()
}

#[test]
fn growth_that_does_not_fit_says_why_and_ends_with_pod() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("no-growth")?;
    start_beside_other(&tenant)?;
    let resize_to = |option: &str, amount: &str| {
        cluster.drava(&[
            "-n",
            tenant.name(),
            "resize",
            "grow",
            option,
            amount,
            "--timeout",
            "5",
        ])
    };
    let resize = |memory: &str| resize_to("--memory", memory);
    // More than the GPU has is refused at once, and leaves nothing that holds up the next resize.
    let never = resize("500Gi")?;
    ensure!(never.code == 1, "{never:?}");
    ensure!(never.stderr.contains("can never"), "{never:?}");
    ensure!(companions(&tenant)?.is_empty(), "{never:?}");
    let refused = resize_to("--cores", "90")?;
    ensure!(refused.code == 1, "{refused:?}");
    ensure!(refused.stderr.contains("InsufficientCores"), "{refused:?}");
    tenant.event("grow", "GrowthWaits: claim ")?;
    let explained = cluster.drava(&["-n", tenant.name(), "explain", "pod", "grow"])?;
    ensure!(
        explained
            .stdout
            .contains("is not allocated: InsufficientCores")
            && explained.stdout.contains("counts, where claim"),
        "{explained:?}"
    );
    let again = resize("3Gi")?;
    ensure!(
        again.stderr.contains("waits for its allocation"),
        "{again:?}"
    );
    for companion in companions(&tenant)? {
        let name = companion["metadata"]["name"].as_str().context("name")?;
        tenant.kubectl(&["delete", "resourceclaim", name, "--timeout=30s"])?;
    }
    let grown = resize("3Gi")?;
    ensure!(grown.code == 0, "{grown:?}");
    tenant.delete_pods(&["grow"])?;
    wait("the companion ends with its pod", || {
        Ok(companions(&tenant)?.is_empty().then_some(()))
    })?;
    cluster.check_allocations()
}

/// A tenant labels a claim of its own, in use, as the companion of another one: its capacity counts once.
#[test]
fn claim_in_use_adds_nothing_to_another() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("forged-growth")?;
    tenant.share_one_gpu(&[("base", "3Gi"), ("other", "4Gi")])?;
    let (base, other) = (tenant.claim_of("base")?, tenant.claim_of("other")?);
    let uid = tenant.kubectl(&[
        "get",
        "resourceclaim",
        &base,
        "-o",
        "jsonpath={.metadata.uid}",
    ])?;
    let label = format!("gpu.drava.dev/companion-of={uid}");
    tenant.kubectl(&["label", "resourceclaim", &other, &label])?;
    let why = tenant.event(&other, "GrowthRefused")?;
    ensure!(why.contains("is prepared for a pod"), "{why}");
    ensure!(
        total_mib(&tenant, "base")? == 3072,
        "the share grew by capacity in use"
    );
    ensure!(
        total_mib(&tenant, "other")? == 4096,
        "the claim in use lost its capacity"
    );
    Ok(())
}

fn resize(
    cluster: &TestCluster,
    tenant: &Namespace<'_>,
    pod: &str,
    memory: &str,
    timeout: &str,
) -> Result<ProgramOutput> {
    let amount = ["--memory", memory, "--timeout", timeout];
    let command = ["-n", tenant.name(), "resize", pod];
    cluster.drava(&[&command[..], &amount].concat())
}

/// The API server is frozen for a minute, in which the node driver and kubelet are restarted, and the programs allocate.
#[test]
fn growth_outlives_api_server_driver_and_kubelet() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("growth-outage")?;
    let program =
        "while :; do cuda-probe churn --largest-mib 512 --held 8 --pause-us 10000; sleep 0.1; done";
    let pod = pod_with_share("grow", "vgpu.drava.dev", "{memory: 3Gi}");
    tenant.apply(&pod.replace(
        "command: [sleep, infinity]",
        &format!("command: [sh, -c, {}]", json!(program)),
    ))?;
    tenant.running("grow")?;
    let grown = resize(&cluster, &tenant, "grow", "5Gi", "60")?;
    ensure!(grown.code == 0, "{grown:?}");
    let companion = companions(&tenant)?;
    let name = companion[0]["metadata"]["name"].as_str().context("name")?;
    let node = cluster.first_node();
    let limits = || {
        node.run(
            "sh",
            &[
                "-c",
                "cat /var/lib/drava/claims/*/*/limits/page | sha256sum",
            ],
        )
    };
    let (api_server, before) = (cluster.kubernetes().control_plane(), limits()?);
    api_server.pause(Component::KubeApiserver)?;
    sleep(OUTAGE / 2);
    let killed = cluster.kill_processes("drava-dra-driver");
    sleep(OUTAGE / 2);
    let during = limits();
    api_server.resume(Component::KubeApiserver)?;
    ensure!(killed? > 0, "no driver process on the node");
    ensure!(during? == before, "a limit changed without the API server");
    wait("the API server responds", || Ok(companions(&tenant).ok()))?;
    api_server.restart(Component::Kubelet)?;
    cluster.drava_ready()?;
    ensure!(total_mib(&tenant, "grow")? == 5120, "the share shrank");
    // What was asked for is done afterwards.
    tenant.kubectl(&["delete", "resourceclaim", name, "--timeout=120s"])?;
    wait("the share has its own memory", || {
        Ok((total_mib(&tenant, "grow")? == 3072).then_some(()))
    })?;
    let pod = tenant.find("pod", "grow")?.context("the pod is gone")?;
    let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
    ensure!(*restarts == 0, "the container was restarted");
    cluster.check_allocations()
}

#[test]
fn companion_that_waits_ends_with_its_pod() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("growth-ends")?;
    start_beside_other(&tenant)?;
    let more = ["resize", "grow", "--cores", "90", "--timeout", "5"];
    let refused = cluster.drava(&[&["-n", tenant.name()], &more[..]].concat())?;
    ensure!(refused.code == 1, "{refused:?}");
    let waiting = companions(&tenant)?;
    ensure!(
        waiting.len() == 1 && waiting[0]["status"]["allocation"].is_null(),
        "{waiting:?}"
    );
    tenant.delete_pods(&["grow"])?;
    wait("the companion ends with its pod", || {
        Ok(companions(&tenant)?.is_empty().then_some(()))
    })?;
    tenant.delete_pods(&["other"])?;
    cluster.first_node().wait_until_clean()
}

/// A companion for the claim with that UID, as its pod's owner would write it.
fn companion(name: &str, base: &str, pod: (&str, &str), request: &str) -> String {
    let (pod, uid) = pod;
    format!(
        "{{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {{name: {name}, labels: {{gpu.drava.dev/companion-of: {base}}}, \
         ownerReferences: [{{apiVersion: v1, kind: Pod, name: {pod}, uid: {uid}, controller: true}}]}}, \
         spec: {{devices: {{requests: [{request}]}}}}}}"
    )
}

fn uid_of(tenant: &Namespace<'_>, kind: &str, name: &str) -> Result<String> {
    let object = tenant.find(kind, name)?.context("an object is gone")?;
    let uid = object["metadata"]["uid"].as_str();
    Ok(uid.context("uid")?.to_owned())
}

/// Another tenant names a claim that is not its own; and the tenant writes odd companions itself.
#[test]
fn forged_and_odd_companions_change_nothing() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("growth-victim")?;
    let other = cluster.namespace("growth-forger")?;
    start(&tenant, "grow", "3Gi")?;
    start(&other, "grow", "1Gi")?;
    let claim = tenant.claim_of("grow")?;
    let base = uid_of(&tenant, "resourceclaim", &claim)?;
    let (victim, forger) = (
        uid_of(&tenant, "pod", "grow")?,
        uid_of(&other, "pod", "grow")?,
    );
    let exactly = |class: &str, more: &str| {
        format!(
            "{{name: gpu, exactly: {{deviceClassName: {class}{more}, capacity: {{requests: {{memory: 1Gi, cores: \"0\"}}}}}}}}"
        )
    };
    let plain = exactly("vgpu.drava.dev", "");
    // Label and owner of another namespace.
    other.apply(&companion("own-pod", &base, ("grow", &forger), &plain))?;
    other.apply(&companion("their-pod", &base, ("grow", &victim), &plain))?;
    // The garbage collector takes an owner of another namespace for one that is gone.
    other.event("own-pod", "InvalidCompanion")?;
    // By the tenant itself: another pod, class, request, several devices, no owner, and a claim that does not exist.
    let odd = [
        (
            "class",
            companion(
                "class",
                &base,
                ("grow", &victim),
                &exactly("gpu.drava.dev", ""),
            ),
        ),
        (
            "count",
            companion(
                "count",
                &base,
                ("grow", &victim),
                &exactly("vgpu.drava.dev", ", count: 2"),
            ),
        ),
        (
            "request",
            companion(
                "request",
                &base,
                ("grow", &victim),
                &plain.replace("name: gpu", "name: other"),
            ),
        ),
        (
            "nothing",
            companion("nothing", &forger, ("grow", &victim), &plain),
        ),
    ];
    for (name, manifest) in &odd {
        tenant.apply(manifest)?;
        tenant.event(name, "InvalidCompanion")?;
    }
    for (tenant, name) in odd
        .iter()
        .map(|(name, _)| (&tenant, *name))
        .chain([(&other, "own-pod")])
    {
        let claim = tenant
            .find("resourceclaim", name)?
            .context("a claim is gone")?;
        ensure!(claim["status"]["allocation"].is_null(), "{claim}");
    }
    ensure!(total_mib(&tenant, "grow")? == 3072, "the share grew");
    ensure!(
        total_mib(&other, "grow")? == 1024,
        "the share of the forger grew"
    );
    cluster.check_allocations()
}

const GROWTH_QUOTA: &str = "growth-quota";

#[test]
fn quota_limits_growth() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("growth-quota")?;
    start(&tenant, "grow", "2Gi")?;
    let _quota = cluster.deletes("gpuquota", GROWTH_QUOTA);
    let quota = format!(
        "{{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuQuota, metadata: {{name: {GROWTH_QUOTA}}}, spec: {{namespaces: [{}], limit: {{memory: 4Gi}}}}}}",
        tenant.name()
    );
    tenant.apply(&quota)?;
    wait("the quota is counted", || {
        let quota = cluster.get(&["gpuquota", GROWTH_QUOTA])?;
        Ok((quota["status"]["used"]["memory"] == "2Gi").then_some(()))
    })?;
    let refused = resize(&cluster, &tenant, "grow", "5Gi", "5")?;
    ensure!(
        refused.code == 1 && refused.stderr.to_lowercase().contains("quota"),
        "{refused:?}"
    );
    for companion in companions(&tenant)? {
        let name = companion["metadata"]["name"].as_str().context("name")?;
        tenant.kubectl(&["delete", "resourceclaim", name, "--timeout=30s"])?;
    }
    let grown = resize(&cluster, &tenant, "grow", "4Gi", "60")?;
    ensure!(grown.code == 0, "{grown:?}");
    let quota = cluster.get(&["gpuquota", GROWTH_QUOTA])?;
    ensure!(quota["status"]["used"]["memory"] == "4Gi", "{quota}");
    // Less than the claim itself has, and pods that are not there.
    let less = resize(&cluster, &tenant, "grow", "1Gi", "5")?;
    ensure!(
        less.code == 1 && less.stderr.contains("2048 MiB"),
        "{less:?}"
    );
    let absent = resize(&cluster, &tenant, "absent", "4Gi", "5")?;
    ensure!(
        absent.code == 1 && absent.stderr.contains("absent"),
        "{absent:?}"
    );
    ensure!(
        total_mib(&tenant, "grow")? == 4096,
        "a refused resize changed the share"
    );
    Ok(())
}

/// Two resizes at the same time: one of them is done, or says why not, and the share has what one of them wanted.
#[test]
fn resizes_at_the_same_time_lose_nothing() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("growth-race")?;
    start(&tenant, "grow", "2Gi")?;
    let outcomes = std::thread::scope(|scope| {
        let (cluster, tenant) = (&cluster, &tenant);
        let begin = |memory: &'static str| {
            scope.spawn(move || resize(cluster, tenant, "grow", memory, "30"))
        };
        ["3Gi", "4Gi"]
            .map(begin)
            .map(std::thread::ScopedJoinHandle::join)
    });
    for outcome in outcomes {
        let outcome = outcome.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        ensure!(
            outcome.code == 0 || !outcome.stderr.is_empty(),
            "{outcome:?}"
        );
    }
    // As after one of them alone, or after both in turn: they do not add up.
    let sum: u64 = companions(&tenant)?
        .iter()
        .map(|claim| {
            let requests =
                &claim["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"];
            match requests["memory"].as_str() {
                Some("1Gi" | "1024Mi" | "1073741824") => 1024,
                _ => 2048,
            }
        })
        .sum();
    ensure!((1024..=2048).contains(&sum), "{:?}", companions(&tenant)?);
    wait("the share has what its companions add", || {
        Ok((total_mib(&tenant, "grow")? == 2048 + sum).then_some(()))
    })?;
    let settled = resize(&cluster, &tenant, "grow", "2Gi", "60")?;
    ensure!(settled.code == 0, "{settled:?}");
    ensure!(companions(&tenant)?.is_empty(), "a companion is left");
    cluster.check_allocations()
}

/// The example of growth.
#[test]
fn example_grows_by_command_and_by_manifest() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("growth-example")?;
    tenant.example("growth")?;
    tenant.running("trainer")?;
    let grown = resize(&cluster, &tenant, "trainer", "12Gi", "60")?;
    ensure!(
        grown.code == 0 && total_mib(&tenant, "trainer")? == 12288,
        "{grown:?}"
    );
    let given_back = resize(&cluster, &tenant, "trainer", "8Gi", "60")?;
    ensure!(
        given_back.code == 0 && total_mib(&tenant, "trainer")? == 8192,
        "{given_back:?}"
    );
    ensure!(companions(&tenant)?.is_empty(), "a companion is left");
    Ok(())
}

/// Installs the scheduling of this mode; the compatibility with other systems needs the managed one.
fn set_scheduling(cluster: &TestCluster, mode: &str, is_compatible: bool) -> Result<()> {
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/helm/drava");
    let set = format!("scheduling.mode={mode},compatibility.enabled={is_compatible}");
    let upgrade = ["upgrade", "drava", chart, "-n", "drava-system"];
    let values = [
        "--reuse-values",
        "--force-conflicts",
        "--set",
        &set,
        "--wait",
    ];
    cluster.helm(upgrade.into_iter().chain(values)).map(drop)
}

/// Only the controller allocates companions. What a share has gained before is its own.
#[test]
fn native_mode_refuses_growth() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("native-growth")?;
    start(&tenant, "grow", "2Gi")?;
    let grown = resize(&cluster, &tenant, "grow", "3Gi", "60")?;
    ensure!(grown.code == 0, "{grown:?}");
    set_scheduling(&cluster, "native", false)?;
    let outcome = (|| {
        let refused = resize(&cluster, &tenant, "grow", "4Gi", "10")?;
        ensure!(refused.code == 1, "{refused:?}");
        let why = "shares grow with scheduling.mode=managed only";
        ensure!(refused.stderr.contains(why), "{refused:?}");
        let mut unallocated = companions(&tenant)?;
        unallocated.retain(|claim| claim["status"]["allocation"].is_null());
        let [companion] = &unallocated[..] else {
            anyhow::bail!("{unallocated:?}");
        };
        ensure!(
            total_mib(&tenant, "grow")? == 3072,
            "the share does not have what it had"
        );
        let name = companion["metadata"]["name"].as_str().context("name")?;
        let withdraw = ["delete", "resourceclaim", name, "--timeout=30s"];
        ensure!(
            refused.stderr.contains(name),
            "the refusal names no claim to withdraw: {refused:?}"
        );
        tenant.kubectl(&withdraw).map(drop)
    })();
    set_scheduling(&cluster, "managed", true)?;
    cluster.drava_ready()?;
    outcome?;
    let grown = resize(&cluster, &tenant, "grow", "4Gi", "60")?;
    ensure!(grown.code == 0, "{grown:?}");
    cluster.check_allocations()
}
