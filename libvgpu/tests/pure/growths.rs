//! What is charged for a pool while several threads make it grow: enough at any moment, and no more than they reserved.

use crate::growth::Growth;

const CHUNK: u64 = 32;

/// Calls that are made together. Miri takes thousands of times as long for each of the orders in which they may come.
const CALLS: usize = if cfg!(miri) { 3 } else { 4 };
/// The orders of as many calls of two steps each.
const ORDERS: u64 = if cfg!(miri) { 90 } else { 2520 };

/// How far a call has come, which has reserved a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    NotMade,
    Made,
    Over,
}

/// A pool, its account, and calls that make it grow if their bit says so.
#[derive(Clone)]
struct Pool<const CALLS: usize> {
    has_bytes: u64,
    growth: Growth,
    /// All that is charged or reserved.
    account_bytes: u64,
    calls: [Call; CALLS],
    grow: u32,
    /// Whether it may still give a chunk back by itself.
    may_shrink: bool,
}

impl<const CALLS: usize> Pool<CALLS> {
    fn new(grow: u32, may_shrink: bool) -> Self {
        let mut growth = Growth {
            charged_bytes: CHUNK,
            ahead_bytes: 0,
        };
        for _ in 0..CALLS {
            growth = growth.expect(CHUNK);
        }
        Self {
            has_bytes: CHUNK,
            growth,
            account_bytes: CHUNK * (1 + CALLS as u64),
            calls: [Call::NotMade; CALLS],
            grow,
            may_shrink,
        }
    }

    fn settle(&mut self, ahead_bytes: u64) {
        let settled = self.growth.settle(ahead_bytes, self.has_bytes);
        assert!(
            settled.to <= settled.from,
            "what is over takes more: {settled:?}"
        );
        self.account_bytes -= settled.from - settled.to;
        // As it is remembered.
        self.growth = Growth::of(&settled.growth.held(0));
    }

    /// Everything that can happen next, each in a world of its own.
    fn go_on(self, ends: &mut u64) {
        let under_way = self.calls.iter().filter(|call| **call != Call::Over);
        let ahead_bytes = CHUNK * under_way.count() as u64;
        assert!(self.has_bytes <= self.account_bytes, "less than it has");
        assert_eq!(
            self.account_bytes,
            self.growth.charged_bytes + ahead_bytes,
            "more than is charged and reserved"
        );
        assert_eq!(self.growth.ahead_bytes, ahead_bytes);
        if ahead_bytes == 0 {
            let mut pool = self.clone();
            pool.settle(0);
            assert_eq!(pool.account_bytes, pool.has_bytes);
            // The last one to be over has settled what all have done.
            if !self.may_shrink {
                assert_eq!(self.account_bytes, self.has_bytes);
            }
            *ends += 1;
        }
        for (index, call) in self.calls.iter().enumerate() {
            let mut next = self.clone();
            match call {
                Call::NotMade => {
                    next.has_bytes += CHUNK * u64::from(self.grow >> index & 1);
                    next.calls[index] = Call::Made;
                }
                Call::Made => {
                    next.settle(CHUNK);
                    next.calls[index] = Call::Over;
                }
                Call::Over => continue,
            }
            next.go_on(ends);
        }
        if self.may_shrink {
            let mut next = self;
            next.may_shrink = false;
            next.has_bytes -= CHUNK;
            next.settle(0);
            next.go_on(ends);
        }
    }
}

#[test]
fn a_pool_that_several_make_grow_is_charged_once() {
    let mut ends = 0;
    for grow in 0..1 << CALLS {
        Pool::<CALLS>::new(grow, false).go_on(&mut ends);
    }
    assert_eq!(ends, ORDERS << CALLS);
    // One that gives something back meanwhile has many more orders for the same calls.
    for grow in 0..1 << (CALLS - 1) {
        Pool::<{ CALLS - 1 }>::new(grow, true).go_on(&mut ends);
    }
}

/// A driver that takes more than it said it would is charged what it has.
#[test]
fn what_nobody_reserved_is_charged_nevertheless() {
    let growth = Growth::default().expect(CHUNK).expect(CHUNK);
    assert_eq!(growth.unpaid(3 * CHUNK), CHUNK);
    assert_eq!(growth.unpaid(2 * CHUNK), 0);
    let settled = growth.settle(CHUNK, 3 * CHUNK);
    assert_eq!((settled.from, settled.to), (CHUNK, 2 * CHUNK));
    let settled = settled.growth.settle(CHUNK, 3 * CHUNK);
    assert_eq!((settled.from, settled.to), (3 * CHUNK, 3 * CHUNK));
    assert_eq!(settled.growth.ahead_bytes, 0);
}
