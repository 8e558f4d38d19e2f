//! Condition `records`: whether this build can read all claim records of the node.
//!
//! During an update the other instance can be of a newer build, and after a downgrade its records remain. This build
//! leaves them alone, see [`record`](crate::prepare::record).

use std::time::Duration;

use drava_api::error::describe;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{RunError, until};
use crate::kubelet::claims::blocking;
use crate::node::claim::ClaimUid;
use crate::prepare::record::{RecordChanges, RecordStore, Unsupported};
use crate::report::conditions::{Condition, Conditions};

/// Time between two checks.
const INTERVAL: Duration = Duration::from_secs(5);

/// Number of claims that the condition names.
const NAMED: usize = 3;

/// Sets the condition `records` until `stop`.
pub(super) async fn check(
    store: RecordStore,
    conditions: Conditions,
    stop: CancellationToken,
) -> Result<&'static str, RunError> {
    let mut changes = RecordChanges::default();
    loop {
        if changes.is_changed(&store, Instant::now()) {
            let store = store.clone();
            let state = match blocking(move || store.unsupported()).await {
                Ok(Ok(unsupported)) => describe_all(&unsupported),
                Ok(Err(error)) => Err(describe(&error)),
                Err(error) => Err(describe(&error)),
            };
            if state.is_err() {
                changes = RecordChanges::default();
            }
            conditions.set(Condition::Records, state);
        }
        if !until(&stop, tokio::time::sleep(INTERVAL)).await {
            return Ok("check of the claim records");
        }
    }
}

fn describe_all(unsupported: &[(ClaimUid, Unsupported)]) -> Result<(), String> {
    if unsupported.is_empty() {
        return Ok(());
    }
    let claims: Vec<String> = unsupported
        .iter()
        .take(NAMED)
        .map(|(uid, Unsupported { gpus, reason })| {
            let gpus: Vec<&str> = gpus.iter().map(String::as_str).collect();
            format!("claim {uid} ({reason}; GPUs {})", gpus.join(", "))
        })
        .collect();
    let more = unsupported.len() - claims.len();
    let more = match more {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Err(format!(
        "cannot read the records of {}{more}, written by another build; their GPUs are not prepared for other claims; run \
         the node driver that wrote the records, or drain the node with it before a downgrade",
        claims.join(", ")
    ))
}
