//! Who holds a card's token. Pure.
//!
//! In token mode a card is used by one tenant at a time, for slices of [`SHORTEST_US`] to [`LONGEST_US`]. The order is
//! deficit round robin: each tenant that wants time is credited with its part of a [`ROUND_US`] and keeps its turn until
//! it has used it. Work conserving: one that does not want its slice hands it on, and what is credited to a tenant that
//! wants nothing is forgotten. A tenant that dies loses the token with the next look.
//!
//! A kernel cannot be stopped, so a turn ends later than by the clock: what was launched in it runs on, in the time of
//! the next one. When a turn is over, it is [settled](Ring::settle): what was used beyond it is owed, and who had less
//! than its turn because of the one before gets that back.
//!
//! What comes after a slice is decided and told [`AHEAD_US`] before its end: the clock hands the token on, and the card
//! is not idle until somebody looks.
//!
//! Nothing here can stop the card: a token that nobody takes back ends by itself, and libvgpu lets every launch go after
//! a while.

use std::collections::BTreeMap;

use drava_vgpu_abi::bucket::TokenSlice;

/// The shortest slice that is handed out, microseconds.
pub const SHORTEST_US: u64 = 10_000;

/// The longest.
pub const LONGEST_US: u64 = 50_000;

/// So long before the end of a slice it is decided who is next, microseconds; more than the time between two looks.
pub const AHEAD_US: u64 = 10_000;

/// What all tenants that want time are credited with together when it is their turn again.
const ROUND_US: i64 = 100_000;

/// What is unused of turns counts against what is used beyond the next ones up to here, µs: launches are counted some
/// time before or after they run.
const UNUSED_US: i64 = 3_000;

/// The most that is made up for of what a tenant used beyond its turns, µs.
const MOST_MADE_UP_US: i64 = 100_000;

/// The most that a tenant can owe, µs.
const MOST_OWED_US: i64 = 1_000_000;

/// A tenant in token mode as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contender<Id> {
    /// Which.
    pub id: Id,
    /// Its part of the time: percent of the card, 0 counts as 1.
    pub cores: u32,
    /// Whether it waits for time or uses it.
    pub wants: bool,
    /// Whether it gives way to one of higher priority: it has no turn then, but what it is credited with.
    pub gives_way: bool,
}

/// What is to be written into limits pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<Id> {
    /// This one has that turn, of the clock that is given to [`Ring::look`].
    Grant(Id, TokenSlice),
    /// This one may not launch any more.
    Revoke(Id),
}

/// A turn that is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended<Id> {
    /// Whose.
    pub id: Id,
    /// How long it was by the clock, µs.
    pub held_us: u64,
}

/// The tenants of one card that are in token mode.
#[derive(Debug, Clone)]
pub struct Ring<Id> {
    /// Who has the token.
    present: Option<(Id, TokenSlice)>,
    /// Who has been told that it is next. Its turn begins when the present one ends.
    next: Option<(Id, TokenSlice)>,
    /// Who was chosen last; the next one is behind it.
    last: Option<Id>,
    /// Time credited and not handed out, µs; negative is owed.
    credit_us: BTreeMap<Id, i64>,
    /// What they used beyond their turns, or left unused of them, that does not count yet, µs.
    over_us: BTreeMap<Id, i64>,
    /// What they used beyond their turns and nobody has got back, µs.
    overrun_us: BTreeMap<Id, i64>,
    /// Turns that are over and not yet settled.
    ended: Vec<Ended<Id>>,
    /// The last look, µs.
    looked_us: u64,
}

impl<Id> Default for Ring<Id> {
    fn default() -> Self {
        Self {
            present: None,
            next: None,
            last: None,
            credit_us: BTreeMap::new(),
            over_us: BTreeMap::new(),
            overrun_us: BTreeMap::new(),
            ended: Vec::new(),
            looked_us: 0,
        }
    }
}

impl<Id: Ord + Copy> Ring<Id> {
    /// Who may launch now.
    #[must_use]
    pub fn holder(&self) -> Option<Id> {
        self.present.map(|(id, _)| id)
    }

    /// Whether that one has the token or knows when it will have it.
    #[must_use]
    pub fn has_turn(&self, id: Id) -> bool {
        [self.present, self.next]
            .iter()
            .flatten()
            .any(|(of, _)| *of == id)
    }

    /// Looks at who wants time at `now_us`. Tenants that are gone are not among `contenders`.
    pub fn look(&mut self, now_us: u64, contenders: &[Contender<Id>]) -> Vec<Change<Id>> {
        let is_waiting = |c: &&Contender<Id>| c.wants && !c.gives_way;
        let waiting: Vec<&Contender<Id>> = contenders.iter().filter(is_waiting).collect();
        let wants = |id: Id| waiting.iter().any(|contender| contender.id == id);
        let stands_back = |id: Id| contenders.iter().any(|c| c.id == id && c.gives_way);
        self.forget(now_us, contenders);
        let mut changes = Vec::new();
        if let Some((id, turn)) = self.next.filter(|(id, _)| !wants(*id)) {
            self.next = None;
            changes.push(Change::Revoke(id));
            if stands_back(id) {
                self.give_back(id, turn.until_us - turn.from_us);
            }
        }
        if let Some((id, turn)) = self.present
            && (!wants(id) || now_us >= turn.until_us)
        {
            self.present = None;
            let held_us = now_us.min(turn.until_us).saturating_sub(turn.from_us);
            self.ended.push(Ended { id, held_us });
            if now_us < turn.until_us {
                changes.push(Change::Revoke(id));
                if stands_back(id) {
                    self.give_back(id, turn.until_us - now_us);
                }
            }
        }
        if self.present.is_none() {
            self.present = self.begin(now_us, &waiting, &mut changes);
        }
        if self.next.is_none()
            && let Some((id, turn)) = self.present
        {
            let left_us = turn.until_us.saturating_sub(now_us);
            let is_alone = waiting.iter().all(|contender| contender.id == id);
            if is_alone && left_us <= LONGEST_US / 2 {
                // Renewed in time, so that its launches never stop. For what nobody else wants it owes nothing later,
                // and it saves nothing meanwhile.
                self.credit_us.remove(&id);
                let until_us = now_us + LONGEST_US;
                self.extend((id, TokenSlice { until_us, ..turn }), &mut changes);
            } else if !is_alone && left_us <= AHEAD_US {
                self.decide((id, turn), &waiting, &mut changes);
            }
        }
        changes
    }

    /// The turns that have ended since the last call. Each is to be settled.
    pub fn ended(&mut self) -> Vec<Ended<Id>> {
        std::mem::take(&mut self.ended)
    }

    /// Takes what the tenant of a turn that has ended was charged since the last one of its own that was settled, µs.
    pub fn settle(&mut self, ended: Ended<Id>, used_us: u64) {
        let signed = |us: u64| i64::try_from(us).unwrap_or(i64::MAX).min(MOST_OWED_US);
        let mut over_us = signed(used_us) - signed(ended.held_us);
        let overrun_us = self.overrun_us.entry(ended.id).or_default();
        *overrun_us = (*overrun_us + over_us.max(0)).min(MOST_MADE_UP_US);
        let credit = self.credit_us.entry(ended.id).or_default();
        // Others have used some of this turn.
        for (_, overrun_us) in self
            .overrun_us
            .iter_mut()
            .filter(|(id, _)| **id != ended.id)
        {
            let back_us = (*overrun_us).min(-over_us).max(0);
            *overrun_us -= back_us;
            *credit += back_us;
            over_us += back_us;
        }
        let sum_us = self.over_us.entry(ended.id).or_default();
        *sum_us = (*sum_us + over_us).max(-UNUSED_US);
        if *sum_us > 0 {
            *credit = (*credit - *sum_us).max(-MOST_OWED_US);
            *sum_us = 0;
        }
    }

    /// What is credited to tenants that want nothing is forgotten. What they owe is repaid by the time that is theirs.
    fn forget(&mut self, now_us: u64, contenders: &[Contender<Id>]) {
        let passed_us = now_us.saturating_sub(self.looked_us);
        self.looked_us = now_us;
        self.credit_us.retain(|id, credit| {
            let Some(contender) = contenders.iter().find(|contender| contender.id == *id) else {
                return false;
            };
            if contender.wants || contender.gives_way {
                return true;
            }
            let repaid_us = passed_us.saturating_mul(weight(contender).unsigned_abs()) / 100;
            *credit = credit.saturating_add_unsigned(repaid_us).min(0);
            *credit < 0
        });
        let is_there = |id: &Id| contenders.iter().any(|contender| contender.id == *id);
        self.over_us.retain(|id, _| is_there(id));
        self.overrun_us.retain(|id, _| is_there(id));
    }

    /// The turn that begins now, as nobody has the token: of who was told to be next, if that has come, else of who is
    /// chosen.
    fn begin(
        &mut self,
        now_us: u64,
        waiting: &[&Contender<Id>],
        changes: &mut Vec<Change<Id>>,
    ) -> Option<(Id, TokenSlice)> {
        if let Some((id, told)) = self.next.take()
            && now_us < told.until_us
        {
            if told.from_us <= now_us {
                return Some((id, told));
            }
            // The one before has ended early.
            let turn = TokenSlice {
                from_us: now_us,
                until_us: now_us + (told.until_us - told.from_us),
            };
            changes.push(Change::Grant(id, turn));
            return Some((id, turn));
        }
        let (id, slice_us) = self.choose(waiting)?;
        let turn = TokenSlice {
            from_us: now_us,
            until_us: now_us + slice_us,
        };
        changes.push(Change::Grant(id, turn));
        Some((id, turn))
    }

    /// What follows the present turn: more of it, or another one's.
    fn decide(
        &mut self,
        present: (Id, TokenSlice),
        waiting: &[&Contender<Id>],
        changes: &mut Vec<Change<Id>>,
    ) {
        let (holder, turn) = present;
        let Some((id, slice_us)) = self.choose(waiting) else {
            return;
        };
        let until_us = turn.until_us + slice_us;
        if id == holder {
            self.extend((id, TokenSlice { until_us, ..turn }), changes);
            return;
        }
        let from_us = turn.until_us;
        let turn = TokenSlice { from_us, until_us };
        self.next = Some((id, turn));
        changes.push(Change::Grant(id, turn));
    }

    fn extend(&mut self, present: (Id, TokenSlice), changes: &mut Vec<Change<Id>>) {
        self.present = Some(present);
        changes.push(Change::Grant(present.0, present.1));
    }

    /// Whose slice comes next, and how long it is, which is taken off what it is credited with.
    fn choose(&mut self, waiting: &[&Contender<Id>]) -> Option<(Id, u64)> {
        let mut waiting = waiting.to_vec();
        waiting.sort_unstable_by_key(|contender| contender.id);
        let weights: i64 = waiting.iter().map(|contender| weight(contender)).sum();
        if waiting.is_empty() {
            return None;
        }
        // Its turn goes on while it has credit for another slice.
        if let Some(last) = self.last
            && let Some(slice_us) = waiting
                .iter()
                .find(|contender| contender.id == last)
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
                *credit += (ROUND_US * weight(contender) / weights).max(1);
                if let Some(slice_us) = self.slice(contender.id) {
                    self.last = Some(contender.id);
                    return Some((contender.id, slice_us));
                }
            }
        }
    }

    /// What was taken off its credit for a turn that another one has.
    fn give_back(&mut self, id: Id, us: u64) {
        let credit = self.credit_us.entry(id).or_default();
        *credit = credit.saturating_add_unsigned(us).min(ROUND_US);
    }

    fn slice(&mut self, id: Id) -> Option<u64> {
        const SHORTEST: i64 = SHORTEST_US.cast_signed();
        const LONGEST: i64 = LONGEST_US.cast_signed();
        let credit = self.credit_us.get_mut(&id)?;
        // What would leave less than a slice is not cut off.
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

fn weight<Id>(contender: &Contender<Id>) -> i64 {
    i64::from(contender.cores.clamp(1, 100))
}
