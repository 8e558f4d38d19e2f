//! The pod that a command changes.

use anyhow::{bail, ensure};
use k8s_openapi::api::core::v1::Pod;

/// Returns the name of a pod that is given as `NAME` or `pod/NAME`.
///
/// # Errors
/// When another kind of object is given.
pub(crate) fn name(argument: &str) -> anyhow::Result<&str> {
    match argument.split_once('/') {
        None => Ok(argument),
        Some(("pod" | "pods" | "po", name)) => Ok(name),
        Some(_) => bail!(
            "{argument} is no pod; give a name of `kubectl get pods`, and its namespace with -n"
        ),
    }
}

/// Parses the name of an object, which has no slash.
///
/// # Errors
/// When there is one, with what was probably meant.
pub(crate) fn object_name(argument: &str) -> Result<String, String> {
    match argument.split_once('/') {
        None => Ok(argument.to_owned()),
        Some((namespace, name)) => Err(format!(
            "a name has no slash; did you mean {name} -n {namespace}?"
        )),
    }
}

/// Refuses a pod that has finished.
///
/// # Errors
/// When it has.
pub(crate) fn check_unfinished(pod: &Pod) -> anyhow::Result<()> {
    let phase = pod.status.as_ref();
    let phase = phase.and_then(|status| status.phase.as_deref());
    let phase = phase.unwrap_or_default();
    ensure!(
        !matches!(phase, "Succeeded" | "Failed"),
        "pod {} has finished ({phase}): only running pods have shares",
        pod.metadata.name.as_deref().unwrap_or_default()
    );
    Ok(())
}

/// Returns whether the pod is bound to a node.
pub(crate) fn is_bound(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    spec.is_some_and(|spec| spec.node_name.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_names_of_pods_only() {
        for argument in ["a", "pod/a", "pods/a", "po/a"] {
            assert_eq!(name(argument).unwrap(), "a");
        }
        assert_eq!(
            name("deployment/a").unwrap_err().to_string(),
            "deployment/a is no pod; give a name of `kubectl get pods`, and its namespace with -n"
        );
        assert_eq!(object_name("a"), Ok("a".to_owned()));
        assert_eq!(
            object_name("research/a").unwrap_err(),
            "a name has no slash; did you mean a -n research?"
        );
    }
}
