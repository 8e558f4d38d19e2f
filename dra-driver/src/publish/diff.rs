//! What must be written so that the published slices become the desired ones. Pure.
//!
//! Generation rules are those of the Go helper: one changed slice keeps the pool's generation, anything more bumps it
//! and rewrites every slice, so that readers never combine slices of two states of the pool.

use std::collections::BTreeMap;

use drava_api::{Quantity, names};
use k8s_openapi::api::resource::v1::{
    CounterSet, Device, DeviceTaint, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde_json::Value;

use super::{Features, Pool, SliceContent};

/// The Node that owns the slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Name of the node.
    pub node: String,
    /// UID of its Node object.
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

/// One write. They are done in the order delete, update, create.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Delete the slice that has this UID.
    Delete {
        /// Object name.
        name: String,
        /// UID it must still have.
        uid: String,
    },
    /// Replace the slice; carries the resource version that it was computed from.
    Update(Box<ResourceSlice>),
    /// Create the slice.
    Create(Box<ResourceSlice>),
}

/// What must be written so that `existing` (all slices of this driver and node) becomes `pool`.
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

/// An unchanged taint keeps the time at which the API server first saw it: evictions are counted from there.
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

/// Whether the API server has what we want, up to spelling: quantities are compared by value, `timeAdded` is its own.
#[must_use]
pub fn same(present: &ResourceSlice, wanted: &ResourceSlice) -> bool {
    present.metadata.owner_references == wanted.metadata.owner_references
        && comparable(&present.spec) == comparable(&wanted.spec)
}

/// Fields of `sent` that are missing in `stored`.
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

/// The spec as JSON without `timeAdded`, empty lists and nulls, and with quantities in one spelling.
fn comparable(spec: &ResourceSliceSpec) -> Value {
    let mut value = serde_json::to_value(spec).unwrap_or(Value::Null);
    normalise(None, &mut value);
    value
}

/// JSON keys whose value is a quantity wherever they occur in a slice. (An attribute's string is under `string`.)
const QUANTITIES: [&str; 5] = ["value", "default", "min", "max", "step"];

fn normalise(key: Option<&str>, value: &mut Value) {
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
                normalise(Some(key), field);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| normalise(key, item)),
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
