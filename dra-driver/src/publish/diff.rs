//! Writes that turn the existing slices into the desired slices. Pure.
//!
//! Generations follow the Go helper (`dynamic-resource-allocation/resourceslice`): one changed slice keeps the pool's
//! generation; more changes increment the generation and rewrite every slice, so that readers never combine slices of
//! two states.

use std::collections::BTreeMap;

use drava_api::{Quantity, names};
use k8s_openapi::api::resource::v1::{
    CounterSet, Device, DeviceTaint, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde_json::Value;

use super::{Features, Pool, SliceContent};

/// Node object that owns the slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Name of the node.
    pub node: String,
    /// UID of the Node object.
    pub uid: String,
}

impl Owner {
    fn reference(&self) -> OwnerReference {
        OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: self.node.clone(),
            uid: self.uid.clone(),
            controller: Some(true),
            ..OwnerReference::default()
        }
    }
}

/// One write. The order is delete, update, create.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Deletes a slice.
    Delete {
        /// Object name.
        name: String,
        /// UID of the slice, a precondition.
        uid: String,
    },
    /// Replaces a slice; has the resource version of the existing slice.
    Update(Box<ResourceSlice>),
    /// Creates a slice.
    Create(Box<ResourceSlice>),
}

/// Returns the writes that turn `existing` (all slices of this driver and node) into `pool`.
#[must_use]
pub fn changes(existing: &[ResourceSlice], pool: &Pool, owner: &Owner) -> Vec<Change> {
    let slice_count = i64::try_from(pool.slices.len()).unwrap_or(i64::MAX);
    let generation = existing
        .iter()
        .filter(|slice| slice.spec.pool.name == pool.name)
        .map(|slice| slice.spec.pool.generation)
        .max();
    let wanted = |name: &str| pool.slices.contains_key(name);
    let mut changes: Vec<Change> = existing
        .iter()
        .filter_map(|slice| {
            let name = slice.metadata.name.clone().unwrap_or_default();
            let uid = slice.metadata.uid.clone().unwrap_or_default();
            (!wanted(&name)).then_some(Change::Delete { name, uid })
        })
        .collect();
    let present: BTreeMap<&str, &ResourceSlice> = existing
        .iter()
        .filter_map(|slice| Some((slice.metadata.name.as_deref()?, slice)))
        .collect();

    let build = |generation: i64| {
        pool.slices
            .iter()
            .map(|(name, content)| {
                build(
                    name,
                    content,
                    pool,
                    slice_count,
                    generation,
                    owner,
                    present.get(&**name),
                )
            })
            .collect::<Vec<_>>()
    };
    let stale = |slice: &ResourceSlice| {
        present
            .get(slice.metadata.name.as_deref().unwrap_or_default())
            .is_none_or(|present| !same(present, slice))
    };
    let at_present = build(generation.unwrap_or(1));
    let stale_count = at_present.iter().filter(|slice| stale(slice)).count();
    let any_new = pool
        .slices
        .keys()
        .any(|name| !present.contains_key(&**name));
    let slices = match generation {
        Some(generation) if any_new || stale_count > 1 => build(generation + 1),
        Some(_) | None => at_present,
    };
    let (updates, creates): (Vec<_>, Vec<_>) =
        slices.into_iter().filter(stale).partition(|slice| {
            present.contains_key(slice.metadata.name.as_deref().unwrap_or_default())
        });
    changes.extend(
        updates
            .into_iter()
            .map(|slice| Change::Update(Box::new(slice))),
    );
    changes.extend(
        creates
            .into_iter()
            .map(|slice| Change::Create(Box::new(slice))),
    );
    changes
}

fn build(
    name: &str,
    content: &SliceContent,
    pool: &Pool,
    slice_count: i64,
    generation: i64,
    owner: &Owner,
    present: Option<&&ResourceSlice>,
) -> ResourceSlice {
    let (devices, shared_counters) = match content {
        SliceContent::Devices(devices) => {
            let before = present
                .and_then(|slice| slice.spec.devices.as_deref())
                .unwrap_or_default();
            (
                Some(
                    devices
                        .iter()
                        .map(|device| keep_taint_times(device, before))
                        .collect(),
                ),
                None,
            )
        }
        SliceContent::Counters(sets) => (None, Some(sets.clone())),
    };
    ResourceSlice {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            owner_references: Some(vec![owner.reference()]),
            resource_version: present.and_then(|slice| slice.metadata.resource_version.clone()),
            ..ObjectMeta::default()
        },
        spec: ResourceSliceSpec {
            driver: names::DRIVER.to_owned(),
            node_name: Some(owner.node.clone()),
            pool: ResourcePool {
                name: pool.name.clone(),
                generation,
                resource_slice_count: slice_count,
            },
            devices,
            shared_counters,
            ..ResourceSliceSpec::default()
        },
    }
}

/// Copies `timeAdded` of unchanged taints: toleration seconds count from that time.
fn keep_taint_times(device: &Device, before: &[Device]) -> Device {
    let mut device = device.clone();
    let Some(before) = before.iter().find(|before| before.name == device.name) else {
        return device;
    };
    for taint in device.taints.iter_mut().flatten() {
        let same_taint = |before: &&DeviceTaint| {
            before.key == taint.key && before.value == taint.value && before.effect == taint.effect
        };
        taint.time_added = before
            .taints
            .iter()
            .flatten()
            .find(same_taint)
            .and_then(|before| before.time_added.clone());
    }
    device
}

/// Returns whether both slices are equivalent: quantities are compared by value, and `timeAdded`, which the API server
/// sets, is ignored.
#[must_use]
pub fn same(present: &ResourceSlice, wanted: &ResourceSlice) -> bool {
    present.metadata.owner_references == wanted.metadata.owner_references
        && comparable(&present.spec) == comparable(&wanted.spec)
}

/// Returns the features that the API server stored: a feature is unset when `sent` uses its fields and `stored` does not.
#[must_use]
pub fn dropped(sent: &ResourceSlice, stored: &ResourceSlice) -> Features {
    let has_counters = |spec: &ResourceSliceSpec| {
        spec.shared_counters
            .as_ref()
            .is_some_and(|sets: &Vec<CounterSet>| !sets.is_empty())
            || any_device(spec, |device| {
                device
                    .consumes_counters
                    .as_ref()
                    .is_some_and(|used| !used.is_empty())
            })
    };
    let is_shared = |spec: &ResourceSliceSpec| {
        any_device(spec, |device| {
            device.allow_multiple_allocations == Some(true)
        })
    };
    let has_taints = |spec: &ResourceSliceSpec| {
        any_device(spec, |device| {
            device.taints.as_ref().is_some_and(|t| !t.is_empty())
        })
    };
    let kept = |has: &dyn Fn(&ResourceSliceSpec) -> bool| !has(&sent.spec) || has(&stored.spec);
    Features {
        counters: kept(&has_counters),
        sharing: kept(&is_shared),
        taints: kept(&has_taints),
    }
}

fn any_device(spec: &ResourceSliceSpec, test: impl Fn(&Device) -> bool) -> bool {
    spec.devices.iter().flatten().any(test)
}

/// Returns the spec as JSON without `timeAdded`, empty lists and nulls, and with canonical quantities.
fn comparable(spec: &ResourceSliceSpec) -> Value {
    let mut value = serde_json::to_value(spec).unwrap_or(Value::Null);
    normalize(None, &mut value);
    value
}

/// JSON keys whose value is a quantity anywhere in a slice. (String attributes use the key `string`.)
const QUANTITIES: [&str; 5] = ["value", "default", "min", "max", "step"];

fn normalize(key: Option<&str>, value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("timeAdded");
            fields.retain(|_, field| match field {
                Value::Null => false,
                Value::Array(items) => !items.is_empty(),
                Value::Object(fields) => !fields.is_empty(),
                Value::Bool(_) | Value::Number(_) | Value::String(_) => true,
            });
            for (key, field) in fields.iter_mut() {
                normalize(Some(key), field);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| normalize(key, item)),
        Value::String(text) => {
            let quantity = key
                .filter(|key| QUANTITIES.contains(key))
                .and_then(|_| text.parse::<Quantity>().ok());
            if let Some(quantity) = quantity {
                *text = quantity.nano().to_string();
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
