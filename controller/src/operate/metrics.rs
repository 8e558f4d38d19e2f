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
use drava_allocator::cluster::FreeMemory;
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

use crate::action::{EvictionCause, EvictionOutcome, OwnCause, Precedence};
use crate::pods::live_pods::GangCounts;
use crate::watch::Kind;

mod namespace_usage;

pub use namespace_usage::NamespaceAmounts;
use namespace_usage::NamespaceUsage;

/// Upper bounds of the buckets of decisions, seconds. Passes over 100 ms stall the other tasks of the leader.
const DECISION_BUCKETS: [f64; 14] = [
    0.000_01, 0.000_1, 0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 10.0,
];

/// Upper bounds of the buckets of waits, seconds.
const WAIT_BUCKETS: [f64; 10] = [0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0];

/// What the leader knows of the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterMetrics {
    /// Number of pending pods by the reason of their last rejection; `None` before the first decision and after an
    /// allocation.
    pub pending: BTreeMap<Option<Reason>, usize>,
    /// Gangs with unfinished members.
    pub gangs: GangCounts,
    /// Companions by their state.
    pub companions: CompanionCounts,
    /// Allocation jobs in flight.
    pub in_flight: usize,
    /// When the oldest version of a claim was written that the watch has not delivered.
    pub oldest_undelivered: Option<tokio::time::Instant>,
    /// Unreserved allocations that kube-scheduler has released since this replica leads.
    pub scheduler_releases: u64,
    /// Pools that are excluded from allocation.
    pub excluded_pools: usize,
    /// Objects that this build cannot read.
    pub unreadable: BTreeMap<Kind, usize>,
    /// Quotas.
    pub quotas: Vec<QuotaMetrics>,
    /// What the claims of each namespace have.
    pub namespaces: BTreeMap<String, NamespaceAmounts>,
}

/// Number of companions by their state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CompanionCounts {
    /// Not allocated; they may fit later.
    pub waiting: usize,
    /// Not allocated, and never will be.
    pub refused: usize,
    /// Allocated.
    pub allocated: usize,
    /// Deleted, but the shares keep their capacity.
    pub returning: usize,
}

/// A node with usable devices, or without.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NodeMetrics {
    /// Shareable devices.
    pub devices: Vec<DeviceMetrics>,
    /// Free GPU memory; `None` without usable devices.
    pub free_memory: Option<FreeMemory>,
}

/// A shareable device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceMetrics {
    /// Name of the device.
    pub device: Arc<str>,
    /// Published and allocated amount by capacity.
    pub amounts: BTreeMap<String, (f64, f64)>,
    /// Amount by capacity that is reserved for pods which wait; not allocated.
    pub reserved: BTreeMap<String, f64>,
    /// Claims that have the device alone.
    pub exclusive: u32,
    /// More is allocated of the GPU than it has, also by other devices of it, such as the whole GPU.
    pub is_gpu_overcommitted: bool,
}

/// A quota: memory in bytes, cores in percent of the GPU time of one GPU, devices.
#[derive(Debug, Clone, PartialEq)]
pub struct QuotaMetrics {
    /// Name of the quota.
    pub name: String,
    /// Used amounts.
    pub used: BTreeMap<QuotaResource, f64>,
    /// Used amounts of suspended shares.
    pub suspended: BTreeMap<QuotaResource, f64>,
    /// Limits.
    pub limit: BTreeMap<QuotaResource, f64>,
    /// Guarantees.
    pub guarantee: BTreeMap<QuotaResource, f64>,
    /// Used amounts beyond the guarantee.
    pub borrowed: BTreeMap<QuotaResource, f64>,
    /// Ratio of the limit from which on an alert fires.
    pub alert_threshold_ratio: f64,
}

impl DeviceMetrics {
    /// Creates the metrics of a device; `in_use` includes what is reserved.
    pub(crate) fn new(device: &Device, in_use: &DeviceUse, reserved: &DeviceUse) -> Self {
        let of =
            |found: &DeviceUse, name: &str| found.consumed.get(name).copied().unwrap_or_default();
        let amounts = device.capacity.iter().map(|(name, capacity)| {
            let allocated = of(in_use, name) - of(reserved, name);
            let published = capacity.value.to_f64_lossy();
            (name.clone(), (published, allocated.to_f64_lossy()))
        });
        let reserved_amounts = device.capacity.keys();
        let reserved_amounts =
            reserved_amounts.map(|name| (name.clone(), of(reserved, name).to_f64_lossy()));
        Self {
            device: Arc::clone(&device.name),
            amounts: amounts.collect(),
            reserved: reserved_amounts.collect(),
            exclusive: in_use.exclusive.saturating_sub(reserved.exclusive),
            is_gpu_overcommitted: false,
        }
    }

    /// Returns whether more is allocated than there is.
    pub(crate) fn is_overcommitted(&self) -> bool {
        let is_above = self
            .amounts
            .values()
            .any(|(published, allocated)| allocated > published);
        is_above || self.exclusive > 1 || self.is_gpu_overcommitted
    }
}

/// Metrics of this replica.
#[derive(Debug)]
pub struct Metrics {
    leadership: Mutex<Leadership>,
    decisions: Histogram,
    waits: Histogram,
    explanations: Histogram,
    allocated: Counter,
    failed: Counter,
    released: Counter,
    evictions: Mutex<EvictionCounters>,
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
    /// By name.
    nodes: BTreeMap<String, Arc<NodeMetrics>>,
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
            explanations: Histogram::new(WAIT_BUCKETS),
            allocated: Counter::default(),
            failed: Counter::default(),
            released: Counter::default(),
            evictions: Mutex::default(),
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

    /// Sets the state of the cluster, of its nodes that have changed, and of the watches.
    pub fn set_cluster(
        &self,
        cluster: ClusterMetrics,
        changed_nodes: BTreeMap<String, NodeMetrics>,
        synced: Vec<(Kind, bool)>,
    ) {
        let mut leadership = lock(&self.leadership);
        for (name, node) in changed_nodes {
            if node == NodeMetrics::default() {
                leadership.nodes.remove(&name);
            } else {
                leadership.nodes.insert(name, Arc::new(node));
            }
        }
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

    /// Records the time from the creation of a pod to the condition that says why it waits.
    pub fn explained(&self, wait: SignedDuration) {
        self.explanations.observe(wait.as_secs_f64().max(0.0));
    }

    /// Counts a failed allocation job.
    pub fn allocation_failed(&self) {
        self.failed.inc();
    }

    /// Counts a released allocation.
    pub fn released(&self) {
        self.released.inc();
    }

    /// Counts the pods of an eviction.
    pub fn evicted(&self, outcome: &EvictionOutcome) {
        lock(&self.evictions).count(outcome);
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
            explanations: self.explanations.clone(),
            jobs: [
                ("allocated", self.allocated.get()),
                ("failed", self.failed.get()),
            ],
            released: self.released.get(),
            evictions: *lock(&self.evictions),
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
    explanations: Histogram,
    /// Allocation jobs by outcome.
    jobs: [(&'static str, u64); 2],
    released: u64,
    evictions: EvictionCounters,
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
            encode_nodes(&leadership.nodes, encoder)?;
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
        table::EXPLANATION_SECONDS.encode_histograms(encoder, [([], &self.explanations)])?;
        let jobs = self.jobs.map(|(outcome, count)| ([outcome], count as f64));
        table::ALLOCATIONS.encode(encoder, jobs)?;
        table::RELEASES.encode(encoder, [([], self.released as f64)])?;
        self.evictions.encode(encoder)
    }
}

fn encode_nodes(
    nodes: &BTreeMap<String, Arc<NodeMetrics>>,
    encoder: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    let devices = || {
        nodes.iter().flat_map(|(node, metrics)| {
            let devices = metrics.devices.iter();
            devices.map(move |device| (node.as_str(), device))
        })
    };
    let amounts = || {
        devices().flat_map(|(node, device)| {
            let amounts = device.amounts.iter();
            amounts.map(move |(name, amounts)| ([node, &*device.device, name], *amounts))
        })
    };
    let published = amounts().map(|(labels, (published, _))| (labels, published));
    table::CAPACITY.encode(encoder, published)?;
    let allocated = amounts().map(|(labels, (_, allocated))| (labels, allocated));
    table::ALLOCATED.encode(encoder, allocated)?;
    let reserved = devices().flat_map(|(node, device)| {
        let reserved = device.reserved.iter();
        reserved.map(move |(name, amount)| ([node, &*device.device, name], *amount))
    });
    table::RESERVED.encode(encoder, reserved)?;
    let each = |value: fn(&DeviceMetrics) -> f64| {
        devices().map(move |(node, device)| ([node, &*device.device], value(device)))
    };
    table::OVERCOMMITTED.encode(encoder, each(|device| flag(device.is_overcommitted())))?;
    table::EXCLUSIVE.encode(encoder, each(|device| f64::from(device.exclusive)))?;
    let fragmentation = nodes.iter().filter_map(|(node, metrics)| {
        let free = metrics.free_memory?;
        Some(([node.as_str()], free.fragmentation_ratio()))
    });
    table::FRAGMENTATION.encode(encoder, fragmentation)
}

impl ClusterMetrics {
    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        table::EXCLUDED_POOLS.encode(encoder, [([], self.excluded_pools as f64)])?;
        let unreadable = Kind::ALL.map(|kind| {
            let count = self.unreadable.get(&kind).copied().unwrap_or_default();
            ([kind.as_str()], count as f64)
        });
        table::UNREADABLE.encode(encoder, unreadable)?;
        // All reasons, so that a reason without pods is 0 instead of absent.
        let reasons = Reason::ALL.iter().copied().map(Some).chain([None]);
        let pending = reasons.map(|reason| {
            let count = self.pending.get(&reason).copied().unwrap_or_default();
            ([reason.map_or("None", Reason::as_str)], count as f64)
        });
        table::PENDING_PODS.encode(encoder, pending)?;
        let gangs = [
            ("pending", self.gangs.pending),
            ("running", self.gangs.running),
        ];
        let gangs = gangs.map(|(state, count)| ([state], count as f64));
        table::GANGS.encode(encoder, gangs)?;
        let companions = [
            ("waiting", self.companions.waiting),
            ("refused", self.companions.refused),
            ("allocated", self.companions.allocated),
            ("returning", self.companions.returning),
        ];
        let companions = companions.map(|(state, count)| ([state], count as f64));
        table::COMPANIONS.encode(encoder, companions)?;
        table::IN_FLIGHT.encode(encoder, [([], self.in_flight as f64)])?;
        let drift = self.oldest_undelivered.map(|since| since.elapsed());
        let drift = drift.unwrap_or_default().as_secs_f64();
        table::LEDGER_DRIFT.encode(encoder, [([], drift)])?;
        let releases = [([], self.scheduler_releases as f64)];
        table::SCHEDULER_RELEASES.encode(encoder, releases)?;
        self.encode_quotas(encoder)
    }

    fn encode_quotas(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Amounts = fn(&QuotaMetrics) -> &BTreeMap<QuotaResource, f64>;
        let metrics: [(&Metric, Amounts); 5] = [
            (&table::QUOTA_USED, |quota| &quota.used),
            (&table::QUOTA_SUSPENDED, |quota| &quota.suspended),
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

/// Evictions for one cause.
#[derive(Debug, Clone, Copy, Default)]
struct Evictions {
    evicted: u64,
    failed: u64,
}

/// Preemptions and evictions of this replica.
#[derive(Debug, Clone, Copy, Default)]
struct EvictionCounters {
    by_priority: u64,
    by_guarantee: u64,
    preemption: Evictions,
    incomplete_gang: Evictions,
    suspension: Evictions,
    idle: Evictions,
}

impl EvictionCounters {
    /// Counts an outcome. A preemptor counts when a pod was evicted for it.
    fn count(&mut self, outcome: &EvictionOutcome) {
        let evictions = match &outcome.eviction.cause {
            EvictionCause::Preemption(preemptor) => {
                let preemptions = match preemptor.precedence {
                    Precedence::Priority => &mut self.by_priority,
                    Precedence::Guarantee => &mut self.by_guarantee,
                };
                *preemptions += u64::from(!outcome.evicted.is_empty());
                &mut self.preemption
            }
            EvictionCause::Own(OwnCause::IncompleteGang, _) => &mut self.incomplete_gang,
            EvictionCause::Own(OwnCause::SuspensionExpired, _) => &mut self.suspension,
            EvictionCause::Own(OwnCause::Idle, _) => &mut self.idle,
        };
        evictions.evicted += outcome.evicted.len() as u64;
        evictions.failed += u64::from(outcome.failure.is_some());
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let preemptions = [
            ("priority", self.by_priority),
            ("guarantee", self.by_guarantee),
        ];
        let preemptions = preemptions.map(|(precedence, count)| ([precedence], count as f64));
        table::PREEMPTIONS.encode(encoder, preemptions)?;
        let causes = [
            ("preemption", self.preemption),
            ("incomplete-gang", self.incomplete_gang),
            ("suspension", self.suspension),
            ("idle", self.idle),
        ];
        let evicted = causes.map(|(cause, evictions)| ([cause], evictions.evicted as f64));
        table::EVICTIONS.encode(encoder, evicted)?;
        let failed = causes.map(|(cause, evictions)| ([cause], evictions.failed as f64));
        table::EVICTION_FAILURES.encode(encoder, failed)
    }
}

#[cfg(test)]
mod tests;
