//! What a selector reads of a device.

use cel::common::ast::LiteralValue;
use cel::common::ast::operators;
use cel::common::ast::{Expr, IdedExpr};

use super::children;
use crate::attribute::is_of_gpu;

/// Returns whether an expression may read an attribute that differs from GPU to GPU. Whatever is not known to read another one
/// may, such as a macro over the map of attributes.
pub(super) fn reads_gpu(expression: &IdedExpr) -> bool {
    if let Some((map, name)) = entry(expression)
        && is_attributes_of_domain(map)
    {
        return is_of_gpu(name);
    }
    match &expression.expr {
        Expr::Ident(name) => name == "device",
        Expr::Select(select) if is_device(&select.operand) => select.field == "attributes",
        _ => children(expression).any(reads_gpu),
    }
}

/// Returns a map and the name of its entry that is read, also one that is optional or only tested.
fn entry(expression: &IdedExpr) -> Option<(&IdedExpr, &str)> {
    match &expression.expr {
        Expr::Select(select) => Some((&select.operand, &select.field)),
        Expr::Call(call) => match (call.func_name.as_str(), call.args.as_slice()) {
            (operators::INDEX | operators::OPT_INDEX | operators::OPT_SELECT, [map, name]) => {
                match &name.expr {
                    Expr::Literal(LiteralValue::String(name)) => Some((map, name.inner())),
                    _ => None,
                }
            }
            _ => None,
        },
        _ => None,
    }
}

fn is_attributes_of_domain(expression: &IdedExpr) -> bool {
    entry(expression).is_some_and(|(map, _)| {
        matches!(&map.expr, Expr::Select(select)
            if select.field == "attributes" && is_device(&select.operand))
    })
}

fn is_device(expression: &IdedExpr) -> bool {
    matches!(&expression.expr, Expr::Ident(name) if name == "device")
}

#[cfg(test)]
mod tests {
    use super::super::Selectors;

    #[test]
    fn finds_selectors_that_may_read_the_gpu() {
        let selectors = Selectors::default();
        for (expression, expected) in [
            (
                r#"device.attributes["gpu.drava.dev"].type == "vgpu""#,
                false,
            ),
            (r#"device.attributes["gpu.drava.dev"]["index"] < 2"#, false),
            (
                r#"device.attributes["gpu.drava.dev"].?profile.orValue("") == "x""#,
                false,
            ),
            (r#"has(device.attributes["gpu.drava.dev"].type)"#, false),
            (
                r#"device.capacity["gpu.drava.dev"].memory.isGreaterThan(quantity("1Gi"))"#,
                false,
            ),
            (
                r#"device.driver == "gpu.drava.dev" && device.allowMultipleAllocations"#,
                false,
            ),
            ("true", false),
            (
                r#"device.attributes["gpu.drava.dev"].uuid == "GPU-1""#,
                true,
            ),
            (
                r#"device.attributes["gpu.drava.dev"]["uuid"] == "GPU-1""#,
                true,
            ),
            (
                r#"device.attributes["gpu.drava.dev"].?uuid.orValue("") == "x""#,
                true,
            ),
            (r#"has(device.attributes["gpu.drava.dev"].uuid)"#, true),
            (
                r#"device.attributes["resource.kubernetes.io"].pciBusID == "x""#,
                true,
            ),
            (
                r#"device.attributes["gpu.drava.dev"]["uu" + "id"] == "x""#,
                true,
            ),
            (
                r#"device.attributes["gpu.drava.dev"].exists(name, name == "type")"#,
                true,
            ),
            (r#"device.attributes.exists(domain, domain == "x")"#, true),
            (
                r#"cel.bind(a, device.attributes["gpu.drava.dev"], a.type == "vgpu")"#,
                true,
            ),
            (r#"cel.bind(d, device, d.driver == "x")"#, true),
            ("no expression ?!", true),
        ] {
            assert_eq!(
                selectors.compile("", expression).reads_gpu(),
                expected,
                "{expression}"
            );
        }
    }
}
