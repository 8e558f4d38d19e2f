//! Quantities: `quantity`, `isQuantity` and their methods, as in `k8s.io/apiserver/pkg/cel/library`.

use cel::common::types::{CelBool, CelDouble, CelInt, CelString, Type};
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload};
use drava_api::Quantity;

use crate::failed;
use crate::opaque::{Content, Opaque};

/// A quantity, comparable by methods and `==` as in Kubernetes' CEL library.
type QuantityValue = Opaque<Quantity>;

impl Content for Quantity {
    fn cel_type() -> &'static Type {
        static TYPE: Type = Type::new_unspecified_type("kubernetes.Quantity");
        &TYPE
    }
}

pub(crate) fn register(env: &mut Env) -> Result<(), DeclarationError> {
    add_overload!(env, fn quantity: (CelString) -> Result<QuantityValue>)?;
    add_overload!(env, fn is_quantity: (CelString) -> CelBool)?;
    add_member_overload!(env, fn quantity_sign: (QuantityValue) -> CelInt, name = "sign")?;
    add_member_overload!(env, fn quantity_is_integer: (QuantityValue) -> CelBool, name = "isInteger")?;
    add_member_overload!(env, fn quantity_as_integer: (QuantityValue) -> Result<CelInt>, name = "asInteger")?;
    add_member_overload!(env, fn quantity_as_float: (QuantityValue) -> CelDouble, name = "asApproximateFloat")?;
    add_member_overload!(env, fn quantity_greater: (QuantityValue, QuantityValue) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn quantity_less: (QuantityValue, QuantityValue) -> CelBool, name = "isLessThan")?;
    add_member_overload!(env, fn quantity_compare: (QuantityValue, QuantityValue) -> CelInt, name = "compareTo")?;
    add_member_overload!(env, fn quantity_add: (QuantityValue, QuantityValue) -> QuantityValue, name = "add")?;
    add_member_overload!(env, fn quantity_sub: (QuantityValue, QuantityValue) -> QuantityValue, name = "sub")?;
    add_member_overload!(env, fn quantity_add_int: (QuantityValue, CelInt) -> QuantityValue, name = "add")?;
    add_member_overload!(env, fn quantity_sub_int: (QuantityValue, CelInt) -> QuantityValue, name = "sub")
}

fn quantity(text: &CelString<'_>) -> Result<QuantityValue, ExecutionError> {
    text.inner()
        .parse()
        .map(Opaque)
        .map_err(|error: drava_api::quantity::ParseQuantityError| failed("quantity", error))
}

fn is_quantity(text: &CelString<'_>) -> CelBool {
    text.inner().parse::<Quantity>().is_ok().into()
}

fn quantity_sign(this: &QuantityValue) -> CelInt {
    let sign = match this.0.cmp(&Quantity::ZERO) {
        std::cmp::Ordering::Less => -1,
        std::cmp::Ordering::Equal => 0,
        std::cmp::Ordering::Greater => 1,
    };
    CelInt::from(sign)
}

fn quantity_is_integer(this: &QuantityValue) -> CelBool {
    this.0.to_i64().is_some().into()
}

fn quantity_as_integer(this: &QuantityValue) -> Result<CelInt, ExecutionError> {
    this.0
        .to_i64()
        .map(CelInt::from)
        .ok_or_else(|| failed("asInteger", "cannot convert value to integer"))
}

fn quantity_as_float(this: &QuantityValue) -> CelDouble {
    this.0.to_f64_lossy().into()
}

fn quantity_greater(this: &QuantityValue, other: &QuantityValue) -> CelBool {
    (this.0 > other.0).into()
}

fn quantity_less(this: &QuantityValue, other: &QuantityValue) -> CelBool {
    (this.0 < other.0).into()
}

fn quantity_compare(this: &QuantityValue, other: &QuantityValue) -> CelInt {
    CelInt::from(this.0.cmp(&other.0) as i64)
}

fn quantity_add(this: &QuantityValue, other: &QuantityValue) -> QuantityValue {
    Opaque(this.0 + other.0)
}

fn quantity_sub(this: &QuantityValue, other: &QuantityValue) -> QuantityValue {
    Opaque(this.0 - other.0)
}

fn units(count: CelInt) -> Quantity {
    let magnitude = Quantity::count(count.inner().unsigned_abs());
    if *count.inner() < 0 {
        -magnitude
    } else {
        magnitude
    }
}

fn quantity_add_int(this: &QuantityValue, other: &CelInt) -> QuantityValue {
    Opaque(this.0 + units(*other))
}

fn quantity_sub_int(this: &QuantityValue, other: &CelInt) -> QuantityValue {
    Opaque(this.0 - units(*other))
}
