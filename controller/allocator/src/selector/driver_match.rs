//! Which drivers' devices an expression can select, by partial evaluation: `device.driver` and the attribute domains of
//! this driver's devices are known, everything else is unknown.

use cel::common::ast::{CallExpr, Expr, IdedExpr, LiteralValue, operators};
use drava_api::names;

use super::children;

/// Domain of the standard attributes of Kubernetes, which this driver publishes besides its own.
const STANDARD_DOMAIN: &str = "resource.kubernetes.io";

/// Which drivers' devices a selector can select.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DriverMatch {
    /// Devices of any driver.
    Any,
    /// No device of this driver.
    Other,
    /// Devices of this driver: the selector names the driver.
    Own,
}

impl DriverMatch {
    /// Returns the match of an expression.
    pub(super) fn of(expression: &IdedExpr) -> Self {
        if names_driver(expression) {
            Self::Own
        } else if Outcomes::of(expression).can_be_true {
            Self::Any
        } else {
            Self::Other
        }
    }

    /// Returns the match of an expression that cannot be parsed.
    pub(super) fn of_text(source: &str) -> Self {
        if source.contains(names::DRIVER) {
            Self::Own
        } else {
            Self::Any
        }
    }

    /// Returns the match of selectors that all have to select a device.
    pub(crate) fn all(matches: impl IntoIterator<Item = Self>) -> Self {
        matches.into_iter().max().unwrap_or(Self::Any)
    }
}

/// Returns whether the expression contains this driver's name as a string, other than in `device.driver != "…"`.
fn names_driver(expression: &IdedExpr) -> bool {
    match &expression.expr {
        Expr::Literal(LiteralValue::String(text)) => text.inner() == names::DRIVER,
        Expr::Call(CallExpr {
            func_name, args, ..
        }) if func_name == operators::NOT_EQUALS => {
            !args.iter().any(is_driver_field) && args.iter().any(names_driver)
        }
        _ => children(expression).any(names_driver),
    }
}

fn is_driver_field(expression: &IdedExpr) -> bool {
    matches!(&expression.expr, Expr::Select(select) if select.field == "driver")
}

/// Possible results of an expression for a device of this driver. Neither: the evaluation always fails.
#[derive(Debug, Clone, Copy)]
struct Outcomes {
    can_be_true: bool,
    can_be_false: bool,
}

impl Outcomes {
    const UNKNOWN: Self = Self::new(true, true);
    const ERROR: Self = Self::new(false, false);

    const fn new(can_be_true: bool, can_be_false: bool) -> Self {
        Self {
            can_be_true,
            can_be_false,
        }
    }

    fn of(expression: &IdedExpr) -> Self {
        match &expression.expr {
            Expr::Literal(LiteralValue::Boolean(value)) => {
                Self::new(*value.inner(), !*value.inner())
            }
            Expr::Select(select) if select.test && is_foreign_domain(&select.operand) => {
                Self::new(false, true)
            }
            Expr::Call(call) => Self::of_call(call),
            _ if always_fails(expression) => Self::ERROR,
            _ => Self::UNKNOWN,
        }
    }

    fn of_call(call: &CallExpr) -> Self {
        match (call.func_name.as_str(), call.args.as_slice()) {
            (operators::LOGICAL_NOT, [operand]) => {
                let operand = Self::of(operand);
                Self::new(operand.can_be_false, operand.can_be_true)
            }
            (operators::LOGICAL_AND, [left, right]) => {
                let (left, right) = (Self::of(left), Self::of(right));
                Self::new(
                    left.can_be_true && right.can_be_true,
                    left.can_be_false || right.can_be_false,
                )
            }
            (operators::LOGICAL_OR, [left, right]) => {
                let (left, right) = (Self::of(left), Self::of(right));
                Self::new(
                    left.can_be_true || right.can_be_true,
                    left.can_be_false && right.can_be_false,
                )
            }
            (operators::CONDITIONAL, [condition, then, otherwise]) => {
                let condition = Self::of(condition);
                let (then, otherwise) = (Self::of(then), Self::of(otherwise));
                Self::new(
                    condition.can_be_true && then.can_be_true
                        || condition.can_be_false && otherwise.can_be_true,
                    condition.can_be_true && then.can_be_false
                        || condition.can_be_false && otherwise.can_be_false,
                )
            }
            // A literal with the name of this driver is handled by `names_driver`.
            (operators::EQUALS, [left, right]) if names_other_driver(left, right) => {
                Self::new(false, true)
            }
            (operators::IN, [key, domains])
                if is_device_map(domains) && text(key).is_some_and(is_foreign) =>
            {
                Self::new(false, true)
            }
            (operators::IN, [key, list]) if is_device_driver(key) && is_list_of_texts(list) => {
                Self::new(false, true)
            }
            _ if call
                .target
                .as_deref()
                .into_iter()
                .chain(&call.args)
                .any(always_fails) =>
            {
                Self::ERROR
            }
            _ => Self::UNKNOWN,
        }
    }
}

/// Returns whether the expression reads an attribute or capacity of a domain in which this driver publishes none.
fn always_fails(expression: &IdedExpr) -> bool {
    match &expression.expr {
        Expr::Select(select) if is_foreign_domain(&select.operand) => !select.test,
        Expr::Select(select) => always_fails(&select.operand),
        Expr::Call(call) => match (call.func_name.as_str(), call.args.as_slice()) {
            (operators::INDEX, [operand, _]) if is_foreign_domain(operand) => true,
            // These do not evaluate all of their operands, or turn a failure into a value.
            (
                operators::LOGICAL_AND
                | operators::LOGICAL_OR
                | operators::CONDITIONAL
                | operators::OPT_INDEX
                | operators::OPT_SELECT,
                _,
            ) => false,
            _ => call
                .target
                .as_deref()
                .into_iter()
                .chain(&call.args)
                .any(always_fails),
        },
        Expr::Comprehension(comprehension) => always_fails(&comprehension.iter_range),
        _ => false,
    }
}

fn names_other_driver(left: &IdedExpr, right: &IdedExpr) -> bool {
    is_device_driver(left) && text(right).is_some()
        || is_device_driver(right) && text(left).is_some()
}

/// Returns whether the expression is `device.driver`.
fn is_device_driver(expression: &IdedExpr) -> bool {
    is_device_field(expression, &["driver"])
}

/// Returns whether the expression is `device.attributes` or `device.capacity`.
fn is_device_map(expression: &IdedExpr) -> bool {
    is_device_field(expression, &["attributes", "capacity"])
}

fn is_device_field(expression: &IdedExpr, fields: &[&str]) -> bool {
    matches!(&expression.expr, Expr::Select(select) if !select.test
        && fields.contains(&select.field.as_str())
        && matches!(&select.operand.expr, Expr::Ident(name) if name == "device"))
}

/// Returns whether the expression is `device.attributes["<domain>"]` with a domain that this driver does not publish.
fn is_foreign_domain(expression: &IdedExpr) -> bool {
    match &expression.expr {
        Expr::Call(call) if call.func_name == operators::INDEX => match call.args.as_slice() {
            [map, domain] => is_device_map(map) && text(domain).is_some_and(is_foreign),
            _ => false,
        },
        Expr::Select(select) => is_device_map(&select.operand) && is_foreign(&select.field),
        _ => false,
    }
}

fn is_foreign(domain: &str) -> bool {
    ![names::DRIVER, STANDARD_DOMAIN].contains(&domain)
}

fn is_list_of_texts(expression: &IdedExpr) -> bool {
    matches!(&expression.expr, Expr::List(list) if list.elements.iter().all(|element| text(element).is_some()))
}

fn text(expression: &IdedExpr) -> Option<&str> {
    match &expression.expr {
        Expr::Literal(LiteralValue::String(text)) => Some(text.inner()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::Selectors;
    use super::DriverMatch::{self, Any, Other, Own};

    #[test]
    fn determines_drivers_of_selectors() {
        let selectors = Selectors::default();
        for (expression, expected) in [
            (
                r#"device.driver == "gpu.drava.dev" && device.attributes["gpu.drava.dev"].type == "vgpu""#,
                Own,
            ),
            (r#"device.attributes["gpu.drava.dev"].type == "vgpu""#, Own),
            (
                r#"cel.bind(a, device.attributes["gpu.drava.dev"], a.type == "vgpu")"#,
                Own,
            ),
            (
                r#"device.driver in ["gpu.drava.dev", "other.example.com"]"#,
                Own,
            ),
            (r#"device.attributes["gpu.drava.dev"].type != "vgpu""#, Own),
            // Neither compiles, the API server may know more.
            (r#"device.driver == "gpu.drava.dev" && ?"#, Own),
            (
                r#"device.driver == "gpu.drava.dev" && nosuchfunction()"#,
                Own,
            ),
            ("?!", Any),
            (r#"device.driver == "gpu.nvidia.com""#, Other),
            (r#""gpu.nvidia.com" == device.driver"#, Other),
            (
                r#"device.driver == "gpu.nvidia.com" && nosuchfunction()"#,
                Other,
            ),
            (r#"device.driver == "a" || device.driver == "b""#, Other),
            (r#"device.driver in ["a", "b"]"#, Other),
            (r#"!(device.driver != "a")"#, Any),
            (r#"!(device.driver == "a")"#, Any),
            (
                r#"device.attributes["gpu.nvidia.com"].type == "gpu""#,
                Other,
            ),
            (
                r#"device.attributes["gpu.nvidia.com"]["names"].exists(n, n == "a")"#,
                Other,
            ),
            (r#"has(device.attributes["gpu.nvidia.com"].type)"#, Other),
            (r#"!has(device.attributes["gpu.nvidia.com"].type)"#, Any),
            (r#""gpu.nvidia.com" in device.attributes"#, Other),
            (
                r#"device.capacity["dra.example.com"].memory.isGreaterThan(quantity("1Gi"))"#,
                Other,
            ),
            (
                r#"device.attributes["gpu.nvidia.com"].?type.orValue("gpu") == "gpu""#,
                Any,
            ),
            (
                r#"device.attributes["gpu.nvidia.com"].type == "gpu" || true"#,
                Any,
            ),
            (
                r#"device.driver == "a" ? true : device.attributes["resource.kubernetes.io"].pcieRoot == "x""#,
                Any,
            ),
            (
                r#"device.attributes["resource.kubernetes.io"].pcieRoot == "x""#,
                Any,
            ),
            (r#"device.driver != "gpu.drava.dev""#, Any),
            ("true", Any),
            ("false", Other),
        ] {
            assert_eq!(
                selectors.compile("", expression).driver_match(),
                expected,
                "{expression}"
            );
        }
    }

    #[test]
    fn combines_selectors() {
        assert_eq!(DriverMatch::all([]), Any);
        assert_eq!(DriverMatch::all([Any, Other]), Other);
        assert_eq!(DriverMatch::all([Other, Own, Any]), Own);
    }
}
