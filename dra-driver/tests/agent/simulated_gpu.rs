//! Simulated shares of one GPU in virtual time, with libvgpu's bucket, on the engine of the simulated machine.
//!
//! The length of a kernel by events is the wall-clock time from its start to its end, slices of other contexts included.
//! Shares launch when their bucket permits, sleep as libvgpu does, and correct the charge of a kernel at its end. The
//! controller gets the values that the agent reads in the regions.
//!
//! GPUs differ in what takes time besides kernels ([`Timing`]).

use drava_dra_driver::agent::policy::control::{ActivityChange, Controller, Decision};
use simulator_machine::kernel::engine::{Engine, Outcome, Timing};
use simulator_machine::protocol::{ContextId, Nanos};

use crate::simulated_share::SimulatedShare;
use crate::workload::Workload;

/// Simulation step.
const STEP_US: u64 = 100;
pub(crate) const NS_PER_US: Nanos = 1_000;
/// Control period of the agent.
const TICK_US: u64 = 100_000;
pub(crate) const SECOND_US: u64 = 1_000_000;

/// A GPU that loses no time between slices.
pub(crate) const NO_SWITCHES: Timing = Timing::slices_of(2_000 * NS_PER_US);

/// An H200 by `docs/results/raw/gpu-h200.md`, and the simulated machine: between slices of 2.05 ms nothing runs for 0.2 ms.
pub(crate) const H200: Timing = Timing {
    context_switch: 200 * NS_PER_US,
    ..Timing::slices_of(2_050 * NS_PER_US)
};

/// A GPU with shares and the agent's controller.
pub(crate) struct SimulatedGpu {
    engine: Engine,
    shares: Vec<SimulatedShare>,
    controller: Controller<usize>,
    now_us: u64,
    stepped_us: u64,
    /// Whether the agent runs.
    has_agent: bool,
}

impl SimulatedGpu {
    pub(crate) fn new(loads: &[Workload]) -> Self {
        Self::of(H200, loads)
    }

    pub(crate) fn of(timing: Timing, loads: &[Workload]) -> Self {
        // The clock does not start at zero on a running machine.
        let mut engine = Engine::new(1, timing, SECOND_US * NS_PER_US);
        let contexts = (1..).map(ContextId);
        let shares: Vec<_> = contexts
            .zip(loads)
            .map(|(context, load)| SimulatedShare::new(context, load))
            .collect();
        shares
            .iter()
            .for_each(|share| engine.add_context(share.context));
        Self {
            engine,
            shares,
            controller: Controller::default(),
            now_us: SECOND_US,
            stepped_us: SECOND_US,
            has_agent: true,
        }
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
            self.shares[id].apply(decision);
        }
    }

    /// Runs for `seconds` and returns the percentage of the GPU that each share was charged.
    pub(crate) fn run_charged(&mut self, seconds: f64) -> Vec<f64> {
        let charged =
            |gpu: &Self| -> Vec<u64> { gpu.shares.iter().map(|share| share.gpu_time_us).collect() };
        let before = charged(self);
        self.run(seconds);
        let of_gpu = |us: u64| us as f64 / (seconds * SECOND_US as f64) * 100.0;
        let after = charged(self);
        after
            .iter()
            .zip(before)
            .map(|(after, before)| of_gpu(after - before))
            .collect()
    }

    /// Returns the rates in the pages.
    pub(crate) fn rates(&self) -> Vec<Option<u32>> {
        self.shares
            .iter()
            .map(|share| share.limits.rate_us_per_s)
            .collect()
    }
}
