//! Memory that the driver keeps for the process though nothing is allocated in it: in memory pools, and for graphs.
//!
//! It is charged, and given back before anything is refused.

use crate::card::Card;

pub(crate) mod graphs;
pub(crate) mod pools;

/// Notes what the driver has given back to the card meanwhile.
pub(crate) fn refresh(card: Card) {
    graphs::refresh(card);
    pools::refresh(card);
}

/// Takes `bytes` from the card, if need be after the driver has given back what it keeps and nobody uses.
pub(crate) fn take(card: Card, bytes: u64) -> bool {
    card.reserve(bytes).is_ok() || (give_back(card) && card.reserve(bytes).is_ok())
}

/// `false` if the driver keeps nothing.
fn give_back(card: Card) -> bool {
    let (has_pools, has_graphs) = (pools::trim_all(card), graphs::trim_all(card));
    has_pools || has_graphs
}
