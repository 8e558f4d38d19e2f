//! Validates the opaque config of claims and claim templates, so that its author gets the error at once. Without the
//! webhook, the controller reports the same error at the pod.

use std::collections::BTreeMap;

use drava_api::config::{self, VgpuConfig};
use drava_api::{Quantity, names};
use k8s_openapi::api::resource::v1::{
    CapacityRequirements, DeviceClaimConfiguration, DeviceClass, DeviceClassConfiguration,
    ResourceClaimSpec,
};

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
        let decoded = VgpuConfig::decode(&opaque.parameters.0);
        let decoded = decoded.map_err(|error| error.to_string());
        let result = decoded.and_then(|document| {
            allowed(&single, spec, classes)?;
            match document.memory.and_then(|memory| memory.limit) {
                Some(_) => burst(&single, spec, classes).map_err(|error| error.to_string()),
                None => Ok(()),
            }
        });
        if let Err(error) = result {
            errors.push(format!("{path}: {error}"));
        }
    }
    errors
}

/// A request, or an alternative of one.
struct Requested<'a> {
    /// Its name; of an alternative `request/alternative`.
    name: String,
    class: &'a str,
    capacity: Option<&'a CapacityRequirements>,
}

impl Requested<'_> {
    /// Returns the config of its class; `None` if the class is unknown, and so is what it allows.
    fn class_config<'a>(
        &self,
        classes: &'a BTreeMap<String, DeviceClass>,
    ) -> Option<&'a [DeviceClassConfiguration]> {
        let spec = classes.get(self.class)?.spec.as_ref();
        Some(
            spec.and_then(|spec| spec.config.as_deref())
                .unwrap_or_default(),
        )
    }

    /// Returns the memory that it requests, bytes; `None` if it names no amount.
    fn memory_bytes(&self) -> Option<u64> {
        let requests = self.capacity?.requests.as_ref()?;
        let memory = Quantity::try_from(requests.get(names::capacity::MEMORY)?).ok()?;
        u64::try_from(memory.to_i64()?).ok()
    }
}

fn requested(spec: &ResourceClaimSpec) -> Vec<Requested<'_>> {
    let requests = spec
        .devices
        .iter()
        .flat_map(|devices| devices.requests.iter().flatten());
    let mut all = Vec::new();
    for request in requests {
        all.extend(request.exactly.iter().map(|exactly| Requested {
            name: request.name.clone(),
            class: &exactly.device_class_name,
            capacity: exactly.capacity.as_ref(),
        }));
        let alternatives = request.first_available.iter().flatten();
        all.extend(alternatives.map(|sub| Requested {
            name: format!("{}/{}", request.name, sub.name),
            class: &sub.device_class_name,
            capacity: sub.capacity.as_ref(),
        }));
    }
    all
}

/// Checks that the claim's document is allowed under the config of each class to which it applies.
fn allowed(
    document: &[DeviceClaimConfiguration; 1],
    spec: &ResourceClaimSpec,
    classes: &BTreeMap<String, DeviceClass>,
) -> Result<(), String> {
    for request in requested(spec) {
        let Some(of_class) = request.class_config(classes) else {
            continue;
        };
        // An invalid config of the class is not an error of the claim.
        if config::check_class(of_class).is_ok() {
            let resolved = config::resolve_spec(of_class, document, &request.name);
            resolved.map_err(|error| error.for_class(request.class))?;
        }
    }
    Ok(())
}

/// Checks the limit that the claim's document sets against the memory of each request to which it applies.
fn burst(
    document: &[DeviceClaimConfiguration; 1],
    spec: &ResourceClaimSpec,
    classes: &BTreeMap<String, DeviceClass>,
) -> Result<(), config::ConfigError> {
    let all = spec
        .devices
        .iter()
        .flat_map(|devices| devices.config.iter().flatten());
    let all: Vec<DeviceClaimConfiguration> = all.cloned().collect();
    for request in requested(spec) {
        let of_class = request.class_config(classes);
        let (Some(of_class), Some(memory_bytes)) = (of_class, request.memory_bytes()) else {
            continue;
        };
        let resolve = |of_claim| config::resolve_spec(of_class, of_claim, &request.name);
        // Errors of the class and of other documents are theirs.
        let (Ok(own), Ok(settings)) = (resolve(document), resolve(&all)) else {
            continue;
        };
        if own.memory_limit.is_some() {
            settings.burst_limit(memory_bytes)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
