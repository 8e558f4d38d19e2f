//! Validates the opaque config of claims and claim templates, so that its author gets the error at once. Without the
//! webhook, the controller reports the same error at the pod.

use std::collections::BTreeMap;

use drava_api::config::{self, VgpuConfig};
use drava_api::names;
use k8s_openapi::api::resource::v1::{DeviceClaimConfiguration, DeviceClass, ResourceClaimSpec};

/// Returns the errors of the config of a claim, each with the path of its field. `root` is the path of the claim's spec.
pub(super) fn errors(
    spec: &ResourceClaimSpec,
    root: &str,
    classes: &BTreeMap<String, DeviceClass>,
) -> Vec<String> {
    let Some(devices) = &spec.devices else {
        return Vec::new();
    };
    let configs = devices.config.as_deref().unwrap_or_default();
    let mut errors = Vec::new();
    for (index, config) in configs.iter().enumerate() {
        let Some(opaque) = config
            .opaque
            .as_ref()
            .filter(|opaque| opaque.driver == names::DRIVER)
        else {
            continue;
        };
        let path = format!("{root}.devices.config[{index}].opaque.parameters");
        let single = [config.clone()];
        let result = VgpuConfig::decode(&opaque.parameters.0)
            .map(|_| ())
            .and_then(|()| allowed(&single, spec, classes));
        if let Err(error) = result {
            errors.push(format!("{path}: {error}"));
        }
    }
    errors
}

/// Checks that the claim's document is allowed under the config of each class to which it applies.
fn allowed(
    document: &[DeviceClaimConfiguration; 1],
    spec: &ResourceClaimSpec,
    classes: &BTreeMap<String, DeviceClass>,
) -> Result<(), config::ConfigError> {
    let requests = spec
        .devices
        .iter()
        .flat_map(|devices| devices.requests.iter().flatten());
    for request in requests {
        let exact = request
            .exactly
            .iter()
            .map(|exactly| (request.name.clone(), &exactly.device_class_name));
        let alternatives = request.first_available.iter().flatten().map(|sub| {
            let name = format!("{}/{}", request.name, sub.name);
            (name, &sub.device_class_name)
        });
        for (name, class) in exact.chain(alternatives) {
            // The config of an unknown class, which may allow the document, is unknown.
            let Some(class) = classes.get(class) else {
                continue;
            };
            let of_class = class
                .spec
                .as_ref()
                .and_then(|spec| spec.config.as_deref())
                .unwrap_or_default();
            // An invalid config of the class is not an error of the claim.
            if config::resolve_spec(of_class, &[], &name).is_ok() {
                config::resolve_spec(of_class, document, &name)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
