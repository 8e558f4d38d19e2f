//! Memory that the driver keeps for the process though nothing is allocated in it: in memory pools, and for graphs.
//!
//! It is charged as [`crate::growth`] says, and given back before anything is refused.

use crate::card::Card;
use crate::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use crate::growth::{Growth, Settled};
use crate::guard::Passage;
use crate::held::HeldMap;

pub(crate) mod graphs;
pub(crate) mod pools;

/// Notes what the driver has given back to the card meanwhile.
pub(crate) fn refresh(card: Card) {
    graphs::refresh(card);
    pools::refresh(card);
}

/// Takes `bytes` from the card, if need be after others have given back what they do not need after all, and the driver
/// what it keeps and nobody uses.
pub(crate) fn take(card: Card, bytes: u64) -> bool {
    take_with(card, || card.reserve(bytes).is_ok())
}

/// Refuses a request, which counts as one that was.
pub(crate) fn deny(card: Card) -> CUresult {
    card.count_denied();
    CUDA_ERROR_OUT_OF_MEMORY
}

/// As [`take`], with whatever takes it.
pub(crate) fn take_with(card: Card, reserve: impl Fn() -> bool) -> bool {
    let attempts = &card.process().attempts;
    let is_taken = attempts.take(&reserve) || (give_back(card) && attempts.take(&reserve));
    if !is_taken {
        card.count_denied();
    }
    is_taken
}

/// As [`take`], for a call that may not need all of it. A refusal is not counted as one: the caller may know another way.
#[inline]
pub(crate) fn take_ahead(card: Card, bytes: u64) -> Option<Passage<'static>> {
    let attempts = &card.process().attempts;
    let begin = || {
        if attempts.surely(|| card.is_known_to_lack(bytes)) {
            return None;
        }
        attempts.begin_with(|| card.reserve(bytes).is_ok())
    };
    begin().or_else(|| give_back(card).then(begin)?)
}

/// `false` if the driver keeps nothing.
fn give_back(card: Card) -> bool {
    let (has_pools, has_graphs) = (pools::trim_all(card), graphs::trim_all(card));
    has_pools || has_graphs
}

/// Notes that a call is about to be made which has reserved so much for what is kept under `key`. The caller holds the
/// guard of what is kept.
fn expect(card: Card, kept: &HeldMap, key: u64, ahead_bytes: u64) {
    let more = |growth: Growth| growth.expect(ahead_bytes).held(card.index());
    let known = kept.change(key, |held| Some(more(Growth::of(held))));
    if known.is_none() {
        kept.insert(key, more(Growth::default()));
    }
}

/// Makes the charge for what is kept under `key` what the driver says, or leaves it if the driver says nothing. A call
/// that had reserved `ahead_bytes` for it is over. The caller holds the guard of what is kept.
///
/// Returns what was charged before and what is now.
fn settle(
    card: Card,
    kept: &HeldMap,
    key: u64,
    ahead_bytes: u64,
    has_bytes: Option<u64>,
) -> (u64, u64) {
    let settle = |growth: Growth| {
        let unchanged = growth.charged_bytes.saturating_add(ahead_bytes);
        growth.settle(ahead_bytes, has_bytes.unwrap_or(unchanged))
    };
    let (mut before, mut settled) = (Growth::default(), None::<Settled>);
    kept.change(key, |held| {
        before = Growth::of(held);
        let settled = settled.insert(settle(before));
        Some(settled.growth.held(card.index()))
    });
    let settled = settled.unwrap_or_else(|| {
        let settled = settle(before);
        // What the driver does not know is gone.
        if has_bytes.is_some() {
            kept.insert(key, settled.growth.held(card.index()));
        }
        settled
    });
    card.correct(settled.from, settled.to);
    (before.charged_bytes, settled.growth.charged_bytes)
}
