//! Pools that were destroyed with live allocations; see [`crate::destroyed_pools`].

use crate::card::Card;
use crate::destroyed_pools::{DestroyedPool, FreedAt, PoolMember};
use crate::hooks::streams;
use crate::process::Process;

fn release(process: &'static Process, pool: DestroyedPool) {
    if let Some(card) = process.card(pool.card) {
        card.release(pool.bytes);
    }
}

/// Records the free of an allocation of a destroyed pool.
pub(crate) fn freed(process: &'static Process, taken: PoolMember, when: FreedAt) {
    let release = |pool| release(process, pool);
    process.destroyed_pools.finish_free(taken, when, release);
}

/// Releases the charges of the GPU's destroyed pools without live allocations, as far as streams have completed
/// their frees. Returns `false` if there are none.
pub(crate) fn settle(card: Card) -> bool {
    let process = Process::of(card);
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
pub(crate) fn forget_stream(process: &'static Process, stream: u64) {
    for card in (0..=u8::MAX).map_while(|index| process.card(index)) {
        settle(card);
    }
    process.destroyed_pools.forget_stream(stream);
}
