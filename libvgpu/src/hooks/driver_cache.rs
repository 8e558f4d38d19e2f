//! Memory that the driver keeps for the process though nothing is allocated in it: in memory pools, and for graphs.
//!
//! It is charged as [`crate::cache_charge`] says, and given back before anything is refused.

use crate::cache_charge::{CacheCharge, Settled};
use crate::card::Card;
use crate::charge_map::ChargeMap;
use crate::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use crate::guard::GateGuard;

pub(crate) mod graphs;
pub(crate) mod pools;

/// Notes what the driver has given back to the card meanwhile.
pub(crate) fn refresh(card: Card) {
    graphs::refresh(card);
    pools::refresh(card);
}

/// Takes `bytes` from the card, if need be after others have given back what they do not need after all, and the driver
/// what it keeps and none uses.
pub(crate) fn reserve(card: Card, bytes: u64) -> bool {
    reserve_with(card, || card.reserve(bytes).is_ok())
}

/// Refuses a request, which counts as one that was.
pub(crate) fn deny(card: Card) -> CUresult {
    card.count_denied();
    CUDA_ERROR_OUT_OF_MEMORY
}

/// As [`reserve`], with whatever takes it.
pub(crate) fn reserve_with(card: Card, reserve: impl Fn() -> bool) -> bool {
    let pending = &card.process().pending_reservations;
    let is_taken = pending.reserve(&reserve) || (trim_all(card) && pending.reserve(&reserve));
    if !is_taken {
        card.count_denied();
    }
    is_taken
}

/// As [`reserve`], for a call that may not need all of it. A refusal is not counted as one: the caller may know another way.
#[inline]
pub(crate) fn reserve_ahead(card: Card, bytes: u64) -> Option<GateGuard<'static>> {
    let pending = &card.process().pending_reservations;
    let begin = || {
        if pending.is_certain(|| card.certainly_lacks(bytes)) {
            return None;
        }
        pending.begin_reserving(|| card.reserve(bytes).is_ok())
    };
    begin().or_else(|| trim_all(card).then(begin)?)
}

/// `false` if the driver keeps nothing.
fn trim_all(card: Card) -> bool {
    let (has_pools, has_graphs) = (pools::trim_all(card), graphs::trim_all(card));
    has_pools || has_graphs
}

/// Notes that a call is about to be made which has reserved so much for what is kept under `key`. The caller holds the
/// guard of what is caches.
fn add_reservation(card: Card, caches: &ChargeMap, key: u64, reserved_bytes: u64) {
    let more = |growth: CacheCharge| {
        growth
            .add_reservation(reserved_bytes)
            .to_charge(card.index())
    };
    let known = caches.change(key, |held| Some(more(CacheCharge::of(held))));
    if known.is_none() {
        caches.insert(key, more(CacheCharge::default()));
    }
}

/// Makes the charge for what is kept under `key` what the driver says, or leaves it if the driver says nothing. A call
/// that had reserved `reserved_bytes` for it is over. The caller holds the guard of what is caches.
///
/// Returns what was charged before and what is now.
fn settle(
    card: Card,
    caches: &ChargeMap,
    key: u64,
    reserved_bytes: u64,
    has_bytes: Option<u64>,
) -> (u64, u64) {
    let settle = |growth: CacheCharge| {
        let unchanged = growth.charged_bytes.saturating_add(reserved_bytes);
        growth.settle(reserved_bytes, has_bytes.unwrap_or(unchanged))
    };
    let (mut before, mut settled) = (CacheCharge::default(), None::<Settled>);
    caches.change(key, |held| {
        before = CacheCharge::of(held);
        let settled = settled.insert(settle(before));
        Some(settled.charge.to_charge(card.index()))
    });
    let settled = settled.unwrap_or_else(|| {
        let settled = settle(before);
        // What the driver does not know is gone.
        if has_bytes.is_some() {
            caches.insert(key, settled.charge.to_charge(card.index()));
        }
        settled
    });
    card.correct(settled.from, settled.to);
    (before.charged_bytes, settled.charge.charged_bytes)
}
