//! Memory beyond the guarantees: which share gets how much, and which gives it back. Pure.
//!
//! What no claim holds of a GPU's memory is lent to the shares with a limit above their guarantee. A page is a promise, so the sum
//! of what the pages promise never exceeds the GPU, with what was promised and is not known to have been freed. A new claim begins
//! with an empty page, and a companion with the page that its base had: the agent raises them when their guarantee is
//! [backed](Division::unbacked), which takes lent memory back if need be.
//!
//! With `burst: idle`, a share may also have what other shares are guaranteed and do not use, where their classes lend it. The page of
//! such a [lender](Loan) lacks what is lent, so that the sum of the pages still is no more than the GPU: a process that needs it finds
//! its page empty and waits until the agent has taken the memory back, as a new claim does.
//!
//! Lent memory is taken back for guarantees only. Where the room is divided in another way, because shares have come or gone, a
//! limit falls as its use does.

use std::collections::BTreeMap;

use drava_api::config::Priority;

use crate::gpus::capacity::MIB;

/// The least of its guarantee that a share has in its page beyond its use, bytes, and the part of the guarantee, which may be more.
const MARGIN_BYTES: u64 = 1 << 30;
const MARGIN_PART: u64 = 8;

/// A loan grows by no less, bytes: each change is a write to two pages.
const STEP_BYTES: u64 = 256 << 20;

/// What a share lends of its guarantee, bytes. The default is a share that lends nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Loan {
    /// Lent now: the page lacks it.
    pub lent_bytes: u64,
    /// The most that may be lent.
    pub idle_bytes: u64,
    /// Whether the share needs all of its guarantee: one of its processes waits for it, or uses more than the page has.
    pub is_recalled: bool,
}

/// Returns what a share with this guarantee and this use may lend, bytes.
#[must_use]
pub fn idle_bytes(guarantee_bytes: u64, used_bytes: u64) -> u64 {
    let margin_bytes = MARGIN_BYTES.max(guarantee_bytes / MARGIN_PART);
    let kept_bytes = used_bytes.saturating_add(margin_bytes);
    guarantee_bytes.saturating_sub(kept_bytes) / MIB * MIB
}

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
    /// Whether it may use what other shares lend of their guarantees.
    pub bursts_idle: bool,
    /// What it lends of its own.
    pub loan: Loan,
    /// Limit in its page, without what it lends; 0 without a page.
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

    /// Returns what others may use of its guarantee for the time being.
    const fn waived_bytes(&self) -> u64 {
        match self.loan.is_recalled {
            true => 0,
            false => self.loan.lent_bytes,
        }
    }

    /// Returns what it may use or may still use, without lent memory that is given back.
    fn committed_bytes(&self) -> u64 {
        let claimed_bytes = self.held_bytes.saturating_sub(self.waived_bytes());
        claimed_bytes.max(self.promised_bytes())
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
        self.present_bytes < self.kept_bytes.saturating_sub(self.waived_bytes())
    }
}

/// Limits of the shares of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Division<Id> {
    /// New limit in the page of each share that can burst.
    pub limits: Vec<(Id, u64)>,
    /// What shares lend of their guarantees from now on, of each that lends or did.
    pub loans: Vec<(Id, u64)>,
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
            } else if share.is_waiting() {
                // What an earlier agent may have lent it is counted, and is no promise of its guarantee.
                share.present_bytes
            } else {
                // An allocation that was admitted before the limit was lowered is kept, as others are.
                share.promised_bytes().min(share.demand_bytes())
            };
            (share.id, limit)
        });
        let lenders = shares.iter().filter(|share| share.loan.lent_bytes > 0);
        let loans = lenders.map(|share| {
            let is_due = share.is_waiting() && !unbacked.contains(&share.id);
            let lent_bytes = if is_due { 0 } else { share.loan.lent_bytes };
            (share.id, lent_bytes)
        });
        return Division {
            limits: limits.collect(),
            loans: loans.collect(),
            reclaimed,
            unbacked,
        };
    }
    // What other shares have in their pages beyond what they hold is theirs, too. What they lend is theirs all the same.
    let base_bytes = sum(|share| match share.can_burst() {
        true => share.held_bytes,
        false => share.held_bytes.max(share.promised_bytes()),
    });
    let room_bytes = allocatable_bytes.saturating_sub(base_bytes);
    let mut extra_bytes = extras(room_bytes, shares, ShareMemory::most_extra_bytes);
    let still_wanted = |share: &ShareMemory<Id>| {
        let extra = extra_bytes.get(&share.id).copied().unwrap_or(0);
        let most = share.most_extra_bytes();
        match share.bursts_idle && held_bytes <= allocatable_bytes {
            true => most.saturating_sub(extra),
            false => 0,
        }
    };
    let wanted_bytes = shares.iter().map(still_wanted);
    let targets = loans(wanted_bytes.fold(0, u64::saturating_add), shares);
    let lent_bytes = targets.iter().map(|(_, bytes)| *bytes);
    let borrowed = extras(
        lent_bytes.fold(0, u64::saturating_add),
        shares,
        still_wanted,
    );
    for (id, bytes) in borrowed {
        *extra_bytes.entry(id).or_default() += bytes;
    }
    let mut free_bytes = allocatable_bytes.saturating_sub(committed_bytes);
    let mut loans = Vec::new();
    for (share, target) in targets {
        let lent = share.loan.lent_bytes;
        let returned = match share.loan.is_recalled {
            // All of its guarantee is committed.
            true => lent,
            false => {
                let returned = lent.saturating_sub(target).min(free_bytes);
                free_bytes -= returned;
                returned
            }
        };
        loans.push((share.id, target.max(lent - returned)));
    }
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
        loans,
        reclaimed: Vec::new(),
        unbacked,
    }
}

/// Returns what each share that can lend is to lend, so that together they lend `wanted_bytes` if they can. A share that lends goes on
/// before another one begins; then those of lower priority lend first, of these the one with most to lend.
fn loans<Id: Ord + Copy>(
    wanted_bytes: u64,
    shares: &[ShareMemory<Id>],
) -> Vec<(&ShareMemory<Id>, u64)> {
    let can_lend = |share: &&ShareMemory<Id>| share.loan != Loan::default();
    let mut lenders: Vec<_> = shares.iter().filter(can_lend).collect();
    lenders.sort_by_key(|share| {
        let Loan {
            lent_bytes,
            idle_bytes,
            ..
        } = share.loan;
        let most_first = std::cmp::Reverse((lent_bytes, std::cmp::Reverse(share.priority)));
        (most_first, std::cmp::Reverse(idle_bytes), share.id)
    });
    let mut wanted_bytes = wanted_bytes;
    let target = |share| {
        let &ShareMemory { loan, .. } = share;
        let is_step = loan.idle_bytes >= loan.lent_bytes.saturating_add(STEP_BYTES);
        let most = match is_step {
            true => loan.idle_bytes,
            false => loan.idle_bytes.min(loan.lent_bytes),
        };
        let target = match loan.is_recalled {
            true => 0,
            false => most.min(wanted_bytes) / MIB * MIB,
        };
        wanted_bytes -= target;
        (share, target)
    };
    lenders.into_iter().map(target).collect()
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

/// Returns which shares must give back all beyond their guarantee, so that the others can keep what they use: first those that may use
/// unused guarantees, of these those of the lowest priority, of these the one with the most use beyond its guarantee.
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
    lent.sort_by_key(|share| {
        let most_first = std::cmp::Reverse(beyond(share));
        (!share.bursts_idle, share.priority, most_first, share.id)
    });
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

/// Returns what each share gets of `room_bytes`: by priority, then evenly, up to what `most` returns.
fn extras<Id: Ord + Copy>(
    room_bytes: u64,
    shares: &[ShareMemory<Id>],
    most: impl Fn(&ShareMemory<Id>) -> u64,
) -> BTreeMap<Id, u64> {
    let mut wanted: Vec<(Priority, u64, Id)> = shares
        .iter()
        .map(|share| (share.priority, most(share), share.id))
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
