//! How full a GPU is by the weights of a GpuPolicy.

use drava_api::policy::Weights;
use drava_api::{Quantity, names};

use crate::pool::Pool;
use crate::score::{MAX_SCORE, allocated_ppm};
use crate::usage::Usage;

/// Returns the allocated fraction of a GPU by these weights, ppm. A device without one of the amounts, such as a partition
/// without slots, counts with its part of the memory.
pub(crate) fn gpu_load(usage: &Usage, pool: &Pool, gpu: &str, weights: Weights) -> u32 {
    let memory = usage.gpu_memory(pool, gpu);
    let load = |name: &str| {
        let (mut allocated, mut total) = (Quantity::ZERO, Quantity::ZERO);
        let mut without = Quantity::ZERO;
        let devices = pool.devices.iter().zip(&usage.devices);
        for (device, device_use) in devices.filter(|(device, _)| *device.gpu == *gpu) {
            let whole = device.amount(name);
            total = total.max(whole.unwrap_or_default());
            let shares = device_use.consumed.get(name).copied();
            allocated += shares.unwrap_or_default();
            match whole {
                _ if device_use.exclusive == 0 => {}
                Some(whole) => allocated += whole,
                None => without += device.amount(names::capacity::MEMORY).unwrap_or_default(),
            }
        }
        let load = allocated_ppm(allocated, total) + allocated_ppm(without, memory.total);
        u64::from(load.min(MAX_SCORE))
    };
    let (mut weighted, mut sum) = (0, 0);
    for (weight, name) in [
        (weights.memory, names::capacity::MEMORY),
        (weights.cores, names::capacity::CORES),
        (weights.slots, names::capacity::SLOTS),
    ] {
        let weight = u64::from(weight.unwrap_or_default());
        if weight > 0 {
            weighted += weight * load(name);
            sum += weight;
        }
    }
    mean(weighted, sum)
}

/// Returns `sum / count`.
pub(crate) fn mean(sum: u64, count: u64) -> u32 {
    u32::try_from(sum.checked_div(count).unwrap_or_default()).unwrap_or(MAX_SCORE)
}
