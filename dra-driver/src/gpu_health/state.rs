//! Health of one GPU as a state machine. Pure: no I/O, no clock.
//!
//! A fault is set by an event of NVML and holds for the whole GPU, or for the memory slices of a MIG instance. It ends
//! - when the recovery was seen: the GPU was gone and answers again, its counter of energy begins again, as after a reset and a
//!   reload of the NVIDIA driver, or the NVIDIA driver withdrew its recovery action,
//! - or when the GPU answered for the recovery window without another fatal event. After an XID that calls for a reset, this
//!   needs an NVIDIA driver that reports recovery actions (since 565), and none: the time alone does not reset a GPU.
//!
//! A GPU that is gone, that does not answer, whose NVLink fabric is not ready, whose memory could not be repaired, or for which
//! the NVIDIA driver requests a recovery action is unhealthy as long as this lasts.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use drava_api::xid::{self, XidClass, XidPolicy};
use drava_nvml::{
    EventKind, FabricDefect, FabricHealth, FabricState, MemoryRepair, Placement, RecoveryAction,
    Sensor, Status,
};
use serde::{Deserialize, Serialize};

use crate::node::options::HealthOptions;

/// Rules of the state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// Classes of XIDs.
    pub xids: XidPolicy,
    /// Time without a fatal event after which a GPU that answers is healthy.
    pub recovery_window: Duration,
    /// Time without an answer after which a GPU is unhealthy.
    pub response_limit: Duration,
    /// Time after which a GPU is unhealthy whose NVLink fabric is not ready. The fabric manager takes its time after a boot.
    pub fabric_limit: Duration,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            xids: XidPolicy::default(),
            recovery_window: Duration::from_secs(600),
            response_limit: Duration::from_secs(30),
            fabric_limit: Duration::from_secs(120),
        }
    }
}

impl From<&HealthOptions> for Rules {
    fn from(options: &HealthOptions) -> Self {
        Self {
            xids: XidPolicy {
                ignored: options.xid_ignore.iter().copied().collect(),
                fatal: options.xid_fatal.iter().copied().collect(),
            },
            recovery_window: options.health_recovery_window,
            ..Self::default()
        }
    }
}

/// Why a GPU or a MIG instance is unhealthy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Fault {
    /// The GPU has fallen off the bus.
    Lost,
    /// NVML calls do not return.
    NotResponding,
    /// A fatal XID.
    Xid(u64),
    /// An uncorrectable memory error.
    DoubleBitEcc,
    /// The NVIDIA driver reports the GPU as unavailable.
    Unavailable,
    /// The GPU is not part of its NVLink fabric.
    FabricNotReady,
    /// A faulty row of the memory could not be remapped.
    MemoryRepairFailed,
    /// The GPU must be reset.
    GpuReset,
    /// The node must be rebooted.
    NodeReboot,
    /// Peer-to-peer traffic must end.
    DrainP2p,
    /// All programs must end, and the GPU must be reset.
    DrainAndReset,
    /// Another recovery action.
    OtherAction(u64),
}

impl Fault {
    /// Returns the value of the taint, such as `xid-79`.
    #[must_use]
    pub fn value(self) -> String {
        match self {
            Self::Lost => "lost".to_owned(),
            Self::NotResponding => "not-responding".to_owned(),
            Self::Xid(xid) => format!("xid-{xid}"),
            Self::DoubleBitEcc => "ecc-double-bit".to_owned(),
            Self::Unavailable => "unavailable".to_owned(),
            Self::FabricNotReady => "fabric-not-ready".to_owned(),
            Self::MemoryRepairFailed => "memory-repair-failed".to_owned(),
            Self::GpuReset => "needs-gpu-reset".to_owned(),
            Self::NodeReboot => "needs-node-reboot".to_owned(),
            Self::DrainP2p => "needs-p2p-drain".to_owned(),
            Self::DrainAndReset => "needs-drain-and-reset".to_owned(),
            Self::OtherAction(action) => format!("needs-action-{action}"),
        }
    }

    /// Returns what ends the fault.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::FabricNotReady => {
                "start the fabric manager of the NVIDIA driver's version on the node (nvidia-fabricmanager, with nvlsm on HGX \
                 B200 and later)"
            }
            Self::MemoryRepairFailed => "replace its pods, then replace the GPU",
            Self::Lost
            | Self::NotResponding
            | Self::Xid(_)
            | Self::DoubleBitEcc
            | Self::Unavailable
            | Self::GpuReset
            | Self::NodeReboot
            | Self::DrainP2p
            | Self::DrainAndReset
            | Self::OtherAction(_) => "replace its pods, then reset the GPU or reboot the node",
        }
    }

    /// Returns whether time without further errors is no recovery.
    fn needs_reset(self) -> bool {
        match self {
            Self::Xid(number) => xid::needs_reset(number),
            Self::DoubleBitEcc => true,
            Self::Lost
            | Self::NotResponding
            | Self::Unavailable
            | Self::FabricNotReady
            | Self::MemoryRepairFailed
            | Self::GpuReset
            | Self::NodeReboot
            | Self::DrainP2p
            | Self::DrainAndReset
            | Self::OtherAction(_) => false,
        }
    }

    const fn of_action(action: RecoveryAction) -> Option<Self> {
        match action {
            RecoveryAction::None => None,
            RecoveryAction::GpuReset => Some(Self::GpuReset),
            RecoveryAction::NodeReboot => Some(Self::NodeReboot),
            RecoveryAction::DrainP2p => Some(Self::DrainP2p),
            RecoveryAction::DrainAndReset => Some(Self::DrainAndReset),
            RecoveryAction::Other(action) => Some(Self::OtherAction(action)),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => f.write_str("the GPU has fallen off the bus"),
            Self::NotResponding => f.write_str("NVML calls for the GPU do not return"),
            Self::Xid(number) => write!(f, "XID {number}: {}", xid::meaning(*number)),
            Self::DoubleBitEcc => f.write_str("uncorrectable double-bit ECC error"),
            Self::Unavailable => f.write_str("the NVIDIA driver reports the GPU as unavailable"),
            Self::FabricNotReady => f.write_str(
                "the GPU is not registered with its NVLink fabric, so CUDA programs fail with error 802 (system not ready)",
            ),
            Self::MemoryRepairFailed => {
                f.write_str("a faulty row of the memory could not be remapped")
            }
            Self::GpuReset => f.write_str("the NVIDIA driver requests a reset of the GPU"),
            Self::NodeReboot => f.write_str("the NVIDIA driver requests a reboot of the node"),
            Self::DrainP2p => {
                f.write_str("the NVIDIA driver requests the end of peer-to-peer traffic")
            }
            Self::DrainAndReset => f.write_str(
                "the NVIDIA driver requests the end of all programs and a reset of the GPU",
            ),
            Self::OtherAction(action) => {
                write!(f, "the NVIDIA driver requests recovery action {action}")
            }
        }
    }
}

/// Part of a GPU that a fault concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// The whole GPU.
    Gpu,
    /// The memory slices of a MIG instance.
    Slices(Placement),
}

/// Answer of NVML about the health of a GPU. What a failed query reported before stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// Requested recovery action.
    pub action: Sensor<RecoveryAction>,
    /// Registration with the NVLink fabric.
    pub fabric: Sensor<FabricState>,
    /// Health of the NVLink fabric.
    pub fabric_health: Sensor<FabricHealth>,
    /// Repair of faulty memory.
    pub memory_repair: Sensor<MemoryRepair>,
    /// Energy since the GPU was reset or the NVIDIA driver was loaded, mJ.
    pub energy_millijoules: Sensor<u64>,
}

/// What was observed of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observation {
    /// NVML answered.
    Answer(Answer),
    /// NVML rejected a query.
    Refusal(Status),
    /// NVML reported an event about this part of the GPU.
    Event(EventKind, Scope),
    /// The GPU is missing in the inventory.
    Missing,
}

/// A fault of a GPU that does not make it unhealthy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Degradation {
    /// An XID that this version does not know.
    UnknownXid(u64),
    /// A repair of the memory waits for a reset.
    MemoryRepairPending,
    /// The NVLink fabric is not healthy.
    Fabric(FabricDefect),
}

impl fmt::Display for Degradation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownXid(xid) => write!(
                f,
                "XID {xid}, which this version of drava does not know; the GPU stays in use: see NVIDIA's XID catalog, and add the \
                 XID to driver.health.fatalXids of the drava chart if it must not"
            ),
            Self::Fabric(defect) => write!(
                f,
                "the NVLink fabric is not healthy: {defect}; the GPU stays in use, with slow or failing traffic to other GPUs: see \
                 the log of the fabric manager (nvidia-fabricmanager) and nvidia-smi -q on the node"
            ),
            Self::MemoryRepairPending => f.write_str(
                "faulty memory was found, and its repair takes effect at a reset; the GPU stays in use: reset it when its pods have \
                 ended",
            ),
        }
    }
}

/// Faults of a GPU at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuHealth {
    /// Fault of the whole GPU.
    pub gpu: Option<Fault>,
    /// Faults of MIG instances by their memory slices.
    pub instances: BTreeMap<Placement, Fault>,
    /// Faults that leave the GPU healthy.
    pub degradations: BTreeSet<Degradation>,
}

impl GpuHealth {
    /// Returns whether neither the GPU nor a MIG instance has a fault.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.gpu.is_none() && self.instances.is_empty()
    }

    /// Returns the fault of a device: of the GPU, or of a MIG instance that uses one of the memory slices of the device.
    /// Devices other than partitions have no `slices` and use all of the GPU.
    #[must_use]
    pub fn of_device(&self, slices: Option<Placement>) -> Option<Fault> {
        let mut instances = self.instances.iter();
        let overlaps =
            |placement: &Placement| slices.is_none_or(|slices| overlap(slices, *placement));
        self.gpu
            .or_else(|| Some(*instances.find(|(placement, _)| overlaps(placement))?.1))
    }

    /// Returns the faults with the part of the GPU.
    pub fn faults(&self) -> impl Iterator<Item = (Scope, Fault)> {
        let gpu = self.gpu.map(|fault| (Scope::Gpu, fault));
        let instances = self.instances.iter();
        gpu.into_iter()
            .chain(instances.map(|(placement, fault)| (Scope::Slices(*placement), *fault)))
    }
}

const fn overlap(one: Placement, other: Placement) -> bool {
    one.start < other.start.saturating_add(other.size)
        && other.start < one.start.saturating_add(one.size)
}

/// Health of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuState {
    /// Faults set by events, with the time of the last fatal event.
    faults: BTreeMap<Scope, (Fault, Instant)>,
    /// Unknown XIDs, with the time of the last one.
    unknown_xids: BTreeMap<u64, Instant>,
    /// Last counter of energy, mJ. It only grows until the GPU is reset.
    energy_millijoules: Option<u64>,
    contact: Contact,
}

/// Answers of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contact {
    /// The GPU answers.
    Answering {
        /// Time of the first answer without an interruption.
        since: Instant,
        /// Time of the last answer.
        last: Instant,
        /// Action that the NVIDIA driver requests.
        needs: Option<Fault>,
        /// Whether the NVIDIA driver reports recovery actions.
        reports_actions: bool,
        /// Time since which the fabric is not ready.
        fabric_waits_since: Option<Instant>,
        /// Repair of the memory.
        repair: MemoryRepair,
        /// Health of the fabric.
        fabric_health: FabricHealth,
    },
    /// The GPU is gone.
    Gone,
}

impl GpuState {
    /// Returns the state of a GPU that is first seen at `now`, with the faults of an earlier instance of the driver,
    /// whose recovery windows start again.
    #[must_use]
    pub fn new(recorded: impl IntoIterator<Item = (Scope, Fault)>, now: Instant) -> Self {
        let faults = recorded.into_iter();
        Self {
            faults: faults.map(|(scope, fault)| (scope, (fault, now))).collect(),
            unknown_xids: BTreeMap::new(),
            energy_millijoules: None,
            contact: Contact::Answering {
                since: now,
                last: now,
                needs: None,
                reports_actions: false,
                fabric_waits_since: None,
                repair: MemoryRepair::default(),
                fabric_health: FabricHealth::default(),
            },
        }
    }

    /// Processes an observation.
    pub fn observe(&mut self, observation: &Observation, rules: &Rules, now: Instant) {
        match observation {
            Observation::Answer(answer) => {
                let needs = match answer.action {
                    Sensor::Value(action) => Fault::of_action(action),
                    Sensor::Absent => None,
                    Sensor::Failed(_) => self.requested(),
                };
                if let Sensor::Value(energy) = answer.energy_millijoules {
                    let before = self.energy_millijoules.replace(energy);
                    if before.is_some_and(|before| energy < before) {
                        self.recover();
                    }
                }
                self.answer(needs, rules, now);
                self.set_reported(answer, now);
            }
            Observation::Refusal(Status::GpuLost) | Observation::Missing => {
                self.contact = Contact::Gone;
            }
            Observation::Refusal(Status::ResetRequired) => {
                self.answer(Some(Fault::GpuReset), rules, now);
            }
            // A GPU without a feature answers.
            Observation::Refusal(status) if status.is_absent() => self.answer(None, rules, now),
            // An error of NVML, not of the GPU.
            Observation::Refusal(_) => self.interrupt(now),
            Observation::Event(kind, scope) => self.event(*kind, *scope, rules, now),
        }
    }

    fn answer(&mut self, needs: Option<Fault>, rules: &Rules, now: Instant) {
        match &mut self.contact {
            Contact::Gone => {
                self.recover();
                self.contact = Self::new([], now).contact;
                self.answer(needs, rules, now);
            }
            Contact::Answering {
                since,
                last,
                needs: before,
                ..
            } => {
                let is_withdrawn = before.is_some() && needs.is_none();
                if now.duration_since(*last) > rules.response_limit {
                    *since = now;
                }
                (*last, *before) = (now, needs);
                if is_withdrawn {
                    self.recover();
                }
            }
        }
    }

    /// Returns the fault of the action that the NVIDIA driver requested last.
    const fn requested(&self) -> Option<Fault> {
        match self.contact {
            Contact::Answering { needs, .. } => needs,
            Contact::Gone => None,
        }
    }

    fn recover(&mut self) {
        self.faults.clear();
        self.unknown_xids.clear();
    }

    /// Sets what an answer reports.
    fn set_reported(&mut self, answer: &Answer, now: Instant) {
        if let Contact::Answering {
            reports_actions,
            fabric_waits_since,
            repair,
            fabric_health,
            ..
        } = &mut self.contact
        {
            // Without its answer, time alone is no recovery.
            *reports_actions = answer.action.value().is_some();
            *repair = match answer.memory_repair {
                Sensor::Value(repair) => repair,
                Sensor::Absent => MemoryRepair::default(),
                Sensor::Failed(_) => *repair,
            };
            *fabric_health = match answer.fabric_health {
                Sensor::Value(health) => health,
                Sensor::Absent => FabricHealth::default(),
                Sensor::Failed(_) => *fabric_health,
            };
            *fabric_waits_since = match answer.fabric {
                Sensor::Absent | Sensor::Value(FabricState::Completed) => None,
                Sensor::Value(
                    FabricState::NotStarted | FabricState::InProgress | FabricState::Failed(_),
                ) => fabric_waits_since.or(Some(now)),
                Sensor::Failed(_) => *fabric_waits_since,
            };
        }
    }

    fn event(&mut self, kind: EventKind, scope: Scope, rules: &Rules, now: Instant) {
        let (scope, fault) = match kind {
            EventKind::Xid(number) => match rules.xids.class(number) {
                XidClass::Application | XidClass::Informational => return,
                XidClass::Unknown => {
                    self.unknown_xids.insert(number, now);
                    return;
                }
                XidClass::Unhealthy => (scope, Fault::Xid(number)),
                // The whole GPU has left the bus.
                XidClass::Lost => (Scope::Gpu, Fault::Xid(number)),
            },
            EventKind::DoubleBitEcc => (scope, Fault::DoubleBitEcc),
            EventKind::Unavailable => (Scope::Gpu, Fault::Unavailable),
            EventKind::RecoveryAction(action) => {
                return self.answer(Fault::of_action(action), rules, now);
            }
            EventKind::Lost => {
                self.contact = Contact::Gone;
                return;
            }
            EventKind::MigConfigChange | EventKind::Other(_) => return,
        };
        // The first fault is the cause of those that follow.
        self.faults.entry(scope).or_insert((fault, now)).1 = now;
    }

    /// Removes the faults of XIDs that are not fatal by a new policy.
    pub fn forget_ignored(&mut self, policy: &XidPolicy) {
        self.faults.retain(|_, (fault, _)| match fault {
            Fault::Xid(number) => policy.class(*number).is_fatal(),
            Fault::Lost
            | Fault::NotResponding
            | Fault::DoubleBitEcc
            | Fault::Unavailable
            | Fault::FabricNotReady
            | Fault::MemoryRepairFailed
            | Fault::GpuReset
            | Fault::NodeReboot
            | Fault::DrainP2p
            | Fault::DrainAndReset
            | Fault::OtherAction(_) => true,
        });
    }

    /// Starts the contact again without an answer: NVML as a whole cannot be used, which is no fault of the GPU.
    pub fn interrupt(&mut self, now: Instant) {
        if let Contact::Answering { since, last, .. } = &mut self.contact {
            (*since, *last) = (now, now);
        }
    }

    /// Removes the faults whose recovery window has passed.
    pub fn expire(&mut self, rules: &Rules, now: Instant) {
        let Contact::Answering {
            since,
            last,
            needs: None,
            reports_actions,
            ..
        } = self.contact
        else {
            return;
        };
        if now.duration_since(last) > rules.response_limit {
            return;
        }
        let is_recent = |at: Instant| now.duration_since(since.max(at)) < rules.recovery_window;
        self.faults
            .retain(|_, (fault, at)| is_recent(*at) || (fault.needs_reset() && !reports_actions));
        self.unknown_xids.retain(|_, at| is_recent(*at));
    }

    /// Returns the health at `now`.
    #[must_use]
    pub fn health(&self, rules: &Rules, now: Instant) -> GpuHealth {
        let of_contact = match self.contact {
            Contact::Gone => Some(Fault::Lost),
            Contact::Answering { last, .. } if now.duration_since(last) > rules.response_limit => {
                Some(Fault::NotResponding)
            }
            Contact::Answering {
                needs,
                fabric_waits_since,
                repair,
                ..
            } => {
                let is_late = |since| now.duration_since(since) >= rules.fabric_limit;
                let fabric = fabric_waits_since.is_some_and(is_late);
                needs
                    .or(repair.has_failed.then_some(Fault::MemoryRepairFailed))
                    .or(fabric.then_some(Fault::FabricNotReady))
            }
        };
        let unknown = self.unknown_xids.keys().copied();
        let mut degradations: BTreeSet<_> = unknown.map(Degradation::UnknownXid).collect();
        if let Contact::Answering {
            repair,
            fabric_health,
            ..
        } = self.contact
        {
            if repair.is_pending {
                degradations.insert(Degradation::MemoryRepairPending);
            }
            let defects = fabric_health.defects().into_iter();
            degradations.extend(defects.map(Degradation::Fabric));
        }
        let mut health = GpuHealth {
            gpu: of_contact,
            instances: BTreeMap::new(),
            degradations,
        };
        for (scope, (fault, _)) in &self.faults {
            match scope {
                // The cause is more useful than the action that follows from it.
                Scope::Gpu => match health.gpu {
                    Some(Fault::Lost | Fault::NotResponding) => {}
                    Some(_) | None => health.gpu = Some(*fault),
                },
                Scope::Slices(placement) => {
                    health.instances.insert(*placement, *fault);
                }
            }
        }
        health
    }

    /// Returns the faults that the next instance of the driver must know.
    pub fn recorded(&self) -> impl Iterator<Item = (Scope, Fault)> {
        self.faults
            .iter()
            .map(|(scope, (fault, _))| (*scope, *fault))
    }
}

#[cfg(test)]
mod tests;
