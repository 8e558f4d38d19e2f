//! Content of a claim's `status.devices`. Pure.

use std::collections::BTreeMap;

use drava_api::condition::ConditionReason;
use drava_api::config::ComputePolicy;
use drava_api::names;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::capacity;
use crate::claim::ShareId;
use crate::inventory::NodeInventory;
use crate::prepare::record::ClaimRecord;
use crate::prepare::{Access, Prepared, Share};

/// Injection of a claim's CDI devices, and violations of its limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Injection {
    /// No problem was detected.
    Expected,
    /// The container runtime ignored the CDI devices.
    Ignored,
    /// Containers run; these shares violate their limits.
    Observed(BTreeMap<ShareId, Violation>),
}

/// Violation of the limits of a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Reason of the condition `Enforced`.
    pub reason: ConditionReason,
    /// Message of the condition.
    pub message: String,
}

/// Condition of a device without the time of its transition.
struct Condition {
    reason: ConditionReason,
    message: String,
}

/// Returns the entries of `status.devices`. A condition with the same status as in `written` keeps its transition time.
pub(super) fn statuses(
    record: &ClaimRecord,
    inventory: &NodeInventory,
    injection: &Injection,
    written: &Value,
    now: Timestamp,
) -> Vec<Value> {
    let status = |device: &Prepared| {
        let mut entries = written.as_array().into_iter().flatten();
        let before = entries.find(|before| is_status_of(before, device));
        let conditions: Vec<Value> = [prepared(device), enforced(device, inventory, injection)]
            .into_iter()
            .map(|condition| condition.to_json(before, now))
            .collect();
        let mut status = BTreeMap::from([
            ("driver", json!(names::DRIVER)),
            ("pool", json!(device.pool)),
            ("device", json!(device.device)),
            ("conditions", Value::Array(conditions)),
            ("data", data(device)),
        ]);
        if let Some(share) = device.share() {
            status.insert("shareID", json!(share.id.as_str()));
        }
        json!(status)
    };
    record.devices.iter().map(status).collect()
}

fn is_status_of(status: &Value, device: &Prepared) -> bool {
    let field = |name: &str| status.get(name).and_then(Value::as_str);
    field("driver") == Some(names::DRIVER)
        && field("pool") == Some(&device.pool)
        && field("device") == Some(&device.device)
        && field("shareID") == device.share().map(|share| share.id.as_str())
}

fn prepared(device: &Prepared) -> Condition {
    Condition {
        reason: ConditionReason::Prepared,
        message: format!("GPU {} is ready for containers", device.card.uuid),
    }
}

fn enforced(device: &Prepared, inventory: &NodeInventory, injection: &Injection) -> Condition {
    let (reason, message) = match &device.access {
        Access::Share(share) => share_enforced(device, share, inventory, injection),
        Access::Whole => (
            ConditionReason::WholeGpu,
            "the claim has the whole GPU".to_owned(),
        ),
        Access::Partition(partition) => (
            ConditionReason::Partition,
            format!("the GPU isolates MIG partition {}", partition.profile),
        ),
        Access::Admin => (
            ConditionReason::AdminAccess,
            "admin access has no limits".to_owned(),
        ),
    };
    Condition { reason, message }
}

fn share_enforced(
    device: &Prepared,
    share: &Share,
    inventory: &NodeInventory,
    injection: &Injection,
) -> (ConditionReason, String) {
    match injection {
        Injection::Expected => {}
        Injection::Ignored => {
            let message = "the container runtime ignored the CDI devices of the claim";
            return (ConditionReason::CdiIgnored, message.to_owned());
        }
        Injection::Observed(violations) => {
            if let Some(violation) = violations.get(&share.id) {
                return (violation.reason, violation.message.clone());
            }
        }
    }
    let unenforceable = inventory
        .card(&device.card.uuid)
        .and_then(capacity::unenforceable);
    if let Some(reason) = unenforceable {
        return (ConditionReason::SharedAddressSpace, reason.to_owned());
    }
    if share.unmetered {
        let message = "the device class mounts graphics and video libraries, whose allocations no limit covers";
        return (ConditionReason::Unmetered, message.to_owned());
    }
    let mib = share.memory_bytes / capacity::MIB;
    let time = time(share);
    let message = format!("libvgpu limits memory to {mib} MiB; {time}");
    (ConditionReason::Interposed, message)
}

/// GPU time of the share, as text.
fn time(share: &Share) -> String {
    let cores = share.cores;
    match (share.compute_policy, cores) {
        (ComputePolicy::None, _) => "GPU time is not metered".to_owned(),
        (_, 0) => "GPU time is best effort (no guarantee)".to_owned(),
        (ComputePolicy::Balance, _) => format!("{cores}% of GPU time guaranteed"),
        (ComputePolicy::Fixed, _) => format!("GPU time limited to {cores}%"),
        (ComputePolicy::Token, _) => format!("{cores}% of GPU time in time slices"),
    }
}

impl Condition {
    fn to_json(&self, before: Option<&Value>, now: Timestamp) -> Value {
        let kind = self.reason.condition_type();
        let status = if self.reason.status() {
            "True"
        } else {
            "False"
        };
        let conditions = before
            .and_then(|before| before.get("conditions"))
            .and_then(Value::as_array);
        let unchanged = conditions.into_iter().flatten().find(|before| {
            let field = |name: &str| before.get(name).and_then(Value::as_str);
            field("type") == Some(kind.as_str()) && field("status") == Some(status)
        });
        let time = unchanged
            .and_then(|before| before.get("lastTransitionTime").cloned())
            .unwrap_or_else(|| json!(now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()));
        json!({
            "type": kind.as_str(),
            "status": status,
            "reason": self.reason.as_str(),
            "message": self.message,
            "lastTransitionTime": time,
        })
    }
}

fn data(device: &Prepared) -> Value {
    let mut data = BTreeMap::from([
        ("uuid", json!(device.card.uuid)),
        ("minor", json!(device.card.minor)),
    ]);
    if let Some(share) = device.share() {
        data.insert("memoryBytes", json!(share.memory_bytes));
        data.insert("cores", json!(share.cores));
        data.insert("computePolicy", json!(share.compute_policy));
        data.insert("priority", json!(share.priority));
    }
    if let Some(partition) = device.partition() {
        data.insert("profile", json!(partition.profile));
        data.insert("start", json!(partition.start));
        if let Some(instance) = &partition.instance {
            data.insert("migUuid", json!(instance.uuid.as_str()));
        }
    }
    json!(data)
}
