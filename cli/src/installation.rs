//! In which namespace drava is installed, by an object that tenants may not write.

use anyhow::bail;
use drava_api::names;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::ObjectMeta;
use kube::{Api, Client};

/// Class of the chart that each installation has.
const CLASS: &str = "gpu.drava.dev";

/// Returns the namespace that the chart has written to its device classes.
pub(crate) fn of_classes(classes: &[DeviceClass]) -> Option<&str> {
    let is_ours = |class: &&DeviceClass| class.metadata.name.as_deref() == Some(CLASS);
    of(&classes.iter().find(is_ours)?.metadata)
}

/// Reads the namespace of drava; `None` for a chart that did not write it, and where the user may not read device classes.
///
/// # Errors
/// When the API server fails.
pub(crate) async fn namespace(client: &Client) -> kube::Result<Option<String>> {
    let classes: Api<DeviceClass> = Api::all(client.clone());
    match classes.get_metadata_opt(CLASS).await {
        Ok(class) => Ok(class.and_then(|class| of(&class.metadata).map(str::to_owned))),
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(None),
        Err(error) => Err(error),
    }
}

fn of(class: &ObjectMeta) -> Option<&str> {
    let annotations = class.annotations.as_ref()?;
    Some(annotations.get(names::NAMESPACE_ANNOTATION)?)
}

/// Checks that objects which claim to be those of drava are of one namespace, where the chart names none.
///
/// # Errors
/// When they are of several, with the namespaces.
pub(crate) fn check_one<'a>(
    what: &str,
    namespaces: impl Iterator<Item = &'a str>,
) -> anyhow::Result<()> {
    let mut namespaces: Vec<&str> = namespaces.collect();
    namespaces.sort_unstable();
    namespaces.dedup();
    if namespaces.len() > 1 {
        bail!(
            "{what} exist in several namespaces, {}, and device class {CLASS} does not say which one drava is in; upgrade the chart",
            namespaces.join(" and ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_chart_writes() {
        let chart = include_str!("../../deploy/helm/drava/templates/deviceclasses.yaml");
        let written = format!(
            "\n    {}: {{{{ .Release.Namespace }}}}\n",
            names::NAMESPACE_ANNOTATION
        );
        assert_eq!(
            chart.matches(&written).count(),
            chart.matches("kind: DeviceClass").count()
        );
        assert!(chart.contains(&format!("\n  name: {CLASS}\n")));
    }

    #[test]
    fn refuses_to_choose_between_namespaces() {
        check_one("prices", ["a", "a"].into_iter()).expect("one");
        check_one("prices", std::iter::empty()).expect("none");
        let error = check_one("prices", ["b", "a", "b"].into_iter()).expect_err("two");
        assert!(
            error
                .to_string()
                .starts_with("prices exist in several namespaces, a and b, ")
        );
    }
}
