//! Claims with `computePolicy: spatial` and the daemons of MPS that serve them. A script stands for the program that becomes a
//! daemon; tests/e2e runs the daemon of the simulated machine.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use drava_api::config::ComputePolicy;
use drava_dra_driver::gpus::mps_directories;
use drava_dra_driver::mps::Server;
use drava_dra_driver::node::claim::ClaimRef;
use drava_dra_driver::node::limits_page::Page;
use drava_dra_driver::prepare::Prepared;
use drava_dra_driver::prepare::apply::ApplyError;
use drava_dra_driver::prepare::overcommit;
use drava_dra_driver::prepare::plan::plan;
use drava_vgpu_abi as abi;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};
use simulator_machine::testing::skips_without_root;

use crate::cluster::inode;
use crate::crash::CrashingEffects;
use crate::fixture::Allocated::{self, Share, Whole};
use crate::fixture::{GPU_UUIDS, POOL, claim, claim_ref, claim_with, config, h100x2};
use crate::node::{TestNode, lacks_device_files, page_of, prepare, record_of, spec_of};

/// The program of [`TestNode::mps`]: as a daemon it names its process and waits; a command is written down, and answered from the
/// file with its first word. `quit` ends the daemon.
const PROGRAM: &str = r#"#!/bin/sh
here="$(dirname "$0")"
if [ "$1" = mps-daemon ]; then
    [ -e "$here/broken" ] && { echo "no GPU"; exit 3; }
    dir="$2"
    read -r stat < /proc/$$/stat
    set -- ${stat##*) }
    shift 19
    echo "{\"pid\": $$, \"startTime\": $1}" > "$here/record"
    mv "$here/record" "$dir/daemon.json"
    echo "$$" >> "$here/daemons"
    while :; do sleep 0.05; done
fi
read -r command
echo "$command" >> "$here/commands"
pid="${2%/root}"
case "$command" in quit*) kill -9 "${pid#/proc/}" ;; esac
cat "$here/${command%% *}" 2> /dev/null || true
"#;

/// A node with the program, whose daemons end with it.
struct Node(TestNode);

impl Node {
    fn new() -> Self {
        let node = Self(TestNode::started());
        let program = node.path("mps");
        fs::write(&program, PROGRAM).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.root.path().join(name)
    }

    /// Directory of the daemon of the first GPU.
    fn dir(&self) -> PathBuf {
        self.0.layout().mps_gpu(GPU_UUIDS[0])
    }

    /// PIDs of all daemons that were started.
    fn daemons(&self) -> Vec<u32> {
        let daemons = fs::read_to_string(self.path("daemons")).unwrap_or_default();
        daemons.lines().map(|pid| pid.parse().unwrap()).collect()
    }

    fn running(&self) -> Vec<u32> {
        let is_running = |pid: &u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.is_ok_and(|stat| !stat.contains(") Z"))
        };
        self.daemons().into_iter().filter(is_running).collect()
    }

    fn kill(pid: u32) {
        let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }

    fn prepare(&self, number: u32, found: &ResourceClaim) -> Result<(), ApplyError> {
        let applier = self.0.applier(self.0.effects());
        prepare(&self.0, &applier, number, found).map(drop)
    }

    fn unprepare(&self, number: u32) {
        let applier = self.0.applier(self.0.effects());
        applier.unprepare(&claim_ref(number)).unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.running().into_iter().for_each(Self::kill);
    }
}

fn spatial(number: u32, results: &[Allocated]) -> ResourceClaim {
    let config = config("FromClass", &json!({"computePolicy": "spatial"}));
    claim_with(number, results, &config)
}

fn planned(claim: &ResourceClaim, number: u32) -> (ClaimRef, Vec<Prepared>) {
    let devices = plan(&claim_ref(number), Some(claim), POOL, &h100x2()).unwrap();
    (claim_ref(number), devices)
}

#[test]
fn first_share_starts_daemon_and_last_one_ends_it() {
    if lacks_device_files() {
        return;
    }
    let node = Node::new();
    node.prepare(1, &spatial(1, &[Share(0, "8Gi", "30")]))
        .unwrap();
    node.prepare(2, &spatial(2, &[Share(0, "8Gi", "0")]))
        .unwrap();
    assert_eq!(node.running().len(), 1);
    assert_eq!(node.daemons().len(), 1);
    let shm = node.dir().join("shm");
    assert!(node.0.tmpfs.mounted().contains(&shm));

    let edits = |number| -> Value {
        let spec = fs::read(spec_of(&node.0, number)).unwrap();
        let spec: Value = serde_json::from_slice(&spec).unwrap();
        spec["devices"][0]["containerEdits"].clone()
    };
    let (first, second) = (edits(1), edits(2));
    assert_eq!(
        first["env"],
        json!([
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
            "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps",
        ])
    );
    assert_eq!(
        second["env"],
        json!(["CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"])
    );
    let mount = |inside: &str| {
        let mounts = first["mounts"].as_array().unwrap();
        let mut mounts = mounts.iter();
        mounts
            .find(|mount| mount["containerPath"] == inside)
            .unwrap()
            .clone()
    };
    let pipe = mount("/tmp/nvidia-mps");
    assert_eq!(pipe["hostPath"], node.dir().join("pipe").to_str().unwrap());
    let options: Vec<&str> = pipe["options"]
        .as_array()
        .unwrap()
        .iter()
        .map(|option| option.as_str().unwrap())
        .collect();
    assert!(options.contains(&"ro"), "{options:?}");
    assert_eq!(mount("/dev/shm")["hostPath"], shm.to_str().unwrap());
    // No launch waits for libvgpu.
    let page = Page::open(page_of(&node.0, 1).parent().unwrap()).unwrap();
    let limits = page.limits();
    assert_eq!(limits.compute_policy, abi::ComputePolicy::None);
    assert_eq!(limits.memory_limit_bytes, Some(8 << 30));

    node.unprepare(1);
    assert_eq!(node.running().len(), 1);
    node.unprepare(2);
    assert_eq!(node.running(), [0; 0]);
    assert!(!node.dir().exists());
    assert_eq!(node.0.tmpfs.mounted(), [].into());
}

/// An older build must not give such a GPU to other claims.
#[test]
fn record_has_kind_of_its_own() {
    if lacks_device_files() {
        return;
    }
    let node = Node::new();
    node.prepare(1, &spatial(1, &[Share(0, "8Gi", "30")]))
        .unwrap();
    let record = fs::read_to_string(record_of(&node.0, 1)).unwrap();
    assert!(record.contains("spatialShare"), "{record}");
    let store = drava_dra_driver::prepare::record::RecordStore::new(node.0.layout().claims());
    let loaded = store.load(&claim_ref(1).uid).unwrap();
    let drava_dra_driver::prepare::record::Loaded::Present(record) = loaded else {
        panic!("{loaded:?}")
    };
    let share = record.devices[0].share().unwrap();
    assert_eq!(share.compute_policy, ComputePolicy::Spatial);
}

#[test]
fn daemon_that_has_ended_is_started_for_its_claims() {
    if lacks_device_files() {
        return;
    }
    let node = Node::new();
    for number in [1, 2] {
        node.prepare(number, &spatial(number, &[Share(0, "8Gi", "30")]))
            .unwrap();
    }
    let applier = node.0.applier(node.0.effects());
    assert_eq!(applier.settle_mps(GPU_UUIDS[0], || ()).unwrap(), []);
    let [first] = node.running()[..] else {
        panic!("{:?}", node.daemons())
    };
    // Containers have these directories mounted, and see the next daemon in them.
    let inodes = || ["pipe", "shm"].map(|name| inode(&node.dir().join(name)));
    let before = inodes();
    let (socket, own) = (node.dir().join("pipe/control"), node.dir().join("shm/own"));
    fs::write(&socket, "").unwrap();
    fs::write(&own, "of a program").unwrap();
    Node::kill(first);
    while node.running() == [first] {
        std::thread::yield_now();
    }
    assert_eq!(node.0.mps().server(GPU_UUIDS[0]).unwrap(), Server::NoDaemon);
    let hit = applier.settle_mps(GPU_UUIDS[0], || ()).unwrap();
    assert_eq!(hit, [1, 2].map(claim_ref));
    assert_eq!(node.running().len(), 1);
    assert_eq!(inodes(), before);
    assert!(!socket.exists() && own.exists());
    // One that does not start takes them from no container either.
    let [second] = node.running()[..] else {
        panic!("{:?}", node.daemons())
    };
    fs::write(node.path("broken"), "").unwrap();
    Node::kill(second);
    while node.running() == [second] {
        std::thread::yield_now();
    }
    assert!(applier.settle_mps(GPU_UUIDS[0], || ()).is_err());
    assert_eq!(inodes(), before);
    fs::remove_file(node.path("broken")).unwrap();
    assert_eq!(applier.settle_mps(GPU_UUIDS[0], || ()).unwrap().len(), 2);
    assert_eq!(inodes(), before);
}

#[test]
fn damaged_record_of_another_claim_holds_up_no_daemon() {
    if lacks_device_files() {
        return;
    }
    let node = Node::new();
    node.prepare(1, &spatial(1, &[Share(0, "8Gi", "30")]))
        .unwrap();
    node.prepare(2, &claim(2, &[Share(1, "8Gi", "30")]))
        .unwrap();
    fs::write(record_of(&node.0, 2), "{").unwrap();
    let [first] = node.running()[..] else {
        panic!("{:?}", node.daemons())
    };
    Node::kill(first);
    while node.running() == [first] {
        std::thread::yield_now();
    }
    let applier = node.0.applier(node.0.effects());
    let started = applier.settle_mps(GPU_UUIDS[0], || ()).unwrap();
    assert_eq!(started, [claim_ref(1)]);
    assert_eq!(node.running().len(), 1);
}

/// Before a client with work in flight is killed, so that its end disturbs no other one.
#[test]
fn client_is_terminated_on_its_server_alone_and_in_bounded_time() {
    if lacks_device_files() {
        return;
    }
    let node = Node::new();
    let terminate = |pid, seconds| {
        let time = Duration::from_secs(seconds);
        node.0.mps().terminate_client(GPU_UUIDS[0], pid, time)
    };
    terminate(71, 60).expect("without a daemon");
    node.prepare(1, &spatial(1, &[Share(0, "8Gi", "30")]))
        .unwrap();
    fs::write(node.path("get_server_list"), "17\n18\n").unwrap();
    fs::write(node.path("get_client_list"), "71\n72\n").unwrap();
    let given = |pid| {
        fs::write(node.path("commands"), "").unwrap();
        terminate(pid, 60).unwrap();
        let commands = fs::read_to_string(node.path("commands")).unwrap();
        commands.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(
        given(71),
        [
            "get_server_list",
            "get_client_list 17",
            "terminate_client 17 71",
            "get_client_list 18",
            "terminate_client 18 71",
        ]
    );
    // A program that is no client of MPS.
    assert_eq!(
        given(73),
        [
            "get_server_list",
            "get_client_list 17",
            "get_client_list 18"
        ]
    );
    // The script reads until the test ends: a daemon that root in a container has stopped.
    fs::remove_file(node.path("get_client_list")).unwrap();
    let fifo = node.path("get_client_list");
    let made = Command::new("mkfifo").arg(&fifo).status();
    assert!(made.unwrap().success());
    let error = terminate(71, 1).unwrap_err().to_string();
    assert!(error.contains("does not answer"), "{error}");
    drop(fs::File::options().write(true).open(fifo).unwrap());
}

#[test]
fn logs_of_daemon_stay_small() {
    if lacks_device_files() {
        return;
    }
    let node = Node::new();
    node.prepare(1, &spatial(1, &[Share(0, "8Gi", "30")]))
        .unwrap();
    let log = |name: &str| node.dir().join("log").join(name);
    let write = |name: &str, bytes| {
        let file = fs::File::options()
            .create(true)
            .append(true)
            .open(log(name));
        file.unwrap().set_len(bytes).unwrap();
    };
    write("daemon.log", (8 << 20) + 1);
    write("server.log", 1 << 20);
    node.0.mps().trim_logs(GPU_UUIDS[0]).unwrap();
    let size = |name: &str| fs::metadata(log(name)).unwrap().len();
    assert_eq!((size("daemon.log"), size("server.log")), (0, 1 << 20));
    assert_eq!(node.running().len(), 1);
}

#[test]
fn daemon_without_claims_ends() {
    if lacks_device_files() {
        return;
    }
    let node = Node::new();
    node.0.mps().ensure(GPU_UUIDS[0]).unwrap();
    assert_eq!(node.0.mps().gpus().unwrap(), [GPU_UUIDS[0]]);
    // A record that cannot be read may need it.
    node.prepare(1, &claim(1, &[Share(1, "8Gi", "30")]))
        .unwrap();
    let record = record_of(&node.0, 1);
    let content = fs::read(&record).unwrap();
    fs::write(&record, "{").unwrap();
    let applier = node.0.applier(node.0.effects());
    assert_eq!(applier.settle_mps(GPU_UUIDS[0], || ()).unwrap(), []);
    assert_eq!(node.running().len(), 1);
    fs::write(&record, content).unwrap();
    assert_eq!(applier.settle_mps(GPU_UUIDS[0], || ()).unwrap(), []);
    assert_eq!(node.running(), [0; 0]);
    assert_eq!(node.0.mps().gpus().unwrap(), [""; 0]);
}

#[test]
fn daemon_that_does_not_start_fails_prepare_with_its_log() {
    if lacks_device_files() {
        return;
    }
    let node = Node::new();
    fs::write(node.path("broken"), "").unwrap();
    let error = node
        .prepare(1, &spatial(1, &[Share(0, "8Gi", "30")]))
        .unwrap_err();
    let error = drava_api::error::describe(&error);
    assert!(error.contains("no GPU: exit status: 3"), "{error}");
    assert!(error.contains("nvidia-cuda-mps-control"), "{error}");
    assert!(!node.dir().exists());
    assert_eq!(node.0.claim_state(), (Vec::new(), [].into()));
}

#[test]
fn server_with_fault_is_found_and_ended() {
    if lacks_device_files() {
        return;
    }
    let node = Node::new();
    let (mps, gpu) = (node.0.mps(), GPU_UUIDS[0]);
    assert_eq!(mps.server(gpu).unwrap(), Server::NoDaemon);
    mps.ensure(gpu).unwrap();
    assert_eq!(mps.server(gpu).unwrap(), Server::Serving);
    fs::write(node.path("get_server_list"), "4711\n").unwrap();
    fs::write(node.path("get_server_status"), "ACTIVE\n").unwrap();
    assert_eq!(mps.server(gpu).unwrap(), Server::Serving);
    fs::write(node.path("get_server_status"), "FAULT\n").unwrap();
    assert_eq!(mps.server(gpu).unwrap(), Server::Fault);
    mps.end_servers(gpu).unwrap();
    let commands = fs::read_to_string(node.path("commands")).unwrap();
    assert_eq!(commands.lines().last(), Some("shutdown_server 4711 -f"));
    mps.stop(gpu).unwrap();
    assert_eq!(node.running(), [0; 0]);
}

#[test]
fn gpu_is_spatial_for_one_namespace_or_not_at_all() {
    let check = |new: &(ClaimRef, Vec<Prepared>), other: &(ClaimRef, Vec<Prepared>)| {
        let others = [(&other.0, other.1.as_slice())];
        let checked = overcommit::check(&new.0, &new.1, others, &h100x2());
        checked.map_err(|conflict| conflict.to_string())
    };
    let first = planned(&spatial(1, &[Share(0, "8Gi", "30")]), 1);
    let mut second = planned(&spatial(2, &[Share(0, "8Gi", "30")]), 2);
    assert_eq!(check(&second, &first), Ok(()));
    second.0.namespace = "other".to_owned();
    let error = check(&second, &first).unwrap_err();
    assert!(error.contains("of another namespace"), "{error}");
    let elsewhere = planned(&spatial(3, &[Share(1, "8Gi", "30")]), 3);
    assert_eq!(check(&elsewhere, &first), Ok(()));
    let full = planned(&spatial(4, &[Share(0, "8Gi", "71")]), 4);
    assert!(check(&full, &first).unwrap_err().contains("cores"));

    for other in [Share(0, "8Gi", "30"), Whole(0)] {
        let other = planned(&claim(5, &[other]), 5);
        for (new, held) in [(&first, &other), (&other, &first)] {
            let error = check(new, held).unwrap_err();
            assert!(
                error.contains("shares with computePolicy: spatial"),
                "{error}"
            );
        }
    }
}

#[test]
fn refuses_spatial_share_beside_other_devices_of_its_claim() {
    let several = spatial(1, &[Share(0, "8Gi", "30"), Share(1, "8Gi", "30")]);
    let error = plan(&claim_ref(1), Some(&several), POOL, &h100x2()).unwrap_err();
    assert!(
        error.to_string().contains("request one share only"),
        "{error}"
    );
    let whole = spatial(1, &[Whole(0)]);
    let error = plan(&claim_ref(1), Some(&whole), POOL, &h100x2()).unwrap_err();
    assert!(error.to_string().contains("computePolicy"), "{error}");
}

#[test]
fn completes_and_undoes_after_crash_at_any_step() {
    if lacks_device_files() {
        return;
    }
    let found = spatial(1, &[Share(0, "8Gi", "30")]);
    let mut steps = 0;
    loop {
        let node = Node::new();
        let cut = CrashingEffects::after(steps, node.0.effects());
        let prepared = prepare(&node.0, &node.0.applier(cut), 1, &found);
        let is_whole = prepared.is_ok();
        node.prepare(1, &found).unwrap();
        assert_eq!(node.running().len(), 1, "step {steps}");
        let cut = CrashingEffects::after(steps, node.0.effects());
        let undone = node.0.applier(cut).unprepare(&claim_ref(1));
        node.unprepare(1);
        assert_eq!(node.running(), [0; 0], "step {steps}");
        assert_eq!(
            node.0.claim_state(),
            (Vec::new(), [].into()),
            "step {steps}"
        );
        if is_whole && undone.is_ok() {
            break;
        }
        steps += 1;
    }
    assert!(steps >= 6, "{steps}");
}

/// The socket of a daemon is trusted by programs of claims. Its user could answer them.
#[test]
fn refuses_directory_that_another_user_could_change() {
    if lacks_device_files() || skips_without_root() {
        return;
    }
    let node = Node::new();
    node.prepare(1, &spatial(1, &[Share(0, "8Gi", "30")]))
        .unwrap();
    let (mps, pipe) = (node.0.layout().mps(), node.dir().join("pipe"));
    let found = spatial(2, &[Share(0, "8Gi", "30")]);
    for directory in [mps.clone(), node.dir(), pipe] {
        let refused = || {
            let error = node.prepare(2, &found).unwrap_err();
            let error = drava_api::error::describe(&error);
            // The node driver logs the same while it watches the daemon.
            let watched = node.0.mps().server(GPU_UUIDS[0]).unwrap_err();
            assert!(error.contains(&watched.to_string()), "{error}");
            // The GPUs of the node have an attribute about it.
            let found = mps_directories::check_all(&mps).unwrap_err();
            assert_eq!(found.to_string(), watched.to_string());
            error
        };
        chown(&directory, Some(1000), None).unwrap();
        let error = refused();
        let named = format!(
            "the directory {} of MPS belongs to user 1000",
            directory.display()
        );
        assert!(
            error.contains(&named) && error.contains("remove it"),
            "{error}"
        );
        chown(&directory, Some(0), None).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
        let error = refused();
        assert!(error.contains("user 0 with mode 777"), "{error}");
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let pipe = node.dir().join("pipe");
    fs::rename(&pipe, node.dir().join("moved")).unwrap();
    std::os::unix::fs::symlink("moved", &pipe).unwrap();
    assert!(node.prepare(2, &found).is_err(), "a link");
    fs::remove_file(&pipe).unwrap();
    fs::rename(node.dir().join("moved"), &pipe).unwrap();
    mps_directories::check_all(&mps).unwrap();
    node.prepare(2, &found).unwrap();
    assert_eq!(node.daemons().len(), 1, "the daemon was never replaced");
}
