//! The charge for a pool that several threads grow concurrently: never less than its memory, and no more than they
//! reserved.

use crate::accounts::cache_charge::{CacheCharge, Report};

const CHUNK: u64 = 32;

/// Concurrent calls. Miri takes thousands of times as long for each interleaving.
const CALLS: usize = if cfg!(miri) { 2 } else { 3 };
/// Interleavings of that many calls of three steps each.
const ORDERS: u64 = if cfg!(miri) { 20 } else { 1680 };

/// State of a call that has reserved a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    NotMade,
    Made,
    /// The pool's size was queried after the call.
    Queried(Report),
    Over,
}

/// A pool, its account, and calls that grow it if their bit is set.
#[derive(Clone)]
struct Pool<const CALLS: usize> {
    has_bytes: u64,
    queries: u64,
    latest: Report,
    growth: CacheCharge,
    /// Charged and reserved bytes.
    account_bytes: u64,
    calls: [Call; CALLS],
    grow: u32,
    /// Whether the pool may still release a chunk by itself.
    may_shrink: bool,
}

impl<const CALLS: usize> Pool<CALLS> {
    fn new(grow: u32, may_shrink: bool) -> Self {
        let mut growth = CacheCharge {
            charged_bytes: CHUNK,
            reserved_bytes: 0,
        };
        for _ in 0..CALLS {
            growth = growth.add_reservation(CHUNK);
        }
        Self {
            has_bytes: CHUNK,
            queries: 0,
            latest: Report::default(),
            growth,
            account_bytes: CHUNK * (1 + CALLS as u64),
            calls: [Call::NotMade; CALLS],
            grow,
            may_shrink,
        }
    }

    fn query(&mut self) -> Report {
        self.queries += 1;
        Report {
            query: self.queries,
            bytes: self.has_bytes,
        }
    }

    fn settle(&mut self, reserved_bytes: u64, report: Report) {
        self.latest = self.latest.latest(report);
        let settled = self.growth.settle(reserved_bytes, self.latest.bytes);
        assert!(
            settled.to <= settled.from,
            "a settled call increases the charge: {settled:?}"
        );
        self.account_bytes -= settled.from - settled.to;
        // Converted to its stored form and back.
        self.growth = CacheCharge::of(&settled.charge.on(0));
    }

    /// Explores every possible next step.
    fn explore(self, ends: &mut u64) {
        let in_flight = self.calls.iter().filter(|call| **call != Call::Over);
        let reserved_bytes = CHUNK * in_flight.count() as u64;
        assert!(
            self.has_bytes <= self.account_bytes,
            "the account is below the pool"
        );
        assert_eq!(
            self.account_bytes,
            self.growth.charged_bytes + reserved_bytes,
            "the account exceeds charges and reservations"
        );
        assert_eq!(self.growth.reserved_bytes, reserved_bytes);
        if reserved_bytes == 0 {
            let mut pool = self.clone();
            let report = pool.query();
            pool.settle(0, report);
            assert_eq!(pool.account_bytes, pool.has_bytes);
            // The last call settles for all calls.
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
                Call::Made => next.calls[index] = Call::Queried(next.query()),
                Call::Queried(report) => {
                    next.settle(CHUNK, *report);
                    next.calls[index] = Call::Over;
                }
                Call::Over => continue,
            }
            next.explore(ends);
        }
        if self.may_shrink {
            let mut next = self;
            next.may_shrink = false;
            next.has_bytes -= CHUNK;
            let report = next.query();
            next.settle(0, report);
            next.explore(ends);
        }
    }
}

#[test]
fn charges_concurrent_pool_growth_once() {
    let mut ends = 0;
    for grow in 0..1 << CALLS {
        Pool::<CALLS>::new(grow, false).explore(&mut ends);
    }
    assert_eq!(ends, ORDERS << CALLS);
    // A pool that shrinks has many more interleavings for the same calls.
    for grow in 0..1 << (CALLS - 1) {
        Pool::<{ CALLS - 1 }>::new(grow, true).explore(&mut ends);
    }
}

/// A driver that allocates more than expected is charged in full.
#[test]
fn charges_unreserved_growth() {
    let growth = CacheCharge::default()
        .add_reservation(CHUNK)
        .add_reservation(CHUNK);
    assert_eq!(growth.uncharged_bytes(3 * CHUNK), CHUNK);
    assert_eq!(growth.uncharged_bytes(2 * CHUNK), 0);
    let settled = growth.settle(CHUNK, 3 * CHUNK);
    assert_eq!((settled.from, settled.to), (CHUNK, 2 * CHUNK));
    let settled = settled.charge.settle(CHUNK, 3 * CHUNK);
    assert_eq!((settled.from, settled.to), (3 * CHUNK, 3 * CHUNK));
    assert_eq!(settled.charge.reserved_bytes, 0);
}

/// State of a graph launch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Launch {
    NotBegun,
    Lent(u64),
    Reserved,
    Made,
    Over,
}

/// Two graphs of a device with their sizes, and their launches.
#[derive(Clone)]
struct Device {
    needs: [u64; 2],
    /// Whether each was ever launched: as the driver knows, and as recorded, which is earlier.
    launched: [bool; 2],
    known: [bool; 2],
    has_bytes: u64,
    growth: CacheCharge,
    account_bytes: u64,
    launches: [(usize, Launch); 2],
    /// Whether the driver may still release memory that no graph uses.
    may_shrink: bool,
}

impl Device {
    /// Combined memory of the graphs.
    fn sum(&self, which: [bool; 2]) -> u64 {
        let needs = self.needs.iter().zip(which);
        needs.map(|(need, counts)| need * u64::from(counts)).sum()
    }

    fn settle(&mut self, reserved_bytes: u64) {
        let settled = self.growth.settle(reserved_bytes, self.has_bytes);
        self.account_bytes = self.account_bytes - settled.from + settled.to;
        self.growth = settled.charge;
    }

    fn with(&self, index: usize, launch: Launch) -> Self {
        let mut next = self.clone();
        next.launches[index].1 = launch;
        next
    }

    /// Explores every possible next step.
    fn explore(self, ends: &mut u64) {
        assert!(
            self.has_bytes <= self.account_bytes,
            "the account is below the pool"
        );
        let total = self.growth.charged_bytes + self.growth.reserved_bytes;
        assert_eq!(self.account_bytes, total);
        for (index, (graph, launch)) in self.launches.into_iter().enumerate() {
            let need = self.needs[graph];
            match launch {
                Launch::NotBegun => {
                    let mut next = self.clone();
                    next.known[graph] = true;
                    let (growth, lent) = next.growth.reuse_charge(need, next.sum(next.known));
                    next.launches[index].1 = Launch::Lent(lent);
                    next.growth = growth;
                    next.explore(ends);
                }
                Launch::Lent(lent) => {
                    let mut next = self.with(index, Launch::Reserved);
                    next.account_bytes += need - lent;
                    next.growth = next.growth.add_reservation(need - lent);
                    next.explore(ends);
                    // The launch does not fit.
                    let mut next = self.with(index, Launch::Over);
                    next.settle(lent);
                    next.explore(ends);
                }
                // The driver uses the graph's memory, the other graph's memory, or both.
                Launch::Reserved => {
                    let mut made = self.with(index, Launch::Made);
                    made.launched[graph] = true;
                    let most = made.sum(made.launched).min(self.has_bytes + need);
                    let least = self.has_bytes.max(need);
                    for has_bytes in (least..=most).step_by(usize::try_from(CHUNK).unwrap()) {
                        let mut next = made.clone();
                        next.has_bytes = has_bytes;
                        next.explore(ends);
                    }
                }
                Launch::Made => {
                    let mut next = self.with(index, Launch::Over);
                    next.settle(need);
                    next.explore(ends);
                }
                Launch::Over => {}
            }
        }
        if self
            .launches
            .iter()
            .all(|(_, launch)| *launch == Launch::Over)
        {
            *ends += 1;
        }
        if self.may_shrink {
            for has_bytes in (0..self.has_bytes).step_by(usize::try_from(CHUNK).unwrap()) {
                let mut next = self.clone();
                next.may_shrink = false;
                next.has_bytes = has_bytes;
                next.settle(0);
                next.explore(ends);
            }
        }
    }
}

#[test]
fn charges_relaunched_graphs_for_driver_memory() {
    let needs = [2 * CHUNK, CHUNK];
    let mut ends = 0;
    for (graphs, known) in [[0, 0], [0, 1], [1, 1]]
        .into_iter()
        .flat_map(|graphs| (0..4).map(move |known| (graphs, [known & 1 != 0, known & 2 != 0])))
    {
        // Miri runs only the case in which the graphs share the driver's memory.
        if cfg!(miri) && (graphs, known) != ([0, 1], [true, true]) {
            continue;
        }
        let mut device = Device {
            needs,
            launched: known,
            known,
            has_bytes: 0,
            growth: CacheCharge::default(),
            account_bytes: 0,
            launches: graphs.map(|graph| (graph, Launch::NotBegun)),
            // Miri would take minutes for it.
            may_shrink: !cfg!(miri),
        };
        for has_bytes in (0..=device.sum(known)).step_by(usize::try_from(CHUNK).unwrap()) {
            device.has_bytes = has_bytes;
            device.account_bytes = has_bytes;
            device.growth.charged_bytes = has_bytes;
            device.clone().explore(&mut ends);
        }
    }
    assert!(ends > if cfg!(miri) { 100 } else { 1000 });
}

/// A graph needs its memory once, however often it is launched.
#[test]
fn reserves_only_memory_missing_in_driver() {
    let growth = CacheCharge {
        charged_bytes: 2 * CHUNK,
        reserved_bytes: 0,
    };
    // The driver already has all memory of the graph.
    let (lent, bytes) = growth.reuse_charge(2 * CHUNK, 2 * CHUNK);
    assert_eq!((lent.reserved_bytes, bytes), (2 * CHUNK, 2 * CHUNK));
    // Another launch in flight holds all of it.
    assert_eq!(lent.reuse_charge(CHUNK, 2 * CHUNK).1, 0);
    // Another graph may need one more chunk.
    assert_eq!(growth.reuse_charge(2 * CHUNK, 3 * CHUNK).1, CHUNK);
    // The memory of the driver's graphs is unknown.
    assert_eq!(growth.reuse_charge(2 * CHUNK, u64::MAX), (growth, 0));
    assert_eq!(CacheCharge::default().reuse_charge(CHUNK, 0).1, 0);
}
