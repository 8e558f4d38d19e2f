//! Claims with the label of a suspension, with the whole driver: what it answers, and what it prepares meanwhile. The processes are
//! in the tests of the agent.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use drava_dra_driver::driver::Config;
use drava_fake_kubelet::Plugin;
use drava_nvml::{Process, ProcessKind, ProcessMemory};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::api_server::eventually;
use crate::cluster::{Running, TestCluster, kubelet_claim, prepare_error};
use crate::fixture::Allocated::{Share, Whole};
use crate::fixture::{Allocated, GPU_UUIDS, claim_ref, claim_with};

fn allowed() -> Value {
    json!([{
        "source": "FromClass", "requests": [],
        "opaque": {"driver": "gpu.drava.dev", "parameters": {
            "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "suspend": {"allowed": true},
        }},
    }])
}

async fn cluster() -> TestCluster {
    let cluster = TestCluster::new().await;
    cluster.gpus.set_processes(GPU_UUIDS[0], Vec::new());
    cluster
}

/// Stores a claim with or without the label, with the status that it has.
fn put(cluster: &TestCluster, number: u32, devices: &[Allocated], config: &Value, suspend: bool) {
    let mut claim = serde_json::to_value(claim_with(number, devices, config)).unwrap();
    let name = claim["metadata"]["name"].as_str().unwrap().to_owned();
    if cluster.api.has_claim(&name) {
        let status = cluster.api.claim(&name)["status"]["devices"].clone();
        claim["status"]["devices"] = status;
    }
    let consumer = json!({"resource": "pods", "name": "trainer", "uid": "trainer"});
    claim["status"]["reservedFor"] = json!([consumer]);
    if suspend {
        claim["metadata"]["labels"] = json!({"gpu.drava.dev/suspend": "true"});
    }
    cluster.api.put_claim_json(&claim);
}

async fn await_reason(cluster: &TestCluster, claim: &str, reason: &str) -> Value {
    eventually(reason, || {
        let condition = cluster.api.condition(claim, "Suspended")?;
        (condition["reason"] == reason).then_some(condition)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn other_claim_is_prepared_while_a_share_is_suspended_which_then_waits() {
    let cluster = cluster().await;
    let (running, plugin) = cluster.start_ready().await;
    let big = [Share(0, "60Gi", "80")];
    put(&cluster, 1, &big, &allowed(), false);
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    put(&cluster, 2, &big, &json!([]), false);
    assert!(prepare_error(&plugin, 2).await.contains("memory"));

    put(&cluster, 1, &big, &allowed(), true);
    let condition = await_reason(&cluster, "claim-1", "Suspended").await;
    assert_eq!(condition["status"], "True");
    plugin.prepare_one(&kubelet_claim(2)).await.unwrap();
    // The other conditions are there, too.
    let prepared = cluster.api.condition("claim-1", "Prepared").unwrap();
    assert_eq!(prepared["status"], "True");

    // A driver that was killed goes on: it does not resume a share that does not fit.
    running.kill().await;
    put(&cluster, 1, &big, &allowed(), false);
    let (running, plugin) = cluster.start_ready().await;
    let reads = cluster.api.reads("claim-1");
    eventually("two reviews", || {
        (cluster.api.reads("claim-1") > reads + 2).then_some(())
    })
    .await;
    let condition = cluster.api.condition("claim-1", "Suspended").unwrap();
    assert_eq!(condition["reason"], "Suspended");

    // Once it fits, the answer is there before the record says that it runs.
    plugin.unprepare_one(&kubelet_claim(2)).await.unwrap();
    let condition = await_reason(&cluster, "claim-1", "Resumed").await;
    assert_eq!(condition["status"], "False");
    assert!(prepare_error(&plugin, 2).await.contains("memory"));

    // A deleted claim leaves nothing.
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    plugin.prepare_one(&kubelet_claim(2)).await.unwrap();
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_waits_for_the_api_server() {
    let cluster = cluster().await;
    let (running, plugin) = cluster.start_ready().await;
    let share = [Share(0, "8Gi", "30")];
    put(&cluster, 1, &share, &allowed(), true);
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    await_reason(&cluster, "claim-1", "Suspended").await;
    cluster.api.fail_statuses(3);
    put(&cluster, 1, &share, &allowed(), false);
    let phase = || {
        let record = std::fs::read_to_string(cluster.record_file(1)).unwrap();
        let body: Value = serde_json::from_str(record.lines().nth(1).unwrap()).unwrap();
        body["devices"][0]["access"]["suspension"]["phase"].clone()
    };
    eventually("the record", || (phase() == "resuming").then_some(())).await;
    assert_eq!(
        cluster.api.condition("claim-1", "Suspended").unwrap()["status"],
        "True"
    );
    await_reason(&cluster, "claim-1", "Resumed").await;
    assert_eq!(phase(), "running");
    running.stop().await;
}

/// Returns the program that stands for libcuda, with the state of all processes in a file, which it also creates.
fn libcuda(files: &TempDir, state: &Path) -> PathBuf {
    let program = files.path().join("libcuda");
    if !program.exists() {
        fs::write(state, "running\n").unwrap();
        let text = LOSES_PROCESSES.replace("STATE", state.to_str().unwrap());
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    program
}

/// Lets NVML list this process with 1 GiB.
fn list(cluster: &TestCluster, pid: u32) {
    let listed = Process {
        pid,
        memory: ProcessMemory::Used { bytes: 1 << 30 },
        gpu_instance: None,
        compute_instance: None,
        kind: ProcessKind::Compute,
    };
    cluster.gpus.set_processes(GPU_UUIDS[0], vec![listed]);
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_what_cannot_be_suspended() {
    let cluster = cluster().await;
    cluster.gpus.set_processes(GPU_UUIDS[1], Vec::new());
    let (running, plugin) = cluster.start_ready().await;
    let two = [Share(1, "8Gi", "10"), Share(1, "8Gi", "10")];
    for (number, devices, config, expected) in [
        (
            1,
            [Share(1, "8Gi", "10")].as_slice(),
            json!([]),
            "suspend.allowed: true",
        ),
        (2, &[Whole(0)], json!([]), "only shares of a GPU"),
        (3, &two, allowed(), "several devices"),
    ] {
        put(&cluster, number, devices, &config, true);
        plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
        let name = format!("claim-{number}");
        let condition = await_reason(&cluster, &name, "SuspendRefused").await;
        let message = condition["message"].as_str().unwrap();
        assert!(message.contains(expected), "{message}");
        assert_eq!(condition["status"], "False");
    }
    running.stop().await;
}

/// A libcuda that checkpoints each process and never restores it. The word in `state` is the state of all processes.
const LOSES_PROCESSES: &str = r#"#!/bin/sh
case $3 in
lock) echo locked > STATE ;;
checkpoint) echo checkpointed > STATE ;;
restore) echo cuda 304; exit ;;
unlock) echo cuda 401; exit ;;
esac
read state < STATE
echo "state $state"
"#;

#[tokio::test(flavor = "multi_thread")]
async fn share_of_earlier_boot_has_lost_its_state() {
    let cluster = cluster().await;
    let files = tempfile::tempdir().unwrap();
    let (state, boot) = (files.path().join("state"), files.path().join("boot"));
    fs::write(&boot, "first\n").unwrap();
    let config = || Config {
        program: libcuda(&files, &state),
        boot_id_file: boot.clone(),
        ..cluster.config()
    };
    let running = cluster.start_with(config(), cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    let share = [Share(0, "8Gi", "30")];
    put(&cluster, 1, &share, &allowed(), false);
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let mut program = Command::new("sleep").arg("600").spawn().unwrap();
    let directory = cluster.node.start_process(program.id(), 1);
    list(&cluster, program.id());
    put(&cluster, 1, &share, &allowed(), true);
    let is_held = || fs::read_to_string(&state).is_ok_and(|state| state == "checkpointed\n");
    eventually("the checkpoint", || is_held().then_some(())).await;
    cluster.gpus.set_processes(GPU_UUIDS[0], Vec::new());
    await_reason(&cluster, "claim-1", "Suspended").await;

    running.kill().await;
    program.kill().unwrap();
    program.wait().unwrap();
    fs::remove_dir_all(directory).unwrap();
    cluster.node.tmpfs.reboot();
    fs::write(&boot, "second\n").unwrap();
    let running = cluster.start_with(config(), cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    let condition = await_reason(&cluster, "claim-1", "StateLost").await;
    assert_eq!(condition["status"], "True", "others may use its memory");
    let message = condition["message"].as_str().unwrap();
    assert!(message.contains("the node was restarted"), "{message}");
    // Its pod is evicted.
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    assert!(!cluster.record_file(1).exists());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_process_is_killed_with_an_event_and_its_share_resumed() {
    let cluster = cluster().await;
    let files = tempfile::tempdir().unwrap();
    let state = files.path().join("state");
    let config = Config {
        program: libcuda(&files, &state),
        ..cluster.config()
    };
    let running = cluster.start_with(config, cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    let share = [Share(0, "8Gi", "30")];
    put(&cluster, 1, &share, &allowed(), false);
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();

    let mut lost = Command::new("sleep").arg("600").spawn().unwrap();
    let directory = cluster.node.start_process(lost.id(), 1);
    list(&cluster, lost.id());
    put(&cluster, 1, &share, &allowed(), true);
    let is_held = || fs::read_to_string(&state).is_ok_and(|state| state == "checkpointed\n");
    eventually("the checkpoint", || is_held().then_some(())).await;
    cluster.gpus.set_processes(GPU_UUIDS[0], Vec::new());
    await_reason(&cluster, "claim-1", "Suspended").await;
    assert!(lost.try_wait().unwrap().is_none());

    put(&cluster, 1, &share, &allowed(), false);
    let ended = eventually("its end", || lost.try_wait().unwrap()).await;
    assert_eq!(ended.signal(), Some(9));
    fs::remove_dir_all(directory).unwrap();
    await_reason(&cluster, "claim-1", "Resumed").await;
    let events = || -> Vec<(String, String)> {
        let events = cluster.api.events_with_kind().into_iter();
        let events = events.filter(|(reason, ..)| reason == "RestoreFailed");
        events.map(|(_, note, kind)| (kind, note)).collect()
    };
    let found = eventually("events", || Some(events()).filter(|found| found.len() == 2)).await;
    let kinds: Vec<&str> = found.iter().map(|(kind, _)| kind.as_str()).collect();
    assert_eq!(kinds, ["ResourceClaim", "Pod"]);
    let expected = format!("claim {}: killed process {}", claim_ref(1), lost.id());
    assert!(found[0].1.starts_with(&expected), "{}", found[0].1);
    running.stop().await;
}

/// The same, with processes that come back.
fn restoring_libcuda(files: &TempDir, state: &Path) -> PathBuf {
    let program = libcuda(files, state);
    let text = fs::read_to_string(&program).unwrap();
    let state = state.display();
    let text = text
        .replace("echo cuda 304; exit", &format!("echo locked > {state}"))
        .replace("echo cuda 401; exit", &format!("echo running > {state}"));
    fs::write(&program, text).unwrap();
    program
}

/// A cluster on which the process of claim 1 is checkpointed, and NVML shows its memory all the time, so that it is not suspended yet.
struct Locked {
    cluster: TestCluster,
    files: TempDir,
    program: Child,
    directory: PathBuf,
}

impl Locked {
    /// The processes of claim `number` are locked. Shares of `others` are suspended before.
    async fn new(number: u32, others: &[u32]) -> (Self, Running, Plugin) {
        let cluster = cluster().await;
        let files = tempfile::tempdir().unwrap();
        let program = Command::new("sleep").arg("600").spawn().unwrap();
        let locked = Self {
            directory: PathBuf::new(),
            cluster,
            files,
            program,
        };
        let (running, plugin) = locked.start().await;
        running.await_ready().await;
        let cluster = &locked.cluster;
        for other in others {
            put(cluster, *other, &[Share(0, "8Gi", "30")], &allowed(), true);
            let claim = kubelet_claim(*other);
            plugin.prepare_one(&claim).await.unwrap();
            await_reason(cluster, &format!("claim-{other}"), "Suspended").await;
        }
        let share = [Share(0, "8Gi", "30")];
        put(cluster, number, &share, &allowed(), false);
        let claim = kubelet_claim(number);
        plugin.prepare_one(&claim).await.unwrap();
        let pid = locked.program.id();
        let directory = cluster.node.start_process(pid, number);
        list(cluster, pid);
        put(cluster, number, &share, &allowed(), true);
        locked.await_state("checkpointed").await;
        (
            Self {
                directory,
                ..locked
            },
            running,
            plugin,
        )
    }

    async fn start(&self) -> (Running, Plugin) {
        let config = Config {
            program: restoring_libcuda(&self.files, &self.files.path().join("state")),
            ..self.cluster.config()
        };
        let running = self.cluster.start_with(config, self.cluster.source());
        let plugin = self
            .cluster
            .kubelet
            .register("gpu.drava.dev")
            .await
            .unwrap();
        (running, plugin)
    }

    fn has_state(&self, wanted: &str) -> bool {
        let state = fs::read_to_string(self.files.path().join("state"));
        state.is_ok_and(|state| state.trim() == wanted)
    }

    async fn await_state(&self, wanted: &str) {
        eventually(wanted, || self.has_state(wanted).then_some(())).await;
    }

    async fn end(mut self, running: Running) {
        running.kill().await;
        self.program.kill().unwrap();
        self.program.wait().unwrap();
        fs::remove_dir_all(&self.directory).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_that_a_killed_driver_left_locked_go_on_without_the_api_server() {
    let (locked, running, _) = Locked::new(1, &[]).await;
    running.kill().await;
    locked.cluster.api.set_down(true);
    let (running, _plugin) = locked.start().await;
    locked.await_state("running").await;
    locked.cluster.api.set_down(false);
    locked.end(running).await;
}

/// A read of a claim may take ten seconds, as that of another claim does meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn processes_that_are_locked_do_not_wait_for_a_hanging_api_server() {
    let (locked, running, plugin) = Locked::new(1, &[]).await;
    put(
        &locked.cluster,
        2,
        &[Share(1, "8Gi", "30")],
        &allowed(),
        false,
    );
    let stalled = ["claim-1", "claim-2"].map(str::to_owned);
    locked.cluster.api.stall_reads(stalled);
    let other = kubelet_claim(2);
    tokio::select! {
        () = locked.await_state("running") => {}
        prepared = plugin.prepare_one(&other) => panic!("{prepared:?} before the end of the lock"),
    }
    locked.end(running).await;
}

/// Each of their reads takes ten seconds.
#[tokio::test(flavor = "multi_thread")]
async fn processes_that_are_locked_do_not_wait_for_other_suspended_claims_after_a_restart() {
    let (locked, running, _) = Locked::new(3, &[1, 2]).await;
    let cluster = &locked.cluster;
    let share = [Share(1, "8Gi", "30")];
    put(cluster, 4, &share, &allowed(), false);
    running.kill().await;
    let stalled = [1, 2, 3, 4].map(|number| format!("claim-{number}"));
    cluster.api.stall_reads(stalled);
    let (running, plugin) = locked.start().await;
    let other = kubelet_claim(4);
    tokio::select! {
        () = locked.await_state("running") => {}
        prepared = plugin.prepare_one(&other) => panic!("{prepared:?} before the end of the lock"),
    }
    locked.end(running).await;
}
