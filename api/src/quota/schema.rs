//! Validation of a GpuQuota by the API server: schemas of fields and CEL rules.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

/// GPU memory as a quantity that fits into [`crate::Quantity`].
pub(crate) fn memory(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "maxLength": 15,
        "pattern": r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$",
    })
}

/// A number of devices, or percent of GPU time.
pub(super) fn count(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "format": "int64", "minimum": 0, "maximum": 1_000_000_000})
}

pub(super) fn namespaces(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "minItems": 1,
        "maxItems": 256,
        "x-kubernetes-list-type": "set",
        "items": {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    })
}

pub(super) fn product_names(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "minItems": 1,
        "maxItems": 64,
        "x-kubernetes-list-type": "set",
        "items": {"type": "string", "minLength": 1, "maxLength": 64},
    })
}

pub(super) fn device_types(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "x-kubernetes-list-type": "set",
        "items": {"type": "string", "enum": ["gpu", "vgpu", "mig"]},
    })
}

/// CEL rules of the spec.
pub(super) fn spec_rules() -> Value {
    json!([
        {
            "rule": "has(self.namespaces) != has(self.namespaceSelector)",
            "message": "set exactly one of namespaces and namespaceSelector",
        },
        {
            "rule": "has(self.limit) || has(self.guarantee) || has(self.claim)",
            "message": "set at least one of limit, guarantee and claim",
        },
        at_most("memory", "guarantee", "limit"),
        at_most("cores", "guarantee", "limit"),
        at_most("devices", "guarantee", "limit"),
        at_most("memory", "claim.default", "claim.max"),
        at_most("cores", "claim.default", "claim.max"),
    ])
}

/// CEL rules of the device selector.
pub(super) fn device_selector_rules() -> Value {
    json!([{
        "rule": "has(self.productNames) || has(self.types)",
        "message": "set productNames, types or both; without deviceSelector all devices count",
    }])
}

/// Rule that `lower.resource` does not exceed `upper.resource` where both are set.
fn at_most(resource: &str, lower: &str, upper: &str) -> Value {
    let has = |path: &str| {
        let mut prefix = "self".to_owned();
        let steps = path.split('.').chain([resource]).map(|step| {
            prefix = format!("{prefix}.{step}");
            format!("has({prefix})")
        });
        steps.collect::<Vec<_>>().join(" && ")
    };
    let comparison = if resource == "memory" {
        let quantity = |path: &str| format!("quantity(self.{path}.{resource})");
        format!("{}.compareTo({}) <= 0", quantity(lower), quantity(upper))
    } else {
        format!("self.{lower}.{resource} <= self.{upper}.{resource}")
    };
    json!({
        "rule": format!("!({} && {}) || {comparison}", has(lower), has(upper)),
        "message": format!("{lower}.{resource} must not exceed {upper}.{resource}"),
    })
}
