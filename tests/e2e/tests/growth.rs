//! Shares that grow and shrink while their programs run.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Returns the limit that a program of the pod sees, MiB.
fn total_mib(tenant: &Namespace<'_>, pod: &str) -> Result<u64> {
    let info = tenant
        .exec(pod, "app", &["cuda-probe", "info", "-o", "json"])?
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
fn growth_that_does_not_fit_says_why_and_ends_with_pod() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("no-growth")?;
    start(&tenant, "grow", "2Gi")?;
    let resize = |memory: &str| {
        cluster.drava(&[
            "-n",
            tenant.name(),
            "resize",
            "grow",
            "--memory",
            memory,
            "--timeout",
            "5",
        ])
    };
    let refused = resize("500Gi")?;
    ensure!(refused.code == 1, "{refused:?}");
    ensure!(refused.stderr.contains("InsufficientMemory"), "{refused:?}");
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
