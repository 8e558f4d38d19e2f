//! Decides when an instance registers with kubelet, and when it leaves the node to another instance.
//!
//! Kubelet calls the instance that registered last; during a rolling update that is the new one. An instance that
//! cannot find the NVIDIA driver, install its artifacts or read the claim records (a downgrade) must therefore not replace
//! an instance that works: it stays in standby and is not ready, which stops the update. When the active instance ends, it
//! leaves the node to a registered one. An instance that is alone on the node registers in any case: unprepare needs neither
//! GPUs nor artifacts, and prepare reports what is missing in the events of the pods.

use tokio::sync::watch;

use super::socket::{self, Sockets};
use crate::report::conditions::{Condition, Conditions};

/// Conditions that an instance in standby must meet before it replaces the active one.
const REQUIRED: [Condition; 3] = [Condition::Gpus, Condition::Artifacts, Condition::Records];

/// Role of this instance among the instances of the driver on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstanceRole {
    /// The lock of the active instance was not checked yet.
    Unknown,
    /// Another instance is active.
    Standby,
    /// This instance is active.
    Active,
}

/// Returns when this instance may register. Until then the condition `registered` names the reason.
pub async fn may_register(conditions: &Conditions, mut role: watch::Receiver<InstanceRole>) {
    let mut states = conditions.watch();
    loop {
        let present = *role.borrow_and_update();
        states.mark_unchanged();
        let missing = missing(conditions);
        if missing.is_empty() || present == InstanceRole::Active {
            return;
        }
        if present == InstanceRole::Standby {
            conditions.set(
                Condition::Registered,
                Err(format!(
                    "another instance serves this node until this instance can: {}",
                    missing.join("; ")
                )),
            );
        }
        tokio::select! {
            // Both fail only when their senders are dropped; the senders live as long as the driver.
            _ = states.changed() => {}
            _ = role.changed() => {}
        }
    }
}

/// Returns whether this instance must not become active: it misses a condition, and another instance serves kubelet.
pub async fn yields(conditions: &Conditions, sockets: &Sockets) -> bool {
    !missing(conditions).is_empty() && socket::is_only_other_registered(sockets).await
}

fn missing(conditions: &Conditions) -> Vec<String> {
    let unmet = conditions.unmet().into_iter();
    unmet
        .filter(|(condition, _)| REQUIRED.contains(condition))
        .map(|(condition, reason)| format!("{condition}: {reason}"))
        .collect()
}
