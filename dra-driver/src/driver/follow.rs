//! Reports of unmet conditions, and reactions to changes of the GPUs.

use std::sync::Arc;
use std::time::Duration;

use drava_api::event::EventReason;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::{RunError, until};
use crate::conditions::{Condition, Conditions};
use crate::inventory::State;
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

/// Sets the condition `gpus` and requests a reconciliation when the GPUs change.
pub(super) async fn follow_gpus(
    mut gpus: watch::Receiver<State>,
    conditions: Conditions,
    reconcile: Arc<Notify>,
    stop: CancellationToken,
) -> Result<&'static str, RunError> {
    while until(&stop, gpus.changed()).await {
        let state = gpus.borrow_and_update().clone();
        match state {
            State::Known(node) => {
                let inventory = &node.inventory;
                tracing::info!(
                    gpus = inventory.gpus.cards.len(),
                    driver.version = inventory.gpus.driver_version,
                    faults = ?inventory.gpus.faults,
                    "GPU inventory changed"
                );
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
