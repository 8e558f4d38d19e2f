//! Checks the configuration of kube-state-metrics: every path exists in the custom resource definition.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use drava_cluster::workspace_root;
use serde_json::Value;

use super::libtest::Outcome;

const CONFIG: &str = "deploy/kube-state-metrics/custom-resource-state.yaml";
const DEFINITION: &str = "deploy/helm/drava/files/crds/gpuquotas.yaml";

/// Runs the task.
pub(crate) fn check() -> Outcome {
    let result = read(workspace_root().join(CONFIG)).and_then(|config| {
        let definition = read(workspace_root().join(DEFINITION))?;
        check_paths(&config, &definition)
    });
    Outcome::of_check("configuration of kube-state-metrics", result)
}

fn read(path: impl AsRef<Path>) -> Result<Value> {
    let path = path.as_ref();
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    serde_saphyr::from_str(&text).with_context(|| format!("parse {}", path.display()))
}

/// Checks the paths of all metrics against the schema.
fn check_paths(config: &Value, definition: &Value) -> Result<()> {
    let version = &definition["spec"]["versions"][0];
    let resource = &config["spec"]["resources"][0];
    let kind = &resource["groupVersionKind"];
    let names = &definition["spec"]["names"];
    ensure!(
        kind["kind"] == names["kind"]
            && kind["version"] == version["name"]
            && kind["group"] == definition["spec"]["group"],
        "{kind} is not the resource of {DEFINITION}"
    );
    let schema = &version["schema"]["openAPIV3Schema"];
    let metrics = resource["metrics"].as_array().context("no metrics")?;
    ensure!(!metrics.is_empty(), "no metrics");
    for metric in metrics {
        let gauge = &metric["each"]["gauge"];
        let field = field(schema, &gauge["path"]).with_context(|| metric.to_string())?;
        // A list is a sample for each item.
        let item = if field["type"] == "array" {
            &field["items"]
        } else {
            field
        };
        let labels = gauge["labelsFromPath"].as_object().into_iter().flatten();
        let relative = labels.map(|(_, path)| path).chain(gauge.get("valueFrom"));
        for path in relative {
            self::field(item, path).with_context(|| metric.to_string())?;
        }
    }
    Ok(())
}

/// Returns the schema of the field at a path.
fn field<'a>(schema: &'a Value, path: &Value) -> Result<&'a Value> {
    let names = path.as_array().context("no path")?;
    let mut found = schema;
    for name in names {
        let name = name.as_str().context("a path has names")?;
        // Metadata has no schema in a definition.
        found = &found["properties"][name];
        ensure!(!found.is_null(), "no field {path}");
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn finds_fields_that_do_not_exist() {
        let schema =
            json!({"properties": {"status": {"properties": {"used": {"type": "string"}}}}});
        assert!(field(&schema, &json!(["status", "used"])).is_ok());
        let error = field(&schema, &json!(["status", "free"])).unwrap_err();
        assert!(error.to_string().contains("free"), "{error}");
    }
}
