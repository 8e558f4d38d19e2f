//! Pods that request GPUs by the extended resources of other systems, see [`drava_compatibility`].
//!
//! The webhook replaces the resources of a new pod by a reference to a claim template whose name is a hash of the claim. It
//! creates the template before the pod exists, so that kube-controller-manager finds it, and records the claim in an
//! annotation of the pod; the leader creates a template that is missing, and deletes those without pods ([`templates`]). The
//! annotation is tenant input: [`accept`] admits only claims that a translation can produce.

use std::collections::BTreeSet;

use drava_api::names;
use drava_compatibility::{Settings, template_name};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaimSpec;
use serde_json::{Value, json};

pub mod templates;

/// Result of the translation of a pod: JSON Patch operations and warnings for its author.
#[derive(Debug, PartialEq)]
pub(crate) struct PodTranslation {
    /// Name of the claim template that the pod references.
    pub(crate) template: String,
    pub(crate) claim: ResourceClaimSpec,
    pub(crate) operations: Vec<Value>,
    pub(crate) warnings: Vec<String>,
}

/// Translates a new pod. `limits` are the objects of its namespace that limit resources. Returns `None` if no container requests a translated resource.
///
/// # Errors
/// With every field that cannot be translated, or a limit that would be lost: a translated pod requests no resource that a
/// ResourceQuota or LimitRange counts.
pub(crate) fn translate<'a>(
    pod: &Value,
    settings: &Settings,
    limits: impl Iterator<Item = (String, &'a [String])>,
) -> Result<Option<PodTranslation>, String> {
    let Some(translation) =
        drava_compatibility::translate(pod, settings).map_err(|refusals| refusals.to_string())?
    else {
        return Ok(None);
    };
    if let Some(refusal) = lost_limit(pod, settings, limits) {
        return Err(refusal);
    }
    let mut translated = pod.clone();
    let template = translation.template_name();
    translation.apply(&mut translated, &template);
    let metadata = |map: &str, key: &str, value: String| {
        let mut map = match pod.pointer(&format!("/metadata/{map}")) {
            Some(Value::Object(map)) => map.clone(),
            _ => serde_json::Map::new(),
        };
        map.insert(key.to_owned(), value.into());
        Value::from(map)
    };
    let claim = json!(translation.claim).to_string();
    let annotations = metadata("annotations", names::TRANSLATED_CLAIM_ANNOTATION, claim);
    let labels = metadata("labels", names::TRANSLATED_LABEL, "true".to_owned());
    Ok(Some(PodTranslation {
        operations: vec![
            json!({"op": "add", "path": "/metadata/annotations", "value": annotations}),
            json!({"op": "add", "path": "/metadata/labels", "value": labels}),
            json!({"op": "replace", "path": "/spec", "value": translated["spec"]}),
        ],
        warnings: translation
            .warnings
            .iter()
            .map(|warning| warning.to_string())
            .collect(),
        template,
        claim: translation.claim,
    }))
}

/// Returns the refusal of a pod with a resource that an object of its namespace limits.
fn lost_limit<'a>(
    pod: &Value,
    settings: &Settings,
    mut limits: impl Iterator<Item = (String, &'a [String])>,
) -> Option<String> {
    let containers = ["containers", "initContainers"]
        .into_iter()
        .filter_map(|list| pod["spec"][list].as_array())
        .flatten();
    let resources: BTreeSet<&str> = containers
        .flat_map(|container| ["limits", "requests"].map(|list| &container["resources"][list]))
        .filter_map(Value::as_object)
        .flat_map(|amounts| amounts.keys())
        .map(String::as_str)
        .filter(|resource| settings.resources.contains(resource))
        .collect();
    limits.find_map(|(object, limited)| {
        let limited = limited.iter().find(|limited| {
            let plain = limited
                .strip_prefix("requests.")
                .or_else(|| limited.strip_prefix("limits."))
                .unwrap_or(limited);
            resources.contains(plain)
        })?;
        Some(format!(
            "{object} limits {limited}, which a translated pod does not request; replace the limit by a ResourceQuota of \
             the device classes of drava, such as {}.deviceclass.resource.k8s.io/devices",
            names::class::VGPU
        ))
    })
}

/// Why the claim in the annotation of a pod is not accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AcceptError {
    /// The annotation is not the JSON of a claim.
    #[error("annotation {} is not a claim", names::TRANSLATED_CLAIM_ANNOTATION)]
    Malformed(#[from] serde_json::Error),
    /// The pod references no template for the claim.
    #[error(
        "the pod does not reference template {0}, whose name is the hash of the claim in its annotation"
    )]
    NotReferenced(String),
    /// The claim is none that a translation produces.
    #[error(
        "a translated claim has only exact requests for device classes of drava, without admin access and tolerations"
    )]
    NotTranslated,
}

/// Returns the name of the template that a translated pod needs, and its claim. `None` for a pod that was not translated.
///
/// # Errors
/// When the claim is none that a translation of this pod can produce.
pub(crate) fn accept(pod: &Pod) -> Result<Option<(String, ResourceClaimSpec)>, AcceptError> {
    let annotations = pod.metadata.annotations.iter().flatten();
    let Some((_, claim)) = annotations
        .into_iter()
        .find(|(name, _)| *name == names::TRANSLATED_CLAIM_ANNOTATION)
    else {
        return Ok(None);
    };
    let claim: ResourceClaimSpec = serde_json::from_str(claim)?;
    if !is_translated(&claim) {
        return Err(AcceptError::NotTranslated);
    }
    let name = template_name(&claim);
    let claims = pod
        .spec
        .iter()
        .flat_map(|spec| spec.resource_claims.iter().flatten());
    let mut templates = claims.filter_map(|claim| claim.resource_claim_template_name.as_deref());
    if !templates.any(|template| template == name) {
        return Err(AcceptError::NotReferenced(name));
    }
    Ok(Some((name, claim)))
}

/// Returns whether the claim requests only devices of this driver, without privileges.
fn is_translated(claim: &ResourceClaimSpec) -> bool {
    use names::class::{FRACTION, GPU, MIG, VGPU};
    let devices = claim.devices.as_ref();
    let mut requests = devices
        .into_iter()
        .flat_map(|devices| devices.requests.iter().flatten());
    let mut configs = devices
        .into_iter()
        .flat_map(|devices| devices.config.iter().flatten());
    requests.all(|request| {
        request.exactly.as_ref().is_some_and(|exactly| {
            [GPU, VGPU, MIG, FRACTION].contains(&exactly.device_class_name.as_str())
                && exactly.admin_access.is_none()
                && exactly.tolerations.is_none()
        })
    }) && configs.all(|config| {
        let opaque = config.opaque.as_ref();
        opaque.is_some_and(|opaque| opaque.driver == names::DRIVER)
    })
}

#[cfg(test)]
mod tests;
