//! What was nearest to a solution on a node, in words.

use drava_api::Quantity;

use crate::device::Device;
use crate::explanation::{DeviceVerdict, NodeVerdict};
use crate::reason::{Reason, Rejection};
use crate::search::Misses;
use crate::search::question::PoolView;

/// Cards in use that a detail names.
const CARDS_NAMED: usize = 2;

/// The verdict on a node on which the search has found nothing.
pub(super) fn nearest_miss(node: &str, pools: &[PoolView<'_>], misses: &Misses) -> NodeVerdict {
    // In published order: the order of the policy changes with what is in use, the text should not.
    let mut misses_by_place = misses.devices.clone();
    misses_by_place.sort_by_key(|(place, _)| *place);
    let named: Vec<(&Device, &Rejection)> = misses_by_place
        .iter()
        .filter_map(|(place, rejection)| {
            let device = pools.get(place.pool)?.pool.devices.get(place.index)?;
            Some((device.as_ref(), rejection))
        })
        .collect();
    let place = |device: &Device| format!("{node}/{}", device.display_name());
    let devices = named
        .iter()
        .map(|(device, rejection)| DeviceVerdict {
            device: device.name.to_string(),
            reason: rejection.reason(),
            detail: rejection.detail(&place(device)),
        })
        .collect();
    // Of equally near misses the one with the most free, and of those the first.
    let nearest = named
        .iter()
        .rev()
        .max_by_key(|(_, rejection)| (rejection.nearness(), rejection.free()))
        // Those that were found are too few, and the others are not even of the kind asked for.
        .filter(|(_, rejection)| misses.found == 0 || rejection.is_near());
    let (reason, nearness) = nearest.map_or(
        (Reason::InsufficientDevices, (0, Quantity::ZERO)),
        |(_, rejection)| {
            // Of nodes whose cards are in use the one on which most devices were found.
            let measure = match rejection.reason() {
                Reason::ExclusiveConflict => {
                    Quantity::count(u64::try_from(misses.found).unwrap_or_default())
                }
                _ => rejection.free(),
            };
            (rejection.reason(), (rejection.nearness(), measure))
        },
    );
    NodeVerdict {
        node: node.to_owned(),
        reason,
        detail: detail(node, misses, &named, nearest.copied()),
        nearness,
        devices,
    }
}

/// The particulars of the nearest miss: how many devices were found where it takes several, then what stands in the
/// way of the next; of cards in use all are named, up to a few.
fn detail(
    node: &str,
    misses: &Misses,
    named: &[(&Device, &Rejection)],
    nearest: Option<(&Device, &Rejection)>,
) -> String {
    let several = misses.needed > 1;
    // The node is said once.
    let place = |device: &Device| match several {
        true => device.display_name().to_owned(),
        false => format!("{node}/{}", device.display_name()),
    };
    let obstacle = match nearest {
        None => String::new(),
        Some((_, rejection)) if rejection.reason() == Reason::ExclusiveConflict => {
            let in_use: Vec<_> = named
                .iter()
                .filter(|(_, rejection)| rejection.reason() == Reason::ExclusiveConflict)
                .map(|(device, rejection)| rejection.detail(&place(device)))
                .collect();
            let more = in_use.len().saturating_sub(CARDS_NAMED);
            let quoted = in_use.get(..CARDS_NAMED).unwrap_or(&in_use).join(", ");
            if more == 0 {
                quoted
            } else {
                format!("{quoted} and {more} more")
            }
        }
        Some((device, rejection)) => rejection.detail(&place(device)),
    };
    match (several, obstacle.is_empty()) {
        (false, _) => obstacle,
        (true, true) => format!(
            "{} of {} devices found on {node}",
            misses.found, misses.needed
        ),
        (true, false) => format!(
            "{} of {} devices found on {node}; {obstacle}",
            misses.found, misses.needed
        ),
    }
}
