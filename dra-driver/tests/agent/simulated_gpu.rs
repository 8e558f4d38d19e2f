//! Simulated shares of one GPU in virtual time, with libvgpu's bucket.
//!
//! The GPU runs one context at a time, round-robin in time slices, as hardware does. The length of a kernel by events is
//! the wall-clock time from its start to its end, slices of other contexts included. Shares launch when their bucket
//! permits, sleep as libvgpu does, and correct the charge of a kernel at its end. The controller gets the values that the
//! agent reads in the regions, and six times per second the busy time of each share in whole percents.
//!
//! GPUs differ in the length of a slice and in the event before a kernel that waits for its slice ([`Hardware`]).

use std::cell::Cell;
use std::collections::VecDeque;

use drava_dra_driver::agent::policy::control::{ActivityChange, Controller, Decision, Measured};
use drava_vgpu_abi::Limits;
use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::bucket::{self, Bucket, Grant, LEASE_US};
use drava_vgpu_abi::contention::ALL_PPM;
use drava_vgpu_abi::region::Header;

use crate::workload::Workload;

/// Simulation step.
const STEP_US: u64 = 100;
/// NVML's sample period.
const SAMPLE_US: u64 = 166_600;
/// Control period of the agent, and polling of resumed shares: interval, duration, and silence until a share is idle.
const TICK_US: u64 = 100_000;
const POLL_US: u64 = 20_000;
const POLLING_US: u64 = 1_000_000;
const IDLE_AFTER_US: u64 = 40_000;
const SECOND_US: u64 = 1_000_000;

/// A GPU model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hardware {
    /// Time slice.
    pub(crate) slice_us: u64,
    /// Whether an event in an idle stream is recorded only in a slice of its context.
    pub(crate) records_in_turn: bool,
}

/// Slices shorter than the agent expects, and events that include the wait for the first slice.
pub(crate) const SHORT_SLICES: Hardware = Hardware {
    slice_us: 1_000,
    records_in_turn: false,
};

/// The hardware of the simulated machine.
pub(crate) const DEFAULT_SLICES: Hardware = Hardware {
    slice_us: 2_000,
    records_in_turn: true,
};

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

struct Kernel {
    left_us: u64,
    charged_us: u64,
}

struct SimulatedShare {
    load: Workload,
    header: Header<VirtualWord>,
    limits: Limits,
    own_time_ppm: u32,
    queue: VecDeque<Kernel>,
    launched: usize,
    /// Start of the running kernel by its event; `None` before the event.
    start_us: Option<u64>,
    not_before_us: u64,
    /// Taken from the bucket and not yet used.
    lease_us: u64,
    waits: bool,
    /// Moving average, as in the cost table.
    cost_us: u64,
    gpu_time_us: u64,
    throttled_us: u64,
    wanted_us: u64,
    seen: (u64, u64, u64),
    seen_launched: usize,
    launch_us: u64,
    was_idle: bool,
    is_lent: bool,
    demand_us: u64,
    polled_until_us: u64,
    seen_busy_us: u64,
    used_us: u64,
}

/// A GPU with shares and the agent's controller.
pub(crate) struct SimulatedGpu {
    hardware: Hardware,
    shares: Vec<SimulatedShare>,
    controller: Controller<usize>,
    now_us: u64,
    running: usize,
    slice_us: u64,
    stepped_us: u64,
    /// Whether the agent runs.
    has_agent: bool,
    /// Returns NVML's value in percent of the true value, at a time, µs.
    sample_percent: fn(u64) -> u64,
}

impl SimulatedGpu {
    pub(crate) fn new(loads: &[Workload]) -> Self {
        Self::of(SHORT_SLICES, loads)
    }

    pub(crate) fn of(hardware: Hardware, loads: &[Workload]) -> Self {
        let share = |load: &Workload| SimulatedShare {
            load: load.clone(),
            header: Header::from_words(|| VirtualWord(Cell::new(0))),
            limits: Limits {
                cores: load.entitlement.cores,
                compute_policy: load.entitlement.policy,
                priority: load.entitlement.priority,
                ..Limits::memory(1 << 30)
            },
            own_time_ppm: ALL_PPM,
            queue: VecDeque::new(),
            launched: 0,
            start_us: None,
            not_before_us: 0,
            lease_us: 0,
            waits: false,
            cost_us: 2_000,
            gpu_time_us: 0,
            throttled_us: 0,
            wanted_us: 0,
            seen: (0, 0, 0),
            seen_launched: 0,
            launch_us: 0,
            was_idle: true,
            is_lent: false,
            demand_us: 0,
            polled_until_us: 0,
            seen_busy_us: 0,
            used_us: 0,
        };
        Self {
            hardware,
            shares: loads.iter().map(share).collect(),
            controller: Controller::default(),
            // The clock does not start at zero on a running machine.
            now_us: SECOND_US,
            running: 0,
            slice_us: 0,
            stepped_us: SECOND_US,
            has_agent: true,
            sample_percent: |_| 100,
        }
    }

    /// Sets NVML's value in percent of the true value, by time.
    pub(crate) fn distort_samples(&mut self, sample_percent: fn(u64) -> u64) {
        self.sample_percent = sample_percent;
    }

    /// Stops the agent.
    pub(crate) fn stop_agent(&mut self) {
        self.has_agent = false;
    }

    /// Returns the seconds since the start.
    pub(crate) fn now_s(&self) -> f64 {
        (self.now_us - SECOND_US) as f64 / SECOND_US as f64
    }

    /// Runs for `seconds` and returns the percentage of the GPU that each share used.
    pub(crate) fn run(&mut self, seconds: f64) -> Vec<f64> {
        let before: Vec<u64> = self.shares.iter().map(|share| share.used_us).collect();
        let start_us = self.now_us;
        while ((self.now_us - start_us) as f64) < seconds * SECOND_US as f64 {
            self.step();
        }
        let elapsed = (self.now_us - start_us) as f64;
        self.shares
            .iter()
            .zip(before)
            .map(|(share, before)| (share.used_us - before) as f64 / elapsed * 100.0)
            .collect()
    }

    fn step(&mut self) {
        for share in &mut self.shares {
            share.launch(self.now_us, self.hardware);
        }
        self.execute();
        self.now_us += STEP_US;
        if !self.has_agent {
            return;
        }
        if self.now_us.is_multiple_of(TICK_US) {
            self.control();
        } else {
            self.update_activity();
        }
        if self.now_us.is_multiple_of(SAMPLE_US) {
            self.observe();
        }
    }

    fn execute(&mut self) {
        let count = self.shares.len();
        let ready = |index: usize| !self.shares[index].queue.is_empty();
        if self.slice_us == 0 || !ready(self.running) {
            let next = (1..=count)
                .map(|offset| (self.running + offset) % count)
                .find(|index| ready(*index));
            let Some(next) = next else {
                self.slice_us = 0;
                return;
            };
            self.running = next;
            self.slice_us = self.hardware.slice_us;
        }
        self.slice_us -= STEP_US;
        self.shares[self.running].execute(self.now_us);
    }

    fn control(&mut self) {
        let now_us = self.now_us;
        let shares: Vec<_> = self
            .shares
            .iter_mut()
            .enumerate()
            .map(|(id, t)| (id, t.load.entitlement, t.measure(now_us)))
            .collect();
        let elapsed_us = self.now_us - self.stepped_us;
        self.stepped_us = self.now_us;
        let decisions = self.controller.tick(elapsed_us, &shares);
        self.apply(decisions);
    }

    /// Lets the controller react to lent shares that resume, and to polled shares that go idle.
    fn update_activity(&mut self) {
        let now_us = self.now_us;
        let turns = self
            .shares
            .iter_mut()
            .map(|share| share.activity_change(now_us));
        let turned: Vec<(usize, ActivityChange)> = turns
            .enumerate()
            .filter_map(|(id, turn)| Some((id, turn?)))
            .collect();
        if turned.is_empty() {
            return;
        }
        let entitlement = self.shares.iter().map(|share| share.load.entitlement);
        let shares: Vec<_> = entitlement.enumerate().collect();
        let decisions = self.controller.on_activity_change(&shares, &turned);
        self.apply(decisions);
    }

    fn apply(&mut self, decisions: Vec<(usize, Decision)>) {
        for (id, decision) in decisions {
            self.shares[id].limits.rate_us_per_s = Some(decision.rate_us_per_s);
            self.shares[id].is_lent = decision.is_lent;
            self.shares[id].own_time_ppm = decision.own_time_ppm;
        }
    }

    fn observe(&mut self) {
        let says = (self.sample_percent)(self.now_us - SECOND_US);
        let seen = |share: &mut SimulatedShare| {
            let percent = std::mem::take(&mut share.seen_busy_us) * says / SAMPLE_US;
            let cut_off = u64::from((1..100).contains(&percent));
            (percent * 10 + cut_off * 5) * SAMPLE_US / 1000
        };
        let seen: Vec<_> = self.shares.iter_mut().map(seen).enumerate().collect();
        let busy_us = seen.iter().map(|(_, us)| us).sum::<u64>().min(SAMPLE_US);
        self.controller.observe(SAMPLE_US, busy_us, &seen);
    }

    /// Returns the rates in the pages.
    pub(crate) fn rates(&self) -> Vec<Option<u32>> {
        self.shares
            .iter()
            .map(|share| share.limits.rate_us_per_s)
            .collect()
    }
}

impl SimulatedShare {
    fn launch(&mut self, now_us: u64, hardware: Hardware) {
        if !(self.load.is_active)(now_us - SECOND_US) || now_us < self.not_before_us {
            return;
        }
        let bucket = Bucket::new(&self.header);
        while self.queue.len() < self.load.depth {
            let grant = Grant::of(&self.limits, bucket::TokenSlice::default(), now_us);
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
            }
            if self.queue.is_empty() {
                self.start_us = (!hardware.records_in_turn).then_some(now_us);
            }
            let length = self.load.kernels_us[self.launched % self.load.kernels_us.len()];
            let length = length * (self.load.kernel_scale)(now_us - SECOND_US);
            self.launched += 1;
            self.queue.push_back(Kernel {
                left_us: length,
                charged_us: self.cost_us,
            });
            self.gpu_time_us += self.cost_us;
        }
    }

    fn execute(&mut self, now_us: u64) {
        self.used_us += STEP_US;
        self.seen_busy_us += STEP_US;
        let Some(kernel) = self.queue.front_mut() else {
            return;
        };
        let start_us = *self.start_us.get_or_insert(now_us);
        kernel.left_us = kernel.left_us.saturating_sub(STEP_US);
        if kernel.left_us > 0 {
            return;
        }
        let end_us = now_us + STEP_US;
        let raw_us = end_us - start_us;
        self.start_us = Some(end_us);
        let own_us = raw_us * u64::from(self.own_time_ppm) / u64::from(ALL_PPM);
        let charged_us = kernel.charged_us;
        self.queue.pop_front();
        self.cost_us = (self.cost_us * 15 + own_us) / 16;
        let bucket = Bucket::new(&self.header);
        if own_us > charged_us {
            bucket.charge(own_us - charged_us);
        } else {
            bucket.repay(charged_us - own_us);
        }
        self.gpu_time_us = (self.gpu_time_us + own_us).saturating_sub(charged_us);
        if self.load.host_us > 0 {
            self.not_before_us = end_us + self.load.host_us;
        }
    }

    /// Returns whether the share resumes or goes idle.
    fn activity_change(&mut self, now_us: u64) -> Option<ActivityChange> {
        let before_us = std::mem::replace(&mut self.demand_us, self.wanted_us);
        if self.is_lent && before_us != self.wanted_us {
            self.polled_until_us = now_us + POLLING_US;
            self.is_lent = false;
            return Some(ActivityChange::Resumed);
        }
        let is_polled =
            !self.is_lent && now_us < self.polled_until_us && now_us.is_multiple_of(POLL_US);
        let is_quiet = now_us - self.wanted_us >= IDLE_AFTER_US;
        (is_polled && is_quiet && !self.is_in_debt(now_us)).then_some(ActivityChange::Idle)
    }

    fn is_in_debt(&self, now_us: u64) -> bool {
        let rate = u64::from(self.limits.rate_us_per_s.unwrap_or(0));
        let gained = (now_us - self.header.refilled_us.load()) * rate / SECOND_US;
        Bucket::new(&self.header).credit_us().min(0).unsigned_abs() > gained
    }

    /// Returns the values that the agent reads in the region.
    fn measure(&mut self, now_us: u64) -> Measured {
        let (gpu_time_us, throttled_us, wanted_us) = self.seen;
        self.seen = (
            self.gpu_time_us.max(gpu_time_us),
            self.throttled_us,
            self.wanted_us,
        );
        let in_debt = self.is_in_debt(now_us);
        let is_idle = self.is_lent && self.wanted_us == self.demand_us && !in_debt;
        self.demand_us = self.wanted_us;
        if wanted_us == self.wanted_us {
            self.was_idle = !in_debt;
            return Measured {
                used_us: 0,
                launches: 0,
                has_waited: in_debt,
                launch_us: self.launch_us,
                is_idle,
            };
        }
        let has_waited = self.throttled_us > throttled_us || in_debt || self.was_idle;
        let has_waited = has_waited && !is_idle;
        self.was_idle = is_idle;
        let used_us = self.gpu_time_us.saturating_sub(gpu_time_us);
        let launches = (self.launched - self.seen_launched) as u64;
        self.seen_launched = self.launched;
        if let Some(mean_us) = used_us.checked_div(launches).filter(|us| *us > 0) {
            self.launch_us = mean_us;
        }
        Measured {
            used_us,
            launches,
            has_waited,
            launch_us: self.launch_us,
            is_idle,
        }
    }
}
