//! Metrics of the controller at `/metrics`.
//!
//! The leading replica updates them in its loop; a scrape reads what was set last. Only the leader has series of the
//! cluster, so that sums over replicas are correct.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use drava_allocator::device::Device;
use drava_allocator::usage::DeviceUse;
use drava_api::metric::{self, BUILD_INFO, Metric, controller as table};
use drava_api::quota::QuotaResource;
use drava_api::reason::Reason;
use jiff::SignedDuration;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;

use crate::watches::Kind;

mod namespace_usage;

pub use namespace_usage::NamespaceAmounts;
use namespace_usage::NamespaceUsage;

/// Upper bounds of the buckets of decisions, seconds.
const DECISION_BUCKETS: [f64; 9] = [0.000_01, 0.000_1, 0.001, 0.005, 0.01, 0.05, 0.1, 1.0, 10.0];

/// Upper bounds of the buckets of waits, seconds.
const WAIT_BUCKETS: [f64; 10] = [0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0];

/// What the leader knows of the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterMetrics {
    /// Shareable devices.
    pub devices: Vec<DeviceMetrics>,
    /// Number of pending pods by the reason of their last rejection; `None` before the first decision and after an
    /// allocation.
    pub pending: BTreeMap<Option<Reason>, usize>,
    /// Allocation jobs in flight.
    pub in_flight: usize,
    /// Pools that are excluded from allocation.
    pub excluded_pools: usize,
    /// Quotas.
    pub quotas: Vec<QuotaMetrics>,
    /// What the claims of each namespace have.
    pub namespaces: BTreeMap<String, NamespaceAmounts>,
}

/// A shareable device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceMetrics {
    /// Name of the node.
    pub node: String,
    /// Name of the device.
    pub device: Arc<str>,
    /// Published and allocated amount by capacity.
    pub amounts: BTreeMap<String, (f64, f64)>,
    /// Claims that have the device alone.
    pub exclusive: u32,
}

/// A quota: memory in bytes, cores in percent of the GPU time of one GPU, devices.
#[derive(Debug, Clone, PartialEq)]
pub struct QuotaMetrics {
    /// Name of the quota.
    pub name: String,
    /// Used amounts.
    pub used: BTreeMap<QuotaResource, f64>,
    /// Limits.
    pub limit: BTreeMap<QuotaResource, f64>,
    /// Guarantees.
    pub guarantee: BTreeMap<QuotaResource, f64>,
    /// Used amounts beyond the guarantee.
    pub borrowed: BTreeMap<QuotaResource, f64>,
    /// Ratio of the limit from which on an alert fires.
    pub alert_threshold_ratio: f64,
}

impl From<(&str, &Device, &DeviceUse)> for DeviceMetrics {
    fn from((node, device, device_use): (&str, &Device, &DeviceUse)) -> Self {
        let amounts = device.capacity.iter().map(|(name, capacity)| {
            let allocated = device_use.consumed.get(name).copied().unwrap_or_default();
            let published = capacity.value.to_f64_lossy();
            (name.clone(), (published, allocated.to_f64_lossy()))
        });
        Self {
            node: node.to_owned(),
            device: Arc::clone(&device.name),
            amounts: amounts.collect(),
            exclusive: device_use.exclusive,
        }
    }
}

impl DeviceMetrics {
    fn is_overcommitted(&self) -> bool {
        let is_above = self
            .amounts
            .values()
            .any(|(published, allocated)| allocated > published);
        is_above || self.exclusive > 1
    }
}

/// Metrics of this replica.
#[derive(Debug)]
pub struct Metrics {
    leadership: Mutex<Leadership>,
    decisions: Histogram,
    waits: Histogram,
    allocated: Counter,
    failed: Counter,
    released: Counter,
    watch_failures: Mutex<BTreeMap<Kind, u64>>,
    certificate: Mutex<Option<CertificateValidity>>,
    started: Instant,
}

/// Validity of the certificate that the webhook serves, Unix time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CertificateValidity {
    /// First second.
    pub start: i64,
    /// Last second.
    pub end: i64,
}

/// State of the leader; a standby replica has neither cluster nor watches.
#[derive(Debug, Clone, Default)]
struct Leadership {
    is_leading: bool,
    cluster: Option<Arc<ClusterMetrics>>,
    /// Whether the first list of a kind is complete.
    synced: Vec<(Kind, bool)>,
    usage: NamespaceUsage,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            leadership: Mutex::default(),
            decisions: Histogram::new(DECISION_BUCKETS),
            waits: Histogram::new(WAIT_BUCKETS),
            allocated: Counter::default(),
            failed: Counter::default(),
            released: Counter::default(),
            watch_failures: Mutex::default(),
            certificate: Mutex::default(),
            started: Instant::now(),
        }
    }
}

impl Metrics {
    /// Sets whether this replica leads. The series of the cluster end with the leadership.
    pub fn set_leading(&self, is_leading: bool) {
        *lock(&self.leadership) = Leadership {
            is_leading,
            ..Leadership::default()
        };
    }

    /// Sets the state of the cluster and of the watches.
    pub fn set_cluster(&self, cluster: ClusterMetrics, synced: Vec<(Kind, bool)>) {
        let mut leadership = lock(&self.leadership);
        let namespaces = cluster.namespaces.clone();
        leadership.usage.set(namespaces, self.started.elapsed());
        leadership.cluster = Some(Arc::new(cluster));
        leadership.synced = synced;
    }

    /// Records a pass of decisions.
    pub fn decided(&self, duration: Duration) {
        self.decisions.observe(duration.as_secs_f64());
    }

    /// Counts an allocation job, and records the time since the creation of each pod where that is known.
    pub fn allocated(&self, waits: impl Iterator<Item = Option<SignedDuration>>) {
        self.allocated.inc();
        for wait in waits.flatten() {
            self.waits.observe(wait.as_secs_f64().max(0.0));
        }
    }

    /// Counts a failed allocation job.
    pub fn allocation_failed(&self) {
        self.failed.inc();
    }

    /// Counts a released allocation.
    pub fn released(&self) {
        self.released.inc();
    }

    /// Counts an interrupted watch.
    pub fn watch_failed(&self, kind: Kind) {
        *lock(&self.watch_failures).entry(kind).or_default() += 1;
    }

    /// Sets the validity of the certificate that the webhook serves.
    pub fn set_certificate(&self, validity: CertificateValidity) {
        *lock(&self.certificate) = Some(validity);
    }

    /// Returns the metrics as OpenMetrics text.
    ///
    /// # Errors
    /// When they cannot be encoded.
    pub fn text(&self) -> Result<String, fmt::Error> {
        metric::exposition(Samples {
            leadership: lock(&self.leadership).clone(),
            decisions: self.decisions.clone(),
            waits: self.waits.clone(),
            jobs: [
                ("allocated", self.allocated.get()),
                ("failed", self.failed.get()),
            ],
            released: self.released.get(),
            watch_failures: lock(&self.watch_failures).clone(),
            certificate: *lock(&self.certificate),
            now: self.started.elapsed(),
        })
    }
}

fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    // The states are valid after a panic: every change is one operation.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the router of `/metrics`.
pub fn router(metrics: Arc<Metrics>) -> Router {
    Router::new()
        .route("/metrics", get(scrape))
        .with_state(metrics)
}

async fn scrape(State(metrics): State<Arc<Metrics>>) -> Response {
    match metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, metric::CONTENT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "cannot encode the metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// Samples of one scrape.
#[derive(Debug)]
struct Samples {
    leadership: Leadership,
    decisions: Histogram,
    waits: Histogram,
    /// Allocation jobs by outcome.
    jobs: [(&'static str, u64); 2],
    released: u64,
    watch_failures: BTreeMap<Kind, u64>,
    certificate: Option<CertificateValidity>,
    /// Time of the scrape, in the clock of the usage.
    now: Duration,
}

impl Collector for Samples {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (leadership, encoder) = (&self.leadership, &mut encoder);
        let version = env!("CARGO_PKG_VERSION");
        BUILD_INFO.encode(encoder, [(["controller", version], 1.0)])?;
        table::LEADER.encode(encoder, [([], flag(leadership.is_leading))])?;
        let synced = leadership.synced.iter();
        let synced = synced.map(|(kind, is_synced)| ([kind.as_str()], flag(*is_synced)));
        table::SYNCED.encode(encoder, synced)?;
        let failures = Kind::ALL.map(|kind| {
            let count = self.watch_failures.get(&kind).copied().unwrap_or_default();
            ([kind.as_str()], count as f64)
        });
        table::WATCH_FAILURES.encode(encoder, failures)?;
        if let Some(cluster) = &leadership.cluster {
            cluster.encode(encoder)?;
            leadership.usage.encode(encoder, self.now)?;
        }
        let certificate = self.certificate.iter();
        let ends = certificate
            .clone()
            .map(|validity| ([], validity.end as f64));
        table::CERTIFICATE_END.encode(encoder, ends)?;
        let starts = certificate.map(|validity| ([], validity.start as f64));
        table::CERTIFICATE_START.encode(encoder, starts)?;
        table::DECISION_SECONDS.encode_histograms(encoder, [([], &self.decisions)])?;
        table::WAIT_SECONDS.encode_histograms(encoder, [([], &self.waits)])?;
        let jobs = self.jobs.map(|(outcome, count)| ([outcome], count as f64));
        table::ALLOCATIONS.encode(encoder, jobs)?;
        table::RELEASES.encode(encoder, [([], self.released as f64)])
    }
}

impl ClusterMetrics {
    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let amounts = || {
            self.devices.iter().flat_map(|device| {
                let amounts = device.amounts.iter();
                amounts
                    .map(|(name, amounts)| ([device.node.as_str(), &device.device, name], *amounts))
            })
        };
        let published = amounts().map(|(labels, (published, _))| (labels, published));
        table::CAPACITY.encode(encoder, published)?;
        let allocated = amounts().map(|(labels, (_, allocated))| (labels, allocated));
        table::ALLOCATED.encode(encoder, allocated)?;
        let each = |value: fn(&DeviceMetrics) -> f64| {
            let sample = move |device: &'_ DeviceMetrics| value(device);
            self.devices
                .iter()
                .map(move |device| ([device.node.as_str(), &*device.device], sample(device)))
        };
        table::OVERCOMMITTED.encode(encoder, each(|device| flag(device.is_overcommitted())))?;
        table::EXCLUSIVE.encode(encoder, each(|device| f64::from(device.exclusive)))?;
        table::EXCLUDED_POOLS.encode(encoder, [([], self.excluded_pools as f64)])?;
        // All reasons, so that a reason without pods is 0 instead of absent.
        let reasons = Reason::ALL.iter().copied().map(Some).chain([None]);
        let pending = reasons.map(|reason| {
            let count = self.pending.get(&reason).copied().unwrap_or_default();
            ([reason.map_or("None", Reason::as_str)], count as f64)
        });
        table::PENDING_PODS.encode(encoder, pending)?;
        table::IN_FLIGHT.encode(encoder, [([], self.in_flight as f64)])?;
        self.encode_quotas(encoder)
    }

    fn encode_quotas(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Amounts = fn(&QuotaMetrics) -> &BTreeMap<QuotaResource, f64>;
        let metrics: [(&Metric, Amounts); 4] = [
            (&table::QUOTA_USED, |quota| &quota.used),
            (&table::QUOTA_LIMIT, |quota| &quota.limit),
            (&table::QUOTA_GUARANTEE, |quota| &quota.guarantee),
            (&table::QUOTA_BORROWED, |quota| &quota.borrowed),
        ];
        for (metric, amounts) in metrics {
            let samples = self.quotas.iter().flat_map(|quota| {
                let amounts = amounts(quota).iter();
                amounts
                    .map(|(resource, amount)| ([quota.name.as_str(), resource.as_str()], *amount))
            });
            metric.encode(encoder, samples)?;
        }
        let thresholds = self.quotas.iter();
        let thresholds =
            thresholds.map(|quota| ([quota.name.as_str()], quota.alert_threshold_ratio));
        table::QUOTA_ALERT_THRESHOLD_RATIO.encode(encoder, thresholds)
    }
}

impl NamespaceUsage {
    fn encode(&self, encoder: &mut DescriptorEncoder<'_>, now: Duration) -> fmt::Result {
        type Amount = fn(&NamespaceAmounts) -> f64;
        let current: [(&Metric, Amount); 3] = [
            (&table::NAMESPACE_MEMORY, |amounts| amounts.memory),
            (&table::NAMESPACE_GPUS, |amounts| amounts.gpus),
            (&table::NAMESPACE_DEVICES, |amounts| amounts.devices),
        ];
        let integrals: [(&Metric, Amount); 3] = [
            (&table::NAMESPACE_MEMORY_SECONDS, |amounts| amounts.memory),
            (&table::NAMESPACE_GPU_SECONDS, |amounts| amounts.gpus),
            (&table::NAMESPACE_DEVICE_SECONDS, |amounts| amounts.devices),
        ];
        let until_now = self.integrals(now);
        for (metrics, amounts) in [(current, self.current()), (integrals, &until_now)] {
            for (metric, amount) in metrics {
                let samples = amounts.iter();
                metric.encode(
                    encoder,
                    samples.map(|(namespace, amounts)| ([namespace.as_str()], amount(amounts))),
                )?;
            }
        }
        Ok(())
    }
}

fn flag(is_set: bool) -> f64 {
    f64::from(u8::from(is_set))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(allocated: f64, exclusive: u32) -> DeviceMetrics {
        DeviceMetrics {
            node: "n1".to_owned(),
            device: "gpu-0-vgpu".into(),
            amounts: BTreeMap::from([("memory".to_owned(), (80.0, allocated))]),
            exclusive,
        }
    }

    fn leading() -> Metrics {
        let metrics = Metrics::default();
        metrics.set_leading(true);
        let cluster = ClusterMetrics {
            devices: vec![device(8.0, 0)],
            pending: BTreeMap::from([(None, 1), (Some(Reason::InsufficientMemory), 2)]),
            in_flight: 3,
            excluded_pools: 0,
            quotas: vec![QuotaMetrics {
                name: "team-a".to_owned(),
                used: BTreeMap::from([(QuotaResource::Memory, 60.0)]),
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
        };
        metrics.set_certificate(CertificateValidity {
            start: 1_000,
            end: 2_000,
        });
        metrics.set_cluster(cluster, Kind::ALL.map(|kind| (kind, true)).into());
        metrics.decided(Duration::from_millis(2));
        metrics.allocated([Some(SignedDuration::from_secs(3))].into_iter());
        metrics.allocation_failed();
        metrics.watch_failed(Kind::Pods);
        metrics.released();
        metrics
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
            "drava_quota_borrowed{quota=\"team-a\",resource=\"memory\"} 20.0",
            "drava_namespace_allocated_memory_bytes{namespace=\"team-a\"} 60.0",
            "drava_namespace_allocated_gpus{namespace=\"team-a\"} 0.5",
            "drava_webhook_certificate_end_timestamp_seconds{} 2000.0",
            "drava_controller_watch_failures_total{kind=\"pods\"} 1.0",
            "drava_controller_allocation_jobs_total{outcome=\"failed\"} 1.0",
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
}
