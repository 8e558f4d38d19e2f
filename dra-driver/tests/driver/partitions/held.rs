//! MIG instances that a monitor holds open, as dcgm-exporter does.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use drava_dra_driver::gpus::inventory::Source;
use drava_fake_kubelet::Plugin;
use k8s_openapi::api::resource::v1::ResourceClaim;
use simulator_machine::control::Command;
use simulator_machine::description::H100X2;
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::GpuIndex;
use simulator_machine::testing::Machine;

use super::PartitionedNode;
use crate::api_server::eventually;
use crate::cluster::{Running, TestCluster, kubelet_claim};
use crate::fixture::Allocated::Partition;
use crate::fixture::claim;
use crate::node::lacks_device_files;

fn hold_instances(machine: &Machine, holds_instances: bool) {
    let faults = Faults {
        holds_instances,
        ..Faults::default()
    };
    let gpu = GpuIndex(0);
    machine.control(&Command::Break { gpu, faults }).unwrap();
}

/// Adds a process to `proc_root` that has the device file of the only GPU instance of the first GPU open.
fn start_monitor(proc_root: &Path, machine: &Machine) {
    let driver = machine.root().join("proc/driver");
    symlink(&driver, proc_root.join("driver")).unwrap();
    let instances = driver.join("nvidia/capabilities/gpu0/mig");
    let instance = fs::read_dir(&instances).unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        path.is_dir().then_some(path)
    });
    let access = fs::read_to_string(instance.unwrap().join("access")).unwrap();
    let minor = access
        .lines()
        .find_map(|line| line.strip_prefix("DeviceFileMinor: "));
    let process = proc_root.join("77");
    fs::create_dir_all(process.join("fd")).unwrap();
    fs::write(process.join("comm"), "dcgm-exporter\n").unwrap();
    let file = format!("/dev/nvidia-caps/nvidia-cap{}", minor.unwrap());
    symlink(file, process.join("fd/5")).unwrap();
}

struct HeldCluster {
    cluster: TestCluster,
    machine: Machine,
    running: Running,
    plugin: Plugin,
}

impl HeldCluster {
    fn start_driver(cluster: &TestCluster, machine: &Machine) -> Running {
        let mut config = cluster.config();
        config.paths.driver_root_mount = machine.root().to_owned();
        let source = Source {
            rescan: Duration::from_millis(100),
            ..Source::nvml(config.paths.driver_root.clone(), machine.root().to_owned())
        };
        cluster.start_with(config, source)
    }

    /// A node with a prepared partition that a monitor holds.
    async fn start() -> Self {
        let cluster = TestCluster::new().await;
        let machine = Machine::start(H100X2).unwrap();
        PartitionedNode::enable(&machine);
        let proc_root = cluster.config().proc_root;
        let running = Self::start_driver(&cluster, &machine);
        let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
        running.await_ready().await;
        cluster.api.put_claim(&partition(1));
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
        start_monitor(&proc_root, &machine);
        hold_instances(&machine, true);
        Self {
            cluster,
            machine,
            running,
            plugin,
        }
    }
}

fn partition(number: u32) -> ResourceClaim {
    claim(number, &[Partition(0, "1g.10gb", number - 1)])
}

/// Waits until no claim can have the slices of the partition: each prepare would fail.
async fn await_taint(cluster: &TestCluster) {
    eventually("taint of the partition", || {
        let mut devices = cluster.api.devices().into_iter();
        devices.find(|device| {
            let taints = device["taints"].as_array().into_iter().flatten();
            let mut values = taints.filter_map(|taint| taint["value"].as_str());
            device["name"] == "gpu-0-mig-1g-10gb-0"
                && values.any(|value| value == "foreign-mig-instance")
        })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_pod_while_monitor_holds_partition() {
    if lacks_device_files() {
        return;
    }
    let HeldCluster {
        cluster,
        machine,
        running: _running,
        plugin,
    } = HeldCluster::start().await;
    let found = partition(1);
    for _ in 0..2 {
        let error = plugin.unprepare_one(&kubelet_claim(1)).await.unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("claim default/claim-1")
                && error.contains("cannot destroy MIG instance")
                && error
                    .contains("it is held by dcgm-exporter (process 77); restart these programs"),
            "{error}"
        );
    }
    // The pod ends; the record keeps the slices.
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    cluster.api.delete_claim(&found);
    assert!(cluster.record_file(1).exists() && !cluster.spec_file(1).exists());
    await_taint(&cluster).await;
    eventually("event on the claim", || {
        let mut events = cluster.api.events_with_kind().into_iter();
        events.find(|(reason, note, kind)| {
            reason == "PartitionInUse" && kind == "ResourceClaim" && note.contains("dcgm-exporter")
        })
    })
    .await;
    hold_instances(&machine, false);
    eventually("destroyed partition", || {
        (!cluster.record_file(1).exists()).then_some(())
    })
    .await;
    let instances = machine
        .root()
        .join("proc/driver/nvidia/capabilities/gpu0/mig");
    let left = fs::read_dir(instances)
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().path().is_dir());
    assert_eq!(left.count(), 0);
}

/// Kubelet does not unprepare a claim again whose pod has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taints_held_partition_again_after_restart() {
    if lacks_device_files() {
        return;
    }
    let HeldCluster {
        cluster,
        machine,
        running,
        plugin,
    } = HeldCluster::start().await;
    for _ in 0..2 {
        plugin.unprepare_one(&kubelet_claim(1)).await.unwrap_err();
    }
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    cluster.api.delete_claim(&partition(1));
    await_taint(&cluster).await;
    running.kill().await;
    cluster.api.wipe_slices();
    let running = HeldCluster::start_driver(&cluster, &machine);
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    await_taint(&cluster).await;
    hold_instances(&machine, false);
    eventually("destroyed partition", || {
        (!cluster.record_file(1).exists()).then_some(())
    })
    .await;
    running.stop().await;
}

/// What the first attempt to unprepare has removed stays removed while kubelet repeats it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restores_no_state_of_claim_that_is_unprepared() {
    if lacks_device_files() {
        return;
    }
    let held = HeldCluster::start().await;
    let cluster = &held.cluster;
    cluster.api.put_claim(&partition(2));
    held.plugin.prepare_one(&kubelet_claim(2)).await.unwrap();
    let error = held.plugin.unprepare_one(&kubelet_claim(1)).await;
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("held by dcgm-exporter")
    );
    assert!(!cluster.spec_file(1).exists());
    // A claim that meets a damaged record requests a reconciliation, which handles claims in order of their UIDs. Another one
    // may have repaired the record just before.
    fs::write(cluster.record_file(2), "noise").unwrap();
    cluster.api.put_claim(&partition(3));
    let _ = held.plugin.prepare_one(&kubelet_claim(3)).await;
    eventually("a rebuilt record", || {
        let mut events = cluster.api.events().into_iter();
        events.find(|(reason, note)| reason == "ClaimStateRepaired" && note.contains("rebuilt"))
    })
    .await;
    assert!(!cluster.spec_file(1).exists());
    let events = cluster.api.events();
    let is_repair = |(reason, note): &(String, String)| {
        reason.starts_with("ClaimState") && note.contains("claim default/claim-1")
    };
    assert!(!events.iter().any(is_repair), "{events:?}");
    hold_instances(&held.machine, false);
    held.plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    held.running.stop().await;
}
