//! `kubectl drava top`: what is allocated of every card, and to whom.

use std::collections::BTreeMap;

use drava_allocator::attribute::Attribute;
use drava_allocator::device::Device;
use drava_allocator::pool::Pool;
use drava_allocator::reason::bytes;
use drava_allocator::usage::{DeviceAccess, Usage};
use drava_api::{DeviceType, Quantity, names};
use serde::Serialize;

use crate::snapshot::Snapshot;
use crate::table::columns;

/// One card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Card {
    node: String,
    card: String,
    uuid: String,
    product_name: String,
    mode: Mode,
    memory: Share,
    cores: Share,
    slots: Share,
    holders: Vec<Holder>,
}

/// How a card is used now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    /// Nobody holds it.
    Free,
    /// One claim holds all of it.
    Whole,
    /// Claims hold shares of it.
    Shared,
    /// Claims hold partitions of it.
    Partitioned,
}

/// What is allocated of an amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
struct Share {
    allocated: u64,
    total: u64,
}

/// A claim that holds something of a card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Holder {
    claim: String,
    device: String,
    pods: Vec<String>,
}

/// All cards, by node and name.
pub(crate) fn cards(snapshot: &Snapshot) -> Vec<Card> {
    let mut cards = Vec::new();
    for (pool_name, pool, usage) in snapshot.cluster.usable_pools() {
        let mut by_card: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, device) in pool.devices.iter().enumerate() {
            let first = pool
                .devices
                .iter()
                .position(|other| other.gpu == device.gpu);
            by_card
                .entry(first.unwrap_or(index))
                .or_default()
                .push(index);
        }
        for indices in by_card.values() {
            cards.extend(card(snapshot, pool_name, pool, usage, indices));
        }
    }
    cards.sort_by(|a, b| a.node.cmp(&b.node));
    cards
}

/// Pools that are left out, with the reason.
pub(crate) fn problems(snapshot: &Snapshot) -> Vec<String> {
    snapshot
        .cluster
        .excluded_pools()
        .map(|(pool, _, problem)| format!("pool {pool} is left out: {problem}"))
        .collect()
}

fn card(
    snapshot: &Snapshot,
    pool_name: &str,
    pool: &Pool,
    usage: &Usage,
    indices: &[usize],
) -> Option<Card> {
    let devices: Vec<(&Device, _)> = indices
        .iter()
        .filter_map(|index| {
            Some((
                pool.devices.get(*index)?.as_ref(),
                usage.devices.get(*index)?,
            ))
        })
        .collect();
    let (first, _) = devices.first()?;
    let in_use: Vec<_> = devices
        .iter()
        .filter(|(_, in_use)| in_use.exclusive > 0 || in_use.shares > 0)
        .collect();
    let mode = match in_use
        .first()
        .map(|(device, in_use)| (device.kind, in_use.exclusive > 0))
    {
        None => Mode::Free,
        Some((Some(DeviceType::Mig), _)) => Mode::Partitioned,
        Some((_, true)) => Mode::Whole,
        Some((_, false)) => Mode::Shared,
    };
    let share = |capacity: &str| {
        let total = devices
            .iter()
            .filter_map(|(device, _)| device.amount(capacity))
            .max()
            .unwrap_or_default();
        let allocated = in_use
            .iter()
            .map(|(device, in_use)| match in_use.exclusive {
                0 => in_use.consumed.get(capacity).copied().unwrap_or_default(),
                _ => device.amount(capacity).unwrap_or_default(),
            });
        let allocated = allocated.fold(Quantity::ZERO, |sum, amount| sum + amount);
        Share {
            allocated: allocated.to_u64_rounded_up().unwrap_or_default(),
            total: total.to_u64_rounded_up().unwrap_or_default(),
        }
    };
    let names: Vec<&str> = devices
        .iter()
        .map(|(device, _)| device.name.as_ref())
        .collect();
    let holders = snapshot
        .cluster
        .allocated_devices()
        .filter(|allocated| {
            allocated.pool == pool_name && names.contains(&allocated.device.as_str())
        })
        .filter(|allocated| !matches!(allocated.access, DeviceAccess::Admin(_)))
        .map(|allocated| Holder {
            claim: allocated.claim.to_string(),
            device: allocated.device.clone(),
            pods: pods_of(snapshot, &allocated.claim.uid),
        })
        .collect();
    Some(Card {
        node: pool.node.clone(),
        card: first.display_name().to_owned(),
        uuid: first.gpu.to_string(),
        product_name: match first.attributes.get(names::attribute::PRODUCT_NAME) {
            Some(Attribute::String(name)) => name.clone(),
            _ => String::new(),
        },
        mode,
        memory: share(names::capacity::MEMORY),
        cores: share(names::capacity::CORES),
        slots: share(names::capacity::SLOTS),
        holders,
    })
}

/// Pods that have reserved the claim with this UID.
fn pods_of(snapshot: &Snapshot, uid: &str) -> Vec<String> {
    snapshot
        .claims
        .iter()
        .find(|claim| claim.metadata.uid.as_deref() == Some(uid))
        .and_then(|claim| claim.status.as_ref()?.reserved_for.as_ref())
        .into_iter()
        .flatten()
        .filter(|consumer| consumer.resource == "pods")
        .map(|consumer| consumer.name.clone())
        .collect()
}

/// The table, and below it what is left out.
pub(crate) fn text(cards: &[Card], problems: &[String]) -> String {
    if cards.is_empty() && problems.is_empty() {
        return format!(
            "No node publishes devices of {}. Is the node driver running?\n",
            names::DRIVER
        );
    }
    let rows: Vec<_> = cards
        .iter()
        .map(|card| {
            vec![
                card.node.clone(),
                card.card.clone(),
                card.product_name.clone(),
                match card.mode {
                    Mode::Free => "free",
                    Mode::Whole => "whole",
                    Mode::Shared => "shared",
                    Mode::Partitioned => "partitioned",
                }
                .to_owned(),
                format!(
                    "{} / {}",
                    bytes(Quantity::bytes(card.memory.allocated)),
                    bytes(Quantity::bytes(card.memory.total))
                ),
                format!("{} / {}", card.cores.allocated, card.cores.total),
                format!("{} / {}", card.slots.allocated, card.slots.total),
                card.holders
                    .iter()
                    .map(Holder::text)
                    .collect::<Vec<_>>()
                    .join(", "),
            ]
        })
        .collect();
    let header = [
        "NODE",
        "CARD",
        "MODEL",
        "MODE",
        "MEMORY",
        "CORES",
        "SLOTS",
        "CLAIMS (PODS)",
    ];
    let mut text = columns(&header, &rows);
    for problem in problems {
        text.push_str(&format!("warning: {problem}\n"));
    }
    text
}

impl Holder {
    fn text(&self) -> String {
        if self.pods.is_empty() {
            format!("{} (none yet)", self.claim)
        } else {
            format!("{} ({})", self.claim, self.pods.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::tests::snapshot;

    #[test]
    fn every_card_with_its_tenants() {
        assert_eq!(
            text(&cards(&snapshot()), &problems(&snapshot())),
            "\
NODE   CARD    MODEL         MODE     MEMORY            CORES       SLOTS    CLAIMS (PODS)
n1     gpu-0   NVIDIA H100   shared   24 GiB / 80 GiB   30 / 100    2 / 10   default/a (a-pod), default/b (none yet)
n1     gpu-1   NVIDIA H100   whole    80 GiB / 80 GiB   100 / 100   0 / 10   default/w (w-pod)
"
        );
    }

    #[test]
    fn nothing_there() {
        assert_eq!(
            text(&cards(&Snapshot::default()), &[]),
            "No node publishes devices of gpu.drava.dev. Is the node driver running?\n"
        );
    }
}
