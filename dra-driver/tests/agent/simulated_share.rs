//! A simulated share: its program, and libvgpu's bucket.

use std::cell::Cell;
use std::collections::VecDeque;

use drava_dra_driver::agent::policy::activity::{ActivityTracker, RegionHeader};
use drava_dra_driver::agent::policy::control::{ActivityChange, Decision, Measured};
use drava_dra_driver::agent::policy::usage_counters::UsageDelta;
use drava_vgpu_abi::Limits;
use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::bucket::{Bucket, Grant, LEASE_US};
use drava_vgpu_abi::contention::OwnTime;
use drava_vgpu_abi::region::Header;
use drava_vgpu_abi::snapshot::ShareUsage;
use simulator_machine::kernel::engine::Engine;
use simulator_machine::protocol::{ContextId, Work};

use crate::simulated_gpu::{NS_PER_US, SECOND_US};
use crate::workload::Workload;

/// Interval of polling resumed shares.
const POLL_US: u64 = 20_000;

/// Events of a share: before a kernel in an idle stream, and after each kernel.
const START: u32 = 0;
const END: u32 = 1;

struct VirtualWord(Cell<u64>);

impl Word for VirtualWord {
    fn load(&self) -> u64 {
        self.0.get()
    }
    fn store(&self, value: u64) {
        self.0.set(value);
    }
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        let found = self.0.get();
        if found == current {
            self.0.set(new);
            Ok(found)
        } else {
            Err(found)
        }
    }
    fn fetch_add(&self, value: u64) -> u64 {
        self.0.replace(self.0.get().wrapping_add(value))
    }
    fn fetch_sub(&self, value: u64) -> u64 {
        self.0.replace(self.0.get().wrapping_sub(value))
    }
}

/// Counters of its processes.
#[derive(Clone, Copy, Default)]
struct Counters {
    gpu_time_us: u64,
    throttled_us: u64,
    launches: u64,
}

/// See the [module](self).
pub(crate) struct SimulatedShare {
    pub(crate) context: ContextId,
    pub(crate) load: Workload,
    header: Header<VirtualWord>,
    pub(crate) limits: Limits,
    pub(crate) own_time: OwnTime,
    /// Charges of the kernels in flight.
    charges_us: VecDeque<u64>,
    pub(crate) launched: usize,
    tickets: u64,
    /// Time of the event before the running kernel.
    start_us: u64,
    not_before_us: u64,
    /// Taken from the bucket and not yet used.
    lease_us: u64,
    waits: bool,
    /// Whether its program waits for a batch of kernels.
    is_waiting: bool,
    /// Moving average, as in the cost table.
    cost_us: u64,
    pub(crate) gpu_time_us: u64,
    throttled_us: u64,
    wanted_us: u64,
    seen: Counters,
    activity: ActivityTracker,
    pace_us_per_s: u32,
}

impl SimulatedShare {
    pub(crate) fn new(context: ContextId, load: &Workload) -> Self {
        Self {
            context,
            load: load.clone(),
            header: Header::from_words(|| VirtualWord(Cell::new(0))),
            limits: Limits {
                cores: load.entitlement.cores,
                compute_policy: load.entitlement.policy,
                priority: load.entitlement.priority,
                ..Limits::memory(1 << 30)
            },
            own_time: OwnTime::ALL,
            charges_us: VecDeque::new(),
            launched: 0,
            tickets: 0,
            start_us: 0,
            not_before_us: 0,
            lease_us: 0,
            waits: false,
            is_waiting: false,
            cost_us: 2_000,
            gpu_time_us: 0,
            throttled_us: 0,
            wanted_us: 0,
            seen: Counters::default(),
            activity: ActivityTracker::default(),
            pace_us_per_s: 0,
        }
    }

    pub(crate) fn launch(&mut self, now_us: u64, engine: &mut Engine) {
        if !(self.load.is_active)(now_us - SECOND_US) || now_us < self.not_before_us {
            return;
        }
        self.is_waiting &= !self.charges_us.is_empty();
        while !self.is_waiting && self.charges_us.len() < self.load.depth {
            let bucket = Bucket::new(&self.header);
            let grant = Grant::of(&self.limits);
            self.wanted_us = now_us;
            bucket.refill(grant, now_us);
            if grant != Grant::Free {
                if self.lease_us < self.cost_us {
                    let least_us = if self.waits {
                        grant.resume_credit_us()
                    } else {
                        0
                    };
                    match bucket.take(grant, self.cost_us - self.lease_us, least_us, LEASE_US) {
                        Ok(taken_us) => {
                            self.waits = false;
                            self.lease_us += taken_us;
                        }
                        Err(debt) => {
                            self.waits = true;
                            self.not_before_us = now_us + debt.retry_after_us;
                            self.throttled_us += debt.retry_after_us;
                            return;
                        }
                    }
                }
                self.lease_us -= self.cost_us;
            } else {
                bucket.enqueue(self.cost_us);
            }
            let length_us = self.load.kernels_us[self.launched % self.load.kernels_us.len()];
            let length_us = length_us * (self.load.kernel_scale)(now_us - SECOND_US);
            if self.charges_us.is_empty() {
                self.submit_event(engine, START);
            }
            let kernel = Work::Kernel {
                nanos: length_us * NS_PER_US,
                multiprocessors: 1,
            };
            self.submit(engine, kernel);
            self.submit_event(engine, END);
            self.launched += 1;
            self.charges_us.push_back(self.cost_us);
            self.gpu_time_us += self.cost_us;
        }
        self.is_waiting |= self.load.is_batch && self.charges_us.len() == self.load.depth;
    }

    fn submit(&mut self, engine: &mut Engine, work: Work) {
        self.tickets += 1;
        assert!(engine.submit(self.context, 0, self.tickets, work));
    }

    fn submit_event(&mut self, engine: &mut Engine, event: u32) {
        let recording = self.tickets + 1;
        self.submit(engine, Work::Record { event, recording });
    }

    /// Corrects the charge of a kernel at its end.
    pub(crate) fn on_event(&mut self, event: u32, at_us: u64) {
        let start_us = std::mem::replace(&mut self.start_us, at_us);
        if event == START {
            return;
        }
        let raw_us = at_us - start_us;
        let own_us = self.own_time.of_ns(raw_us * NS_PER_US) / NS_PER_US;
        let charged_us = self.charges_us.pop_front().unwrap();
        self.cost_us = (self.cost_us * 15 + own_us) / 16;
        let bucket = Bucket::new(&self.header);
        if own_us > charged_us {
            bucket.charge(own_us - charged_us);
        } else {
            bucket.repay(charged_us - own_us);
        }
        self.gpu_time_us = (self.gpu_time_us + own_us).saturating_sub(charged_us);
        if self.load.host_us > 0 {
            self.not_before_us = at_us + self.load.host_us;
        }
    }

    /// Returns whether the share resumes or goes idle.
    pub(crate) fn activity_change(&mut self, now_us: u64) -> Option<ActivityChange> {
        let is_poll = self.activity.is_lent() || now_us.is_multiple_of(POLL_US);
        if !(is_poll && self.activity.is_polled(now_us)) {
            return None;
        }
        let header = self.region_header();
        let is_in_debt = self
            .activity
            .is_in_debt(&header, now_us, self.pace_us_per_s);
        self.activity.poll(now_us, &header, is_in_debt)
    }

    /// Returns the header of its usage region.
    fn region_header(&self) -> RegionHeader {
        let share = ShareUsage {
            total_bytes: 0,
            peak_bytes: 0,
            denied: 0,
            reclaimed: 0,
            credit_us: Bucket::new(&self.header).credit_us(),
            last_demand_us: self.wanted_us,
            admission_timeouts: 0,
            busy_until_us: 0,
            memory_demand_us: 0,
            demanded: 0,
        };
        RegionHeader {
            share,
            refilled_us: self.header.refilled_us.load(),
            slots_in_use: 1,
        }
    }

    fn rate(&self) -> u32 {
        self.limits.rate_us_per_s.unwrap_or(0)
    }

    /// Applies a decision of the controller.
    pub(crate) fn apply(&mut self, decision: Decision) {
        self.limits.rate_us_per_s = Some(decision.rate_us_per_s);
        self.pace_us_per_s = decision.pace_us_per_s;
        self.own_time = decision.own_time;
        self.activity.set_lent(decision.is_lent);
    }

    /// Returns the measurement by the values that the agent reads in the region.
    pub(crate) fn measure(&mut self, now_us: u64) -> Measured {
        let header = self.region_header();
        let is_in_debt = self
            .activity
            .is_in_debt(&header, now_us, self.pace_us_per_s);
        let is_limited = u64::from(self.rate()) < SECOND_US;
        let now = Counters {
            gpu_time_us: self.gpu_time_us.max(self.seen.gpu_time_us),
            throttled_us: self.throttled_us,
            launches: self.launched as u64,
        };
        let seen = &mut self.seen;
        let read = || {
            let before = std::mem::replace(seen, now);
            Some(UsageDelta {
                used_us: now.gpu_time_us - before.gpu_time_us,
                throttled_us: now.throttled_us - before.throttled_us,
                launches: now.launches - before.launches,
                long_kernel_us: None,
            })
        };
        let activity = &mut self.activity;
        activity
            .measure(&header, is_in_debt, is_limited, read)
            .measured
    }
}
