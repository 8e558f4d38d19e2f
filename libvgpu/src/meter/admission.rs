//! When it is the share's turn: leases from its debt bucket, and the wait while it is in debt.

use core::sync::atomic::Ordering;

use drava_vgpu_abi::bucket::{Grant, LEASE_US, MAX_ADMISSION_WAIT_US, MAX_SLEEP_US, NextLaunch};
use drava_vgpu_abi::cost::{Cost, LaunchKind};

use super::Meter;
use super::lease::Lease;
use crate::card::Card;
use crate::share::Share;
use crate::sys::{self, SavedErrno};

const NS_PER_US: u64 = 1_000;

/// Time between two looks of a share that has called the agent and is answered soon, microseconds, and for how long it
/// looks so often.
const ANSWER_PAUSE_US: u64 = 100;
const ANSWER_US: u64 = 3_000;

/// Time between two looks at what is under way while the share may not have more in the card's queues, microseconds.
const DRAIN_PAUSES_US: (u64, u64) = (20, 500);

/// Time between two looks at what is under way while the share has its turn and its launches differ, microseconds: any of
/// them may be over.
const TURN_PAUSES_US: (u64, u64) = (100, 500);

/// Where a lease came from.
enum Outcome {
    /// So many microseconds were taken.
    Taken(u64),
    /// Nothing is there; look again after so many microseconds.
    Later(u64),
}

/// What shares of other priorities ask of a launch.
#[derive(Clone, Copy)]
struct Manners {
    /// Launches are told to the agent.
    notifies_agent: bool,
    /// Microseconds of GPU time that may be under way.
    window_us: Option<u64>,
}

impl Manners {
    fn of(card: Card) -> Self {
        Self {
            notifies_agent: card.shares().any(Share::notifies_agent),
            window_us: card.shares().filter_map(Share::window_us).min(),
        }
    }

    /// What a thread takes at once, microseconds: nothing in advance where each launch is told, and a part of the window
    /// where there is one.
    fn lease_us(self) -> u64 {
        match (self.notifies_agent, self.window_us) {
            (true, _) => 0,
            (false, Some(window_us)) => (window_us / 2).min(LEASE_US),
            (false, None) => LEASE_US,
        }
    }
}

impl Meter {
    /// Waits until the share may make a launch of that kind, charges it, and says how much that was, in
    /// nanoseconds.
    pub(super) fn admit(&self, card: Card, kind: LaunchKind, lease: &Lease) -> u64 {
        let cost = self.costs.get(kind);
        let ns = cost.advance_ns();
        let is_covered = lease.left_ns() >= ns;
        if is_covered && cost.weight().is_some() {
            lease.spend_admitted(ns);
            return ns;
        }
        // What is hardly known is sampled at each launch, and better known by what has been sampled.
        if is_covered && cost.samples() != 0 && !self.samples.is_poll_due(sys::now_us()) {
            lease.spend_admitted(ns);
            return ns;
        }
        let _errno = SavedErrno::new();
        let mut waited_us = 0u64;
        let begun = sys::now_us();
        let mut now = begun;
        let manners = Manners::of(card);
        loop {
            // A sample that has come meanwhile may say that the launch costs less, or that the debt is smaller.
            self.poll(now);
            let cost = self.costs.get(kind);
            let ns = cost.advance_ns();
            let missing = ns.saturating_sub(lease.left_ns()).div_ceil(NS_PER_US);
            if missing == 0 {
                lease.spend_admitted(ns);
                count_wait(card, waited_us);
                return ns;
            }
            if let Some(us) = self.drains_for_us(card, manners, ns)
                && waited_us < MAX_ADMISSION_WAIT_US
                && !self.captures.is_any()
            {
                want(card, now);
                sys::sleep_us(us);
                now = sys::now_us();
                waited_us = now.saturating_sub(begun);
                continue;
            }
            let taken = match self.take(card, missing, cost, manners, waited_us != 0, now) {
                Outcome::Taken(us) => us,
                // Nothing waits while something is being captured: the time is owed.
                Outcome::Later(_) if self.captures.is_any() => owe(card, missing),
                Outcome::Later(_) if waited_us >= MAX_ADMISSION_WAIT_US && is_stuck(card, now) => {
                    if let Some(bucket) = first(card).and_then(Share::bucket) {
                        bucket.count_admission_timeout();
                    }
                    owe(card, missing)
                }
                Outcome::Later(us) => {
                    let us = if manners.notifies_agent && waited_us < ANSWER_US {
                        if waited_us == 0 {
                            card.shares().for_each(Share::notify_agent);
                        }
                        us.min(ANSWER_PAUSE_US)
                    } else {
                        us
                    };
                    sys::sleep_us(us.clamp(1, MAX_SLEEP_US));
                    now = sys::now_us();
                    waited_us = now.saturating_sub(begun);
                    continue;
                }
            };
            let spent = lease.renew(taken.saturating_mul(NS_PER_US));
            self.count_time(card, spent.ns);
            count_launches(card, spent.launches);
            lease.spend_admitted(ns);
            count_wait(card, waited_us);
            if manners.notifies_agent {
                let length = self.lengths.get(kind);
                let length_ns = if length.samples() == 0 {
                    ns
                } else {
                    length.ns()
                };
                tell(card, length_ns, now);
            }
            return ns;
        }
    }

    /// For how long a launch of `ns` waits at least for what was launched before, so that the card's queues hold no more
    /// than the window.
    fn drains_for_us(&self, card: Card, manners: Manners, ns: u64) -> Option<u64> {
        let window_ns = manners.window_us?.saturating_mul(NS_PER_US);
        let least_ns = manners.lease_us().saturating_mul(NS_PER_US);
        let under_way = self.samples.under_way(card, least_ns);
        let more_ns = ns.max(least_ns);
        let is_full = under_way.launches != 0 && under_way.ns.saturating_add(more_ns) > window_ns;
        let (shortest, longest) = DRAIN_PAUSES_US;
        is_full.then(|| (ns / NS_PER_US / 8).clamp(shortest, longest))
    }

    /// Whether all launches that are looked at are to be followed to their ends.
    pub(super) fn follows_launches(card: Card) -> bool {
        let is_followed = |share: &Share| share.window_us().is_some() || share.has_token_policy();
        card.shares().any(is_followed)
    }

    /// What is to be known of a launch in the share's own turn.
    fn next_launch(&self, card: Card, cost: Cost, manners: Manners) -> NextLaunch {
        let least_ns = manners.lease_us().saturating_mul(NS_PER_US);
        let under_way = self.samples.under_way(card, least_ns);
        NextLaunch {
            us: cost.advance_ns() / NS_PER_US,
            is_variable: cost.is_variable(),
            in_flight: under_way.launches,
            in_flight_us: under_way.ns / NS_PER_US,
        }
    }

    fn take(
        &self,
        card: Card,
        need_us: u64,
        cost: Cost,
        manners: Manners,
        has_waited: bool,
        now: u64,
    ) -> Outcome {
        let lease_us = manners.lease_us();
        let mut later = MAX_SLEEP_US;
        for share in card.shares() {
            let Some(bucket) = share.bucket() else {
                // Nothing to count in: launches go through.
                return Outcome::Taken(need_us.max(lease_us));
            };
            share.record_demand(bucket, now);
            if let Some(us) = share.yields_for_us(now) {
                later = later.min(us);
                continue;
            }
            let grant = share.grant(now);
            bucket.refill(grant, now);
            if grant == Grant::Free {
                return Outcome::Taken(need_us.max(lease_us));
            }
            // One that others give way to is not to wait for more than it needs.
            let least_us = if has_waited && !manners.notifies_agent {
                grant.resume_credit_us()
            } else {
                1
            };
            match bucket.take(grant, need_us, least_us, lease_us) {
                Ok(taken) => return Outcome::Taken(taken),
                Err(_) if grant.may_overdraw(self.next_launch(card, cost, manners), now) => {
                    let taken_us = need_us.max(lease_us);
                    bucket.charge(taken_us);
                    return Outcome::Taken(taken_us);
                }
                Err(_) if matches!(grant, Grant::Token { .. }) && cost.is_variable() => {
                    let (shortest, longest) = TURN_PAUSES_US;
                    later = later.min((cost.ns() / NS_PER_US / 16).clamp(shortest, longest));
                }
                Err(debt) => {
                    let turn_us = grant.starts_in_us(now).unwrap_or(debt.retry_after_us);
                    later = later.min(debt.retry_after_us).min(turn_us);
                }
            }
        }
        Outcome::Later(later)
    }

    /// Adds to the GPU time of this process.
    pub(super) fn count_time(&self, card: Card, ns: u64) {
        self.correct_ns(card, i64::try_from(ns).unwrap_or(i64::MAX));
    }

    /// Adds to the GPU time of this process, or takes something off what will be added.
    pub(super) fn correct_ns(&self, card: Card, ns: i64) {
        let carried = self.corrections_ns.swap(0, Ordering::Relaxed).cast_signed();
        let sum = carried.saturating_add(ns);
        let us = sum / 1_000;
        let rest = sum % 1_000;
        self.corrections_ns
            .fetch_add(rest.cast_unsigned(), Ordering::Relaxed);
        if us < 0 {
            self.overcounted_us
                .fetch_add(us.unsigned_abs(), Ordering::Relaxed);
            return;
        }
        let mut us = us.unsigned_abs();
        let mut over = self.overcounted_us.load(Ordering::Relaxed);
        while over != 0 && us != 0 {
            let part = over.min(us);
            match self.overcounted_us.compare_exchange(
                over,
                over.saturating_sub(part),
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    us = us.saturating_sub(part);
                    over = over.saturating_sub(part);
                }
                Err(found) => over = found,
            }
        }
        if us != 0
            && let Some(share) = first(card)
        {
            share.count_gpu_time(us);
        }
    }
}

/// The share that counts what all shares of the card do together.
pub(super) fn first(card: Card) -> Option<&'static Share> {
    card.shares().next()
}

/// Whether waiting alone might never end: hardly any rate, another share's token, or one of higher priority at work.
fn is_stuck(card: Card, now: u64) -> bool {
    card.shares().all(|share| {
        let grant = share.grant(now);
        share.yields_for_us(now).is_some()
            || matches!(grant, Grant::NoToken { .. } | Grant::Rate(..1_000))
    })
}

/// Shows that somebody wants GPU time.
fn want(card: Card, now: u64) {
    for share in card.shares() {
        if let Some(bucket) = share.bucket() {
            share.record_demand(bucket, now);
        }
    }
}

/// Says for how long the card will be busy with a launch that takes `ns`, and calls the agent if it cannot know.
fn tell(card: Card, ns: u64, now: u64) {
    for share in card.shares().filter(|share| share.notifies_agent()) {
        let is_news = share
            .bucket()
            .is_some_and(|bucket| bucket.extend_busy_until(ns.div_ceil(NS_PER_US), now));
        if is_news {
            share.notify_agent();
        }
    }
}

/// Takes time that is not there.
fn owe(card: Card, us: u64) -> u64 {
    if let Some(bucket) = first(card).and_then(Share::bucket) {
        bucket.charge(us);
    }
    us
}

fn count_wait(card: Card, us: u64) {
    if us != 0
        && let Some(share) = first(card)
    {
        share.count_throttled(us);
    }
}

fn count_launches(card: Card, launches: u64) {
    if let Some(share) = first(card) {
        share.count_launches(launches);
    }
}
