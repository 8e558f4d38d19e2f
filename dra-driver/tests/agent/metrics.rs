//! Metrics of shares by the agent, and telemetry of GPUs, on a simulated machine.

use std::sync::Arc;

use drava_dra_driver::agent::share_metrics::{CounterTotals, ShareMetrics};
use drava_dra_driver::gpu_health::HealthTable;
use drava_dra_driver::gpu_health::fabric_manager::FabricManager;
use drava_dra_driver::gpu_health::state::{Fault, Rules};
use drava_dra_driver::gpus::inventory::{InventoryThread, Recorded, Source};
use drava_dra_driver::metrics::gpu_monitor::{self, Tables};
use drava_dra_driver::metrics::telemetry::{GpuEntry, GpuTable, Xid};
use drava_nvml::{GpuLibrary, GpuUuid, Library, Memory, Sensor, find};
use drava_vgpu_abi::ledger::Owner;
use drava_vgpu_abi::region::SlotIndex;
use drava_vgpu_abi::snapshot::ProcessUsage;
use drava_vgpu_abi::{ComputePolicy, Limits};
use simulator_machine::control::Command;
use simulator_machine::description::H100X2;
use simulator_machine::protocol::{GpuEvent, GpuIndex};
use simulator_machine::testing::{Machine, skips_without_root};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::node::{GIB, GPU, MIB, TestNode, eventually, limits};

fn await_metrics(
    metrics: &watch::Receiver<Arc<[ShareMetrics]>>,
    what: &str,
    is_wanted: impl Fn(&ShareMetrics) -> bool,
) -> ShareMetrics {
    eventually(what, || {
        metrics
            .borrow()
            .iter()
            .find(|share| is_wanted(share))
            .cloned()
    })
}

#[test]
fn reports_memory_and_processes_until_unprepared() {
    let node = TestNode::new();
    node.prepare(1, &Limits::memory(2 * GIB));
    let config = node.config();
    let metrics = config.metrics.subscribe();
    let _agent = node.agent_with(config);
    let mut registered = node.escape(1, "cuMemAlloc_v2", GIB, true);
    assert_ne!(registered.send(&format!("take {}", 2 * GIB)), 0, "denied");
    let escaped = node.escape(1, "cuMemAlloc_v2", 64 * MIB, false);
    let share = await_metrics(&metrics, "both processes", |share| {
        share.figures.registered == 1 && share.figures.escaped == 1
    });
    assert_eq!(
        (share.claim.as_str(), &share.share),
        ("claim-1", &TestNode::share_id(1))
    );
    assert_eq!(share.limit_bytes, Some(2 * GIB));
    let figures = share.figures;
    assert!(
        figures.used_bytes >= GIB && figures.peak_bytes >= figures.used_bytes,
        "{figures:?}"
    );
    assert!(figures.driver_bytes < GIB, "{figures:?}");
    assert!(
        figures.processes_bytes.unwrap() >= GIB + 64 * MIB,
        "{figures:?}"
    );
    assert!(figures.denied >= 1, "{figures:?}");
    drop(escaped);
    await_metrics(&metrics, "the end of the process", |share| {
        share.figures.escaped == 0
    });
    node.unprepare(1);
    eventually("the end of the share", || {
        metrics.borrow().is_empty().then_some(())
    });
}

#[test]
fn reports_gpu_time_and_throttling_of_busy_share() {
    let node = TestNode::new();
    node.prepare(1, &limits(ComputePolicy::Fixed, 20, 0));
    let config = node.config();
    let metrics = config.metrics.subscribe();
    let _agent = node.agent_with(config);
    let idle = await_metrics(&metrics, "the share", |_| true);
    assert_eq!((idle.gpu_time_us, idle.figures.last_demand_us), (0, 0));
    let mut tenant = node.tenant(1);
    tenant.ok("start kernel ns=5000000 depth=4").unwrap();
    let busy = await_metrics(&metrics, "use and throttling", |share| {
        share.gpu_time_us > 100_000 && share.throttled_us > 100_000
    });
    assert_eq!(busy.guaranteed_percent, 20);
    await_metrics(&metrics, "utilization of a running program", |share| {
        (5..=40).contains(&share.utilization_percent)
    });
    drop(tenant);
    await_metrics(&metrics, "no utilization after its end", |share| {
        share.utilization_percent == 0
    });
    assert!(busy.figures.last_demand_us > 0);
}

fn usage(slot: usize, generation: u64, gpu_time_us: u64) -> ProcessUsage {
    ProcessUsage {
        slot: SlotIndex::new(slot).unwrap(),
        owner: Owner {
            pid: 1,
            start_time: 1,
            pid_namespace: 1,
        },
        generation,
        used_bytes: 0,
        peak_bytes: 0,
        driver_bytes: 0,
        exported_bytes: 0,
        denied: 0,
        gpu_time_us,
        throttled_us: 0,
        launches: 0,
        long_kernels: 0,
        longest_kernel_us: 0,
    }
}

#[test]
fn totals_rise_over_ends_of_processes() {
    let mut totals = CounterTotals::default();
    let mut total = |processes: &[ProcessUsage]| {
        totals.update(0, processes);
        totals.gpu_time_us()
    };
    assert_eq!(total(&[usage(0, 1, 100)]), 100);
    assert_eq!(total(&[usage(0, 1, 150), usage(1, 1, 10)]), 160);
    assert_eq!(
        total(&[usage(0, 1, 150), usage(1, 2, 5)]),
        165,
        "a slot is reused between two checks"
    );
    assert_eq!(total(&[usage(1, 2, 5)]), 165, "a process has ended");
    assert_eq!(
        total(&[usage(0, 2, 5), usage(1, 2, 5)]),
        170,
        "a free slot is used again"
    );
    assert_eq!(
        total(&[usage(0, 2, 1)]),
        170,
        "a tenant sets its counter back"
    );
    assert_eq!(total(&[usage(0, 2, u64::MAX)]), u64::MAX, "or to nonsense");
}

#[test]
fn measures_utilization_over_last_period() {
    let mut totals = CounterTotals::default();
    let mut percent = |now_us, gpu_time_us| {
        totals.update(now_us, &[usage(0, 1, gpu_time_us)]);
        totals.utilization_percent()
    };
    assert_eq!(percent(10_000_000, 900_000), 0, "unknown before");
    assert_eq!(percent(11_000_000, 1_200_000), 30);
    assert_eq!(percent(11_100_000, 1_300_000), 30, "too short");
    assert_eq!(percent(13_000_000, 1_700_000), 25);
    assert_eq!(percent(14_000_000, 9_000_000), 100, "a long kernel ended");
    assert_eq!(percent(15_000_000, 9_000_000), 0, "idle");
}

#[test]
fn reads_sensors_and_counts_xids_of_gpus() {
    if skips_without_root() {
        return;
    }
    let machine = Machine::start(H100X2).unwrap();
    let root = machine.root().to_owned();
    let source = Source::nvml(root.clone(), root.clone());
    let thread = InventoryThread::start(source, Box::new(Recorded::default)).unwrap();
    let open = move || {
        let library = Library::open(&find(&root).unwrap()).unwrap();
        Ok(Box::new(library) as Box<dyn GpuLibrary>)
    };
    let (table, stop) = (GpuTable::default(), CancellationToken::new());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let health = HealthTable::new(Rules::default());
    let tables = Tables {
        telemetry: table.clone(),
        health: health.clone(),
    };
    let fabric_manager = FabricManager::new("/sys".into(), "/proc".into());
    let running = gpu_monitor::run(
        tables,
        thread.state(),
        Arc::new(open),
        Arc::new(fabric_manager),
        stop.clone(),
    );
    let running = std::thread::spawn(move || runtime.block_on(running));
    let gpu = GpuUuid::new(GPU);
    let entry = |is_wanted: &dyn Fn(&GpuEntry) -> bool| {
        table
            .entries()
            .remove(&gpu)
            .filter(|entry| is_wanted(entry))
    };
    let read = eventually("a reading", || entry(&|entry| entry.sample.is_some()));
    assert_eq!(read.info.unwrap().model, "NVIDIA H100 80GB HBM3");
    let (telemetry, _) = read.sample.unwrap();
    assert!(matches!(
        telemetry.memory,
        Sensor::Value(Memory::Dedicated { .. })
    ));
    assert_eq!(telemetry.temperature_celsius, Sensor::Value(30));
    let raise = Command::Raise(GpuEvent::Xid {
        gpu: GpuIndex(0),
        code: 79,
        instance: None,
    });
    machine.control(&raise).unwrap();
    let struck = eventually("the XID", || entry(&|entry| !entry.xids.is_empty()));
    assert_eq!(
        struck.xids.into_iter().collect::<Vec<_>>(),
        [(Xid::Number(79), 1)]
    );
    let fault = || health.subscribe().borrow().get(&gpu)?.gpu;
    assert_eq!(eventually("the fault", fault), Fault::Xid(79));
    stop.cancel();
    running.join().unwrap();
}
