//! The closest rejection of a node: the device that came closest to serving the request, in words.

use drava_api::reason::Reason;
use drava_api::{DeviceType, Quantity};

use crate::device::Device;
use crate::explanation::{DeviceVerdict, NodeVerdict};
use crate::reason::Rejection;
use crate::search::Rejections;
use crate::search::input::PoolView;

/// A device with its rejection.
type Named<'a> = (&'a Device, &'a Rejection);

/// Most GPUs in use that a detail names.
const NAMED_GPUS: usize = 2;

/// Returns the verdict on a node without a solution.
pub(super) fn closest_rejection(
    node: &str,
    pools: &[PoolView<'_>],
    rejections: &Rejections,
) -> NodeVerdict {
    // In published order: the order by score changes with usage, the text must not.
    let mut by_device = rejections.devices.clone();
    by_device.sort_by_key(|(device, _)| *device);
    let named: Vec<Named<'_>> = by_device
        .iter()
        .filter_map(|(position, rejection)| {
            let device = pools.get(position.pool)?.pool.devices.get(position.index)?;
            Some((device.as_ref(), rejection))
        })
        .collect();
    let devices = named
        .iter()
        .map(|(device, rejection)| DeviceVerdict {
            device: device.name.to_string(),
            reason: rejection.reason(),
            detail: rejection.detail(&format!("{node}/{}", text_name(device, rejection))),
        })
        .collect();
    // Of equally close rejections the one with the most free, and of those the first.
    let closest = named
        .iter()
        .rev()
        .max_by_key(|(_, rejection)| (rejection.closeness(), rejection.free()))
        // Too few devices were found, and all others are of another type.
        .filter(|(_, rejection)| rejections.found == 0 || rejection.is_of_requested_type());
    let (reason, closeness) = closest.map_or(
        (Reason::InsufficientDevices, (0, Quantity::ZERO)),
        |(_, rejection)| {
            // Of nodes whose GPUs are in use the one on which most devices were found.
            let measure = match rejection.reason() {
                Reason::ExclusiveConflict => {
                    Quantity::count(u64::try_from(rejections.found).unwrap_or_default())
                }
                _ => rejection.free(),
            };
            (rejection.reason(), (rejection.closeness(), measure))
        },
    );
    NodeVerdict {
        node: node.to_owned(),
        reason,
        detail: detail(node, pools, rejections, (&named, closest.copied())),
        closeness,
        devices,
    }
}

/// Returns the name of the device in the detail of a rejection.
fn text_name<'a>(device: &'a Device, rejection: &Rejection) -> &'a str {
    match rejection {
        Rejection::GpuInUse(_) => device.gpu_name(),
        _ => device.display_name(),
    }
}

/// Detail of the closest rejection: the number of devices found where several are needed, then the obstacle. GPUs in
/// use are all named, up to [`NAMED_GPUS`].
fn detail(
    node: &str,
    pools: &[PoolView<'_>],
    rejections: &Rejections,
    (named, closest): (&[Named<'_>], Option<Named<'_>>),
) -> String {
    let several = rejections.needed > 1;
    // The text names the node once.
    let path = |device: &Device, rejection: &Rejection| match several {
        true => text_name(device, rejection).to_owned(),
        false => format!("{node}/{}", text_name(device, rejection)),
    };
    let obstacle = match closest {
        None => String::new(),
        Some((_, rejection)) if rejection.reason() == Reason::ExclusiveConflict => {
            let mut in_use: Vec<_> = named
                .iter()
                .filter(|(_, rejection)| rejection.reason() == Reason::ExclusiveConflict)
                .map(|(device, rejection)| rejection.detail(&path(device, rejection)))
                .collect();
            // The partitions of a GPU have one text.
            in_use.dedup();
            let more = in_use.len().saturating_sub(NAMED_GPUS);
            let quoted = in_use.get(..NAMED_GPUS).unwrap_or(&in_use).join(", ");
            if more == 0 {
                quoted
            } else {
                format!("{quoted} and {more} more")
            }
        }
        // All devices are rejected like this one.
        Some((_, Rejection::ClassMismatch { class })) => missing_type(class, pools),
        Some((_, Rejection::SelectorMismatch)) => format!(
            "no device of class {} satisfies the selectors of request {}",
            rejections.class, rejections.request
        ),
        Some((device, rejection)) => rejection.detail(&path(device, rejection)),
    };
    match (several, obstacle.is_empty()) {
        (false, false) => obstacle,
        (_, true) => format!(
            "{} of {} devices found on {node}",
            rejections.found, rejections.needed
        ),
        (true, false) => format!(
            "{} of {} devices found on {node}; {obstacle}",
            rejections.found, rejections.needed
        ),
    }
}

/// Returns what a node lacks for a class, and what provides it.
fn missing_type(class: &str, pools: &[PoolView<'_>]) -> String {
    let mut devices = pools.iter().flat_map(|view| &view.pool.devices);
    let mut publishes = |kind| devices.any(|device| device.kind == Some(kind));
    match class {
        "mig.drava.dev" if !publishes(DeviceType::Mig) => {
            "no GPU is in MIG mode; set mode mig or dynamic in a GpuNodeProfile, or use class fraction.drava.dev".to_owned()
        }
        "gpu.drava.dev" if !publishes(DeviceType::Gpu) => {
            "no GPU is published as a whole; set mode auto or exclusive in a GpuNodeProfile".to_owned()
        }
        "vgpu.drava.dev" if !publishes(DeviceType::Vgpu) => {
            "no GPU is published with shares; set mode auto or vgpu in a GpuNodeProfile, or use class fraction.drava.dev".to_owned()
        }
        _ => format!("no device is of class {class}; use another class, or another mode in a GpuNodeProfile"),
    }
}
