//! Kinds of containers: init, sidecar and ephemeral containers, and rules that restart all of them.

use anyhow::{Result, ensure};
use drava_e2e::{TestCluster, wait};

use super::{
    HELD_MIB, SHARE, SHARE_MIB, SLEEP, USES_SHARE, allocate, container, free_mib, hold, is_limited,
    pod, restarts, run, status,
};

#[test]
fn init_and_sidecar_and_app_containers_have_one_limit() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("sidecar")?;
    // Succeeds if the limit denies the allocation.
    let program = format!(
        "['sh', '-c', 'cuda-probe alloc --mib {HELD_MIB} && ! cuda-probe alloc --mib {}']",
        SHARE_MIB + 1
    );
    let prepare = container("prepare", &program, USES_SHARE);
    let sidecar = container(
        "sidecar",
        &hold(),
        &format!("{USES_SHARE}, restartPolicy: Always"),
    );
    let app = container("app", SLEEP, USES_SHARE);
    run(
        &tenant,
        "app",
        &format!("initContainers: [{prepare}, {sidecar}], containers: [{app}]"),
    )?;
    let exit = status(&tenant, "app", "prepare")?;
    ensure!(exit["state"]["terminated"]["exitCode"] == 0, "{exit}");
    wait("the memory of the sidecar is charged", || {
        Ok((free_mib(&tenant, "app", "app")? <= SHARE_MIB - HELD_MIB).then_some(()))
    })?;
    for name in ["sidecar", "app"] {
        is_limited(&tenant, "app", name)?;
        let (report, granted) = allocate(&tenant, "app", name, 0, HELD_MIB)?;
        ensure!(!granted, "{name} got the memory of the sidecar: {report}");
    }

    // A container of `kubectl debug` cannot name a claim, in any release of Kubernetes, and sees no GPU.
    tenant.kubectl(&[
        "debug",
        "app",
        "--container=debugger",
        "--image=localhost/drava-demo:dev",
        "--image-pull-policy=IfNotPresent",
        "--target=app",
        "--profile=general",
        "--",
        "sleep",
        "infinity",
    ])?;
    wait("the ephemeral container runs", || {
        let devices = tenant.exec("app", "debugger", &["ls", "/dev"])?;
        Ok((devices.code == 0).then_some(()))
    })?;
    let smi = tenant.exec("app", "debugger", &["nvidia-smi"])?;
    ensure!(
        smi.code != 0,
        "the ephemeral container sees a GPU: {}",
        smi.stdout
    );
    is_limited(&tenant, "app", "app")?;
    ensure!(
        restarts(&tenant, "app", "sidecar")? == 0,
        "the sidecar was restarted"
    );
    Ok(())
}

#[test]
fn restart_of_all_containers_frees_and_keeps_share() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("restart-all")?;
    let holder = container("holder", &hold(), USES_SHARE);
    // Asks for a restart of all containers once.
    let script = "['sh', '-c', 'test -e /state/again && exec sleep infinity; touch /state/again; while ! test -e /state/go; do sleep 0.1; done; exit 42']";
    let fields = format!(
        "{USES_SHARE}, volumeMounts: [{{name: state, mountPath: /state}}], restartPolicy: Never, restartPolicyRules: [{{action: RestartAllContainers, exitCodes: {{operator: In, values: [42]}}}}]"
    );
    let app = container("app", script, &fields);
    run(
        &tenant,
        "app",
        &format!("volumes: [{{name: state, emptyDir: {{}}}}], containers: [{holder}, {app}]"),
    )?;
    let charged = || {
        wait("the memory of the holder is charged once", || {
            let free = free_mib(&tenant, "app", "app")?;
            let expected = SHARE_MIB - HELD_MIB;
            Ok((free <= expected && free + HELD_MIB > expected).then_some(free))
        })
    };
    let before = charged()?;
    tenant
        .exec("app", "app", &["touch", "/state/go"])?
        .success()?;
    wait("all containers were restarted", || {
        let counts = [
            restarts(&tenant, "app", "holder")?,
            restarts(&tenant, "app", "app")?,
        ];
        Ok(counts.iter().all(|count| *count > 0).then_some(()))
    })?;
    tenant.running("app")?;
    let after = charged()?;
    ensure!(
        before == after,
        "free before {before} MiB, after {after} MiB"
    );
    for name in ["holder", "app"] {
        is_limited(&tenant, "app", name)?;
    }
    Ok(())
}

/// A job's pod whose container ends and is started again by kubelet gets the memory of its predecessor back.
#[test]
fn container_that_fails_in_its_share_starts_again() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("again")?;
    // Fails while it has more than half of the share, twice.
    let script = format!(
        "['sh', '-c', 'cuda-probe alloc --mib {HELD_MIB} --hold 1 || exit 3; test -e /state/2 && exec sleep infinity; test -e /state/1 && touch /state/2; touch /state/1; exit 1']"
    );
    let fields = format!("{USES_SHARE}, volumeMounts: [{{name: state, mountPath: /state}}]");
    let app = container("app", &script, &fields);
    tenant.apply(SHARE)?;
    tenant.apply(&pod(
        "app",
        &format!("restartPolicy: OnFailure, volumes: [{{name: state, emptyDir: {{}}}}], containers: [{app}]"),
    ))?;
    wait("the container was started three times", || {
        let running = tenant
            .find("pod", "app")?
            .is_some_and(|pod| pod["status"]["phase"] == "Running");
        Ok((running && restarts(&tenant, "app", "app")? == 2).then_some(()))
    })?;
    let last = status(&tenant, "app", "app")?;
    ensure!(last["lastState"]["terminated"]["exitCode"] == 1, "{last}");
    is_limited(&tenant, "app", "app")
}
