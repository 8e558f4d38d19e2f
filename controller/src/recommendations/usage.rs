//! What the metrics of a node driver say of the shares on its node. Pure.

use std::collections::BTreeMap;

use drava_api::metric::{Metric, Sample, driver as metric};

/// Metrics of shares that are read.
const READ: [Metric; 7] = [
    metric::SHARE_MEMORY_USED_BYTES,
    metric::SHARE_MEMORY_PEAK_BYTES,
    metric::SHARE_MEMORY_LIMIT_BYTES,
    metric::SHARE_BURST_BYTES,
    metric::SHARE_MEMORY_DENIALS,
    metric::SHARE_GUARANTEED_RATIO,
    metric::SHARE_GPU_TIME_SECONDS,
];

/// A share of a prepared claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ShareKey {
    /// Namespace of the claim.
    pub(super) namespace: String,
    /// Name of the claim.
    pub(super) claim: String,
    /// UID of the claim.
    pub(super) uid: String,
    /// Request of the claim.
    pub(super) request: String,
    /// ID of the share.
    pub(super) share: String,
}

/// Use of a share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ShareUsage {
    /// Memory at the moment, bytes.
    pub(super) used_bytes: f64,
    /// Highest memory since the share exists, bytes.
    pub(super) peak_bytes: f64,
    /// Memory limit at the moment, bytes.
    pub(super) limit_bytes: f64,
    /// Part of the limit that is lent, bytes.
    pub(super) lent_bytes: f64,
    /// Allocations that were denied since the share exists.
    pub(super) denials: f64,
    /// Its GPU time; `None` where that is not measured.
    pub(super) gpu_time: Option<GpuTime>,
}

/// GPU time of a share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct GpuTime {
    /// Guaranteed part.
    pub(super) guaranteed: f64,
    /// Used since the share exists, seconds.
    pub(super) used_seconds: f64,
}

/// Reads the metrics of a node driver. A share without a memory limit, or one that was not read yet, is left out.
pub(super) fn shares(text: &str) -> BTreeMap<ShareKey, ShareUsage> {
    let mut keys = Vec::new();
    let mut values: BTreeMap<(&str, [String; 3]), f64> = BTreeMap::new();
    let labels =
        |sample: &Sample<'_>| ["namespace", "claim", "share"].map(|name| sample.label(name));
    for sample in text.lines().filter_map(Sample::read) {
        if sample.name == metric::CLAIM_DEVICE_INFO.name && sample.label("access") == "share" {
            let [namespace, claim, share] = labels(&sample);
            keys.push(ShareKey {
                namespace,
                claim,
                uid: sample.label("claim_uid"),
                request: sample.label("request"),
                share,
            });
        } else if let Some(metric) = READ.iter().find(|metric| metric.name == sample.name) {
            values.insert((metric.name, labels(&sample)), sample.value);
        }
    }
    let shares = keys.into_iter().filter_map(|key| {
        let names = [&key.namespace, &key.claim, &key.share].map(String::clone);
        let value = |metric: &Metric| values.get(&(metric.name, names.clone())).copied();
        let usage = ShareUsage {
            used_bytes: value(&metric::SHARE_MEMORY_USED_BYTES)?,
            peak_bytes: value(&metric::SHARE_MEMORY_PEAK_BYTES)?,
            limit_bytes: value(&metric::SHARE_MEMORY_LIMIT_BYTES)?,
            lent_bytes: value(&metric::SHARE_BURST_BYTES).unwrap_or(0.0),
            denials: value(&metric::SHARE_MEMORY_DENIALS)?,
            gpu_time: value(&metric::SHARE_GUARANTEED_RATIO)
                .zip(value(&metric::SHARE_GPU_TIME_SECONDS))
                .map(|(guaranteed, used_seconds)| GpuTime {
                    guaranteed,
                    used_seconds,
                }),
        };
        Some((key, usage))
    });
    shares.collect()
}
