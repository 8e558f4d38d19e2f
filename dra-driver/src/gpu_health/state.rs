//! Health of one GPU as a state machine. Pure: no I/O, no clock.
//!
//! A fault is set by an event of NVML and holds for the whole GPU, or for the memory slices of a MIG instance. It ends
//! - when the recovery was seen: the GPU was gone and answers again, or the NVIDIA driver withdrew its recovery action,
//! - or when the GPU answered for the recovery window without another fatal event.
//!
//! A GPU that is gone, that does not answer, or for which the NVIDIA driver requests a recovery action is unhealthy as
//! long as this lasts.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use drava_api::xid::{self, XidClass, XidPolicy};
use drava_nvml::{EventKind, Placement, RecoveryAction, Status};
use serde::{Deserialize, Serialize};

/// Rules of the state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// Classes of XIDs.
    pub xids: XidPolicy,
    /// Time without a fatal event after which a GPU that answers is healthy.
    pub recovery_window: Duration,
    /// Time without an answer after which a GPU is unhealthy.
    pub response_limit: Duration,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            xids: XidPolicy::default(),
            recovery_window: Duration::from_secs(600),
            response_limit: Duration::from_secs(30),
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
            Self::GpuReset => "needs-gpu-reset".to_owned(),
            Self::NodeReboot => "needs-node-reboot".to_owned(),
            Self::DrainP2p => "needs-p2p-drain".to_owned(),
            Self::DrainAndReset => "needs-drain-and-reset".to_owned(),
            Self::OtherAction(action) => format!("needs-action-{action}"),
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

/// What was observed of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observation {
    /// NVML answered.
    Answer {
        /// Requested recovery action; `None` if the NVIDIA driver does not report one.
        action: Option<RecoveryAction>,
    },
    /// NVML rejected a query.
    Refusal(Status),
    /// NVML reported an event about this part of the GPU.
    Event(EventKind, Scope),
    /// The GPU is missing in the inventory.
    Missing,
}

/// Faults of a GPU at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuHealth {
    /// Fault of the whole GPU.
    pub gpu: Option<Fault>,
    /// Faults of MIG instances by their memory slices.
    pub instances: BTreeMap<Placement, Fault>,
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
            contact: Contact::Answering {
                since: now,
                last: now,
                needs: None,
            },
        }
    }

    /// Processes an observation.
    pub fn observe(&mut self, observation: &Observation, rules: &Rules, now: Instant) {
        match observation {
            Observation::Answer { action } => {
                let needs = action.map(Fault::of_action);
                // Without the value of the NVIDIA driver, an answer means that a reset is not required.
                self.answer(needs.unwrap_or(None), rules, now);
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
        let since = match self.contact {
            Contact::Gone => {
                self.faults.clear();
                now
            }
            Contact::Answering {
                since,
                last,
                needs: before,
            } => {
                if before.is_some() && needs.is_none() {
                    self.faults.clear();
                }
                let is_interrupted = now.duration_since(last) > rules.response_limit;
                if is_interrupted { now } else { since }
            }
        };
        self.contact = Contact::Answering {
            since,
            last: now,
            needs,
        };
    }

    fn event(&mut self, kind: EventKind, scope: Scope, rules: &Rules, now: Instant) {
        let (scope, fault) = match kind {
            EventKind::Xid(number) => match rules.xids.class(number) {
                XidClass::Application | XidClass::Informational => return,
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
        } = self.contact
        else {
            return;
        };
        if now.duration_since(last) > rules.response_limit {
            return;
        }
        self.faults
            .retain(|_, (_, at)| now.duration_since(since.max(*at)) < rules.recovery_window);
    }

    /// Returns the health at `now`.
    #[must_use]
    pub fn health(&self, rules: &Rules, now: Instant) -> GpuHealth {
        let of_contact = match self.contact {
            Contact::Gone => Some(Fault::Lost),
            Contact::Answering { last, .. } if now.duration_since(last) > rules.response_limit => {
                Some(Fault::NotResponding)
            }
            Contact::Answering { needs, .. } => needs,
        };
        let mut health = GpuHealth {
            gpu: of_contact,
            instances: BTreeMap::new(),
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
