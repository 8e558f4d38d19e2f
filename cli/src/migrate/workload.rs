//! Pods, and objects with one pod template.

use drava_compatibility::{Refusal, Settings};
use serde_json::{Value, json};

use super::{Refused, Translated, metadata_beside};

/// Returns the path of the pod template of a kind.
pub(super) fn template_path(group: &str, kind: &str) -> Option<&'static str> {
    match (group, kind) {
        ("", "Pod") => Some(""),
        ("", "PodTemplate") => Some("/template"),
        ("", "ReplicationController")
        | ("apps", "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet")
        | ("batch", "Job") => Some("/spec/template"),
        ("batch", "CronJob") => Some("/spec/jobTemplate/spec/template"),
        _ => None,
    }
}

/// Translates the pod template at `path`. The ResourceClaimTemplate precedes the object.
pub(super) fn translate(
    object: &Value,
    path: &str,
    settings: &Settings,
) -> Result<Translated, Refused> {
    let mut result = object.clone();
    let Some(pod) = result.pointer_mut(path) else {
        return Ok(Translated::unchanged(result));
    };
    let prefix = path.trim_start_matches('/').replace('/', ".");
    let (template, changes) = claim(pod, &prefix, object, settings)?;
    let mut objects = Vec::from_iter(template);
    objects.push(result);
    Ok(Translated {
        objects,
        changes,
        ..Translated::default()
    })
}

/// Puts a claim into a pod template. Returns the ResourceClaimTemplate in the namespace of `owner`, if the pod requests a
/// GPU, and the changes of meaning.
pub(super) fn claim(
    pod: &mut Value,
    prefix: &str,
    owner: &Value,
    settings: &Settings,
) -> Result<(Option<Value>, Vec<String>), Refused> {
    let path = |field: &str| match prefix {
        "" => field.to_owned(),
        prefix => format!("{prefix}.{field}"),
    };
    let translated = drava_compatibility::translate(pod, settings).map_err(|refusals| {
        let reason = |refusal: &Refusal| format!("{}: {}", path(&refusal.field), refusal.cause);
        Refused(refusals.0.iter().map(reason).collect())
    })?;
    let Some(translation) = translated else {
        return Ok((None, Vec::new()));
    };
    let name = translation.template_name();
    translation.apply(pod, &name);
    let template = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": metadata_beside(owner, &name),
        "spec": {"spec": translation.claim},
    });
    let changes = translation
        .warnings
        .iter()
        .map(|warning| format!("{}: {}", path(&warning.field), warning.cause))
        .collect();
    Ok((Some(template), changes))
}
