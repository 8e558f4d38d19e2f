//! What a request consumes of the capacities of a device (KEP-5075).

use std::collections::BTreeMap;

use drava_api::Quantity;
use k8s_openapi::api::resource::v1 as dra;

use super::quantity;

/// Nano-units in one unit.
const UNIT: i128 = 1_000_000_000;

/// Returns the amount of every capacity; `None` if the device can never serve the request.
pub(super) fn amounts(
    device: &dra::Device,
    requested: Option<&dra::CapacityRequirements>,
) -> Option<BTreeMap<String, Quantity>> {
    let none = BTreeMap::new();
    let published = device.capacity.as_ref().unwrap_or(&none);
    let requested: BTreeMap<&String, Quantity> = requested
        .and_then(|requirements| requirements.requests.as_ref())
        .into_iter()
        .flatten()
        .map(|(name, raw)| Some((name, quantity(raw)?)))
        .collect::<Option<_>>()?;
    if requested.keys().any(|name| !published.contains_key(*name)) {
        return None;
    }
    published
        .iter()
        .map(|(name, capacity)| {
            let amount = amount(capacity, requested.get(name).copied())?;
            (amount <= quantity(&capacity.value)?).then(|| (name.clone(), amount))
        })
        .collect()
}

fn amount(capacity: &dra::DeviceCapacity, requested: Option<Quantity>) -> Option<Quantity> {
    let policy = capacity.request_policy.as_ref();
    let default = policy.and_then(|policy| quantity(policy.default.as_ref()?));
    let Some(requested) = requested else {
        return default.or_else(|| quantity(&capacity.value));
    };
    let Some(policy) = policy else {
        return Some(requested);
    };
    let rounded = if let Some(range) = &policy.valid_range {
        let min = quantity(&range.min)?;
        let rounded = match range.step.as_ref().and_then(quantity) {
            _ if requested < min => min,
            None => requested,
            Some(step) => {
                // Steps are counted in whole units (DRAFractionalCapacityRange is off).
                let above = whole(requested) - whole(min);
                let steps = above.div_euclid(whole(step)) + i128::from(above % whole(step) != 0);
                step.with_nano((whole(min) + steps * whole(step)) * UNIT)
            }
        };
        let max = range.max.as_ref().and_then(quantity);
        max.is_none_or(|max| rounded <= max).then_some(rounded)?
    } else if let Some(values) = &policy.valid_values {
        values
            .iter()
            .filter_map(quantity)
            .find(|value| requested <= *value)?
    } else {
        requested
    };
    Some(rounded)
}

/// Units, rounded up.
fn whole(quantity: Quantity) -> i128 {
    -(-quantity.nano()).div_euclid(UNIT)
}
