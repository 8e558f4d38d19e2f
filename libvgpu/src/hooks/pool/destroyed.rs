//! Pools that were destroyed with live allocations; see [`crate::destroyed_pools`].

use super::streams;
use crate::card::Card;
use crate::destroyed_pools::{DestroyedPool, FreedAt, PoolMember};
use crate::process::Process;

fn release(process: &'static Process, pool: DestroyedPool) {
    if let Some(card) = Card::at(process, pool.card) {
        card.release(pool.bytes);
    }
}

/// Records the free of an allocation of a destroyed pool.
pub(super) fn freed(process: &'static Process, taken: PoolMember, when: FreedAt) {
    let release = |pool| release(process, pool);
    process.destroyed_pools.finish_free(taken, when, release);
}

/// Releases the charges of the GPU's destroyed pools without live allocations, as far as streams have completed
/// their frees. Returns `false` if there are none.
pub(crate) fn settle(card: Card) -> bool {
    let process = card.process();
    let mut is_any = false;
    let release = |pool| {
        is_any = true;
        release(process, pool);
    };
    process
        .destroyed_pools
        .settle(card.index(), streams::is_done, release);
    is_any
}

/// Settles the frees in a stream before the stream is destroyed.
pub(super) fn forget_stream(process: &'static Process, stream: u64) {
    for card in (0..=u8::MAX).map_while(|index| Card::at(process, index)) {
        settle(card);
    }
    process.destroyed_pools.forget_stream(stream);
}
