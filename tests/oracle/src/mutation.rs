//! Cases as a defective allocator would see them: the comparison must find each defect.

use serde_json::Value;

/// A defect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Requests are not rounded up.
    DropRounding,
    /// The counters of a shared device are counted again for its second share.
    CountSharedCountersTwice,
    /// `distinctAttribute` is not checked.
    SkipDistinct,
}

impl Mutation {
    /// Returns the case as an allocator with the defect sees it.
    #[must_use]
    pub fn apply(self, case: &Value) -> Value {
        let mut case = case.clone();
        match self {
            Self::DropRounding => each_device(&mut case, drop_rounding),
            Self::CountSharedCountersTwice => count_shared_twice(&mut case),
            Self::SkipDistinct => {
                for claim in list(&mut case["claims"]) {
                    if let Some(constraints) = claim["spec"]["devices"].get_mut("constraints") {
                        list_of(constraints)
                            .retain(|constraint| constraint.get("distinctAttribute").is_none());
                    }
                }
            }
        }
        case
    }
}

fn drop_rounding(device: &mut Value) {
    let capacities = device["capacity"].as_object_mut();
    for capacity in capacities.into_iter().flat_map(|map| map.values_mut()) {
        if let Some(policy) = capacity
            .get_mut("requestPolicy")
            .and_then(Value::as_object_mut)
        {
            policy.remove("validValues");
            policy.remove("validRange");
        }
    }
}

/// Lowers the counters of sets whose shared device has two shares by what it consumes: 1 of every counter.
fn count_shared_twice(case: &mut Value) {
    let mut shares: Vec<(String, String)> = vec![];
    for claim in list(&mut case["allocated"]) {
        for result in list(&mut claim["status"]["allocation"]["devices"]["results"]) {
            if result.get("shareID").is_some() {
                shares.push((result["pool"].to_string(), result["device"].to_string()));
            }
        }
    }
    let mut consumed: Vec<(String, Value)> = vec![];
    for slice in list(&mut case["slices"]) {
        let pool = slice["spec"]["pool"]["name"].to_string();
        for device in list(&mut slice["spec"]["devices"]) {
            let this = (pool.clone(), device["name"].to_string());
            if shares.iter().filter(|share| **share == this).count() > 1 {
                consumed.push((pool.clone(), device["consumesCounters"][0].clone()));
            }
        }
    }
    for slice in list(&mut case["slices"]) {
        let pool = slice["spec"]["pool"]["name"].to_string();
        for set in list(&mut slice["spec"]["sharedCounters"]) {
            let is_charged = consumed
                .iter()
                .any(|(of, consumption)| *of == pool && consumption["counterSet"] == set["name"]);
            if is_charged && let Some(counters) = set["counters"].as_object_mut() {
                for counter in counters.values_mut() {
                    let rest = counter["value"]
                        .as_str()
                        .and_then(|value| value.parse::<u64>().ok())
                        .map_or(0, |value| value.saturating_sub(1));
                    counter["value"] = Value::from(rest.to_string());
                }
            }
        }
    }
}

fn each_device(case: &mut Value, change: impl Fn(&mut Value)) {
    for slice in list(&mut case["slices"]) {
        for device in list(&mut slice["spec"]["devices"]) {
            change(device);
        }
    }
}

fn list(value: &mut Value) -> std::slice::IterMut<'_, Value> {
    value
        .as_array_mut()
        .map_or_else(Default::default, |list| list.iter_mut())
}

fn list_of(value: &mut Value) -> &mut Vec<Value> {
    if !value.is_array() {
        *value = Value::Array(vec![]);
    }
    value
        .as_array_mut()
        .unwrap_or_else(|| unreachable!("set above"))
}
