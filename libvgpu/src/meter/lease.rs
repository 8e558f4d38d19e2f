//! Leases: GPU time that a thread spends without touching shared memory.
//!
//! The thread pointer identifies a thread, so no thread-local storage is needed. A thread that gets the thread pointer
//! of an ended one continues its lease.

use core::sync::atomic::{AtomicU64, Ordering};

use drava_vgpu_abi::cost::{Cost, SAMPLING_INTERVAL};

/// Leases of pairs of a thread and a GPU; further pairs use a common one.
const LEASES: usize = 256;
const PROBES: usize = 8;

const LAUNCH: u64 = 1 << 32;
const COUNTDOWN: u64 = LAUNCH - 1;

/// One thread's lease on one GPU. Only that thread writes it, so loads and stores suffice; in the common lease a lost
/// update is a launch that is not counted.
#[repr(align(64))]
pub(crate) struct Lease {
    /// Thread pointer and GPU, 0 if unused.
    owner: AtomicU64,
    /// Remaining GPU time, nanoseconds.
    remaining_ns: AtomicU64,
    /// Remaining GPU time after the last renewal, nanoseconds.
    renewed_ns: AtomicU64,
    /// Launches since the last renewal (high half), and weight until the next sample (low half).
    launches: AtomicU64,
    random: AtomicU64,
}

pub(crate) struct Leases {
    leases: [Lease; LEASES],
    common: Lease,
}

/// Use of a lease since its last renewal.
#[derive(Clone, Copy)]
pub(crate) struct Spent {
    pub(crate) ns: u64,
    pub(crate) launches: u64,
}

impl Leases {
    /// Returns the lease of the calling thread on that GPU.
    #[inline]
    pub(crate) fn of_this_thread(&self, gpu: u8) -> &Lease {
        let owner = thread_pointer() ^ (u64::from(gpu) << 56);
        let start = usize::try_from(owner.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56).unwrap_or(0);
        match self.leases.get(start) {
            Some(lease) if lease.owner.load(Ordering::Relaxed) == owner => lease,
            _ => self.search(owner, start),
        }
    }

    #[cold]
    fn search(&self, owner: u64, start: usize) -> &Lease {
        let (before, after) = self.leases.split_at(start.min(LEASES));
        let probed = after.iter().chain(before).take(PROBES);
        for lease in probed {
            let found = lease.owner.load(Ordering::Relaxed);
            let is_mine = found == owner
                || (found == 0
                    && lease
                        .owner
                        .compare_exchange(0, owner, Ordering::Relaxed, Ordering::Relaxed)
                        .is_ok());
            if is_mine {
                return lease;
            }
        }
        &self.common
    }
}

impl Lease {
    /// Spends the cost of a launch. Returns `false` if it exceeds the lease or the launch is sampled.
    #[inline]
    pub(crate) fn spend(&self, cost: Cost) -> bool {
        let Some(weight) = cost.weight() else {
            return false;
        };
        let remaining = self.remaining_ns.load(Ordering::Relaxed);
        let launches = self.launches.load(Ordering::Relaxed);
        let Some(rest) = remaining.checked_sub(cost.ns()) else {
            return false;
        };
        let weight = u64::from(weight);
        if launches & COUNTDOWN < weight {
            return false;
        }
        self.remaining_ns.store(rest, Ordering::Relaxed);
        self.launches.store(
            launches.wrapping_add(LAUNCH).wrapping_sub(weight),
            Ordering::Relaxed,
        );
        true
    }

    /// Returns the remaining GPU time, nanoseconds.
    pub(crate) fn remaining_ns(&self) -> u64 {
        self.remaining_ns.load(Ordering::Relaxed)
    }

    /// Spends `ns` and counts one launch.
    pub(crate) fn spend_admitted(&self, ns: u64) {
        let remaining = self.remaining_ns.load(Ordering::Relaxed);
        self.remaining_ns
            .store(remaining.saturating_sub(ns), Ordering::Relaxed);
        let launches = self.launches.load(Ordering::Relaxed);
        self.launches
            .store(launches.wrapping_add(LAUNCH), Ordering::Relaxed);
    }

    /// Adds `ns` and returns the use since the last renewal.
    pub(crate) fn renew(&self, ns: u64) -> Spent {
        let remaining = self.remaining_ns.load(Ordering::Relaxed);
        let spent = self
            .renewed_ns
            .load(Ordering::Relaxed)
            .saturating_sub(remaining);
        let renewed = remaining.saturating_add(ns);
        self.remaining_ns.store(renewed, Ordering::Relaxed);
        self.renewed_ns.store(renewed, Ordering::Relaxed);
        let launches = self.launches.load(Ordering::Relaxed);
        self.launches.store(launches & COUNTDOWN, Ordering::Relaxed);
        Spent {
            ns: spent,
            launches: launches >> 32,
        }
    }

    /// Returns whether the launch that was just admitted is sampled. If so, the next sample follows after
    /// [`SAMPLING_INTERVAL`] times `spread` launches of weight 1, on average. Without a weight each launch is sampled.
    pub(crate) fn is_due(&self, weight: Option<u32>, spread: u64) -> bool {
        let launches = self.launches.load(Ordering::Relaxed);
        let countdown = launches & COUNTDOWN;
        let weight = weight.map(u64::from);
        match weight {
            Some(weight) if countdown >= weight => {
                self.launches
                    .store(launches.wrapping_sub(weight), Ordering::Relaxed);
                false
            }
            _ => {
                let twice_the_mean = u64::from(SAMPLING_INTERVAL)
                    .saturating_mul(spread)
                    .saturating_mul(2);
                // Random, so that samples of a periodic program do not hit the same launch of each period. The launch
                // that ends the interval counts, too.
                let below = twice_the_mean.saturating_sub(weight.unwrap_or(0));
                let next = self.random().checked_rem(below).unwrap_or(0);
                self.launches
                    .store((launches & !COUNTDOWN) | next, Ordering::Relaxed);
                true
            }
        }
    }

    /// Xorshift.
    fn random(&self) -> u64 {
        let mut state = self.random.load(Ordering::Relaxed);
        if state == 0 {
            state = self.owner.load(Ordering::Relaxed) | 1;
        }
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        self.random.store(state, Ordering::Relaxed);
        state >> 11
    }
}

/// Returns a number that no other live thread of the process has.
#[cfg(target_arch = "x86_64")]
#[inline]
fn thread_pointer() -> u64 {
    let pointer: u64;
    // SAFETY: the first word of the thread control block is its own address, by the x86-64 ABI of TLS.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly, pure));
    }
    pointer
}

/// Returns a number that no other live thread of the process has.
#[cfg(target_arch = "aarch64")]
#[inline]
fn thread_pointer() -> u64 {
    let pointer: u64;
    // SAFETY: reads the register that holds the thread pointer.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nomem, nostack, preserves_flags, pure));
    }
    pointer
}
