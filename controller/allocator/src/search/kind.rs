//! The order of shares and MIG partitions by the preference of a GpuPolicy.

use drava_api::policy::Preference;
use drava_api::{DeviceType, Quantity, names};

use crate::claim::Alternative;
use crate::device::Device;
use crate::usage::GpuMemory;

/// Returns the place of a device among those that can serve the request, lowest first. `memory` is that of its GPU.
///
/// Without a preference the profile decides, and shares have none. With `fit` an unused GPU comes last, because its first share
/// or partition excludes the other kind; then the memory decides that a partition has beyond the request.
pub(super) fn order(
    prefer: Option<Preference>,
    request: &Alternative,
    device: &Device,
    memory: GpuMemory,
) -> (bool, Quantity) {
    let is_partition = device.kind == Some(DeviceType::Mig);
    match prefer {
        None => (false, Quantity::ZERO),
        Some(Preference::Vgpu) => (is_partition, Quantity::ZERO),
        Some(Preference::Mig) => (!is_partition, Quantity::ZERO),
        Some(Preference::Fit) => {
            let amount = device.amount(names::capacity::MEMORY);
            let requested = request.requested(names::capacity::MEMORY);
            let beyond = match (is_partition, amount, requested) {
                (true, Some(amount), Some(requested)) => amount - requested,
                _ => Quantity::ZERO,
            };
            (memory.allocated == Quantity::ZERO, beyond)
        }
    }
}
