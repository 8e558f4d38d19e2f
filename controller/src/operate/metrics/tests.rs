//! Exposition of the controller's metrics.

use k8s_openapi::api::core::v1::ObjectReference;

use super::*;
use crate::action::{Eviction, EvictionCause, EvictionFailure, Precedence, Preemptor, Victim};

fn device(allocated: f64, exclusive: u32) -> DeviceMetrics {
    DeviceMetrics {
        device: "gpu-0-vgpu".into(),
        amounts: BTreeMap::from([("memory".to_owned(), (80.0, allocated))]),
        reserved: BTreeMap::from([("memory".to_owned(), 4.0)]),
        exclusive,
        is_gpu_overcommitted: false,
    }
}

fn cluster() -> ClusterMetrics {
    ClusterMetrics {
        pending: BTreeMap::from([(None, 1), (Some(Reason::InsufficientMemory), 2)]),
        gangs: GangCounts {
            pending: 1,
            running: 2,
        },
        companions: CompanionCounts {
            waiting: 4,
            refused: 3,
            allocated: 2,
            returning: 1,
        },
        in_flight: 3,
        oldest_undelivered: None,
        scheduler_releases: 6,
        unreadable: [(Kind::Pods, 2)].into(),
        excluded_pools: 0,
        quotas: vec![QuotaMetrics {
            name: "team-a".to_owned(),
            used: BTreeMap::from([(QuotaResource::Memory, 60.0)]),
            suspended: BTreeMap::from([(QuotaResource::Memory, 25.0)]),
            limit: BTreeMap::from([(QuotaResource::Memory, 80.0)]),
            guarantee: BTreeMap::from([(QuotaResource::Memory, 40.0)]),
            borrowed: BTreeMap::from([(QuotaResource::Memory, 20.0)]),
            alert_threshold_ratio: 0.9,
        }],
        namespaces: BTreeMap::from([(
            "team-a".to_owned(),
            NamespaceAmounts {
                memory: 60.0,
                gpus: 0.5,
                devices: 2.0,
            },
        )]),
    }
}

fn nodes() -> BTreeMap<String, NodeMetrics> {
    let node = NodeMetrics {
        devices: vec![device(8.0, 0)],
        free_memory: Some(FreeMemory {
            total: 80.0,
            on_partly_allocated_gpus: 20.0,
        }),
    };
    [("n1".to_owned(), node)].into()
}

fn leading() -> Metrics {
    let metrics = Metrics::default();
    metrics.set_leading(true);
    metrics.set_certificate(CertificateValidity {
        start: 1_000,
        end: 2_000,
    });
    metrics.set_cluster(
        cluster(),
        nodes(),
        Kind::ALL.map(|kind| (kind, true)).into(),
    );
    metrics.decided(Duration::from_millis(2));
    metrics.allocated([Some(SignedDuration::from_secs(3))].into_iter());
    metrics.allocation_failed();
    metrics.watch_failed(Kind::Pods);
    metrics.released();
    metrics.evicted(&eviction(Precedence::Priority, 2, false));
    metrics.evicted(&eviction(Precedence::Guarantee, 0, true));
    metrics
}

/// Outcome of a preemption.
fn eviction(precedence: Precedence, evicted: usize, has_failed: bool) -> EvictionOutcome {
    let victim = Victim {
        pod: ObjectReference::default(),
        priority: 0,
    };
    EvictionOutcome {
        eviction: Eviction {
            cause: EvictionCause::Preemption(Preemptor {
                uid: "p".to_owned(),
                pod: ObjectReference::default(),
                priority: 1,
                precedence,
            }),
            victims: vec![victim.clone(); evicted + usize::from(has_failed)],
        },
        evicted: vec![victim.clone(); evicted],
        failure: has_failed.then(|| EvictionFailure {
            victim,
            message: "budget".to_owned(),
        }),
    }
}

#[test]
fn encodes_every_metric_of_the_table() {
    let text = leading().text().unwrap();
    let mut types = text
        .lines()
        .filter(|line| line.starts_with("# TYPE "))
        .count();
    for metric in [&BUILD_INFO].into_iter().chain(table::ALL) {
        let mut lines = text.lines().filter(|line| line.starts_with(metric.name));
        let line = lines
            .next()
            .unwrap_or_else(|| panic!("{} has no sample", metric.name));
        for label in metric.labels {
            assert!(line.contains(&format!("{label}=\"")), "{line}");
        }
        types -= 1;
    }
    assert_eq!(types, 0, "metrics without description");
    for sample in [
        "drava_controller_pending_pods{reason=\"InsufficientMemory\"} 2.0",
        "drava_controller_pending_pods{reason=\"None\"} 1.0",
        "drava_controller_pending_pods{reason=\"Tainted\"} 0.0",
        "drava_device_capacity{node=\"n1\",device=\"gpu-0-vgpu\",capacity=\"memory\"} 80.0",
        "drava_device_allocated{node=\"n1\",device=\"gpu-0-vgpu\",capacity=\"memory\"} 8.0",
        "drava_quota_suspended{quota=\"team-a\",resource=\"memory\"} 25.0",
        "drava_quota_borrowed{quota=\"team-a\",resource=\"memory\"} 20.0",
        "drava_namespace_allocated_memory_bytes{namespace=\"team-a\"} 60.0",
        "drava_namespace_allocated_gpus{namespace=\"team-a\"} 0.5",
        "drava_webhook_certificate_end_timestamp_seconds{} 2000.0",
        "drava_controller_watch_failures_total{kind=\"pods\"} 1.0",
        "drava_controller_allocation_jobs_total{outcome=\"failed\"} 1.0",
        "drava_node_fragmentation_ratio{node=\"n1\"} 0.25",
        "drava_controller_gangs{state=\"pending\"} 1.0",
        "drava_controller_gangs{state=\"running\"} 2.0",
        "drava_controller_companions{state=\"waiting\"} 4.0",
        "drava_controller_companions{state=\"refused\"} 3.0",
        "drava_controller_companions{state=\"allocated\"} 2.0",
        "drava_controller_companions{state=\"returning\"} 1.0",
        "drava_controller_ledger_drift_seconds{} 0.0",
        "drava_controller_scheduler_releases_total{} 6.0",
        "drava_controller_preemptions_total{precedence=\"priority\"} 1.0",
        "drava_controller_preemptions_total{precedence=\"guarantee\"} 0.0",
        "drava_controller_evictions_total{cause=\"preemption\"} 2.0",
        "drava_controller_evictions_total{cause=\"incomplete-gang\"} 0.0",
        "drava_controller_eviction_failures_total{cause=\"preemption\"} 1.0",
    ] {
        assert!(text.contains(&format!("{sample}\n")), "{sample}\n{text}");
    }
}

#[test]
fn removes_cluster_series_of_former_leader() {
    let metrics = leading();
    metrics.set_leading(false);
    let text = metrics.text().unwrap();
    assert!(
        !text.contains("drava_device")
            && !text.contains("drava_quota")
            && !text.contains("drava_namespace")
            && !text.contains("pending_pods"),
        "{text}"
    );
    assert!(text.contains("drava_controller_allocation_jobs_total"));
}

#[test]
fn detects_overcommitted_devices() {
    assert!(!device(80.0, 1).is_overcommitted());
    assert!(device(81.0, 0).is_overcommitted());
    assert!(device(0.0, 2).is_overcommitted());
}

#[test]
fn nodes_keep_their_series_until_they_change() {
    let metrics = leading();
    let is_shown = |metrics: &Metrics| metrics.text().unwrap().contains(r#"node="n1""#);
    metrics.set_cluster(cluster(), BTreeMap::new(), Vec::new());
    assert!(is_shown(&metrics));
    let gone = [("n1".to_owned(), NodeMetrics::default())].into();
    metrics.set_cluster(cluster(), gone, Vec::new());
    assert!(!is_shown(&metrics));
}

#[test]
fn ledger_drift_grows_until_the_next_report() {
    let mut cluster = cluster();
    cluster.oldest_undelivered = tokio::time::Instant::now().checked_sub(Duration::from_secs(90));
    let metrics = Metrics::default();
    metrics.set_leading(true);
    metrics.set_cluster(cluster, BTreeMap::new(), Vec::new());
    let text = metrics.text().unwrap();
    let name = "drava_controller_ledger_drift_seconds{} ";
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    let seconds: f64 = value.unwrap().parse().unwrap();
    assert!((90.0..1000.0).contains(&seconds), "{seconds}");
}
