//! Token of one GPU: exclusive time slices. Pure.
//!
//! In token mode one share at a time uses the GPU, for slices of [`SHORTEST_US`] to [`LONGEST_US`]. The order is deficit
//! round robin: each share with demand is credited with its part of a [`ROUND_US`] and keeps the token until it has used
//! it. Work conserving: a share without demand passes its slice on and accumulates no credit. A dead share loses the token
//! with the next poll.
//!
//! A kernel cannot be stopped, so it may run beyond its slice, in the slice of the next share. At its end each slice is
//! [accounted](TokenRing::account_slice): an overrun is deducted from later slices, and the share that lost time is
//! compensated. During an overrun the GPU alternates between both shares, and each is charged that time in full. So half of
//! it is deducted from the charge of each.
//!
//! The next slice is announced [`AHEAD_US`] before the current one ends, so the GPU is not idle until the next poll.
//!
//! Nothing here can stall the GPU: a token expires by itself, and libvgpu admits each launch after a time-out.

use std::collections::BTreeMap;

use drava_vgpu_abi::bucket::TokenSlice;

/// Shortest slice, µs.
pub const SHORTEST_US: u64 = 10_000;

/// Longest slice, µs.
pub const LONGEST_US: u64 = 50_000;

/// Time before the end of a slice at which the next one is announced, µs; longer than the time between two polls.
pub const AHEAD_US: u64 = 10_000;

/// Credit of all shares with demand together per round, µs.
const ROUND_US: i64 = 100_000;

/// Highest overrun of a share that is compensated, µs.
const MAX_COMPENSATION_US: i64 = 100_000;

/// Highest debt of a share, µs.
const MAX_DEBT_US: i64 = 1_000_000;

/// A share in token mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenCandidate<Id> {
    /// The share.
    pub id: Id,
    /// Its part of the time, percent of the GPU; 0 counts as 1.
    pub cores: u32,
    /// Whether it waits for time or uses it.
    pub wants: bool,
    /// Whether it yields to a share of higher priority: it gets no slice and keeps its credit.
    pub yields: bool,
}

/// A change of a limits page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<Id> {
    /// The share has this slice, by the clock of [`TokenRing::poll`].
    Grant(Id, TokenSlice),
    /// The share has no slice.
    Revoke(Id),
}

/// A slice that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndedSlice<Id> {
    /// The share.
    pub id: Id,
    /// Its wall-clock length, µs.
    pub held_us: u64,
}

/// The shares of one GPU in token mode.
#[derive(Debug, Clone, Default)]
pub struct TokenRing<Id> {
    /// Current slice.
    present: Option<(Id, TokenSlice)>,
    /// Announced slice, which starts when the current one ends.
    next: Option<(Id, TokenSlice)>,
    /// Share of the last slice; the next share in order follows.
    last: Option<Id>,
    /// Credit not granted yet, µs; negative is debt.
    credit_us: BTreeMap<Id, i64>,
    /// Overruns not compensated yet, µs.
    uncompensated_us: BTreeMap<Id, i64>,
    /// Half of the last overrun, µs: the share of the next slice is not charged for it.
    overlap_us: i64,
    /// Ended slices that are not accounted yet.
    ended: Vec<EndedSlice<Id>>,
    /// Last poll, µs.
    polled_us: u64,
}

impl<Id: Ord + Copy> TokenRing<Id> {
    /// Returns the share with the token.
    #[must_use]
    pub fn holder(&self) -> Option<Id> {
        self.present.map(|(id, _)| id)
    }

    /// Whether the share has the current or the announced slice.
    #[must_use]
    pub fn has_slice(&self, id: Id) -> bool {
        [self.present, self.next]
            .iter()
            .flatten()
            .any(|(of, _)| *of == id)
    }

    /// Passes the token on at `now_us`. Removed shares are not among `candidates`.
    pub fn poll(&mut self, now_us: u64, candidates: &[TokenCandidate<Id>]) -> Vec<Change<Id>> {
        let is_waiting = |c: &&TokenCandidate<Id>| c.wants && !c.yields;
        let waiting: Vec<&TokenCandidate<Id>> = candidates.iter().filter(is_waiting).collect();
        let wants = |id: Id| waiting.iter().any(|candidate| candidate.id == id);
        let is_yielding = |id: Id| candidates.iter().any(|c| c.id == id && c.yields);
        self.forget(now_us, candidates);
        let mut changes = Vec::new();
        if let Some((id, slice)) = self.next.filter(|(id, _)| !wants(*id)) {
            self.next = None;
            changes.push(Change::Revoke(id));
            if is_yielding(id) {
                self.refund(id, slice.until_us - slice.from_us);
            }
        }
        if let Some((id, slice)) = self.present
            && (!wants(id) || now_us >= slice.until_us)
        {
            self.present = None;
            let held_us = now_us.min(slice.until_us).saturating_sub(slice.from_us);
            self.ended.push(EndedSlice { id, held_us });
            if now_us < slice.until_us {
                changes.push(Change::Revoke(id));
                if is_yielding(id) {
                    self.refund(id, slice.until_us - now_us);
                }
            }
        }
        if self.present.is_none() {
            self.present = self.begin(now_us, &waiting, &mut changes);
        }
        if self.next.is_none()
            && let Some((id, slice)) = self.present
        {
            let left_us = slice.until_us.saturating_sub(now_us);
            let is_alone = waiting.iter().all(|candidate| candidate.id == id);
            if is_alone && left_us <= LONGEST_US / 2 {
                // Extended in time, so that its launches do not stop. Time without other demand costs no credit and earns
                // none.
                self.credit_us.remove(&id);
                let until_us = now_us + LONGEST_US;
                self.extend((id, TokenSlice { until_us, ..slice }), &mut changes);
            } else if !is_alone && left_us <= AHEAD_US {
                self.announce((id, slice), &waiting, &mut changes);
            }
        }
        changes
    }

    /// Returns the slices that have ended since the last call, each of which is to be accounted.
    pub fn ended(&mut self) -> Vec<EndedSlice<Id>> {
        std::mem::take(&mut self.ended)
    }

    /// Accounts an ended slice: `used_us` is what its share was charged since its last accounted slice. Returns the part of
    /// it in which another share used the GPU, µs.
    pub fn account_slice(&mut self, ended: EndedSlice<Id>, used_us: u64) -> u64 {
        let signed = |us: u64| i64::try_from(us).unwrap_or(i64::MAX).min(MAX_DEBT_US);
        let mut over_us = signed(used_us) - signed(ended.held_us);
        let overlap_us = over_us.max(0) / 2;
        let of_others_us = overlap_us + std::mem::replace(&mut self.overlap_us, overlap_us);
        over_us -= of_others_us;
        let overrun_us = self.uncompensated_us.entry(ended.id).or_default();
        *overrun_us = (*overrun_us + over_us.max(0)).min(MAX_COMPENSATION_US);
        let credit = self.credit_us.entry(ended.id).or_default();
        // Unused time is compensated as far as other shares have overrun.
        for (_, overrun_us) in self
            .uncompensated_us
            .iter_mut()
            .filter(|(id, _)| **id != ended.id)
        {
            let back_us = (*overrun_us).min(-over_us).max(0);
            *overrun_us -= back_us;
            *credit += back_us;
            over_us += back_us;
        }
        *credit = (*credit - over_us.max(0)).max(-MAX_DEBT_US);
        of_others_us.unsigned_abs()
    }

    /// Drops the credit of shares without demand. Their debt is repaid by their part of the time.
    fn forget(&mut self, now_us: u64, candidates: &[TokenCandidate<Id>]) {
        let passed_us = now_us.saturating_sub(self.polled_us);
        self.polled_us = now_us;
        self.credit_us.retain(|id, credit| {
            let Some(candidate) = candidates.iter().find(|candidate| candidate.id == *id) else {
                return false;
            };
            if candidate.wants || candidate.yields {
                return true;
            }
            let repaid_us = passed_us.saturating_mul(weight(candidate).unsigned_abs()) / 100;
            *credit = credit.saturating_add_unsigned(repaid_us).min(0);
            *credit < 0
        });
        let is_there = |id: &Id| candidates.iter().any(|candidate| candidate.id == *id);
        self.uncompensated_us.retain(|id, _| is_there(id));
    }

    /// Returns the slice that starts now: the announced one, or one of the next share in order.
    fn begin(
        &mut self,
        now_us: u64,
        waiting: &[&TokenCandidate<Id>],
        changes: &mut Vec<Change<Id>>,
    ) -> Option<(Id, TokenSlice)> {
        if let Some((id, announced)) = self.next.take()
            && now_us < announced.until_us
        {
            if announced.from_us <= now_us {
                return Some((id, announced));
            }
            // The slice before has ended early.
            let slice = TokenSlice {
                from_us: now_us,
                until_us: now_us + (announced.until_us - announced.from_us),
            };
            changes.push(Change::Grant(id, slice));
            return Some((id, slice));
        }
        let (id, slice_us) = self.choose(waiting)?;
        let slice = TokenSlice {
            from_us: now_us,
            until_us: now_us + slice_us,
        };
        changes.push(Change::Grant(id, slice));
        Some((id, slice))
    }

    /// Extends the current slice, or announces the slice of another share.
    fn announce(
        &mut self,
        present: (Id, TokenSlice),
        waiting: &[&TokenCandidate<Id>],
        changes: &mut Vec<Change<Id>>,
    ) {
        let (holder, slice) = present;
        let Some((id, slice_us)) = self.choose(waiting) else {
            return;
        };
        let until_us = slice.until_us + slice_us;
        if id == holder {
            self.extend((id, TokenSlice { until_us, ..slice }), changes);
            return;
        }
        let from_us = slice.until_us;
        let slice = TokenSlice { from_us, until_us };
        self.next = Some((id, slice));
        changes.push(Change::Grant(id, slice));
    }

    fn extend(&mut self, present: (Id, TokenSlice), changes: &mut Vec<Change<Id>>) {
        self.present = Some(present);
        changes.push(Change::Grant(present.0, present.1));
    }

    /// Returns the share of the next slice and the length of the slice, which is deducted from its credit.
    fn choose(&mut self, waiting: &[&TokenCandidate<Id>]) -> Option<(Id, u64)> {
        let mut waiting = waiting.to_vec();
        waiting.sort_unstable_by_key(|candidate| candidate.id);
        let weights: i64 = waiting.iter().map(|candidate| weight(candidate)).sum();
        if waiting.is_empty() {
            return None;
        }
        // A share keeps the token while it has credit for another slice.
        if let Some(last) = self.last
            && let Some(slice_us) = waiting
                .iter()
                .find(|candidate| candidate.id == last)
                .and_then(|_| self.slice(last))
        {
            return Some((last, slice_us));
        }
        let start = match self.last {
            Some(last) => waiting.partition_point(|candidate| candidate.id <= last) % waiting.len(),
            None => 0,
        };
        waiting.rotate_left(start);
        // Terminates: each round adds credit.
        loop {
            for candidate in &waiting {
                let credit = self.credit_us.entry(candidate.id).or_default();
                *credit += (ROUND_US * weight(candidate) / weights).max(1);
                if let Some(slice_us) = self.slice(candidate.id) {
                    self.last = Some(candidate.id);
                    return Some((candidate.id, slice_us));
                }
            }
        }
    }

    /// Returns the deducted credit of a slice that another share gets.
    fn refund(&mut self, id: Id, us: u64) {
        let credit = self.credit_us.entry(id).or_default();
        *credit = credit.saturating_add_unsigned(us).min(ROUND_US);
    }

    fn slice(&mut self, id: Id) -> Option<u64> {
        const SHORTEST: i64 = SHORTEST_US.cast_signed();
        const LONGEST: i64 = LONGEST_US.cast_signed();
        let credit = self.credit_us.get_mut(&id)?;
        // The rest is no shorter than a slice.
        let slice_us = match *credit {
            ..SHORTEST => return None,
            credit @ SHORTEST..=LONGEST => credit,
            credit if credit < LONGEST + SHORTEST => credit / 2,
            _ => LONGEST,
        };
        *credit -= slice_us;
        u64::try_from(slice_us).ok()
    }
}

fn weight<Id>(candidate: &TokenCandidate<Id>) -> i64 {
    i64::from(candidate.cores.clamp(1, 100))
}
