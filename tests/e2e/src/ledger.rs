//! What the claims of all namespaces have of the GPUs, compared with what the nodes publish.
//!
//! Computed as the structured allocator of Kubernetes does: a device without shares has one claim; the capacities of a
//! device with shares suffice for all of them, without the memory and GPU time of suspended ones; the counters suffice for all allocated devices, each counted once.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{TestCluster, wait};

const DRIVER: &str = "gpu.drava.dev";

/// Amounts by name.
type Amounts = BTreeMap<String, u128>;
/// Pool and name.
type Key = (String, String);

/// What the nodes publish.
#[derive(Default)]
struct Published {
    devices: BTreeMap<Key, Value>,
    counters: BTreeMap<Key, Amounts>,
}

impl TestCluster {
    /// Checks that no GPU is over-committed by the allocations of all claims. Waits for pools of which not all slices are there:
    /// kubelet deletes the slices of its node at its start, and those of a driver that is away for 30 s.
    ///
    /// # Errors
    /// When a device, a capacity or a counter is allocated beyond what is published, a share to two claims, or a device that is not
    /// published in time.
    pub fn check_allocations(&self) -> Result<()> {
        wait("the allocated GPUs are published", || self.compare())
    }

    /// As [`TestCluster::check_allocations`]; `None` if not all pools of allocated devices are published.
    fn compare(&self) -> Result<Option<()>> {
        let published = Published::read(&self.get(&["resourceslices"])?)?;
        let claims = self.get(&["resourceclaims", "-A"])?;
        let mut claims_of: BTreeMap<Key, usize> = BTreeMap::new();
        let mut consumed: BTreeMap<Key, Amounts> = BTreeMap::new();
        let mut shares: BTreeSet<String> = BTreeSet::new();
        for claim in array(&claims["items"]) {
            for result in array(&claim["status"]["allocation"]["devices"]["results"]) {
                if result["driver"] != DRIVER || result["adminAccess"] == true {
                    continue;
                }
                if let Some(share) = result["shareID"].as_str() {
                    let is_first = shares.insert(share.to_owned());
                    ensure!(is_first, "share {share} is allocated twice");
                }
                let key = (text(&result["pool"])?, text(&result["device"])?);
                let sum = consumed.entry(key.clone()).or_default();
                let mut amounts = result["consumedCapacity"].clone();
                if is_suspended(claim)
                    && let Some(amounts) = amounts.as_object_mut()
                {
                    amounts.retain(|name, _| name != "memory" && name != "cores");
                }
                add(sum, &amounts, |amount| amount)?;
                *claims_of.entry(key).or_default() += 1;
            }
        }
        let mut used: BTreeMap<Key, Amounts> = BTreeMap::new();
        for (key, claims) in &claims_of {
            let Some(device) = published.devices.get(key) else {
                return Ok(None);
            };
            if device["allowMultipleAllocations"] == true {
                let consumed = consumed.get(key).cloned().unwrap_or_default();
                for (name, amount) in consumed {
                    let total = amount_of(&device["capacity"][&name]["value"])?;
                    ensure!(
                        amount <= total,
                        "{key:?}: {amount} of {total} {name} allocated"
                    );
                }
            } else {
                ensure!(*claims == 1, "{key:?} has {claims} claims");
            }
            for consumption in array(&device["consumesCounters"]) {
                let set = (key.0.clone(), text(&consumption["counterSet"])?);
                let sum = used.entry(set).or_default();
                add(sum, &consumption["counters"], of_counter)?;
            }
        }
        for (set, used) in used {
            let totals = published.counters.get(&set);
            let totals = totals.with_context(|| format!("no counter set {set:?}"))?;
            for (name, used) in used {
                let total = totals.get(&name).copied().unwrap_or_default();
                ensure!(used <= total, "{set:?}: {used} of {total} {name} allocated");
            }
        }
        Ok(Some(()))
    }
}

impl Published {
    /// Reads the pools of which all slices of the newest generation are there: readers ignore others.
    fn read(slices: &Value) -> Result<Self> {
        let mut pools: BTreeMap<String, Vec<&Value>> = BTreeMap::new();
        let slices = array(&slices["items"]).map(|slice| &slice["spec"]);
        for spec in slices.filter(|spec| spec["driver"] == DRIVER) {
            let slices = pools.entry(text(&spec["pool"]["name"])?).or_default();
            slices.push(spec);
        }
        let mut published = Self::default();
        for (pool, mut slices) in pools {
            let generation = |spec: &Value| spec["pool"]["generation"].as_i64();
            let newest = slices.iter().map(|spec| generation(spec)).max();
            slices.retain(|spec| Some(generation(spec)) == newest);
            let count = slices
                .first()
                .map(|spec| &spec["pool"]["resourceSliceCount"]);
            if count.and_then(Value::as_u64) != u64::try_from(slices.len()).ok() {
                continue;
            }
            for spec in slices {
                for device in array(&spec["devices"]) {
                    let key = (pool.clone(), text(&device["name"])?);
                    published.devices.insert(key, device.clone());
                }
                for set in array(&spec["sharedCounters"]) {
                    let key = (pool.clone(), text(&set["name"])?);
                    let totals = published.counters.entry(key).or_default();
                    add(totals, &set["counters"], of_counter)?;
                }
            }
        }
        Ok(published)
    }
}

/// Returns whether others may use the memory and GPU time of a claim: it is to be suspended, and is.
fn is_suspended(claim: &Value) -> bool {
    let mut devices = array(&claim["status"]["devices"]).peekable();
    let is_intended = claim["metadata"]["labels"]["gpu.drava.dev/suspend"] == "true";
    is_intended
        && devices.peek().is_some()
        && devices.all(|device| {
            let mut conditions = array(&device["conditions"]);
            conditions
                .any(|condition| condition["type"] == "Suspended" && condition["status"] == "True")
        })
}

fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> Result<String> {
    let text = value
        .as_str()
        .with_context(|| format!("{value} is no text"))?;
    Ok(text.to_owned())
}

/// Adds the amounts of an object by name; `amount` returns the quantity of a value.
fn add(sum: &mut Amounts, values: &Value, amount: fn(&Value) -> &Value) -> Result<()> {
    for (name, value) in values.as_object().into_iter().flatten() {
        *sum.entry(name.clone()).or_default() += amount_of(amount(value))?;
    }
    Ok(())
}

/// Returns the quantity of a counter.
fn of_counter(counter: &Value) -> &Value {
    &counter["value"]
}

/// Parses a quantity without fraction.
fn amount_of(value: &Value) -> Result<u128> {
    let text = text(value)?;
    let end = text.find(|c: char| !c.is_ascii_digit());
    let (digits, unit) = text.split_at(end.unwrap_or(text.len()));
    let factor = match unit {
        "" => 1,
        "k" => 1000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        unit => anyhow::bail!("unknown unit {unit:?} of {text}"),
    };
    Ok(digits.parse::<u128>()? * factor)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A pool of two slices: counters, and a device.
    fn slices(generations: [i64; 2]) -> [Value; 2] {
        let pool = |generation| json!({"name": "n/gpus", "generation": generation, "resourceSliceCount": 2});
        let [first, second] = generations;
        let counters = json!({"name": "gpu-0", "counters": {"memory": {"value": "80Gi"}}});
        [
            json!({"spec": {"driver": DRIVER, "pool": pool(first), "sharedCounters": [counters]}}),
            json!({"spec": {"driver": DRIVER, "pool": pool(second), "devices": [{"name": "gpu-0"}]}}),
        ]
    }

    fn published(slices: &[Value]) -> (usize, usize) {
        let read = Published::read(&json!({"items": slices})).expect("slices");
        (read.devices.len(), read.counters.len())
    }

    #[test]
    fn pool_is_published_with_its_last_slice() {
        let [counters, device] = slices([2, 2]);
        assert_eq!(published(&[counters, device.clone()]), (1, 1));
        assert_eq!(published(&[device]), (0, 0));
        assert_eq!(published(&slices([1, 2])), (0, 0));
    }
}
