//! Which drivers' devices the requests of a claim can get, by the selectors of the requests and their classes.

use std::sync::Arc;

use drava_api::names;
use k8s_openapi::api::resource::v1 as dra;

use super::{ClaimProblem, Classes};
use crate::selector::{DriverMatch, Selector, Selectors};

/// A request or subrequest of a claim, unparsed.
pub(super) struct RawRequest<'a> {
    pub(super) name: String,
    pub(super) class: &'a str,
    pub(super) allocation_mode: Option<&'a str>,
    pub(super) count: Option<i64>,
    pub(super) selectors: &'a [dra::DeviceSelector],
    pub(super) tolerations: &'a [dra::DeviceToleration],
    pub(super) capacity: Option<&'a dra::CapacityRequirements>,
    pub(super) admin_access: bool,
    pub(super) derived_attributes: bool,
}

pub(super) fn raw_alternatives(request: &dra::DeviceRequest) -> Vec<RawRequest<'_>> {
    if let Some(exactly) = &request.exactly {
        return vec![RawRequest {
            name: request.name.clone(),
            class: &exactly.device_class_name,
            allocation_mode: exactly.allocation_mode.as_deref(),
            count: exactly.count,
            selectors: exactly.selectors.as_deref().unwrap_or_default(),
            tolerations: exactly.tolerations.as_deref().unwrap_or_default(),
            capacity: exactly.capacity.as_ref(),
            admin_access: exactly.admin_access.unwrap_or_default(),
            derived_attributes: exactly
                .derived_attributes
                .as_ref()
                .is_some_and(|list| !list.is_empty()),
        }];
    }
    let alternatives = request.first_available.as_deref().unwrap_or_default();
    alternatives
        .iter()
        .map(|sub| RawRequest {
            name: format!("{}/{}", request.name, sub.name),
            class: &sub.device_class_name,
            allocation_mode: sub.allocation_mode.as_deref(),
            count: sub.count,
            selectors: sub.selectors.as_deref().unwrap_or_default(),
            tolerations: sub.tolerations.as_deref().unwrap_or_default(),
            capacity: sub.capacity.as_ref(),
            admin_access: false,
            derived_attributes: sub
                .derived_attributes
                .as_ref()
                .is_some_and(|list| !list.is_empty()),
        })
        .collect()
}

/// Drivers whose devices the requests of a claim can get.
pub(super) enum Drivers {
    /// Only this driver.
    Own,
    /// Other drivers, or none.
    Other,
    /// Any driver.
    Undetermined(ClaimProblem),
    /// This driver, in a claim that cannot be served.
    Invalid(ClaimProblem),
}

pub(super) fn drivers_of(
    namespace: &str,
    requests: &[(String, Vec<RawRequest<'_>>)],
    classes: &impl Classes,
    selectors: &Selectors,
) -> Drivers {
    let (mut own, mut other, mut any, mut unknown) = (None, None, None, None);
    for raw in requests.iter().flat_map(|(_, alternatives)| alternatives) {
        let class = classes.class(raw.class);
        let of_class = class_match(raw.class, class, selectors);
        let of_request =
            compiled(namespace, raw.selectors, selectors).map(|selector| selector.driver_match());
        match DriverMatch::all(of_request.chain([of_class])) {
            DriverMatch::Own => own.get_or_insert(raw),
            DriverMatch::Other => other.get_or_insert(raw),
            DriverMatch::Any => any.get_or_insert(raw),
        };
        if class.is_none() {
            unknown.get_or_insert(raw);
        }
    }
    match (own, other, any, unknown) {
        (Some(_), _, _, Some(raw)) => Drivers::Invalid(ClaimProblem::UnknownClass {
            request: raw.name.clone(),
            class: raw.class.to_owned(),
        }),
        (Some(own), Some(other), _, None) => Drivers::Invalid(ClaimProblem::MixedDrivers {
            ours: own.name.clone(),
            other: other.name.clone(),
        }),
        (Some(_), None, _, None) => Drivers::Own,
        // kube-scheduler reports a class that does not exist.
        (None, None, Some(raw), None) => {
            let of_class = class_selectors(classes.class(raw.class));
            Drivers::Undetermined(ClaimProblem::DriverUnspecified {
                request: raw.name.clone(),
                class: raw.class.to_owned(),
                compile_error: compiled("", of_class, selectors)
                    .chain(compiled(namespace, raw.selectors, selectors))
                    .find_map(|selector| selector.compile_error()),
            })
        }
        (None, _, _, _) => Drivers::Other,
    }
}

/// Returns which drivers' devices a class can select.
pub(crate) fn class_match(
    name: &str,
    class: Option<&dra::DeviceClass>,
    selectors: &Selectors,
) -> DriverMatch {
    if is_own_class_name(name) {
        return DriverMatch::Own;
    }
    DriverMatch::all(
        compiled("", class_selectors(class), selectors).map(|selector| selector.driver_match()),
    )
}

/// Returns whether the chart installs a class of this name; if the class is missing, the claim is still recognized.
fn is_own_class_name(class: &str) -> bool {
    use names::class::{FRACTION, GPU, MIG, VGPU};
    [GPU, VGPU, MIG, FRACTION].contains(&class)
}

pub(super) fn class_selectors(class: Option<&dra::DeviceClass>) -> &[dra::DeviceSelector] {
    class
        .and_then(|class| class.spec.as_ref()?.selectors.as_deref())
        .unwrap_or_default()
}

/// Compiles the selectors of an object in `namespace`, which is empty for a class.
pub(super) fn compiled<'a>(
    namespace: &'a str,
    raw: &'a [dra::DeviceSelector],
    selectors: &'a Selectors,
) -> impl Iterator<Item = Arc<Selector>> + 'a {
    raw.iter()
        .filter_map(|selector| selector.cel.as_ref())
        .map(|cel| selectors.compile(namespace, &cel.expression))
}
