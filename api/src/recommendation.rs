//! GpuShareRecommendation: what the shares of a workload need, by what they have used.
//!
//! The controller writes one for each request of a claim of a workload, in the namespace of the workload. Its owners are those of
//! the pods, so it is deleted with the workload. Nothing applies it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quota::ShareAmounts;

mod estimate;

pub use estimate::{CORES_STEP, LONG_SECONDS, MARGIN, MARGIN_AFTER_DENIAL, MEMORY_STEP_BYTES};
pub use estimate::{Reading, status};

/// Label of the pods of a Deployment with the hash at the end of their ReplicaSet's name.
const TEMPLATE_HASH: &str = "pod-template-hash";

/// Request of a claim of a workload.
#[derive(CustomResource, JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[kube(
    group = "gpu.drava.dev",
    version = "v1alpha1",
    kind = "GpuShareRecommendation",
    plural = "gpusharerecommendations",
    namespaced,
    status = "GpuShareRecommendationStatus",
    derive = "PartialEq",
    doc = "Amounts that the shares of a workload need, by what they have used. Written by the controller; nothing applies it.",
    crates(kube_core = "::kube_core"),
    printcolumn = r#"{"name": "Kind", "type": "string", "jsonPath": ".spec.kind"}"#,
    printcolumn = r#"{"name": "Workload", "type": "string", "jsonPath": ".spec.name"}"#,
    printcolumn = r#"{"name": "Memory", "type": "string", "jsonPath": ".status.current.memory"}"#,
    printcolumn = r#"{"name": "Memory-Request", "type": "string", "jsonPath": ".status.request.memory", "description": "Recommended request"}"#,
    printcolumn = r#"{"name": "Memory-Limit", "type": "string", "jsonPath": ".status.limit.memory", "description": "Recommended limit"}"#,
    printcolumn = r#"{"name": "Cores", "type": "integer", "jsonPath": ".status.current.cores"}"#,
    printcolumn = r#"{"name": "Cores-Request", "type": "integer", "jsonPath": ".status.request.cores", "description": "Recommended request"}"#,
    printcolumn = r#"{"name": "Confidence", "type": "string", "jsonPath": ".status.confidence"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct GpuShareRecommendationSpec {
    /// Kind of the workload, such as Deployment; Pod for a pod by itself, ResourceClaim for a claim that pods name.
    pub kind: String,
    /// Name of the workload.
    pub name: String,
    /// Name of the claim in the pods.
    pub claim: String,
    /// Name of the request in the claim.
    pub request: String,
}

/// What the shares have, have used and need.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[serde(rename_all = "camelCase")]
pub struct GpuShareRecommendationStatus {
    /// Number of shares at the last reading.
    #[serde(default)]
    pub shares: u32,
    /// Most that one of the shares is guaranteed.
    #[serde(default)]
    pub current: ShareAmounts,
    /// Highest memory of the last days, and GPU time that is exceeded a tenth of the time.
    #[serde(default)]
    pub used: ShareAmounts,
    /// Recommended request.
    #[serde(default)]
    pub request: ShareAmounts,
    /// Recommended memory.limit, for device classes that allow one.
    #[serde(default)]
    pub limit: ShareAmounts,
    /// By the observed time: Low for less than a day, High from a week on.
    #[serde(default)]
    pub confidence: Confidence,
    /// What the amounts do not say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<Note>,
    /// What the amounts follow from.
    #[serde(default)]
    pub history: UsageHistory,
}

/// Confidence in a recommendation.
#[derive(
    JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default,
)]
pub enum Confidence {
    /// Observed for less than a day.
    #[default]
    Low,
    /// Observed for less than a week.
    Medium,
    /// Observed for a week.
    High,
}

impl Confidence {
    /// Returns the value in the status.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Low => "Low",
            Self::Medium => "Medium",
            Self::High => "High",
        }
    }
}

/// What the amounts of a recommendation do not say.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum Note {
    /// Allocations were denied at the limit: how much more is needed is not known.
    MemoryWasDenied,
    /// All memory of the share was in use, as of programs that take what they find.
    AllMemoryWasUsed,
    /// All guaranteed GPU time was in use.
    AllTimeWasUsed,
    /// The time is shorter than a day.
    ShortTime,
}

impl Note {
    /// Returns the note for users.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::MemoryWasDenied => {
                "allocations were denied; how much more the programs need is not known"
            }
            Self::AllMemoryWasUsed => {
                "all memory was used, as by programs that take what they find; it stays as it is"
            }
            Self::AllTimeWasUsed => {
                "all guaranteed GPU time was used; with more, the programs may be faster"
            }
            Self::ShortTime => "observed for less than a day",
        }
    }
}

/// What is remembered of the use of the shares of a workload.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[serde(rename_all = "camelCase")]
pub struct UsageHistory {
    /// Highest memory of a share in each of the last observed days, the oldest day first; at most 8.
    #[serde(default)]
    pub memory_peaks: Vec<DailyPeak>,
    /// Histogram of the GPU time of the shares. Weights halve in a day.
    #[serde(default)]
    pub gpu_time: Vec<GpuTimeBucket>,
    /// Time in which a share was observed, seconds.
    #[serde(default)]
    pub observed_seconds: u64,
    /// Time of the last reading.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_at: Option<Time>,
}

/// Highest memory of a share in a day.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct DailyPeak {
    /// When the day began.
    pub start: Time,
    /// Memory in bytes; more than what was used if more was denied.
    pub bytes: u64,
    /// Whether allocations were denied.
    #[serde(default)]
    pub is_denied: bool,
}

/// GPU time of shares over the periods between two readings.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct GpuTimeBucket {
    /// Percent of the time of a GPU, rounded up.
    #[schemars(range(max = 100))]
    pub percent: u8,
    /// Seconds of such periods at the last reading; older ones count less.
    pub weight_seconds: f64,
}

/// What a user has created, of which a pod is a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodOwner {
    /// Kind, such as Deployment.
    pub kind: String,
    /// Name.
    pub name: String,
}

impl PodOwner {
    /// Returns the owner of the pod with this metadata: for pods of a Deployment, the Deployment, for those of a Job of a CronJob, the
    /// CronJob, and for a pod without controller the pod. `job` is the Job of the pod ([`job_of`]), if it is known.
    #[must_use]
    pub fn of(pod: &ObjectMeta, job: Option<&ObjectMeta>) -> Self {
        let owned = |kind: &str, name: &str| Self {
            kind: kind.to_owned(),
            name: name.to_owned(),
        };
        let Some(owner) = controller(pod) else {
            return owned("Pod", pod.name.as_deref().unwrap_or_default());
        };
        if let Some(cron_job) = cron_job_of(pod, job) {
            return owned(&cron_job.kind, &cron_job.name);
        }
        let hash = pod
            .labels
            .iter()
            .find_map(|labels| labels.get(TEMPLATE_HASH));
        let deployment = hash.and_then(|hash| owner.name.strip_suffix(hash)?.strip_suffix('-'));
        match deployment.filter(|_| owner.kind == "ReplicaSet") {
            Some(deployment) => owned("Deployment", deployment),
            None => owned(&owner.kind, &owner.name),
        }
    }
}

/// Returns the Job that controls a pod.
#[must_use]
pub fn job_of(pod: &ObjectMeta) -> Option<&OwnerReference> {
    controller(pod).filter(|owner| owner.kind == "Job" && owner.api_version.starts_with("batch/"))
}

/// Returns the CronJob of a pod with this Job. Another Job with the name of an earlier one is not that of the pod.
#[must_use]
pub fn cron_job_of<'a>(
    pod: &ObjectMeta,
    job: Option<&'a ObjectMeta>,
) -> Option<&'a OwnerReference> {
    let owner = job_of(pod)?;
    let job = job.filter(|job| job.uid.as_ref() == Some(&owner.uid))?;
    controller(job).filter(|owner| owner.kind == "CronJob")
}

/// Returns the controller of an object.
#[must_use]
pub fn controller(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    let mut owners = metadata.owner_references.iter().flatten();
    owners.find(|owner| owner.controller == Some(true))
}

impl GpuShareRecommendationSpec {
    /// Returns the name of its object. Different specs of a namespace have different names: only the last part can contain dots. A
    /// name that would be too long ends with a hash of it.
    #[must_use]
    pub fn object_name(&self) -> String {
        // The request of an alternative has a slash.
        let request = self.request.replace('/', "--");
        let kind = self.kind.to_lowercase();
        let full = format!("{kind}.{}.{request}.{}", self.claim, self.name);
        if full.len() <= LONGEST_NAME {
            return full;
        }
        let hash = format!("{:016x}", fnv(full.as_bytes()));
        let kept: String = full.chars().take(LONGEST_NAME - hash.len() - 1).collect();
        // A part of a name ends with a letter or a digit.
        let kept = kept.trim_end_matches(['.', '-']);
        format!("{kept}.{hash}")
    }
}

/// Longest name of an object, bytes.
const LONGEST_NAME: usize = 253;

/// Returns the hash FNV-1a: the names of objects stay the same with each build.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_objects_are_short_and_differ() {
        let spec = |claim: &str, name: &str| GpuShareRecommendationSpec {
            kind: "Deployment".to_owned(),
            claim: claim.to_owned(),
            request: "gpu/small".to_owned(),
            name: name.to_owned(),
        };
        assert_eq!(
            spec("gpu", "chat").object_name(),
            "deployment.gpu.gpu--small.chat"
        );
        let long = "n".repeat(252);
        for claim in [
            "c".repeat(211),
            "c".repeat(253),
            format!("{}-", "c".repeat(223)),
        ] {
            let names = [format!("{long}a"), format!("{long}b")];
            let [one, other] = names.map(|name| spec(&claim, &name).object_name());
            assert_ne!(one, other);
            assert!(one.len() <= 253 && !one.contains(".."), "{one}");
            assert!(!one.contains("-."), "{one}");
        }
        let fits = spec("c", &"n".repeat(253 - "deployment.c.gpu--small.".len())).object_name();
        assert_eq!(fits.len(), 253);
        assert!(fits.ends_with("nnn"), "{fits}");
    }
}
