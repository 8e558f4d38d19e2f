//! Publishes what the leader reserves, so that `kubectl drava` can name it. No decision reads it.
//!
//! The status of the GpuControllerLeader has it: one object, however many pods wait. A lost or late write is harmless; the
//! next one corrects it.

use std::time::Duration;

use drava_api::error::describe;
use drava_api::leader::{GpuControllerLeader, GpuControllerLeaderStatus, LEADER_NAME};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;

use crate::operate::metrics::Metrics;
use crate::write::lease::Term;
use crate::write::writes::FIELD_MANAGER;

/// Time between two looks at the reservations.
const PERIOD: Duration = Duration::from_secs(1);
/// Looks after which unchanged reservations are written again, in case a former leader was late.
const REPEAT: u32 = 30;

/// Publishes the reservations during the term.
pub async fn publish(client: Client, metrics: &Metrics, term: &Term) {
    let leaders: Api<GpuControllerLeader> = Api::all(client);
    let mut written = None;
    for look in 0_u32.. {
        tokio::time::sleep(PERIOD).await;
        if !term.is_valid() {
            return;
        }
        let Some(reservations) = metrics.reservations() else {
            continue;
        };
        let status = GpuControllerLeaderStatus { reservations };
        if written.as_ref() == Some(&status) && look % REPEAT != 0 {
            continue;
        }
        let parameters = PatchParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let patch = Patch::Merge(json!({"status": status}));
        match leaders.patch_status(LEADER_NAME, &parameters, &patch).await {
            Ok(_) => written = Some(status),
            Err(error) => {
                written = None;
                tracing::warn!(error = describe(&error), "cannot publish the reservations");
            }
        }
    }
}
