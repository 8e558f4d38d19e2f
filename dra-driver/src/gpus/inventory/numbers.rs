//! Numbers of GPUs in device names. Pure.
//!
//! A device name such as `gpu-0-vgpu` outlives a reboot in the allocation of a claim, but minor numbers can shift at a reboot.
//! So a GPU that a claim of this node holds keeps the number in the name of the claim's device, by UUID. Any other GPU gets its
//! minor number, or a free number if another GPU has that one.

use std::collections::{BTreeMap, BTreeSet};

use drava_nvml::{Gpu, GpuUuid};

/// Numbers in device names, by GPU.
pub type Numbers = BTreeMap<GpuUuid, u32>;

/// Returns the numbers of `gpus`. GPUs in `known` keep their number; the number of a GPU in `known` that is not on the node
/// stays reserved, because a claim names its device.
#[must_use]
pub fn assign(gpus: &[Gpu], known: &Numbers) -> Numbers {
    let mut taken: BTreeSet<u32> = known.values().copied().collect();
    let mut numbers = Numbers::new();
    let mut used = BTreeSet::new();
    for gpu in gpus {
        // Of two GPUs with one number, the second gets another one.
        if let Some(&number) = known.get(&gpu.uuid)
            && used.insert(number)
        {
            numbers.insert(gpu.uuid.clone(), number);
        }
    }
    for gpu in gpus {
        if !numbers.contains_key(&gpu.uuid) && taken.insert(gpu.minor) {
            numbers.insert(gpu.uuid.clone(), gpu.minor);
        }
    }
    for gpu in gpus {
        if !numbers.contains_key(&gpu.uuid) {
            let free = (0..=u32::MAX).find(|number| !taken.contains(number));
            let number = free.unwrap_or(gpu.minor);
            taken.insert(number);
            numbers.insert(gpu.uuid.clone(), number);
        }
    }
    numbers
}
