//! Config of device classes. The API server accepts any, and a claim of a class with an invalid one gets no device.

use drava_api::{config, names};
use k8s_openapi::api::resource::v1::{DeviceClass, OpaqueDeviceConfiguration};

use super::state::ClusterState;
use super::{Fault, Finding};

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    state.classes.iter().flat_map(findings).collect()
}

fn findings(class: &DeviceClass) -> Vec<Finding> {
    let Some(spec) = &class.spec else {
        return Vec::new();
    };
    let configs = spec.config.as_deref().unwrap_or_default();
    let finding = |problem: String, fix: String| Finding {
        fault: Fault::ClassConfigInvalid,
        object: format!(
            "deviceclass {}",
            class.metadata.name.as_deref().unwrap_or_default()
        ),
        problem,
        fix,
    };
    let invalid = config::check_class(configs).err().map(|error| {
        let fix = "correct spec.config of the class; the claims need no change";
        finding(
            format!("pods with claims of this class stay pending: {error}"),
            fix.to_owned(),
        )
    });
    let mut selectors = spec.selectors.iter().flatten();
    let is_own = selectors.any(|selector| {
        let cel = selector.cel.as_ref();
        cel.is_some_and(|cel| cel.expression.contains(names::DRIVER))
    });
    let opaque = configs.iter().filter_map(|config| config.opaque.as_ref());
    let others = opaque.filter(|opaque| is_own && is_misnamed(opaque));
    let others = others.map(|opaque| {
        finding(
            format!(
                "its config for driver {} has no effect on devices of {}",
                opaque.driver,
                names::DRIVER
            ),
            format!("use driver: {}", names::DRIVER),
        )
    });
    invalid.into_iter().chain(others).collect()
}

/// Returns whether the config is of this driver by its kind, and names another one.
fn is_misnamed(opaque: &OpaqueDeviceConfiguration) -> bool {
    opaque.driver != names::DRIVER && opaque.parameters.0["kind"] == config::KIND
}
