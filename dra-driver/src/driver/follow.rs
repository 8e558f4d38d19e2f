//! Reports of unmet conditions, and reactions to changes of the GPUs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use drava_api::event::EventReason;
use drava_nvml::{GpuFault, Inventory};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::{RunError, until};
use crate::gpus::inventory::State;
use crate::report::conditions::{Condition, Conditions};
use crate::report::{Reporter, Subject};

/// How long a condition stays unmet before an event is raised.
const UNMET_FOR: Duration = Duration::from_secs(5);

/// Raises an event on the node for each condition that is unmet for [`UNMET_FOR`].
pub(super) async fn report_conditions(
    conditions: Conditions,
    reporter: Reporter,
    stop: CancellationToken,
) -> Result<&'static str, RunError> {
    let reports = conditions.each_settled(UNMET_FOR, |unmet| {
        for (condition, reason) in unmet {
            reporter.event(
                Subject::Node,
                EventReason::NotReady,
                format!("{condition}: {reason}"),
            );
        }
    });
    until(&stop, reports).await;
    Ok("condition reporter")
}

/// Reported GPUs that cannot be read.
#[derive(Default)]
struct Reported {
    /// NVML indices of the GPUs that were read once: their health is reported.
    read: BTreeSet<u32>,
    faults: Vec<GpuFault>,
}

impl Reported {
    /// Returns notes on the GPUs that were never read, each once.
    fn unread(&mut self, nvml: &Inventory) -> Vec<String> {
        self.read.extend(nvml.gpus.iter().map(|gpu| gpu.index));
        let unread = |fault: &&GpuFault| !self.read.contains(&fault.index);
        let faults: Vec<_> = nvml.faults.iter().filter(unread).cloned().collect();
        let new = faults.iter().filter(|fault| !self.faults.contains(fault));
        let notes = new
            .map(|fault| {
                let GpuFault {
                    index,
                    gpu,
                    query,
                    status,
                } = fault;
                let gpu = gpu.as_ref().map_or_else(String::new, |gpu| format!(" ({gpu})"));
                format!(
                    "GPU {index}{gpu} is not published: cannot read {query} from NVML: {status}; it is published as soon as \
                     it answers, see the kernel log of the node"
                )
            })
            .collect();
        self.faults = faults;
        notes
    }
}

/// Sets the condition `exclusive` for the GPUs that the node profile does not exclude.
pub(super) async fn report_other_owners(
    mut gpus: watch::Receiver<State>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Result<&'static str, RunError> {
    loop {
        if let State::Known(node) = &*gpus.borrow_and_update()
            && node.inventory.settings.is_some()
        {
            let inventory = &node.inventory;
            let gpus = inventory.nvml.gpus.iter().map(|gpu| &gpu.uuid);
            let offered = gpus.filter(|gpu| !inventory.gpu_settings(gpu.as_str()).is_excluded);
            conditions.set(Condition::Exclusive, inventory.other_owners.check(offered));
        }
        if !until(&stop, gpus.changed()).await {
            return Ok("other owners of the GPUs");
        }
    }
}

/// Sets the condition `gpus` and requests a reconciliation when the GPUs or their settings change. `gpus` is the state that
/// claims use: the condition is met when they can.
pub(super) async fn follow_gpus(
    mut gpus: watch::Receiver<State>,
    conditions: Conditions,
    reporter: Reporter,
    reconcile: Arc<Notify>,
    stop: CancellationToken,
) -> Result<&'static str, RunError> {
    let mut reported = Reported::default();
    while until(&stop, gpus.changed()).await {
        let state = gpus.borrow_and_update().clone();
        match state {
            State::Known(node) => {
                let inventory = &node.inventory;
                tracing::info!(
                    gpus = inventory.nvml.gpus.len(),
                    driver.version = inventory.nvml.driver_version,
                    faults = ?inventory.nvml.faults,
                    "GPU inventory changed"
                );
                for note in reported.unread(&inventory.nvml) {
                    reporter.event(Subject::Node, EventReason::GpuUnavailable, note);
                }
                conditions.set(Condition::Gpus, Ok(()));
                // The CDI specs of claims may be outdated, or could not be restored without GPUs.
                reconcile.notify_one();
            }
            State::Pending => {}
            State::Unknown(reason) => {
                conditions.set(Condition::Gpus, Err(reason));
            }
        }
    }
    Ok("GPU inventory")
}
