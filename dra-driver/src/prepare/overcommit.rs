//! The last line of defence against over-committed cards. Pure.
//!
//! The API server does not check claims against each other: two allocators, or a claim deleted by force while its pod
//! still runs, can double-book a card. What is prepared on this node is what counts here.

use std::collections::BTreeMap;
use std::fmt;

use super::{Access, Prepared};
use crate::capacity::{self, PublishMode, ShareTotals, UnavailableReason};
use crate::claim::ClaimRef;
use crate::inventory::NodeInventory;

/// Why a claim would over-commit a card.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// The whole card is asked for while others use it, or the reverse.
    #[error(
        "device {device} (card {card}) would be used as {wanted} while claim {holder} holds it as {held}; \
         the allocation conflicts with what is prepared on this node, delete one of the pods"
    )]
    Exclusive {
        /// Device that the claim was allocated.
        device: String,
        /// UUID of the card.
        card: String,
        /// How this claim would use it.
        wanted: Use,
        /// The claim that is in the way.
        holder: ClaimRef,
        /// How that claim uses it.
        held: Use,
    },
    /// The shares of the card would exceed it.
    #[error(
        "device {device} (card {card}): {asked} of {what} is allocated to this claim, but {used} of {total} is \
         prepared for other claims: {holders}; delete one of the pods"
    )]
    Exceeds {
        /// Device that the claim was allocated.
        device: String,
        /// UUID of the card.
        card: String,
        /// Which amount.
        what: &'static str,
        /// The amount of this claim.
        asked: Amount,
        /// The amount of others.
        used: Amount,
        /// The amount there is.
        total: Amount,
        /// The claims that hold shares.
        holders: Holders,
    },
    /// The card cannot be used at all as it is now.
    #[error("device {device} (card {card}) cannot be used: {reason}")]
    NotUsable {
        /// Device that the claim was allocated.
        device: String,
        /// UUID of the card.
        card: String,
        /// Why.
        reason: UnavailableReason,
    },
    /// The card cannot be shared as it is now.
    #[error("device {device} (card {card}) is not shared: {reason}")]
    NotShared {
        /// Device that the claim was allocated.
        device: String,
        /// UUID of the card.
        card: String,
        /// Why.
        reason: Unshared,
    },
}

/// Why shares of a card cannot be given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unshared {
    /// It is not on the node any more.
    Gone,
    /// Its mode does not allow it.
    Unavailable(UnavailableReason),
}

impl fmt::Display for Unshared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => f.write_str("the card is gone from this node"),
            Self::Unavailable(reason) => reason.fmt(f),
        }
    }
}

impl Conflict {
    /// The claims that are in the way.
    #[must_use]
    pub fn holders(&self) -> &[ClaimRef] {
        match self {
            Self::Exclusive { holder, .. } => std::slice::from_ref(holder),
            Self::Exceeds { holders, .. } => &holders.0,
            Self::NotUsable { .. } | Self::NotShared { .. } => &[],
        }
    }
}

/// How a claim uses a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Alone.
    Whole,
    /// By shares.
    Shares,
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Whole => "a whole card",
            Self::Shares => "shares",
        })
    }
}

/// An amount that prints in the unit people use for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// Bytes, printed in MiB.
    Bytes(u64),
    /// Percent.
    Percent(u64),
    /// A count.
    Count(u64),
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{} MiB", bytes.div_ceil(capacity::MIB)),
            Self::Percent(percent) => write!(f, "{percent} %"),
            Self::Count(count) => write!(f, "{count}"),
        }
    }
}

/// Claims, printed as a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holders(Vec<ClaimRef>);

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (position, holder) in self.0.iter().enumerate() {
            let separator = if position == 0 { "" } else { ", " };
            write!(f, "{separator}{holder}")?;
        }
        Ok(())
    }
}

/// Sums of the shares of one card.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    memory_bytes: u64,
    cores: u64,
    slots: u64,
}

impl Sums {
    fn add(&mut self, access: &Access) {
        if let Access::Share(share) = access {
            self.memory_bytes = self.memory_bytes.saturating_add(share.memory_bytes);
            self.cores = self.cores.saturating_add(share.cores);
            self.slots = self.slots.saturating_add(share.slots);
        }
    }
}

/// Refuses `devices` of `claim` if, together with what `others` hold, a card would be used beyond what it has.
/// `others` may contain `claim` itself, which is skipped.
///
/// # Errors
/// The first conflict, by card and in the order memory, cores, slots.
pub fn check<'a>(
    claim: &ClaimRef,
    devices: &[Prepared],
    others: impl IntoIterator<Item = (&'a ClaimRef, &'a [Prepared])>,
    inventory: &NodeInventory,
) -> Result<(), Box<Conflict>> {
    let others: Vec<_> = others
        .into_iter()
        .filter(|(other, _)| other.uid != claim.uid)
        .collect();
    let mut by_card: BTreeMap<&str, Vec<&Prepared>> = BTreeMap::new();
    for device in devices
        .iter()
        .filter(|device| usage(&device.access).is_some())
    {
        by_card
            .entry(device.card.uuid.as_str())
            .or_default()
            .push(device);
    }
    for (card, wanted) in by_card {
        let held: Vec<(&ClaimRef, &Prepared)> = others
            .iter()
            .flat_map(|(other, devices)| devices.iter().map(move |device| (*other, device)))
            .filter(|(_, device)| device.card.uuid == card)
            .collect();
        check_usable(card, &wanted, inventory)?;
        check_exclusive(claim, card, &wanted, &held)?;
        if wanted
            .iter()
            .any(|device| matches!(device.access, Access::Share(_)))
        {
            check_sums(card, &wanted, &held, inventory)?;
        }
    }
    Ok(())
}

/// How a device is used; `None` for admin access, which holds nothing.
fn usage(access: &Access) -> Option<Use> {
    match access {
        Access::Whole => Some(Use::Whole),
        Access::Share(_) => Some(Use::Shares),
        Access::Admin => None,
    }
}

/// What the card is offered as now; `None` where it is gone.
fn offer(card: &str, inventory: &NodeInventory) -> Option<PublishMode> {
    let card = inventory.card(card)?;
    Some(capacity::publish_mode(
        card,
        inventory.gpus.confidential_computing,
    ))
}

fn check_usable(
    card: &str,
    wanted: &[&Prepared],
    inventory: &NodeInventory,
) -> Result<(), Box<Conflict>> {
    match (wanted.first(), offer(card, inventory)) {
        (Some(first), Some(PublishMode::Unpublished(reason))) => {
            Err(Box::new(Conflict::NotUsable {
                device: first.device.clone(),
                card: card.to_owned(),
                reason,
            }))
        }
        (
            _,
            Some(
                PublishMode::Unpublished(_)
                | PublishMode::WholeOnly(_)
                | PublishMode::WholeAndShares(_),
            )
            | None,
        ) => Ok(()),
    }
}

fn check_exclusive(
    claim: &ClaimRef,
    card: &str,
    wanted: &[&Prepared],
    held: &[(&ClaimRef, &Prepared)],
) -> Result<(), Box<Conflict>> {
    for (position, device) in wanted.iter().enumerate() {
        let Some(wanted_use) = usage(&device.access) else {
            continue;
        };
        let own = wanted.iter().take(position).map(|other| (claim, *other));
        for (holder, other) in held.iter().copied().chain(own) {
            match (wanted_use, usage(&other.access)) {
                (_, None) | (Use::Shares, Some(Use::Shares)) => {}
                (Use::Whole, Some(held)) | (Use::Shares, Some(held @ Use::Whole)) => {
                    return Err(Box::new(Conflict::Exclusive {
                        device: device.device.clone(),
                        card: card.to_owned(),
                        wanted: wanted_use,
                        holder: holder.clone(),
                        held,
                    }));
                }
            }
        }
    }
    Ok(())
}

fn check_sums(
    card: &str,
    wanted: &[&Prepared],
    held: &[(&ClaimRef, &Prepared)],
    inventory: &NodeInventory,
) -> Result<(), Box<Conflict>> {
    let Some(first) = wanted.first() else {
        return Ok(());
    };
    let (device, card) = (first.device.clone(), card.to_owned());
    let totals = match offer(&card, inventory) {
        Some(PublishMode::WholeAndShares(totals)) => totals,
        Some(PublishMode::WholeOnly(reason) | PublishMode::Unpublished(reason)) => {
            return Err(Box::new(Conflict::NotShared {
                device,
                card,
                reason: Unshared::Unavailable(reason),
            }));
        }
        None => {
            return Err(Box::new(Conflict::NotShared {
                device,
                card,
                reason: Unshared::Gone,
            }));
        }
    };
    let ShareTotals {
        memory_bytes,
        cores,
        slots,
    } = totals;
    let (mut asked, mut used) = (Sums::default(), Sums::default());
    wanted.iter().for_each(|device| asked.add(&device.access));
    held.iter().for_each(|(_, device)| used.add(&device.access));
    let amounts = [
        (
            "memory",
            Amount::Bytes as fn(u64) -> Amount,
            asked.memory_bytes,
            used.memory_bytes,
            memory_bytes,
        ),
        ("cores", Amount::Percent, asked.cores, used.cores, cores),
        ("slots", Amount::Count, asked.slots, used.slots, slots),
    ];
    for (what, amount, asked, used, total) in amounts {
        if asked.saturating_add(used) > total {
            let mut holders: Vec<ClaimRef> =
                held.iter().map(|(holder, _)| (*holder).clone()).collect();
            holders.sort();
            holders.dedup();
            return Err(Box::new(Conflict::Exceeds {
                device,
                card,
                what,
                asked: amount(asked),
                used: amount(used),
                total: amount(total),
                holders: Holders(holders),
            }));
        }
    }
    Ok(())
}
