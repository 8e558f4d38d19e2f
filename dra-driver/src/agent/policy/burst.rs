//! Memory beyond the guarantees: which share gets how much, and which gives it back. Pure.
//!
//! What no claim holds of a GPU's memory is lent to the shares with a limit above their guarantee. A page is a promise, so the sum
//! of what the pages promise never exceeds the GPU, with what was promised and is not known to have been freed. A new claim begins
//! with an empty page, and a companion with the page that its base had: the agent raises them when their guarantee is
//! [backed](Division::unbacked), which takes lent memory back if need be.
//!
//! Lent memory is taken back for guarantees only. Where the room is divided in another way, because shares have come or gone, a
//! limit falls as its use does.

use std::collections::BTreeMap;

use drava_api::config::Priority;

use crate::gpus::capacity::MIB;

/// Memory of one share of a GPU, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareMemory<Id> {
    /// The share.
    pub id: Id,
    /// Its priority.
    pub priority: Priority,
    /// What its claim and its companions hold.
    pub held_bytes: u64,
    /// What of that it keeps: less while companions are given back.
    pub kept_bytes: u64,
    /// The most that it may use; `None` for a share that gets its guarantee only.
    pub limit_bytes: Option<u64>,
    /// Limit in its page; 0 without a page.
    pub present_bytes: u64,
    /// Highest limit that its page had and below which its use is not known to have fallen; 0 without one.
    pub unreturned_bytes: u64,
    /// What its programs use, by its region; `None` if that cannot be read.
    pub used_bytes: Option<u64>,
    /// Whether it has been told to give back all beyond its guarantee.
    pub is_reclaimed: bool,
}

impl<Id> ShareMemory<Id> {
    const fn can_burst(&self) -> bool {
        self.limit_bytes.is_some()
    }

    /// Returns what its page promises, or has promised and may be in use still.
    fn promised_bytes(&self) -> u64 {
        self.present_bytes.max(self.unreturned_bytes)
    }

    /// Returns what it may use or may still use, without lent memory that is given back.
    fn committed_bytes(&self) -> u64 {
        self.held_bytes.max(self.promised_bytes())
    }

    /// Returns the most beyond its guarantee that it may get. A share that shrinks gives that back first.
    fn most_extra_bytes(&self) -> u64 {
        let is_shrinking = self.kept_bytes < self.held_bytes;
        let limit = self.limit_bytes.filter(|_| !is_shrinking);
        limit.map_or(0, |limit| limit.saturating_sub(self.held_bytes))
    }

    /// Returns what it uses, or might use: by its region, which its tenant can forge, never more than was promised.
    fn demand_bytes(&self) -> u64 {
        let used = self.used_bytes.unwrap_or(u64::MAX);
        self.held_bytes.max(used.min(self.committed_bytes()))
    }

    /// Returns whether its page lacks memory that it is guaranteed.
    #[must_use]
    pub const fn is_waiting(&self) -> bool {
        self.present_bytes < self.kept_bytes
    }
}

/// Limits of the shares of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Division<Id> {
    /// New limit in the page of each share that can burst.
    pub limits: Vec<(Id, u64)>,
    /// Shares that give back all beyond their guarantee.
    pub reclaimed: Vec<Id>,
    /// Shares that wait for guaranteed memory because the GPU lacks it, with all that is lent or not given back.
    pub unbacked: Vec<Id>,
}

/// Divides the memory of a GPU. `allocatable_bytes` is what its shares can get together.
#[must_use]
pub fn divide<Id: Ord + Copy>(allocatable_bytes: u64, shares: &[ShareMemory<Id>]) -> Division<Id> {
    let sum = |bytes: fn(&ShareMemory<Id>) -> u64| {
        let all = shares.iter().map(bytes);
        all.fold(0, u64::saturating_add)
    };
    let held_bytes = sum(|share| share.held_bytes);
    let committed_bytes = sum(ShareMemory::committed_bytes);
    // An oversubscribed GPU guarantees more than it has, and lends nothing.
    let capacity_bytes = allocatable_bytes.max(held_bytes);
    let unbacked = unbacked(capacity_bytes, shares);
    let bursting = || shares.iter().filter(|share| share.can_burst());
    if !unbacked.is_empty() {
        let reclaimed = victims(capacity_bytes, shares);
        let limits = bursting().map(|share| {
            let limit = if share.is_waiting() && !unbacked.contains(&share.id) {
                share.kept_bytes
            } else if reclaimed.contains(&share.id) {
                share.present_bytes.min(share.held_bytes)
            } else {
                // An allocation that was admitted before the limit was lowered is kept, as others are. A share that waits, too, gets
                // nothing of its guarantee yet.
                share.promised_bytes().min(share.demand_bytes())
            };
            (share.id, limit)
        });
        return Division {
            limits: limits.collect(),
            reclaimed,
            unbacked,
        };
    }
    // What other shares have in their pages beyond what they hold is theirs, too.
    let base_bytes = sum(|share| match share.can_burst() {
        true => share.held_bytes,
        false => share.committed_bytes(),
    });
    let room_bytes = allocatable_bytes.saturating_sub(base_bytes);
    let extra_bytes = extras(room_bytes, shares);
    let mut free_bytes = allocatable_bytes.saturating_sub(committed_bytes);
    let mut ranked: Vec<&ShareMemory<Id>> = bursting().collect();
    ranked.sort_by_key(|share| (std::cmp::Reverse(share.priority), share.id));
    let mut limits = Vec::new();
    for share in ranked {
        let extra = extra_bytes.get(&share.id).copied().unwrap_or(0);
        let target = share.kept_bytes.saturating_add(extra);
        let present = share.present_bytes;
        let limit = if present > target {
            present.min(target.max(share.used_bytes.unwrap_or(present)))
        } else {
            // Up to what is committed to it already, the memory is its own.
            let own = share.committed_bytes().min(target);
            let raised = target.saturating_sub(own).min(free_bytes);
            free_bytes = free_bytes.saturating_sub(raised);
            match committed_bytes <= capacity_bytes {
                true => present.max(own.saturating_add(raised)),
                false => present,
            }
        };
        limits.push((share.id, limit));
    }
    Division {
        limits,
        reclaimed: Vec::new(),
        unbacked,
    }
}

/// Returns which of the shares that wait for guaranteed memory do not get it. Each counts with what it was promised before, and those
/// that fit get their guarantee in the order of their IDs: a share that gives nothing back holds up no other claim.
fn unbacked<Id: Ord + Copy>(capacity_bytes: u64, shares: &[ShareMemory<Id>]) -> Vec<Id> {
    let before = shares.iter().map(|share| match share.is_waiting() {
        true => share.promised_bytes(),
        false => share.committed_bytes(),
    });
    let mut promised_bytes = before.fold(0, u64::saturating_add);
    let mut waiting: Vec<_> = shares.iter().filter(|share| share.is_waiting()).collect();
    waiting.sort_by_key(|share| share.id);
    let mut lacks_memory = |share: &&ShareMemory<Id>| {
        let added_bytes = share.committed_bytes() - share.promised_bytes();
        let with_share = promised_bytes.saturating_add(added_bytes);
        let fits = with_share <= capacity_bytes;
        if fits {
            promised_bytes = with_share;
        }
        !fits
    };
    let unbacked = waiting.into_iter().filter(|share| lacks_memory(share));
    unbacked.map(|share| share.id).collect()
}

/// Returns which shares must give back all beyond their guarantee, so that the others can keep what they use: those of the lowest
/// priority first, of these the one with the most use beyond its guarantee.
fn victims<Id: Ord + Copy>(capacity_bytes: u64, shares: &[ShareMemory<Id>]) -> Vec<Id> {
    let demand = |share: &ShareMemory<Id>| match share.can_burst() && !share.is_reclaimed {
        true => share.demand_bytes(),
        false if share.can_burst() => share.held_bytes,
        false => share.committed_bytes(),
    };
    let all = shares.iter().map(demand);
    let wanted_bytes = all.fold(0, u64::saturating_add);
    let mut missing_bytes = wanted_bytes.saturating_sub(capacity_bytes);
    let is_lent = |share: &&ShareMemory<Id>| share.can_burst() && !share.is_reclaimed;
    let mut lent: Vec<&ShareMemory<Id>> = shares.iter().filter(is_lent).collect();
    let beyond = |share: &ShareMemory<Id>| share.demand_bytes().saturating_sub(share.held_bytes);
    lent.sort_by_key(|share| (share.priority, std::cmp::Reverse(beyond(share)), share.id));
    let earlier = shares.iter().filter(|share| share.is_reclaimed);
    let mut found: Vec<Id> = earlier.map(|share| share.id).collect();
    for share in lent {
        if missing_bytes == 0 {
            break;
        }
        if beyond(share) > 0 {
            missing_bytes = missing_bytes.saturating_sub(beyond(share));
            found.push(share.id);
        }
    }
    found
}

/// Returns what each share gets of `room_bytes` beyond its guarantee: by priority, then evenly, up to its limit.
fn extras<Id: Ord + Copy>(room_bytes: u64, shares: &[ShareMemory<Id>]) -> BTreeMap<Id, u64> {
    let mut wanted: Vec<(Priority, u64, Id)> = shares
        .iter()
        .map(|share| (share.priority, share.most_extra_bytes(), share.id))
        .filter(|(_, most, _)| *most > 0)
        .collect();
    // Of equal priority those that want least first: what they leave is divided among the others.
    wanted.sort_by_key(|(priority, most, id)| (std::cmp::Reverse(*priority), *most, *id));
    let (mut extras, mut room_bytes) = (BTreeMap::new(), room_bytes);
    for (position, (priority, most, id)) in wanted.iter().enumerate() {
        let rest = wanted.iter().skip(position);
        let equals = rest.take_while(|(of, ..)| of == priority).count();
        let part = room_bytes / u64::try_from(equals).unwrap_or(u64::MAX).max(1);
        let extra = part.min(*most) / MIB * MIB;
        room_bytes -= extra;
        extras.insert(*id, extra);
    }
    extras
}

#[cfg(test)]
mod tests;
