//! Translation of GPU requests by extended resources and annotations, as HAMi, Volcano's vGPU and NVIDIA's device plugin
//! define them, into a ResourceClaim of drava's device classes.
//!
//! [`translate`] reads a pod or pod template as JSON, so that fields of other API versions survive, and returns one claim
//! spec with one request per container; [`Translation::apply`] puts the claim into the pod. The result depends on nothing
//! but the pod and the [`Settings`]. A request that cannot be translated is refused with its field; a request whose meaning
//! changes is translated with a [`Warning`]. The function never drops a limit silently.
//!
//! Containers run concurrently, so each one has its own request. Init containers run one after another before them: an init
//! container uses the request of another container if both ask for the same.

use k8s_openapi::api::resource::v1::ResourceClaimSpec;
use serde::{Deserialize, Serialize};
use serde_json::Value;

mod amounts;
mod annotations;
mod claim;
mod edit;
mod finding;
mod pod;
mod resource_table;

pub use claim::template_name;
pub use finding::{Refusal, RefusalCause, Refusals, Warning, WarningCause};
pub use resource_table::{CountAlone, ResourceFamily, ResourceTable};

use pod::{ContainerList, PodView};

/// Device class of shares of pods that select none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ShareClass {
    /// [`drava_api::names::class::VGPU`].
    Vgpu,
    /// [`drava_api::names::class::FRACTION`]: the controller chooses a share or a MIG partition.
    #[default]
    Fraction,
}

/// What the translation depends on beside the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Settings {
    /// Names and defaults of the extended resources.
    pub resources: ResourceTable,
    /// Device class of shares of pods without a mode annotation. A request for several devices always uses shares.
    pub share_class: ShareClass,
    /// Schedulers that are replaced by the default scheduler. Other schedulers are kept, with a warning.
    pub replaced_schedulers: Vec<String>,
    /// Largest memory of a share in the cluster in bytes. Requests for more are reduced to it, with a warning.
    pub largest_share_bytes: Option<u64>,
    /// Largest memory of a MIG partition in the cluster in bytes, for pods that may get partitions.
    pub largest_partition_bytes: Option<u64>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            resources: ResourceTable::default(),
            share_class: ShareClass::default(),
            replaced_schedulers: vec!["hami-scheduler".to_owned()],
            largest_share_bytes: None,
            largest_partition_bytes: None,
        }
    }
}

/// Translation of one pod.
#[derive(Debug, Clone, PartialEq)]
pub struct Translation {
    /// The claim with one request per container.
    pub claim: ResourceClaimSpec,
    /// Changes of meaning.
    pub warnings: Vec<Warning>,
    /// Name of the claim in the pod.
    entry: String,
    containers: Vec<ContainerEdit>,
    /// Whether `spec.schedulerName` is replaced by the default scheduler.
    replaces_scheduler: bool,
}

/// Change of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ContainerEdit {
    list: ContainerList,
    index: usize,
    /// Resources to remove from limits and requests.
    resources: Vec<String>,
    /// Request of the claim that the container uses.
    request: Option<String>,
}

/// Translates a pod or pod template (`{"metadata": …, "spec": …}`). Returns `None` if no container requests a resource of
/// the table.
///
/// # Errors
/// With every field that cannot be translated.
pub fn translate(pod: &Value, settings: &Settings) -> Result<Option<Translation>, Refusals> {
    let pod = PodView::decode(pod)?;
    let mut findings = finding::Findings::default();
    let asks: Vec<_> = pod
        .containers()
        .map(|container| {
            let amounts = amounts::read(&container, &settings.resources, &mut findings);
            (container, amounts)
        })
        .collect();
    if findings.refusals.is_empty() && asks.iter().all(|(_, ask)| ask.device.is_none()) {
        return Ok(None);
    }
    let options = annotations::read(&pod, &mut findings);
    let builder = claim::Builder {
        settings,
        options: &options,
        findings: &mut findings,
    };
    let built = builder.build(&asks);
    let replaces_scheduler = schedule(&pod, settings, &mut findings);
    let warnings = findings.finish()?;
    Ok(Some(Translation {
        claim: built.spec,
        warnings,
        entry: pod.free_claim_name(),
        containers: built.containers,
        replaces_scheduler,
    }))
}

/// Returns whether the scheduler of the pod is replaced.
fn schedule(pod: &PodView, settings: &Settings, findings: &mut finding::Findings) -> bool {
    let scheduler = pod.spec.scheduler_name.as_deref().unwrap_or_default();
    if scheduler.is_empty() || scheduler == "default-scheduler" {
        return false;
    }
    let is_replaced = settings
        .replaced_schedulers
        .iter()
        .any(|name| name == scheduler);
    let scheduler = scheduler.to_owned();
    findings.warn(
        "spec.schedulerName",
        if is_replaced {
            WarningCause::SchedulerReplaced { scheduler }
        } else {
            WarningCause::SchedulerKept { scheduler }
        },
    );
    is_replaced
}

impl Translation {
    /// Returns the name of the ResourceClaimTemplate for the claim: equal claims have equal names, so that pods of one
    /// workload share one template.
    #[must_use]
    pub fn template_name(&self) -> String {
        claim::template_name(&self.claim)
    }

    /// Replaces the translated resources of `pod`, the JSON that was translated, by the claim of the ResourceClaimTemplate
    /// `template`. Annotations stay.
    pub fn apply(&self, pod: &mut Value, template: &str) {
        edit::apply(self, pod, template);
    }
}

#[cfg(test)]
mod tests;
