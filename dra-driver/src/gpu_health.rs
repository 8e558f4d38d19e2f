//! Health of the node's GPUs: XIDs, memory errors, lost and hung GPUs.
//!
//! | Part | Responsibility |
//! |---|---|
//! | [`state`] | health of one GPU as a pure state machine, and the rules of recovery |
//! | [`fabric_manager`] | registration with the NVLink fabric of GPUs for which NVML does not report it |
//! | [`HealthTable`] | states of all GPUs, fed by the thread of each GPU ([`crate::metrics::gpu_monitor`]) |
//! | [`record`] | faults in the run directory, for the next instance of the driver |
//!
//! Consumers watch [`HealthTable::subscribe`]: the publisher taints devices, [`crate::repair::health_report`] writes conditions
//! and events, the exporter shows gauges.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use drava_api::node_profile::XidOverrides;
use drava_nvml::GpuUuid;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::gpus::inventory::{NodeInventory, State};

pub mod fabric_manager;
pub mod record;
pub mod state;

use record::RecordFile;
use state::{Fault, GpuHealth, GpuState, Observation, Rules, Scope};

/// Time between two checks for expired faults and hung GPUs.
const TICK: Duration = Duration::from_secs(1);

/// Health by GPU.
pub type HealthByGpu = BTreeMap<GpuUuid, GpuHealth>;

/// Faults by GPU, as recorded for the next instance of the driver.
pub type RecordedFaults = BTreeMap<GpuUuid, Vec<(Scope, Fault)>>;

/// Health of the node's GPUs; clones share the table.
#[derive(Debug, Clone)]
pub struct HealthTable(Arc<Table>);

#[derive(Debug)]
struct Table {
    rules: Rules,
    /// XIDs with another effect by the node profile, by GPU.
    overrides: Mutex<BTreeMap<GpuUuid, XidOverrides>>,
    states: Mutex<States>,
    health: watch::Sender<Arc<HealthByGpu>>,
}

/// States of the GPUs that were seen or recorded.
type States = BTreeMap<GpuUuid, GpuState>;

impl HealthTable {
    /// Returns an empty table.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self(Arc::new(Table {
            rules,
            overrides: Mutex::default(),
            states: Mutex::default(),
            health: watch::Sender::default(),
        }))
    }

    /// Returns a receiver of the health of all known GPUs.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Arc<HealthByGpu>> {
        self.0.health.subscribe()
    }

    /// Sets the GPUs that an earlier instance of the driver knew, with the faults that it recorded. These GPUs are unhealthy at
    /// once, so that no publication without taints comes first. A GPU that is not on the node any more is lost.
    pub fn restore(&self, recorded: RecordedFaults, now: Instant) {
        let mut states = self.lock();
        for (gpu, faults) in recorded {
            states.insert(gpu, GpuState::new(faults, now));
        }
        self.publish(&states, now);
    }

    /// Sets which GPUs NVML lists. A GPU that was listed before and is not is lost, until it is listed again.
    pub fn set_inventory(&self, inventory: &NodeInventory, now: Instant) {
        let (gpus, faults) = (&inventory.nvml.gpus, &inventory.nvml.faults);
        let mut states = self.lock();
        for (uuid, state) in states.iter_mut() {
            if gpus.iter().any(|gpu| gpu.uuid == *uuid) {
                continue;
            }
            // A GPU that left the bus often has no readable UUID; one with a UUID failed another query.
            let mut faults = faults.iter();
            let fault = faults.find(|fault| fault.gpu.as_ref() == Some(uuid));
            let observation = fault.map_or(Observation::Missing, |fault| {
                Observation::Refusal(fault.status.clone())
            });
            state.observe(&observation, &self.0.rules, now);
        }
        let mut overrides = self.overrides();
        for gpu in gpus {
            let state = states.entry(gpu.uuid.clone());
            let state = state.or_insert_with(|| GpuState::new([], now));
            let settings = inventory.gpu_settings(gpu.uuid.as_str());
            // Without settings the profiles are not known yet: recorded faults stay.
            if inventory.settings.is_some()
                && overrides.insert(gpu.uuid.clone(), settings.xids.clone())
                    != Some(settings.xids.clone())
            {
                state.forget_ignored(&self.0.rules.xids.overridden(&settings.xids));
            }
        }
        drop(overrides);
        self.publish(&states, now);
    }

    fn overrides(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, XidOverrides>> {
        // The map is valid after a panic: every change is one operation.
        let overrides = self.0.overrides.lock();
        overrides.unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rules of a GPU.
    fn rules_of(&self, gpu: &GpuUuid) -> Rules {
        let rules = &self.0.rules;
        Rules {
            xids: match self.overrides().get(gpu) {
                Some(overrides) => rules.xids.overridden(overrides),
                None => rules.xids.clone(),
            },
            ..rules.clone()
        }
    }

    /// Processes an observation of a GPU.
    pub fn observe(&self, gpu: &GpuUuid, observation: &Observation, now: Instant) {
        let rules = self.rules_of(gpu);
        let mut states = self.lock();
        if let Some(state) = states.get_mut(gpu) {
            state.observe(observation, &rules, now);
        }
        self.publish(&states, now);
    }

    /// Checks for expired faults and for GPUs that do not respond. Without `is_nvml_available` no GPU can respond.
    pub fn tick(&self, is_nvml_available: bool, now: Instant) {
        let mut states = self.lock();
        for state in states.values_mut() {
            if !is_nvml_available {
                state.interrupt(now);
            }
            state.expire(&self.0.rules, now);
        }
        self.publish(&states, now);
    }

    /// Returns the faults that the next instance of the driver must know.
    #[must_use]
    pub fn recorded(&self) -> RecordedFaults {
        let states = self.lock();
        let faults = |(gpu, state): (&GpuUuid, &GpuState)| {
            let faults: Vec<_> = state.recorded().collect();
            (!faults.is_empty()).then(|| (gpu.clone(), faults))
        };
        states.iter().filter_map(faults).collect()
    }

    fn publish(&self, states: &States, now: Instant) {
        let health =
            |(gpu, state): (&GpuUuid, &GpuState)| (gpu.clone(), state.health(&self.0.rules, now));
        let health: HealthByGpu = states.iter().map(health).collect();
        self.0.health.send_if_modified(|present| {
            let is_changed = **present != health;
            if is_changed {
                *present = Arc::new(health);
            }
            is_changed
        });
    }

    fn lock(&self) -> MutexGuard<'_, States> {
        // The states are valid after a panic: each change of a state is complete or was not begun.
        let states = self.0.states.lock();
        states.unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks the table each [`TICK`] and records its faults when they change, until `stop`. Only the active instance calls
/// this.
pub async fn run(
    table: HealthTable,
    gpus: watch::Receiver<State>,
    record: RecordFile,
    stop: CancellationToken,
) {
    let mut recorded = table.recorded();
    let mut health = table.subscribe();
    loop {
        health.mark_unchanged();
        let is_nvml_available = matches!(*gpus.borrow(), State::Known(_));
        table.tick(is_nvml_available, Instant::now());
        let present = table.recorded();
        if present != recorded {
            // A failed write is repeated with the next tick.
            match record.write(&present) {
                Ok(()) => recorded = present,
                Err(error) => {
                    tracing::warn!(path = %record.path().display(), %error, "cannot record the faults of the GPUs");
                }
            }
        }
        if stop.is_cancelled() {
            return;
        }
        tokio::select! {
            // A change of the last moment is recorded too.
            () = stop.cancelled() => {}
            // The table holds the sender.
            _ = health.changed() => {}
            () = tokio::time::sleep(TICK) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use drava_nvml::EventKind;

    use super::*;

    #[test]
    fn restores_fault_before_gpu_is_listed() {
        let gpu = GpuUuid::new("GPU-1");
        let faults = RecordedFaults::from([(gpu.clone(), vec![(Scope::Gpu, Fault::Xid(79))])]);
        let table = HealthTable::new(Rules::default());
        table.restore(faults.clone(), Instant::now());
        let health = table.subscribe().borrow().clone();
        assert_eq!(health[&gpu].gpu, Some(Fault::Xid(79)));
        assert_eq!(table.recorded(), faults);
    }

    #[test]
    fn ignores_observation_of_unknown_gpu() {
        let table = HealthTable::new(Rules::default());
        let xid = Observation::Event(EventKind::Xid(48), Scope::Gpu);
        table.observe(&GpuUuid::new("GPU-1"), &xid, Instant::now());
        assert!(table.subscribe().borrow().is_empty());
    }
}
