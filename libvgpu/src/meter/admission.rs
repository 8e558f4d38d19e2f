//! Admission of launches: leases from the share's debt bucket, and the wait of a share in debt.

use drava_vgpu_abi::bucket::{Grant, LEASE_US, MAX_ADMISSION_WAIT_US, MAX_SLEEP_US};
use drava_vgpu_abi::contention::OwnTime;
use drava_vgpu_abi::cost::LaunchKind;

use super::Meter;
use super::lease::Lease;
use crate::limits::gpu::Gpu;
use crate::limits::share::Share;
use crate::system::sys::{self, SavedErrno};

const NS_PER_US: u64 = 1_000;

/// Poll interval of a share that has notified the agent, microseconds, and the time in which the agent answers.
const ANSWER_POLL_US: u64 = 100;
const ANSWER_US: u64 = 3_000;

/// Shortest and longest poll interval while the in-flight launches fill the share's window, microseconds.
const WINDOW_POLL_US: (u64, u64) = (20, 500);

/// The wait of one launch.
struct Wait {
    begun_us: u64,
    now_us: u64,
    /// Time to count as throttled, microseconds.
    throttled_us: u64,
}

impl Wait {
    fn begin() -> Self {
        let now_us = sys::now_us();
        Self {
            begun_us: now_us,
            now_us,
            throttled_us: 0,
        }
    }

    fn waited_us(&self) -> u64 {
        self.now_us.saturating_sub(self.begun_us)
    }

    /// Sleeps for at most [`MAX_SLEEP_US`]. A longer time is not the share's: a debugger or `SIGSTOP` has stopped the
    /// process, or the host is loaded. Twice as long is still counted.
    fn sleep(&mut self, us: u64) {
        sys::sleep_us(us.clamp(1, MAX_SLEEP_US));
        let now_us = sys::now_us();
        let slept_us = now_us.saturating_sub(self.now_us);
        self.now_us = now_us;
        self.throttled_us = self
            .throttled_us
            .saturating_add(slept_us.min(MAX_SLEEP_US.saturating_mul(2)));
    }
}

/// Result of a request for GPU time.
enum Admission {
    /// This many microseconds of GPU time were granted.
    Granted(u64),
    /// No GPU time is available; the next attempt is due after this many microseconds.
    RetryAfter(u64),
}

/// Constraints on launches for the sake of shares of other priorities.
#[derive(Clone, Copy)]
struct PriorityConstraints {
    /// Launches are reported to the node agent.
    notifies_agent: bool,
    /// Microseconds of GPU time that may be in flight.
    window_us: Option<u64>,
}

impl PriorityConstraints {
    fn of(gpu: Gpu) -> Self {
        Self {
            notifies_agent: gpu.shares().any(Share::notifies_agent),
            window_us: gpu.shares().filter_map(Share::window_us).min(),
        }
    }

    /// Returns the size of a lease, microseconds: nothing in advance if each launch is reported, and a part of the
    /// window if there is one.
    fn lease_us(self) -> u64 {
        match (self.notifies_agent, self.window_us) {
            (true, _) => 0,
            (false, Some(window_us)) => (window_us / 2).min(LEASE_US),
            (false, None) => LEASE_US,
        }
    }
}

impl Meter {
    /// Waits until the share may make a launch of the kind, charges it, and returns the charge in nanoseconds.
    pub(super) fn admit(&self, gpu: Gpu, kind: LaunchKind, lease: &Lease) -> u64 {
        let cost = self.costs.get(kind);
        let ns = cost.advance_ns();
        let is_covered = lease.remaining_ns() >= ns;
        // The samples taken so far improve the cost, which may be so low that no lease ever ends.
        let is_known = cost.weight().is_some() || cost.samples() != 0;
        if is_covered && is_known && !self.samples.is_poll_due(sys::now_us()) {
            lease.spend_admitted(ns);
            return ns;
        }
        let _errno = SavedErrno::new();
        let mut wait = Wait::begin();
        let constraints = PriorityConstraints::of(gpu);
        loop {
            let now = wait.now_us;
            let waited_us = wait.waited_us();
            // A finished sample may lower the cost of the launch, or the debt.
            self.poll(gpu, now);
            let cost = self.costs.get(kind);
            let ns = cost.advance_ns();
            let missing = ns.saturating_sub(lease.remaining_ns()).div_ceil(NS_PER_US);
            if missing == 0 {
                lease.spend_admitted(ns);
                count_wait(gpu, wait.throttled_us);
                return ns;
            }
            if let Some(us) = self.window_wait_us(gpu, constraints, ns)
                && waited_us < MAX_ADMISSION_WAIT_US
                && !self.captures.is_any()
            {
                record_demand(gpu, now);
                wait.sleep(us);
                continue;
            }
            let granted_us = match request(gpu, missing, constraints, waited_us != 0, now) {
                Admission::Granted(us) => us,
                // No launch waits during a capture: the share goes into debt.
                Admission::RetryAfter(_) if self.captures.is_any() => overdraw(gpu, missing),
                Admission::RetryAfter(_)
                    if waited_us >= MAX_ADMISSION_WAIT_US
                        && (has_no_rate(gpu, now) || self.has_overrun(gpu, now)) =>
                {
                    if let Some(bucket) = first(gpu).and_then(Share::bucket) {
                        bucket.count_admission_timeout();
                    }
                    overdraw(gpu, missing)
                }
                Admission::RetryAfter(us) => {
                    let us = if constraints.notifies_agent && waited_us < ANSWER_US {
                        if waited_us == 0 {
                            gpu.shares().for_each(Share::notify_agent);
                        }
                        us.min(ANSWER_POLL_US)
                    } else {
                        us
                    };
                    wait.sleep(us);
                    continue;
                }
            };
            let spent = lease.renew(granted_us.saturating_mul(NS_PER_US));
            self.count_time(gpu, spent.ns);
            count_launches(gpu, spent.launches);
            lease.spend_admitted(ns);
            count_wait(gpu, wait.throttled_us);
            if constraints.notifies_agent {
                let duration = self.durations.get(kind);
                let duration_ns = if duration.samples() == 0 {
                    ns
                } else {
                    duration.ns()
                };
                report_busy(gpu, duration_ns, now);
            }
            return ns;
        }
    }

    /// Returns how long a launch of `ns` waits at least for earlier launches, so that the in-flight work does not exceed
    /// the window.
    fn window_wait_us(&self, gpu: Gpu, constraints: PriorityConstraints, ns: u64) -> Option<u64> {
        let window_ns = constraints.window_us?.saturating_mul(NS_PER_US);
        let least_ns = constraints.lease_us().saturating_mul(NS_PER_US);
        let in_flight = self.samples.in_flight(gpu, least_ns);
        let more_ns = ns.max(least_ns);
        let is_full = in_flight.launches != 0 && in_flight.ns.saturating_add(more_ns) > window_ns;
        let (shortest, longest) = WINDOW_POLL_US;
        is_full.then(|| (ns / NS_PER_US / 8).clamp(shortest, longest))
    }

    /// Returns whether the end of each launch on the slow path is observed.
    pub(super) fn follows_launches(gpu: Gpu) -> bool {
        gpu.shares().any(|share| share.window_us().is_some())
    }

    /// Adds to the GPU time of this process on the GPU.
    pub(super) fn count_time(&self, gpu: Gpu, ns: u64) {
        self.correct_ns(gpu, i64::try_from(ns).unwrap_or(i64::MAX));
    }

    /// Adds to the GPU time of this process on the GPU. A negative amount is subtracted from the next amounts.
    pub(super) fn correct_ns(&self, gpu: Gpu, ns: i64) {
        let Some(counted) = self.counted_times.get(usize::from(gpu.index())) else {
            return;
        };
        let us = counted.add(ns);
        if us != 0
            && let Some(share) = first(gpu)
        {
            share.count_gpu_time(us);
        }
    }
}

/// Requests at least `need_us` of GPU time from one of the GPU's shares.
fn request(
    gpu: Gpu,
    need_us: u64,
    constraints: PriorityConstraints,
    has_waited: bool,
    now: u64,
) -> Admission {
    let lease_us = constraints.lease_us();
    let mut retry_us = MAX_SLEEP_US;
    for share in gpu.shares() {
        let Some(bucket) = share.bucket() else {
            // GPU time cannot be counted.
            return Admission::Granted(need_us.max(lease_us));
        };
        share.record_demand(bucket, now);
        if let Some(us) = share.yields_for_us(now) {
            retry_us = retry_us.min(us);
            continue;
        }
        let grant = share.grant();
        bucket.refill(grant, now);
        if grant == Grant::Free {
            let granted_us = need_us.max(lease_us);
            bucket.enqueue(granted_us);
            return Admission::Granted(granted_us);
        }
        // A share to which others yield does not wait for more than it needs.
        let least_us = if has_waited && !constraints.notifies_agent {
            grant.resume_credit_us()
        } else {
            1
        };
        match bucket.take(grant, need_us, least_us, lease_us) {
            Ok(taken_us) => return Admission::Granted(taken_us),
            Err(debt) => retry_us = retry_us.min(debt.retry_after_us),
        }
    }
    Admission::RetryAfter(retry_us)
}

/// Returns the share that counts the GPU time of all shares of the GPU.
pub(super) fn first(gpu: Gpu) -> Option<&'static Share> {
    gpu.shares().next()
}

/// Returns which part of the measured time of launches is the share's own.
pub(super) fn own_time(gpu: Gpu) -> OwnTime {
    first(gpu).map_or(OwnTime::ALL, Share::own_time)
}

/// Returns whether the debt may never be repaid: hardly any rate, or a busy share of higher priority.
fn has_no_rate(gpu: Gpu, now: u64) -> bool {
    gpu.shares().all(|share| {
        share.yields_for_us(now).is_some() || matches!(share.grant(), Grant::Rate(..1_000))
    })
}

fn record_demand(gpu: Gpu, now: u64) {
    for share in gpu.shares() {
        if let Some(bucket) = share.bucket() {
            share.record_demand(bucket, now);
        }
    }
}

/// Extends the forecast of the busy GPU by a launch that takes `ns`, and notifies the agent if it does not expect work.
fn report_busy(gpu: Gpu, ns: u64, now: u64) {
    for share in gpu.shares().filter(|share| share.notifies_agent()) {
        let is_unexpected = share
            .bucket()
            .is_some_and(|bucket| bucket.extend_busy_until(ns.div_ceil(NS_PER_US), now));
        if is_unexpected {
            share.notify_agent();
        }
    }
}

/// Takes GPU time beyond the credit, and returns it.
fn overdraw(gpu: Gpu, us: u64) -> u64 {
    if let Some(bucket) = first(gpu).and_then(Share::bucket) {
        bucket.charge(us);
    }
    us
}

fn count_wait(gpu: Gpu, us: u64) {
    if us != 0
        && let Some(share) = first(gpu)
    {
        share.count_throttled(us);
    }
}

fn count_launches(gpu: Gpu, launches: u64) {
    if let Some(share) = first(gpu) {
        share.count_launches(launches);
    }
}
