//! Health of GPUs of a running driver: faults of a simulated machine, taints, conditions, events, kubelet's stream.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drava_api::node_profile::{GpuIdentity, GpuNodeProfile, NodeSettings};
use drava_dra_driver::driver::Config;
use drava_dra_driver::gpu_health::fabric_manager::FabricManager;
use drava_dra_driver::gpu_health::state::{Fault, GpuHealth, Observation, Rules, Scope};
use drava_dra_driver::gpu_health::{HealthByGpu, HealthTable};
use drava_dra_driver::gpus::inventory::{InventoryThread, Recorded, Source};
use drava_dra_driver::metrics::gpu_monitor::{self, Tables};
use drava_dra_driver::metrics::telemetry::GpuTable;
use drava_dra_driver::node::options::UnhealthyEffect;
use drava_dra_driver::publish::{self, Features, TaintPolicy};
use drava_dra_driver::report::conditions::Condition;
use drava_fake_kubelet::{DeviceHealth, HealthStatus};
use drava_nvml::{EventKind, GpuLibrary as _, GpuUuid, Library, Mig, Placement, find};
use futures::StreamExt as _;
use k8s_openapi::api::resource::v1::DeviceTaint;
use serde_json::Value;
use simulator_machine::client::Connection;
use simulator_machine::control::Command;
use simulator_machine::description::{A100_80X8, H100X2};
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::{ClientKind, GpuEvent, GpuIndex, MigRequest, Request};
use simulator_machine::root::DriverRoot;
use simulator_machine::testing::Machine;
use tokio_util::sync::CancellationToken;

use crate::api_server::{ApiServer, SLICES, eventually};
use crate::cluster::{Running, TestCluster, kubelet_claim};
use crate::fixture::Allocated::Share;
use crate::fixture::{GPU_UUIDS, NODE, claim, h100x2};
use crate::node::lacks_device_files;
use crate::publish::{MANAGED, devices};

/// Starts a driver on a machine of its own, with this recovery window.
fn start(cluster: &TestCluster, machine: &Machine, window: Duration) -> Running {
    let mut config = Config {
        health: Rules {
            recovery_window: window,
            ..Rules::default()
        },
        ..cluster.config()
    };
    config.paths.driver_root_mount = machine.root().to_owned();
    let source = Source {
        rescan: Duration::from_millis(100),
        ..Source::nvml(config.paths.driver_root.clone(), machine.root().to_owned())
    };
    cluster.start_with(config, source)
}

fn raise_xid(machine: &Machine, gpu: u32, code: u64) {
    let event = GpuEvent::Xid {
        gpu: GpuIndex(gpu),
        code,
        instance: None,
    };
    machine.control(&Command::Raise(event)).unwrap();
}

fn set_lost(machine: &Machine, gpu: u32, lost: bool) {
    let faults = Faults {
        lost,
        ..Faults::default()
    };
    let gpu = GpuIndex(gpu);
    machine.control(&Command::Break { gpu, faults }).unwrap();
}

/// Returns the devices with a health taint, as `name: value`.
fn tainted(api: &ApiServer) -> Vec<String> {
    let taint = |device: &Value| {
        let mut taints = device["taints"].as_array()?.iter();
        let taint = taints.find(|taint| taint["key"] == "gpu.drava.dev/unhealthy")?;
        let (name, value) = (device["name"].as_str()?, taint["value"].as_str()?);
        Some(format!("{name}: {value}"))
    };
    api.devices().iter().filter_map(taint).collect()
}

/// Waits until exactly these devices have a health taint.
async fn await_tainted(api: &ApiServer, expected: &[&str]) {
    eventually(&format!("taints {expected:?}"), || {
        (tainted(api) == expected).then_some(())
    })
    .await;
}

/// Returns the kinds of the objects of events with this reason whose note contains `text`.
fn event_kinds(api: &ApiServer, reason: &str, text: &str) -> Vec<String> {
    let events = api.events_with_kind().into_iter();
    let events = events.filter(|(found, note, _)| found == reason && note.contains(text));
    let mut kinds: Vec<String> = events.map(|(_, _, kind)| kind).collect();
    kinds.sort();
    kinds
}

const XID_79: [&str; 2] = ["gpu-1: xid-79", "gpu-1-vgpu: xid-79"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taints_gpu_with_fatal_xid_until_it_returns() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let machine = Machine::start(H100X2).unwrap();
    let window = Duration::from_secs(3600);
    let running = start(&cluster, &machine, window);
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    for (number, gpu) in [(1, 0), (2, 1)] {
        let claim = claim(number, &[Share(gpu, "8Gi", "30")]);
        cluster.api.put_claim(&claim);
        plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
    }
    let condition = |claim: &str, status: &str| {
        let condition = cluster.api.condition(claim, "Healthy");
        condition.filter(|condition| condition["status"] == status)
    };
    for claim in ["claim-1", "claim-2"] {
        eventually("condition Healthy", || condition(claim, "True")).await;
    }
    let mut stream = plugin.watch_health().await.unwrap();

    // Errors of applications on the same GPU: a taint would name the first. The monitor may register for events only
    // later.
    eventually("taints", || {
        for code in [13, 31, 43, 45, 79] {
            raise_xid(&machine, 1, code);
        }
        (tainted(&cluster.api) == XID_79).then_some(())
    })
    .await;
    let unhealthy = eventually("unhealthy claim", || condition("claim-2", "False")).await;
    assert_eq!(unhealthy["reason"], "GpuFault");
    let message = unhealthy["message"].as_str().unwrap();
    assert!(
        message.contains(GPU_UUIDS[1])
            && message.contains("XID 79: the GPU has fallen off the bus"),
        "{message}"
    );
    assert!(condition("claim-1", "True").is_some());
    let enforced = cluster.api.condition("claim-2", "Enforced").unwrap();
    assert_eq!(enforced["reason"], "Interposed");
    let kinds = || event_kinds(&cluster.api, "GpuUnhealthy", "XID 79");
    let expected = ["Node", "Pod", "ResourceClaim"];
    eventually("events", || (kinds().len() == expected.len()).then_some(())).await;
    assert_eq!(kinds(), expected);
    assert!(event_kinds(&cluster.api, "GpuUnhealthy", "claim-1").is_empty());
    let message = loop {
        let message = stream.next().await.unwrap().unwrap();
        let is_healthy = |device: &DeviceHealth| device.health() == HealthStatus::Healthy;
        if !message.devices.iter().all(is_healthy) {
            break message;
        }
    };
    for device in &message.devices {
        let is_faulty = device
            .device
            .as_ref()
            .is_some_and(|device| device.device_name.starts_with("gpu-1"));
        let expected = match is_faulty {
            true => HealthStatus::Unhealthy,
            false => HealthStatus::Healthy,
        };
        assert_eq!(device.health(), expected, "{device:?}");
        assert_eq!(device.message.contains("XID 79"), is_faulty, "{device:?}");
    }

    // A restart neither removes the taint nor repeats the events.
    running.stop().await;
    let slice_writes = || {
        let writes = cluster.api.writes().into_iter();
        writes.filter(|write| write.contains(SLICES)).count()
    };
    let writes = slice_writes();
    let running = start(&cluster, &machine, window);
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    assert_eq!(tainted(&cluster.api), XID_79);
    assert_eq!(slice_writes(), writes);

    // As after a reset: the GPU is gone, then answers.
    set_lost(&machine, 1, true);
    await_tainted(&cluster.api, &["gpu-1: lost", "gpu-1-vgpu: lost"]).await;
    eventually("lost claim", || {
        condition("claim-2", "False").filter(|condition| condition["reason"] == "GpuLost")
    })
    .await;
    set_lost(&machine, 1, false);
    await_tainted(&cluster.api, &[]).await;
    eventually("recovered claim", || condition("claim-2", "True")).await;
    let recovered = || event_kinds(&cluster.api, "GpuRecovered", "");
    eventually("event of the claim", || {
        recovered()
            .contains(&"ResourceClaim".to_owned())
            .then_some(())
    })
    .await;
    assert_eq!(kinds(), expected, "reported once");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recovers_after_window_without_fatal_xid() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let machine = Machine::start(H100X2).unwrap();
    let running = start(&cluster, &machine, Duration::from_secs(1));
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    let event = |reason: &'static str| {
        let api = cluster.api.clone();
        move || event_kinds(&api, reason, "double-bit ECC").pop()
    };
    // The monitor may register for events after the publication.
    let raise = || {
        let gpu = GpuIndex(0);
        let event = GpuEvent::DoubleBitEcc { gpu };
        machine.control(&Command::Raise(event)).unwrap();
    };
    let unhealthy = event("GpuUnhealthy");
    eventually("fault", || {
        raise();
        unhealthy()
    })
    .await;
    eventually("recovery", event("GpuRecovered")).await;
    await_tainted(&cluster.api, &[]).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taints_gpu_whose_nvml_calls_hang() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    cluster.gpus.hang(Some(GPU_UUIDS[1]));
    let config = Config {
        health: Rules {
            // Longer than the time between two readings.
            response_limit: Duration::from_secs(10),
            ..Rules::default()
        },
        ..cluster.config()
    };
    let running = cluster.start_with(config, cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    cluster.prepare_shares(&plugin, &[1]).await;
    let expected = ["gpu-1: not-responding", "gpu-1-vgpu: not-responding"];
    await_tainted(&cluster.api, &expected).await;
    cluster.prepare_shares(&plugin, &[2]).await;
    cluster.gpus.hang(None);
    await_tainted(&cluster.api, &[]).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attributes_xid_to_slices_of_mig_instance() {
    if lacks_device_files() {
        return;
    }
    let machine = Machine::start(H100X2).unwrap();
    let root = DriverRoot::new(machine.root());
    let (mut connection, _) = Connection::open(&root, ClientKind::Nvml).unwrap();
    let (gpu, request) = (GpuIndex(0), MigRequest::SetMode { enabled: true });
    connection.request(&Request::Mig { gpu, request }).unwrap();
    let source = Source::nvml(machine.root().to_owned(), machine.root().to_owned());
    let (open, stop) = (Arc::clone(&source.observe), CancellationToken::new());
    let thread = InventoryThread::start(source, Box::new(Recorded::default)).unwrap();
    let tables = Tables {
        telemetry: GpuTable::default(),
        health: HealthTable::new(Rules::default()),
    };
    let health = tables.health.subscribe();
    let fabric_manager = FabricManager::new(machine.root().join("sys"), "/proc".into());
    let running = tokio::spawn(gpu_monitor::run(
        tables,
        thread.state(),
        open,
        Arc::new(fabric_manager),
        stop.clone(),
    ));

    let library = Library::open(&find(machine.root()).unwrap()).unwrap();
    let uuid = GpuUuid::new(GPU_UUIDS[0]);
    let slices = Placement { start: 4, size: 2 };
    let instance = library.create_mig(&uuid, 14, slices).unwrap();
    let raise = |instance| {
        let xid = GpuEvent::Xid {
            gpu,
            code: 95,
            instance: Some(instance),
        };
        machine.control(&Command::Raise(xid)).unwrap();
    };
    let of_gpu = || health.borrow().get(&uuid).cloned();
    // The monitor may register for events only later.
    let with_fault = eventually("fault of the instance", || {
        raise(instance.id);
        of_gpu().filter(|health: &GpuHealth| !health.is_healthy())
    })
    .await;
    let faults: Vec<_> = with_fault.faults().collect();
    assert_eq!(faults, [(Scope::Slices(slices), Fault::Xid(95))]);

    // An instance that was destroyed: the GPU.
    library.destroy_mig(&uuid, instance.id).unwrap();
    raise(instance.id);
    eventually("fault of the GPU", || of_gpu()?.gpu).await;
    stop.cancel();
    running.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taints_gpu_without_its_fabric() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let machine = Machine::start(H100X2).unwrap();
    let gpu = GpuIndex(1);
    let faults = Faults {
        fabric_state: Some(1),
        fabric_health_mask: 16,
        repair_pending: true,
        ..Faults::default()
    };
    machine.control(&Command::Break { gpu, faults }).unwrap();
    let mut config = cluster.config();
    config.health.fabric_limit = Duration::from_secs(1);
    config.paths.driver_root_mount = machine.root().to_owned();
    let source = Source::nvml(config.paths.driver_root.clone(), machine.root().to_owned());
    let running = cluster.start_with(config, source);
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    let expected = ["gpu-1: fabric-not-ready", "gpu-1-vgpu: fabric-not-ready"];
    await_tainted(&cluster.api, &expected).await;
    for (reason, text) in [
        ("GpuUnhealthy", "start the fabric manager"),
        ("GpuDegraded", "repair takes effect at a reset"),
        ("GpuDegraded", "fabric is not healthy: a route is unhealthy"),
    ] {
        eventually("event on the node", || {
            (event_kinds(&cluster.api, reason, text) == ["Node"]).then_some(())
        })
        .await;
    }
    let faults = Faults::default();
    machine.control(&Command::Break { gpu, faults }).unwrap();
    await_tainted(&cluster.api, &[]).await;
    running.stop().await;
}

/// As on HGX A100, whose NVML reports no fabric.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taints_gpus_on_nvswitches_without_fabric_manager() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let third = A100_80X8.match_indices("\n- model: ").nth(2).unwrap().0;
    let machine = Machine::start(&A100_80X8[..=third]).unwrap();
    let mut config = cluster.config();
    config.health.fabric_limit = Duration::from_secs(1);
    config.paths.driver_root_mount = machine.root().to_owned();
    let proc_root = config.proc_root.clone();
    let source = Source {
        sysfs: machine.root().join("sys"),
        ..Source::nvml(config.paths.driver_root.clone(), machine.root().to_owned())
    };
    let running = cluster.start_with(config, source);
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    let fabric_not_ready = ["gpu-0", "gpu-0-vgpu", "gpu-1", "gpu-1-vgpu"];
    let fabric_not_ready = fabric_not_ready.map(|device| format!("{device}: fabric-not-ready"));
    let fabric_not_ready = fabric_not_ready.each_ref().map(String::as_str);
    await_tainted(&cluster.api, &fabric_not_ready).await;
    eventually("event on the node", || {
        let kinds = event_kinds(&cluster.api, "GpuUnhealthy", "start the fabric manager");
        (!kinds.is_empty() && kinds.iter().all(|kind| kind == "Node")).then_some(())
    })
    .await;

    let manager = machine.start_fabric_manager().unwrap();
    let of_node = proc_root.join(manager.pid().to_string());
    symlink(format!("/proc/{}", manager.pid()), of_node).unwrap();
    await_tainted(&cluster.api, &[]).await;
    drop(manager);
    await_tainted(&cluster.api, &fabric_not_ready).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_sensor_hides_no_fault_of_gpu() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let machine = Machine::start(H100X2).unwrap();
    // As with a corrupted infoROM.
    let faults = Faults {
        fabric_state: Some(1),
        failing: BTreeMap::from([("nvmlDeviceGetTotalEccErrors".to_owned(), 14)]),
        ..Faults::default()
    };
    let gpu = GpuIndex(1);
    machine.control(&Command::Break { gpu, faults }).unwrap();
    let mut config = cluster.config();
    config.health.fabric_limit = Duration::from_secs(1);
    config.paths.driver_root_mount = machine.root().to_owned();
    let source = Source::nvml(config.paths.driver_root.clone(), machine.root().to_owned());
    let running = cluster.start_with(config, source);
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    let expected = ["gpu-1: fabric-not-ready", "gpu-1-vgpu: fabric-not-ready"];
    await_tainted(&cluster.api, &expected).await;
    // The monitor may register for events only later.
    eventually("taints of the XID", || {
        raise_xid(&machine, 1, 79);
        (tainted(&cluster.api) == XID_79).then_some(())
    })
    .await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_of_nvml_is_no_reset() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let machine = Machine::start(H100X2).unwrap();
    let running = start(&cluster, &machine, Duration::from_secs(3600));
    cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    // The monitor may register for events only later.
    let expected = ["gpu-1: xid-48", "gpu-1-vgpu: xid-48"];
    eventually("taints", || {
        raise_xid(&machine, 1, 48);
        (tainted(&cluster.api) == expected).then_some(())
    })
    .await;
    let release = async || {
        let annotation = serde_json::json!({"gpu.drava.dev/release-nvml": "true"});
        cluster.api.annotate_node(NODE, &annotation);
        running.await_unmet(Condition::Gpus, "release-nvml").await;
        cluster.api.annotate_node(NODE, &serde_json::json!({}));
        running.await_ready().await;
    };
    release().await;
    // The thread of the GPU reads the sensors before it waits for this event.
    eventually("event of the open NVML", || {
        raise_xid(&machine, 1, 9999);
        event_kinds(&cluster.api, "GpuDegraded", GPU_UUIDS[1]).pop()
    })
    .await;
    let recovered = event_kinds(&cluster.api, "GpuRecovered", "");
    assert_eq!((recovered, tainted(&cluster.api).len()), (vec![], 2));

    release().await;
    eventually("recovery by a reset", || {
        let gpu = GpuIndex(1);
        machine.control(&Command::Reset { gpu }).unwrap();
        tainted(&cluster.api).is_empty().then_some(())
    })
    .await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_gpu_that_disappeared_while_driver_was_down() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    cluster.prepare_shares(&plugin, &[1]).await;
    let reason = |reason: &'static str| {
        let condition = cluster.api.condition("claim-1", "Healthy");
        condition.filter(|condition| condition["reason"] == reason)
    };
    eventually("healthy claim", || reason("NoFault")).await;
    running.kill().await;
    cluster.gpus.change(|gpus| drop(gpus.gpus.remove(0)));
    let (_running, _plugin) = cluster.start_ready().await;
    eventually("claim with a lost GPU", || reason("GpuLost")).await;
    eventually("events", || {
        let kinds = event_kinds(&cluster.api, "GpuUnhealthy", GPU_UUIDS[0]);
        (kinds == ["Node", "Pod", "ResourceClaim"]).then_some(())
    })
    .await;
}

#[test]
fn taints_devices_of_unhealthy_gpu_only() {
    let gpu = h100x2().nvml.gpus[1].uuid.clone();
    let fault = GpuHealth {
        gpu: Some(Fault::Xid(79)),
        ..GpuHealth::default()
    };
    let health = HealthByGpu::from([(gpu, fault)]);
    let policy = TaintPolicy {
        unhealthy: UnhealthyEffect::NoExecute,
        ..MANAGED
    };
    let pool = publish::desired(
        NODE,
        &h100x2(),
        &BTreeMap::new(),
        &health,
        policy,
        Features::ALL,
    );
    let taints: Vec<_> = devices(&pool)
        .iter()
        .map(|device| {
            let taints = device.taints.iter().flatten();
            let text = |taint: &DeviceTaint| {
                let value = taint.value.clone().unwrap();
                format!("{}={value}:{}", taint.key, taint.effect)
            };
            (
                device.name.as_str(),
                taints.map(text).collect::<Vec<_>>().join(" "),
            )
        })
        .collect();
    let managed = "gpu.drava.dev/managed=true:NoSchedule";
    let unhealthy = format!("{managed} gpu.drava.dev/unhealthy=xid-79:NoExecute");
    assert_eq!(
        taints,
        [
            ("gpu-0", managed.to_owned()),
            ("gpu-0-vgpu", managed.to_owned()),
            ("gpu-1", unhealthy.clone()),
            ("gpu-1-vgpu", unhealthy),
        ]
    );
    let text = "XID 79: the GPU has fallen off the bus";
    let names: Vec<&str> = pool.unhealthy.keys().map(String::as_str).collect();
    assert_eq!(names, ["gpu-1", "gpu-1-vgpu"]);
    assert!(pool.unhealthy.values().all(|reason| reason == text));
}

#[test]
fn taints_partitions_that_overlap_unhealthy_instance() {
    let mut inventory = h100x2();
    if let Mig::Capable { enabled, .. } = &mut inventory.nvml.gpus[0].mig {
        *enabled = true;
    }
    let slices = Placement { start: 4, size: 2 };
    let fault = GpuHealth {
        instances: BTreeMap::from([(slices, Fault::Xid(95))]),
        ..GpuHealth::default()
    };
    let health = HealthByGpu::from([(inventory.nvml.gpus[0].uuid.clone(), fault)]);
    let none = BTreeMap::new();
    let pool = publish::desired(NODE, &inventory, &none, &health, MANAGED, Features::ALL);
    let unhealthy: BTreeSet<&str> = pool.unhealthy.keys().map(String::as_str).collect();
    let expected = [
        "gpu-0-mig-1g-10gb-4",
        "gpu-0-mig-1g-10gb-5",
        "gpu-0-mig-1g-10gb-plus-me-4",
        "gpu-0-mig-1g-10gb-plus-me-5",
        "gpu-0-mig-1g-20gb-4",
        "gpu-0-mig-2g-20gb-4",
        "gpu-0-mig-3g-40gb-4",
        "gpu-0-mig-7g-80gb-0",
    ];
    assert_eq!(unhealthy, BTreeSet::from(expected));
}

#[test]
fn profile_overrides_classes_of_xids() {
    let profile = |spec: Value| {
        let profile = GpuNodeProfile::new("a", serde_json::from_value(spec).unwrap());
        let mut inventory = h100x2();
        let gpus = inventory.nvml.gpus.iter().map(|gpu| GpuIdentity {
            uuid: gpu.uuid.as_str(),
            index: gpu.index,
            product_name: &gpu.name,
        });
        let settings = NodeSettings::resolve([&profile], &BTreeMap::new(), gpus);
        inventory.settings = Some(settings);
        inventory
    };
    let (table, now) = (HealthTable::new(Rules::default()), Instant::now());
    let unhealthy = || -> Vec<GpuUuid> {
        let health = table.subscribe().borrow().clone();
        let faulty = health
            .iter()
            .filter(|(_, health)| health.faults().next().is_some());
        faulty.map(|(gpu, _)| gpu.clone()).collect()
    };
    let gpus = GPU_UUIDS.map(GpuUuid::new);
    let raise = |xid| {
        for gpu in &gpus {
            table.observe(
                gpu,
                &Observation::Event(EventKind::Xid(xid), Scope::Gpu),
                now,
            );
        }
    };
    table.set_inventory(
        &profile(
            serde_json::json!({"devices": [{"index": 0, "xids": {"ignore": [48], "fatal": [31]}}]}),
        ),
        now,
    );
    raise(48);
    assert_eq!(unhealthy(), [gpus[1].clone()]);
    raise(31);
    assert_eq!(unhealthy(), gpus);
    // Both faults end when the profile ignores their XIDs.
    table.set_inventory(&h100x2(), now);
    assert_eq!(unhealthy(), gpus, "the profiles are not known");
    table.set_inventory(
        &profile(serde_json::json!({"xids": {"ignore": [31, 48]}})),
        now,
    );
    assert_eq!(unhealthy(), []);
}
