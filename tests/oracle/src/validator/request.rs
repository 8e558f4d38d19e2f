//! The requests of a claim.

use k8s_openapi::api::resource::v1 as dra;

/// One alternative of a request.
pub(crate) struct Alternative<'a> {
    /// Name in results: `request`, or `request/alternative`.
    pub(crate) name: String,
    pub(crate) class: &'a str,
    pub(crate) selectors: &'a [dra::DeviceSelector],
    pub(crate) tolerations: &'a [dra::DeviceToleration],
    pub(crate) capacity: Option<&'a dra::CapacityRequirements>,
    /// Number of devices; `None` for all.
    pub(crate) count: Option<usize>,
    pub(crate) is_admin: bool,
}

/// Returns the alternatives of each request.
pub(crate) fn of_claim(claim: &dra::ResourceClaim) -> Vec<Vec<Alternative<'_>>> {
    claim
        .spec
        .iter()
        .filter_map(|spec| spec.devices.as_ref()?.requests.as_ref())
        .flatten()
        .map(|request| match &request.exactly {
            Some(exactly) => vec![Alternative {
                name: request.name.clone(),
                class: &exactly.device_class_name,
                selectors: exactly.selectors.as_deref().unwrap_or_default(),
                tolerations: exactly.tolerations.as_deref().unwrap_or_default(),
                capacity: exactly.capacity.as_ref(),
                count: count(exactly.allocation_mode.as_deref(), exactly.count),
                is_admin: exactly.admin_access.unwrap_or_default(),
            }],
            None => request
                .first_available
                .iter()
                .flatten()
                .map(|sub| Alternative {
                    name: format!("{}/{}", request.name, sub.name),
                    class: &sub.device_class_name,
                    selectors: sub.selectors.as_deref().unwrap_or_default(),
                    tolerations: sub.tolerations.as_deref().unwrap_or_default(),
                    capacity: sub.capacity.as_ref(),
                    count: count(sub.allocation_mode.as_deref(), sub.count),
                    is_admin: false,
                })
                .collect(),
        })
        .collect()
}

fn count(mode: Option<&str>, count: Option<i64>) -> Option<usize> {
    (mode != Some("All")).then(|| usize::try_from(count.unwrap_or(1)).unwrap_or(usize::MAX))
}
