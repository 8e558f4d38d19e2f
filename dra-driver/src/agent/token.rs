//! Who holds a card's token. Pure.
//!
//! In token mode a card is used by one tenant at a time, for slices of [`SHORTEST_US`] to [`LONGEST_US`]. The order is
//! deficit round robin: each tenant that wants time is credited with its part of a [`ROUND_US`] and keeps its turn until
//! it has used it. Work conserving: one that does not want its slice hands it on, and what is credited to a tenant that
//! wants nothing is forgotten. A tenant that dies loses the token with the next look.
//!
//! Nothing here can stop the card: a token that nobody takes back ends by itself, and libvgpu lets every launch go after
//! a while.

use std::collections::BTreeMap;

/// The shortest slice that is handed out, microseconds.
pub const SHORTEST_US: u64 = 10_000;

/// The longest.
pub const LONGEST_US: u64 = 50_000;

/// What all tenants that want time are credited with together when it is their turn again.
const ROUND_US: u64 = 100_000;

/// A tenant in token mode as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contender<Id> {
    /// Which.
    pub id: Id,
    /// Its part of the time: percent of the card, 0 counts as 1.
    pub cores: u32,
    /// Whether it waits for time or uses it.
    pub wants: bool,
}

/// What is to be written into limits pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<Id> {
    /// This one may launch until then, microseconds of the clock that is given to [`Ring::look`].
    Grant(Id, u64),
    /// This one may not any more.
    Revoke(Id),
}

#[derive(Debug, Clone, Copy)]
struct Holder<Id> {
    id: Id,
    since_us: u64,
    until_us: u64,
}

/// The tenants of one card that are in token mode.
#[derive(Debug, Clone)]
pub struct Ring<Id> {
    holder: Option<Holder<Id>>,
    /// Who had its turn last; the next one is behind it.
    last: Option<Id>,
    /// Time credited and not used, µs; below zero after a slice that lasted too long.
    credit_us: BTreeMap<Id, i64>,
}

impl<Id> Default for Ring<Id> {
    fn default() -> Self {
        Self {
            holder: None,
            last: None,
            credit_us: BTreeMap::new(),
        }
    }
}

impl<Id: Ord + Copy> Ring<Id> {
    /// Who may launch now.
    #[must_use]
    pub fn holder(&self) -> Option<Id> {
        self.holder.as_ref().map(|holder| holder.id)
    }

    /// Looks at who wants time at `now_us`. Tenants that are gone are not among `contenders`.
    pub fn look(&mut self, now_us: u64, contenders: &[Contender<Id>]) -> Vec<Change<Id>> {
        let wants = |id: Id| {
            contenders
                .iter()
                .any(|contender| contender.id == id && contender.wants)
        };
        self.credit_us.retain(|id, _| wants(*id));
        let mut changes = Vec::new();
        let others = |id: Id| {
            contenders
                .iter()
                .any(|contender| contender.wants && contender.id != id)
        };
        if let Some(holder) = self.holder {
            let is_over = now_us >= holder.until_us;
            if wants(holder.id) && !is_over {
                // Alone on the card: renewed in time, so that its launches never stop.
                if !others(holder.id) && holder.until_us - now_us <= LONGEST_US / 2 {
                    let until_us = now_us + LONGEST_US;
                    self.holder = Some(Holder { until_us, ..holder });
                    changes.push(Change::Grant(holder.id, until_us));
                }
                return changes;
            }
            let used = i64::try_from(now_us.saturating_sub(holder.since_us)).unwrap_or(i64::MAX);
            if let Some(credit) = self.credit_us.get_mut(&holder.id) {
                // Debt is bounded: alone on the card it used time that nobody else wanted.
                *credit = credit.saturating_sub(used).max(-signed(LONGEST_US));
            }
            self.holder = None;
            changes.push(Change::Revoke(holder.id));
        }
        if let Some((id, slice_us)) = self.next(contenders) {
            let until_us = now_us + slice_us;
            self.holder = Some(Holder {
                id,
                since_us: now_us,
                until_us,
            });
            self.last = Some(id);
            changes.retain(|change| *change != Change::Revoke(id));
            changes.push(Change::Grant(id, until_us));
        }
        changes
    }

    /// Whose turn it is, and for how long.
    fn next(&mut self, contenders: &[Contender<Id>]) -> Option<(Id, u64)> {
        let mut waiting: Vec<&Contender<Id>> = contenders
            .iter()
            .filter(|contender| contender.wants)
            .collect();
        waiting.sort_unstable_by_key(|contender| contender.id);
        let weights: u64 = waiting.iter().map(|contender| weight(contender)).sum();
        if waiting.is_empty() {
            return None;
        }
        // Its turn goes on while it has credit for another slice.
        if let Some(last) = self.last
            && let Some(slice_us) = waiting
                .iter()
                .find(|c| c.id == last)
                .and_then(|_| self.slice(last))
        {
            return Some((last, slice_us));
        }
        let start = match self.last {
            Some(last) => waiting.partition_point(|contender| contender.id <= last) % waiting.len(),
            None => 0,
        };
        waiting.rotate_left(start);
        // Each turn credits something, so this ends: after as many rounds as the smallest part needs for a slice.
        loop {
            for contender in &waiting {
                let credit = self.credit_us.entry(contender.id).or_default();
                *credit += signed((ROUND_US * weight(contender) / weights).max(1));
                if let Some(slice_us) = self.slice(contender.id) {
                    return Some((contender.id, slice_us));
                }
            }
        }
    }

    fn slice(&self, id: Id) -> Option<u64> {
        let credit = u64::try_from(*self.credit_us.get(&id)?).ok()?;
        // What would leave less than a slice is not cut off.
        (credit >= SHORTEST_US).then_some(match credit {
            credit if credit <= LONGEST_US => credit,
            credit if credit < LONGEST_US + SHORTEST_US => credit / 2,
            _ => LONGEST_US,
        })
    }
}

fn weight<Id>(contender: &Contender<Id>) -> u64 {
    u64::from(contender.cores.clamp(1, 100))
}

fn signed(us: u64) -> i64 {
    i64::try_from(us).unwrap_or(i64::MAX)
}
