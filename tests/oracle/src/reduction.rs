//! Reduction of a case to what a difference needs: removes elements of lists and optional fields one by one.

use anyhow::Result;
use serde_json::Value;

/// Most removals that are tried.
const MAX_TRIALS: usize = 3_000;

/// Returns the smallest case found for which `is_different` holds.
///
/// # Errors
/// When `is_different` fails on a case that it accepted before.
pub fn reduce(case: &Value, mut is_different: impl FnMut(&Value) -> Result<bool>) -> Result<Value> {
    let mut current = case.clone();
    let mut trials = 0;
    loop {
        let mut is_smaller = false;
        let mut removals = removals(&current);
        // Later elements first: earlier positions stay valid.
        removals.reverse();
        for pointer in removals {
            trials += 1;
            if trials > MAX_TRIALS {
                return Ok(current);
            }
            let Some(smaller) = without(&current, &pointer) else {
                continue;
            };
            // A removal can make a case malformed.
            if is_different(&smaller).unwrap_or_default() {
                current = smaller;
                is_smaller = true;
            }
        }
        if !is_smaller {
            return Ok(current);
        }
    }
}

/// Positions of the elements of lists, and of fields, that can be left out.
fn removals(case: &Value) -> Vec<String> {
    const OPTIONAL: [&str; 10] = [
        "selectors",
        "tolerations",
        "taints",
        "capacity",
        "constraints",
        "requestPolicy",
        "consumesCounters",
        "requests",
        "attributes",
        "allowMultipleAllocations",
    ];
    fn visit(value: &Value, at: &str, found: &mut Vec<String>) {
        match value {
            Value::Array(list) => {
                for (index, element) in list.iter().enumerate() {
                    found.push(format!("{at}/{index}"));
                    visit(element, &format!("{at}/{index}"), found);
                }
            }
            Value::Object(fields) => {
                let is_map = at.ends_with("/capacity") || at.ends_with("/attributes");
                for (name, field) in fields {
                    let escaped = name.replace('~', "~0").replace('/', "~1");
                    if is_map || OPTIONAL.contains(&name.as_str()) {
                        found.push(format!("{at}/{escaped}"));
                    }
                    visit(field, &format!("{at}/{escaped}"), found);
                }
            }
            _ => {}
        }
    }
    let mut found = vec![];
    visit(case, "", &mut found);
    // Without the selectors of its class a claim is for no driver, and without conditions a node is not ready.
    found.retain(|pointer| {
        !pointer.starts_with("/classes/") && !pointer.contains("/status/conditions")
    });
    found
}

fn without(case: &Value, pointer: &str) -> Option<Value> {
    let (parent, last) = pointer.rsplit_once('/')?;
    let mut smaller = case.clone();
    match smaller.pointer_mut(parent)? {
        Value::Array(list) => {
            let index: usize = last.parse().ok()?;
            (index < list.len()).then(|| list.remove(index))?;
        }
        Value::Object(fields) => {
            fields.remove(&last.replace("~1", "/").replace("~0", "~"))?;
        }
        _ => return None,
    }
    Some(smaller)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keeps_objects_that_the_difference_needs() {
        let case = json!({"nodes": [1, 2, 3], "claims": [{"selectors": [4, 5]}]});
        let reduced = reduce(&case, |case| Ok(case["nodes"].to_string().contains('2'))).unwrap();
        assert_eq!(reduced, json!({"nodes": [2], "claims": []}));
    }
}
