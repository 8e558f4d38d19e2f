//! What the shares of each workload have used since the reading before. Pure.

use std::collections::BTreeMap;

use drava_api::Quantity;
use drava_api::quota::ShareAmounts;
use drava_api::recommendation::{
    GpuShareRecommendationSpec, PodOwner, Reading, UsageHistory, controller, cron_job_of,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use tokio::time::Instant;

use super::usage::{ShareKey, ShareUsage};

/// Annotation of a claim from a template with its name in the pod.
const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";

/// Oldest reading of which the difference is the GPU time, seconds.
const RECENT_SECONDS: u64 = 1800;

/// What a claim is for: its workload and the object whose end is that of a pod of the workload.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ClaimOwner {
    kind: String,
    name: String,
    /// Name of the claim in the pods.
    claim: String,
    /// Controller of the pods, or what there is instead.
    owner: OwnerReference,
    created: Option<Timestamp>,
}

/// Returns the pod for which a claim was created; `None` for a claim that pods name, and for one that is no request of a pod.
pub(super) fn pod_of(claim: &ObjectMeta) -> Option<&str> {
    pod_claim_name(claim)?;
    let owner = controller(claim)?;
    (owner.kind == "Pod").then_some(owner.name.as_str())
}

fn pod_claim_name(claim: &ObjectMeta) -> Option<&str> {
    let annotations = claim.annotations.as_ref()?;
    Some(annotations.get(POD_CLAIM_NAME)?.as_str())
}

/// Returns the workload of a claim by its metadata, those of its pod, and those of the Job of the pod; `None` for a claim of another
/// program.
pub(super) fn owner_of(
    claim: &ObjectMeta,
    pod: Option<&ObjectMeta>,
    job: Option<&ObjectMeta>,
) -> Option<ClaimOwner> {
    let created = claim.creation_timestamp.as_ref().map(|time| time.0);
    let reference = |api_version: &str, kind: &str, metadata: &ObjectMeta| {
        Some(OwnerReference {
            api_version: api_version.to_owned(),
            kind: kind.to_owned(),
            name: metadata.name.clone()?,
            uid: metadata.uid.clone()?,
            ..OwnerReference::default()
        })
    };
    if let Some(pod) = pod {
        let PodOwner { kind, name } = PodOwner::of(pod, job);
        // The Jobs of a CronJob are deleted one after the other.
        let owner = match cron_job_of(pod, job).or_else(|| controller(pod)) {
            // The API server checks who may block the deletion of an owner, and an object has one controller.
            Some(owner) => OwnerReference {
                controller: None,
                block_owner_deletion: None,
                ..owner.clone()
            },
            None => reference("v1", "Pod", pod)?,
        };
        return Some(ClaimOwner {
            kind,
            name,
            claim: pod_claim_name(claim)?.to_owned(),
            owner,
            created,
        });
    }
    if controller(claim).is_some() {
        return None;
    }
    let name = claim.name.clone()?;
    Some(ClaimOwner {
        kind: "ResourceClaim".to_owned(),
        name: name.clone(),
        claim: name,
        owner: reference("resource.k8s.io/v1", "ResourceClaim", claim)?,
        created,
    })
}

/// What a recommendation is for: namespace and name of its object.
pub(super) type WorkloadKey = (String, String);

/// What the shares of a request of a workload have, and have used.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct WorkloadReading {
    pub(super) spec: GpuShareRecommendationSpec,
    pub(super) owners: Vec<OwnerReference>,
    pub(super) shares: u32,
    pub(super) current: ShareAmounts,
    pub(super) reading: Reading,
}

/// Counters of the shares at the last reading.
#[derive(Debug, Default)]
pub(super) struct LastReadings(BTreeMap<ShareKey, (ShareUsage, Instant)>);

impl LastReadings {
    /// Groups what shares have used since the last reading by workload. `history` returns what is remembered of one.
    pub(super) fn collect<'h>(
        &mut self,
        now: Instant,
        shares: &BTreeMap<ShareKey, ShareUsage>,
        owners: &BTreeMap<String, Option<ClaimOwner>>,
        history: impl Fn(&WorkloadKey) -> Option<&'h UsageHistory>,
    ) -> BTreeMap<WorkloadKey, WorkloadReading> {
        let mut found: BTreeMap<WorkloadKey, WorkloadReading> = BTreeMap::new();
        for (share, usage) in shares {
            let Some(Some(owner)) = owners.get(&share.uid) else {
                continue;
            };
            let spec = GpuShareRecommendationSpec {
                kind: owner.kind.clone(),
                name: owner.name.clone(),
                claim: owner.claim.clone(),
                request: share.request.clone(),
            };
            let key = (share.namespace.clone(), spec.object_name());
            let last = self.0.get(share);
            let is_unseen = |history: &UsageHistory| {
                let read_at = history.read_at.as_ref().map(|time| time.0);
                let began_later = owner
                    .created
                    .zip(read_at)
                    .is_none_or(|(one, other)| one > other);
                began_later || usage.peak_bytes > history.highest_bytes() as f64
            };
            let is_unseen = history(&key).is_none_or(is_unseen);
            let workload = found.entry(key).or_insert_with(|| WorkloadReading {
                spec,
                owners: Vec::new(),
                shares: 0,
                current: ShareAmounts::default(),
                reading: Reading::default(),
            });
            workload.add(
                usage,
                last.map(|(last, at)| (last, now.duration_since(*at))),
                is_unseen,
            );
            if !workload.owners.contains(&owner.owner) {
                workload.owners.push(owner.owner.clone());
            }
        }
        let readings = shares
            .iter()
            .map(|(share, usage)| (share.clone(), (*usage, now)));
        self.0 = readings.collect();
        found
    }
}

impl WorkloadReading {
    /// Adds a share. `is_unseen` says of one without an earlier reading whether its peak and denials are not remembered.
    fn add(
        &mut self,
        usage: &ShareUsage,
        last: Option<(&ShareUsage, std::time::Duration)>,
        is_unseen: bool,
    ) {
        self.shares = self.shares.saturating_add(1);
        let guaranteed = Quantity::bytes(whole(usage.limit_bytes - usage.lent_bytes));
        self.current.memory = self.current.memory.max(Some(guaranteed));
        let cores = usage
            .gpu_time
            .map(|time| u8::try_from(whole((time.guaranteed * 100.0).round())).unwrap_or(100));
        self.current.cores = self.current.cores.max(cores);
        let (is_peak_new, is_denied) = match last {
            Some((last, _)) => (
                usage.peak_bytes > last.peak_bytes,
                usage.denials > last.denials,
            ),
            None => (is_unseen, is_unseen && usage.denials > 0.0),
        };
        let bytes = match is_peak_new {
            true => usage.peak_bytes.max(usage.used_bytes),
            false => usage.used_bytes,
        };
        self.reading.memory_bytes = self.reading.memory_bytes.max(whole(bytes));
        if is_denied {
            let limit = Some(whole(usage.limit_bytes));
            self.reading.denied_at_bytes = self.reading.denied_at_bytes.max(limit);
        }
        let Some((last, elapsed)) = last else { return };
        let used = usage
            .gpu_time
            .zip(last.gpu_time)
            .map(|(time, before)| time.used_seconds - before.used_seconds);
        // A counter that falls is that of a node driver that has started again.
        let is_continued = used.is_none_or(|used| used >= 0.0);
        if (1..=RECENT_SECONDS).contains(&elapsed.as_secs()) && is_continued {
            let ratio = used.map(|used| used / elapsed.as_secs_f64());
            self.reading.gpu_time.extend(ratio);
            let seconds = self.reading.elapsed_seconds;
            self.reading.elapsed_seconds = seconds.max(elapsed.as_secs());
        }
    }
}

/// Returns a whole number, not below zero.
fn whole(number: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "saturates, and the fraction is meant to go"
    )]
    let whole = number as u64;
    whole
}
