//! Samples of a snapshot of the exporter.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::Arc;

use drava_api::condition::ConditionReason;
use drava_api::metric::{self, BUILD_INFO, Metric, MetricKind, alias, driver as table};
use drava_dra_driver::agent::share_metrics::ShareViolation;
use drava_dra_driver::agent::share_metrics::{CoresOf, Figures, ShareMetrics};
use drava_dra_driver::gpu_health::state::{Fault, GpuHealth};
use drava_dra_driver::metrics::aliases::WithAliases;
use drava_dra_driver::metrics::claim_view::{ClaimEntry, Container, DeviceAccess, DeviceEntry};
use drava_dra_driver::metrics::debug_state;
use drava_dra_driver::metrics::exposition::{Now, Snapshot};
use drava_dra_driver::metrics::operations::Operations;
use drava_dra_driver::metrics::telemetry::GpuTable;
use drava_dra_driver::node::claim::ShareId;
use drava_dra_driver::report::conditions::{Condition, Conditions};
use drava_nvml::{GpuUuid, Memory, Sensor, Telemetry, Utilization};
use serde_json::json;
use simulator_machine::testing::python;

use crate::fixture::{GPU_UUIDS, claim_ref, h100x2, share_id};

const NOW: Now = Now {
    unix_seconds: 2000.0,
    monotonic_us: 50_000_000,
};

fn telemetry() -> Telemetry {
    Telemetry {
        fabric: Sensor::Absent,
        fabric_health: Sensor::Absent,
        memory_repair: Sensor::Absent,
        memory: Sensor::Value(Memory::Dedicated {
            total_bytes: 80 << 30,
            reserved_bytes: 1 << 30,
            used_bytes: 8 << 30,
        }),
        utilization: Sensor::Value(Utilization {
            gpu_percent: 50,
            memory_percent: 25,
        }),
        temperature_celsius: Sensor::Value(40),
        power_milliwatts: Sensor::Value(70_500),
        energy_millijoules: Sensor::Value(12_500),
        sm_clock_mhz: Sensor::Value(1980),
        memory_clock_mhz: Sensor::Value(2619),
        ecc_corrected: Sensor::Value(3),
        ecc_uncorrected: Sensor::Value(0),
        recovery_action: Sensor::Absent,
    }
}

/// A GPU with telemetry, one of which nothing was read, and a claim with a share that two pods use.
fn snapshot() -> Snapshot {
    let gpus = GpuTable::default();
    gpus.set_inventory(&h100x2());
    let gpu = GpuUuid::new(GPU_UUIDS[0]);
    gpus.set_sample(&gpu, telemetry(), 1990.0);
    gpus.count_xid(&gpu, 79);
    let share = ShareId::parse(&share_id(1, 0)).unwrap();
    let figures = Figures {
        used_bytes: 3 << 30,
        peak_bytes: 4 << 30,
        driver_bytes: 300 << 20,
        processes_bytes: Some(3 << 30),
        denied: 7,
        registered: 2,
        escaped: 1,
        last_demand_us: 40_000_000,
    };
    let shares = [ShareMetrics {
        claim: claim_ref(1).uid,
        share: share.clone(),
        limit_bytes: Some(8 << 30),
        burst_bytes: Some(2 << 30),
        lent_bytes: Some(1 << 30),
        guaranteed_percent: 30,
        cores_of: CoresOf::Time,
        gpu_time_us: 1_500_000,
        throttled_us: 250_000,
        idle_since_us: Some(20_000_000),
        utilization_percent: 25,
        figures,
    }];
    let claims = [ClaimEntry {
        claim: claim_ref(1),
        devices: vec![DeviceEntry {
            request: "gpu".to_owned(),
            device: "gpu-0-vgpu".to_owned(),
            gpu: GPU_UUIDS[0].to_owned(),
            access: DeviceAccess::Share(share),
            suspended_bytes: Some(6 << 30),
            suspended_since: Some(1940),
        }],
        pods: BTreeSet::from(["a".to_owned(), "b".to_owned()]),
        containers: BTreeMap::from([("a".to_owned(), vec![container("app", &[])])]),
    }];
    let fault = GpuHealth {
        gpu: Some(Fault::Xid(79)),
        ..GpuHealth::default()
    };
    let healthy = GpuUuid::new(GPU_UUIDS[1]);
    let conditions = Conditions::default();
    conditions.set(Condition::Gpus, Ok(()));
    Snapshot {
        conditions: conditions.states(),
        gpus: gpus.entries(),
        health: Arc::new(BTreeMap::from([
            (gpu, fault),
            (healthy, GpuHealth::default()),
        ])),
        shares: Arc::new(shares),
        violations: Arc::new([ShareViolation {
            claim: claim_ref(1).uid,
            share: ShareId::parse(&share_id(1, 0)).unwrap(),
            reason: ConditionReason::MemoryOverLimit,
        }]),
        claims: Arc::new(claims),
        operations: Operations::default(),
        now: NOW,
    }
}

fn container(name: &str, requests: &[&str]) -> Container {
    Container {
        name: name.to_owned(),
        index: 2,
        requests: requests.iter().map(|&request| request.to_owned()).collect(),
    }
}

fn text(snapshot: Snapshot) -> String {
    metric::exposition(snapshot).unwrap()
}

/// Returns the values of a metric by the values of its labels.
pub(crate) fn samples(text: &str, metric: &Metric) -> BTreeMap<Vec<String>, f64> {
    let suffix = match metric.kind {
        MetricKind::Counter => "_total",
        MetricKind::Gauge => "",
        MetricKind::Histogram => "_count",
    };
    let start = format!("{}{suffix}{{", metric.name);
    let lines = text.lines().filter_map(|line| line.strip_prefix(&start));
    let sample = |line: &str| {
        let (labels, value) = line.rsplit_once("} ").unwrap();
        let labels = labels.split("\",").map(|label| {
            let (name, value) = label.split_once("=\"").unwrap();
            (name, value.trim_end_matches('"').to_owned())
        });
        let (names, values): (Vec<&str>, Vec<String>) = labels.unzip();
        assert_eq!(names, metric.labels, "labels of {}", metric.name);
        (values, value.parse().unwrap())
    };
    lines.map(sample).collect()
}

pub(crate) fn values(text: &str, metric: &Metric) -> Vec<f64> {
    samples(text, metric).into_values().collect()
}

#[test]
fn encodes_every_metric_of_the_table() {
    let (text, of_spatial) = (
        text(snapshot()),
        text(with_cores_of(CoresOf::Multiprocessors)),
    );
    for metric in [&BUILD_INFO].into_iter().chain(table::ALL) {
        let has_samples = |text: &str| !samples(text, metric).is_empty();
        assert!(
            has_samples(&text) || has_samples(&of_spatial),
            "{} has no sample",
            metric.name
        );
    }
    let types = text.lines().filter(|line| line.starts_with("# TYPE "));
    assert_eq!(
        types.count(),
        of_snapshot().count() + 1,
        "metrics without description"
    );
}

/// The metrics of the table that [`snapshot`] has, which has no spatial share.
fn of_snapshot() -> impl Iterator<Item = &'static Metric> {
    let of_spatial = table::SHARE_MULTIPROCESSORS_RATIO.name;
    table::ALL
        .iter()
        .filter(move |metric| metric.name != of_spatial)
}

/// A snapshot whose share has another kind of cores, and no time, because that is not measured.
fn with_cores_of(cores_of: CoresOf) -> Snapshot {
    let mut snapshot = snapshot();
    let share = &mut Arc::get_mut(&mut snapshot.shares).unwrap()[0];
    *share = ShareMetrics {
        cores_of,
        gpu_time_us: 0,
        throttled_us: 0,
        ..share.clone()
    };
    snapshot
}

/// Who bills idle time, or recommends cores, takes a time of zero for an idle share.
#[test]
fn time_that_is_not_measured_is_absent() {
    for (cores_of, multiprocessors) in [
        (CoresOf::Multiprocessors, &[0.3] as &[f64]),
        (CoresOf::Nothing, &[]),
    ] {
        let text = text(with_cores_of(cores_of));
        for metric in [
            table::SHARE_GUARANTEED_RATIO,
            table::SHARE_GPU_TIME_SECONDS,
            table::SHARE_THROTTLED_SECONDS,
        ] {
            assert!(values(&text, &metric).is_empty(), "{}", metric.name);
        }
        let found = values(&text, &table::SHARE_MULTIPROCESSORS_RATIO);
        assert_eq!(found, multiprocessors);
        assert_eq!(values(&text, &table::SHARE_MEMORY_DENIALS), [7.0]);
    }
}

#[test]
fn converts_values_to_base_units() {
    let text = text(snapshot());
    for (metric, expected) in [
        (table::GPU_MEMORY_USED_BYTES, 8589934592.0),
        (table::GPU_UTILIZATION_RATIO, 0.5),
        (table::GPU_MEMORY_CONTROLLER_UTILIZATION_RATIO, 0.25),
        (table::GPU_POWER_WATTS, 70.5),
        (table::GPU_ENERGY_JOULES, 12.5),
        (table::SHARE_MEMORY_LIMIT_BYTES, 8589934592.0),
        (table::SHARE_BURST_BYTES, 2147483648.0),
        (table::SHARE_LENT_BYTES, 1073741824.0),
        (table::SHARE_GUARANTEED_RATIO, 0.3),
        (table::SHARE_GPU_TIME_SECONDS, 1.5),
        (table::SHARE_THROTTLED_SECONDS, 0.25),
        (table::SHARE_MEMORY_DENIALS, 7.0),
        (table::SHARE_LAST_ACTIVITY_TIMESTAMP_SECONDS, 1990.0),
        (table::SHARE_IDLE_SECONDS, 30.0),
        (table::SHARE_SUSPENDED_SECONDS, 60.0),
    ] {
        assert_eq!(values(&text, &metric), [expected], "{}", metric.name);
    }
    let clocks = samples(&text, &table::GPU_CLOCK_HERTZ);
    assert_eq!(
        clocks[&vec![GPU_UUIDS[0].to_owned(), "sm".to_owned()]],
        1.98e9
    );
}

#[test]
fn counts_share_of_several_pods_once() {
    let text = text(snapshot());
    assert_eq!(samples(&text, &table::SHARE_MEMORY_USED_BYTES).len(), 1);
    let pods = samples(&text, &table::CLAIM_POD_INFO).into_keys();
    let pods: Vec<String> = pods.filter_map(|labels| labels.last().cloned()).collect();
    assert_eq!(pods, ["a", "b"]);
}

#[test]
fn shows_devices_of_each_container() {
    let mut snapshot = snapshot();
    let claim = &mut Arc::get_mut(&mut snapshot.claims).unwrap()[0];
    claim.devices.push(DeviceEntry {
        request: "whole".to_owned(),
        device: "gpu-1".to_owned(),
        gpu: GPU_UUIDS[1].to_owned(),
        access: DeviceAccess::Whole,
        suspended_bytes: None,
        suspended_since: None,
    });
    let containers = [container("all", &[]), container("some", &["whole"])];
    claim.containers = BTreeMap::from([("a".to_owned(), containers.to_vec())]);
    let text = text(snapshot);
    let series = samples(&text, &table::CONTAINER_DEVICE_INFO).into_keys();
    let series: Vec<String> = series.map(|labels| labels.join(" ")).collect();
    let share = share_id(1, 0);
    let [first, second] = GPU_UUIDS;
    assert_eq!(
        series,
        [
            format!("default a all claim-1 gpu gpu-0-vgpu {first} {share}"),
            format!("default a all claim-1 whole gpu-1 {second} "),
            format!("default a some claim-1 whole gpu-1 {second} "),
        ]
    );
}

#[test]
fn shows_faults_and_unknown_health_without_nvml() {
    let health = |text: &str| {
        let all = samples(text, &table::GPU_HEALTHY);
        GPU_UUIDS.map(|gpu| all[&vec![gpu.to_owned()]])
    };
    let mut snapshot = snapshot();
    let text_with_nvml = text(snapshot.clone());
    assert_eq!(health(&text_with_nvml), [0.0, 1.0]);
    let faults = samples(&text_with_nvml, &table::GPU_FAULT_INFO).into_keys();
    let faults: Vec<Vec<String>> = faults.collect();
    assert_eq!(faults, [[GPU_UUIDS[0], "", "xid-79"].map(str::to_owned)]);
    snapshot.conditions = Conditions::default().states();
    assert_eq!(health(&text(snapshot)), [0.0, 0.0]);
}

#[test]
fn drops_series_of_removed_claims_and_gpus() {
    let mut removed = snapshot();
    removed.claims = Arc::default();
    let text = text(removed);
    assert!(
        !text.contains(&share_id(1, 0)) && !text.contains("drava_share"),
        "{text}"
    );

    let gpus = GpuTable::default();
    gpus.set_inventory(&h100x2());
    let mut one = h100x2();
    one.nvml.gpus.truncate(1);
    gpus.set_inventory(&one);
    assert_eq!(gpus.entries().len(), 1);
}

#[test]
fn hides_stale_reading_but_shows_its_time() {
    let mut stale = snapshot();
    stale.now.unix_seconds = 1990.0 + 61.0;
    let text = text(stale);
    assert!(values(&text, &table::GPU_TEMPERATURE_CELSIUS).is_empty());
    assert_eq!(
        values(&text, &table::GPU_SAMPLE_TIMESTAMP_SECONDS),
        [1990.0]
    );
}

#[test]
fn bounds_distinct_xids() {
    let gpus = GpuTable::default();
    gpus.set_inventory(&h100x2());
    let gpu = GpuUuid::new(GPU_UUIDS[0]);
    (0..1000).for_each(|number| gpus.count_xid(&gpu, number));
    gpus.count_xid(&gpu, 5);
    let text = text(Snapshot {
        gpus: gpus.entries(),
        ..snapshot()
    });
    let xids = samples(&text, &table::GPU_XID_ERRORS);
    let count = |xid: &str| xids[&vec![GPU_UUIDS[0].to_owned(), xid.to_owned()]];
    assert_eq!((xids.len(), count("5"), count("other")), (33, 2.0, 968.0));
}

#[test]
fn openmetrics_parser_accepts_the_exposition() {
    if python::is_unavailable() {
        return;
    }
    let mut snapshot = snapshot();
    let claim = &mut Arc::get_mut(&mut snapshot.claims).unwrap()[0];
    claim.pods.insert("quote\" and \\ backslash".to_owned());
    let script = "import sys\n\
                  from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse\n\
                  families = list(parse(sys.stdin.read()))\n\
                  assert all(family.documentation for family in families)\n\
                  print(len(families))";
    let mut parser = Command::new(python::clients().unwrap().join("python"))
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = parser.stdin.take().unwrap();
    input.write_all(text(snapshot).as_bytes()).unwrap();
    drop(input);
    let output = parser.wait_with_output().unwrap();
    assert!(output.status.success());
    let families: usize = String::from_utf8(output.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    assert_eq!(families, of_snapshot().count() + 1);
}

#[test]
fn shows_aliases_with_units_of_hami_and_volcano() {
    let with_aliases = WithAliases {
        snapshot: snapshot(),
        node: "node-a".to_owned(),
    };
    let text = metric::exposition(with_aliases).unwrap();
    for (metric, expected) in [
        (alias::HOST_GPU_MEMORY_USAGE, 8589934592.0),
        (alias::HOST_CORE_UTILIZATION, 50.0),
        (alias::VGPU_MEMORY_USAGE, 3221225472.0),
        (alias::VGPU_MEMORY_LIMIT, 8589934592.0),
        (alias::LAST_KERNEL, 10.0),
        (alias::DEVICE_MEMORY, 3221225472.0),
        (alias::DEVICE_UTILIZATION, 25.0),
        (alias::HAMI_HOST_MEMORY_USED, 8589934592.0),
        (alias::HAMI_HOST_UTILIZATION, 50.0),
        (alias::HAMI_VGPU_MEMORY_USED, 3221225472.0),
        (alias::HAMI_VGPU_MEMORY_LIMIT, 8589934592.0),
        (alias::HAMI_DEVICE_MEMORY, 3221225472.0),
        (alias::HAMI_DEVICE_UTILIZATION, 25.0),
        (alias::HAMI_LAST_KERNEL, 10.0),
        (alias::HAMI_GPU_MEMORY_LIMIT, 85899345920.0),
        (alias::HAMI_GPU_CORE_LIMIT, 100.0),
        (alias::HAMI_VGPU_MEMORY_ALLOCATED, 8589934592.0),
        (alias::HAMI_VGPU_CORE_ALLOCATED, 30.0),
        (alias::VOLCANO_MEMORY_LIMIT, 81920.0),
    ] {
        assert_eq!(values(&text, &metric), [expected], "{}", metric.name);
    }
    for (metric, expected) in [
        (alias::HAMI_GPU_SHARED, [1.0, 0.0]),
        (alias::HAMI_GPU_MEMORY_ALLOCATED, [8589934592.0, 0.0]),
        (alias::HAMI_GPU_CORE_ALLOCATED, [30.0, 0.0]),
        (alias::VOLCANO_SHARED_NUMBER, [1.0, 0.0]),
        (alias::VOLCANO_ALLOCATED_MEMORY, [8192.0, 0.0]),
        (alias::VOLCANO_ALLOCATED_CORES, [30.0, 0.0]),
        // Two pods share the claim.
        (alias::VOLCANO_POD_MEMORY, [8192.0, 8192.0]),
        (alias::VOLCANO_POD_CORES, [30.0, 30.0]),
    ] {
        assert_eq!(values(&text, &metric), expected, "{}", metric.name);
    }
    for metric in alias::ALL.iter().chain(of_snapshot()) {
        assert!(!values(&text, metric).is_empty(), "{}", metric.name);
    }
}

#[test]
fn aliases_number_the_shares_of_a_container_over_its_claims() {
    let mut snapshot = snapshot();
    let mut claims = snapshot.claims.to_vec();
    let mut second = claims[0].clone();
    second.claim = claim_ref(2);
    claims.push(second);
    snapshot.claims = Arc::from(claims);
    let with_aliases = WithAliases {
        snapshot,
        node: "node-a".to_owned(),
    };
    let text = metric::exposition(with_aliases).unwrap();
    let usage = values(&text, &alias::VGPU_MEMORY_USAGE);
    assert_eq!(usage, [3221225472.0, 3221225472.0], "two shares of one GPU");
}

#[test]
fn shows_state_for_debugging() {
    let unmet = [(Condition::Published, "no RBAC".to_owned())];
    let state = debug_state::state(&snapshot(), &unmet);
    assert_eq!(state["unmetConditions"]["published"], "no RBAC");
    let [faulty, healthy] = [&state["gpus"][0], &state["gpus"][1]];
    assert_eq!(faulty["uuid"], GPU_UUIDS[0]);
    assert_eq!(faulty["faults"][0]["taint"], "xid-79");
    assert_eq!(faulty["xids"], json!({"79": 1}));
    assert_eq!(faulty["sampleAgeSeconds"], 10.0);
    assert_eq!(healthy["healthy"], true);
    let claim = &state["claims"][0];
    assert_eq!(claim["devices"][0]["share"], share_id(1, 0));
    assert_eq!(claim["containers"]["a"][0]["name"], "app");
    assert_eq!(state["shares"][0]["guaranteedPercent"], 30);
}
