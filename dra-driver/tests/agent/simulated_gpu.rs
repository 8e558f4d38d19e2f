//! Simulated shares of one GPU in virtual time, with libvgpu's bucket, on the engine of the simulated machine.
//!
//! The length of a kernel by events is the wall-clock time from its start to its end, slices of other contexts included.
//! Shares launch when their bucket permits, sleep as libvgpu does, and correct the charge of a kernel at its end. The
//! controller gets the values that the agent reads in the regions, and of each of NVML's samples the busy time of each
//! share in whole percents.
//!
//! GPUs differ in what takes time besides kernels ([`Timing`]).

use std::cell::Cell;
use std::collections::VecDeque;

use drava_dra_driver::agent::policy::control::{ActivityChange, Controller, Decision, Measured};
use drava_vgpu_abi::Limits;
use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::bucket::{self, Bucket, Grant, LEASE_US};
use drava_vgpu_abi::contention::ALL_PPM;
use drava_vgpu_abi::region::Header;
use simulator_machine::kernel::engine::{Engine, Outcome, SAMPLE_PERIOD, Timing};
use simulator_machine::protocol::{ContextId, Nanos, Work};

use crate::workload::Workload;

/// Simulation step.
const STEP_US: u64 = 100;
/// NVML's sample period.
const SAMPLE_US: u64 = SAMPLE_PERIOD / NS_PER_US;
const NS_PER_US: Nanos = 1_000;
/// Control period of the agent, and polling of resumed shares: interval, duration, and silence until a share is idle.
const TICK_US: u64 = 100_000;
const POLL_US: u64 = 20_000;
const POLLING_US: u64 = 1_000_000;
const IDLE_AFTER_US: u64 = 40_000;
const SECOND_US: u64 = 1_000_000;

/// Slices shorter than the agent expects, and events that include the wait for the first slice.
pub(crate) const SHORT_SLICES: Timing = Timing {
    records_out_of_slice: true,
    ..Timing::slices_of(1_000 * NS_PER_US)
};

/// The hardware of the simulated machine.
pub(crate) const DEFAULT_SLICES: Timing = Timing::slices_of(2_000 * NS_PER_US);

/// Uneven slices, and time of context switches and events.
pub(crate) const PERTURBED: Timing = Timing {
    slice_deviation_percent: 40,
    context_switch: 50 * NS_PER_US,
    event: 2 * NS_PER_US,
    ..DEFAULT_SLICES
};

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

struct SimulatedShare {
    context: ContextId,
    load: Workload,
    header: Header<VirtualWord>,
    limits: Limits,
    own_time_ppm: u32,
    /// Charges of the kernels in flight.
    charges_us: VecDeque<u64>,
    launched: usize,
    tickets: u64,
    /// Time of the event before the running kernel.
    start_us: u64,
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
}

/// A GPU with shares and the agent's controller.
pub(crate) struct SimulatedGpu {
    engine: Engine,
    shares: Vec<SimulatedShare>,
    controller: Controller<usize>,
    now_us: u64,
    /// End of the last of NVML's samples that was read.
    sampled: Nanos,
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

    pub(crate) fn of(timing: Timing, loads: &[Workload]) -> Self {
        // The clock does not start at zero on a running machine.
        let mut engine = Engine::new(1, timing, SECOND_US * NS_PER_US);
        let share = |(context, load): (ContextId, &Workload)| SimulatedShare {
            context,
            load: load.clone(),
            header: Header::from_words(|| VirtualWord(Cell::new(0))),
            limits: Limits {
                cores: load.entitlement.cores,
                compute_policy: load.entitlement.policy,
                priority: load.entitlement.priority,
                ..Limits::memory(1 << 30)
            },
            own_time_ppm: ALL_PPM,
            charges_us: VecDeque::new(),
            launched: 0,
            tickets: 0,
            start_us: 0,
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
        };
        let contexts = (1..).map(ContextId);
        let shares: Vec<_> = contexts.zip(loads).map(share).collect();
        shares
            .iter()
            .for_each(|share| engine.add_context(share.context));
        Self {
            engine,
            shares,
            controller: Controller::default(),
            now_us: SECOND_US,
            sampled: 0,
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
        let before = self.used();
        let start_us = self.now_us;
        while ((self.now_us - start_us) as f64) < seconds * SECOND_US as f64 {
            self.step();
        }
        let elapsed = ((self.now_us - start_us) * NS_PER_US) as f64;
        self.used()
            .iter()
            .zip(before)
            .map(|(used, before)| (used - before) as f64 / elapsed * 100.0)
            .collect()
    }

    /// Returns the GPU time of each share.
    fn used(&self) -> Vec<Nanos> {
        let shares = self.shares.iter();
        shares
            .map(|share| self.engine.usage(share.context).1)
            .collect()
    }

    fn step(&mut self) {
        for share in &mut self.shares {
            share.launch(self.now_us, &mut self.engine);
        }
        self.now_us += STEP_US;
        self.execute();
        if !self.has_agent {
            return;
        }
        if self.now_us.is_multiple_of(TICK_US) {
            self.control();
        } else {
            self.update_activity();
        }
        self.observe();
    }

    /// Runs the GPU until now.
    fn execute(&mut self) {
        let mut outcomes = Vec::new();
        self.engine.advance(self.now_us * NS_PER_US, &mut outcomes);
        for outcome in outcomes {
            if let Outcome::Recorded {
                context, event, at, ..
            } = outcome
                && let Some(share) = self
                    .shares
                    .iter_mut()
                    .find(|share| share.context == context)
            {
                share.on_event(event, at / NS_PER_US);
            }
        }
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

    /// Passes NVML's next sample to the controller.
    fn observe(&mut self) {
        let sample = self.engine.samples().back();
        let Some(sample) = sample.filter(|sample| sample.end > self.sampled) else {
            return;
        };
        self.sampled = sample.end;
        let says = (self.sample_percent)(self.now_us - SECOND_US);
        let seen = |share: &SimulatedShare| {
            let busy = sample.busy.get(&share.context).copied().unwrap_or(0);
            let percent = busy * says / SAMPLE_PERIOD;
            let cut_off = u64::from((1..100).contains(&percent));
            (percent * 10 + cut_off * 5) * SAMPLE_US / 1000
        };
        let seen: Vec<_> = self.shares.iter().map(seen).enumerate().collect();
        self.controller.observe(SAMPLE_US, &seen);
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
    fn launch(&mut self, now_us: u64, engine: &mut Engine) {
        if !(self.load.is_active)(now_us - SECOND_US) || now_us < self.not_before_us {
            return;
        }
        while self.charges_us.len() < self.load.depth {
            let bucket = Bucket::new(&self.header);
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
    fn on_event(&mut self, event: u32, at_us: u64) {
        let start_us = std::mem::replace(&mut self.start_us, at_us);
        if event == START {
            return;
        }
        let raw_us = at_us - start_us;
        let own_us = raw_us * u64::from(self.own_time_ppm) / u64::from(ALL_PPM);
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
