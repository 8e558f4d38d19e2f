//! Expressions with their results in the DRA environment of Kubernetes.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1 as dra;
use serde_json::json;

use super::*;
use crate::attribute::Attribute;
use crate::capacity::Capacity;

mod libraries;
mod turns;

/// Driver of the test device.
const DRIVER: &str = "dra.example.com";

enum Expect {
    Match,
    NoMatch,
    Error(&'static str),
}
use Expect::{Error, Match, NoMatch};

fn device(is_shared: bool) -> DeviceValue {
    let device: dra::Device = serde_json::from_value(json!({
        "name": "d",
        "attributes": {
            "name": {"string": "fish"},
            "yes": {"bool": true},
            "int": {"int": 1},
            "version": {"version": "1.0.0"},
            "services": {"string": "some_example_value"},
            "names": {"strings": ["fish", "bird"]},
            "ids": {"ints": [1, 2, 3]},
            "versions": {"versions": ["1.0.0", "2.0.0"]},
            "other.example.com/name": {"bool": true},
        },
        "capacity": {"memory": {"value": "1Mi"}, "fraction": {"value": "1500m"}},
    }))
    .unwrap();
    let attributes: BTreeMap<_, _> = device
        .attributes
        .iter()
        .flatten()
        .map(|(name, raw)| (name.clone(), Attribute::parse(raw).unwrap()))
        .collect();
    let capacity: BTreeMap<_, _> = device
        .capacity
        .iter()
        .flatten()
        .map(|(name, raw)| (name.clone(), Capacity::parse(raw).unwrap()))
        .collect();
    DeviceValue::new(DRIVER, &attributes, &capacity, is_shared)
}

fn evaluate(expression: &str, device: &DeviceValue) -> Result<bool, SelectorError> {
    let selectors = Selectors::default();
    selectors.matches(
        &selectors.compile("", expression),
        device,
        &mut Turn::endless(),
    )
}

#[test]
fn evaluates_expressions_as_kubernetes() {
    let cases: &[(&str, Expect)] = &[
        ("true", Match),
        ("false", NoMatch),
        ("?!", Error("compilation failed: Syntax error")),
        (
            "1",
            Error("CEL result of type int could not be converted to bool"),
        ),
        (
            r#"device.attributes["no-such-domain"].noSuchAttr.isGreaterThan(quantity("0"))"#,
            Error("no such key: noSuchAttr"),
        ),
        (
            r#"device.attributes["no-such-domain"]["noSuchAttr"] == 1"#,
            Error("no such key: noSuchAttr"),
        ),
        (r#""no-such-domain" in device.attributes"#, NoMatch),
        (r#""dra.example.com" in device.attributes"#, Match),
        (r#""other.example.com" in device.attributes"#, Match),
        (r#"device.driver == """#, NoMatch),
        (r#"device.driver == "dra.example.com""#, Match),
        (r#"device.attributes["dra.example.com"].yes"#, Match),
        (r#"device.attributes["dra.example.com"]["yes"]"#, Match),
        (
            r#"cel.bind(dra, device.attributes["dra.example.com"], dra.yes && dra.name == "fish")"#,
            Match,
        ),
        (r#"cel.bind(a, 1, cel.bind(b, a + 1, b == 2))"#, Match),
        (r#"cel.bind(a.b, 1, true)"#, Error("simple identifiers")),
        (r#"device.attributes["other.example.com"].name"#, Match),
        (r#"device.attributes["dra.example.com"].int > 0"#, Match),
        (
            r#"device.attributes["dra.example.com"].name == "fish""#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].int.exists(x, x > 0)"#,
            Error(""),
        ),
        (
            r#"device.attributes["dra.example.com"].names"#,
            Error("CEL result of type list could not be converted to bool"),
        ),
        (
            r#"device.attributes["dra.example.com"].names.size() == 2"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].ids.exists(x, x > 2)"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].names.all(x, x != "")"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].versions.all(x, x.isGreaterThan(semver("0.0.1")))"#,
            Match,
        ),
        (r#"1 in device.attributes["dra.example.com"].ids"#, Match),
        (
            r#"device.attributes["dra.example.com"].names.includes("fish")"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].names.includes("cat")"#,
            NoMatch,
        ),
        (
            r#"device.attributes["dra.example.com"].name.includes("fish")"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].name.includes("bird")"#,
            NoMatch,
        ),
        (
            r#"device.attributes["dra.example.com"].yes.includes(true)"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].int.includes(2)"#,
            NoMatch,
        ),
        (
            r#"device.attributes["dra.example.com"].version.includes(semver("1.0.0"))"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].versions.includes(semver("3.0.0"))"#,
            NoMatch,
        ),
        (
            r#"device.attributes["dra.example.com"].version.isGreaterThan(semver("0.0.1"))"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].version.isGreaterThan(semver("v0.0.1", true)) && isSemver("v1.0.0", true)"#,
            Match,
        ),
        (r#"isSemver("1.0") || isSemver("v1.0.0")"#, NoMatch),
        (r#"semver("v01.1", true) == semver("1.1.0")"#, Match),
        (
            r#"semver("1.2.3").major() == 1 && semver("1.2.3").minor() == 2 && semver("1.2.3").patch() == 3"#,
            Match,
        ),
        (
            r#"semver("1.0.0-rc1").isLessThan(semver("1.0.0")) && semver("1.0.0").compareTo(semver("1.0.1")) == -1"#,
            Match,
        ),
        (r#"semver("x").major() == 1"#, Error("semver")),
        (
            r#"device.capacity["dra.example.com"].memory.isGreaterThan(quantity("1Ki"))"#,
            Match,
        ),
        (
            r#"device.capacity["dra.example.com"]["memory"].compareTo(quantity("1024Ki")) == 0"#,
            Match,
        ),
        (
            r#"device.capacity["dra.example.com"].memory == quantity("1048576")"#,
            Match,
        ),
        (
            r#"device.capacity["dra.example.com"].memory.asInteger() == 1048576"#,
            Match,
        ),
        (
            r#"device.capacity["dra.example.com"].fraction.isInteger()"#,
            NoMatch,
        ),
        (
            r#"device.capacity["dra.example.com"].fraction.asInteger() == 1"#,
            Error("cannot convert value to integer"),
        ),
        (
            r#"device.capacity["dra.example.com"].fraction.asApproximateFloat() == 1.5"#,
            Match,
        ),
        (
            r#"quantity("1Gi").add(quantity("1Gi")).sub(1).isLessThan(quantity("2Gi"))"#,
            Match,
        ),
        (
            r#"quantity("-1").sign() == -1 && isQuantity("1Gi") && !isQuantity("Gi")"#,
            Match,
        ),
        (r#"quantity("x").sign() == 0"#, Error("is not a quantity")),
        (r#"quantity("1") < quantity("2")"#, Error("")),
        (
            r#""memory" in device.capacity["dra.example.com"] && device.capacity["dra.example.com"].memory.isGreaterThan(quantity("1Ki"))"#,
            Match,
        ),
        (
            r#"!("nope" in device.capacity["dra.example.com"]) || device.capacity["dra.example.com"].nope.isGreaterThan(quantity("1Ki"))"#,
            Match,
        ),
        (
            r#"device.attributes.exists_one(x, x == "dra.example.com")"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].exists_one(x, x == "services")"#,
            Match,
        ),
        (
            r#"device.capacity.exists_one(x, x == "dra.example.com")"#,
            Match,
        ),
        (
            r#"device.capacity["dra.example.com"].exists_one(x, x == "memory")"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].services.split("example").size() >= 2"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].services.matches("some_[a-z]+")"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].services.lowerAscii().startsWith("some")"#,
            Match,
        ),
        (
            r#"has(device.attributes["dra.example.com"].yes) && !has(device.attributes["dra.example.com"].nope)"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].?nope.orValue("x") == "x""#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].nope == 1 || true"#,
            Match,
        ),
        (
            r#"device.attributes["dra.example.com"].nope == 1 && false"#,
            NoMatch,
        ),
        ("device.allowMultipleAllocations == false", Match),
        ("device.nope == 1", Error("no such key: nope")),
        ("nope == 1", Error("undeclared reference")),
        (
            r#"nosuchfunction(1)"#,
            Error("CEL compile error: undeclared reference to 'nosuchfunction'"),
        ),
        (
            r#"sets.contains([1, 2, 3], [3, 1]) && !sets.contains([1], [1, 2])"#,
            Match,
        ),
        (
            r#"sets.equivalent([1, 1], [1]) && sets.intersects([1, 2], [2, 3])"#,
            Match,
        ),
        (
            r#"[1, 2, 2].isSorted() && ![2, 1].isSorted() && [1, 3].sum() == 4"#,
            Match,
        ),
        (
            r#"[3, 1].min() == 1 && ["a", "b"].max() == "b" && [1, 2, 2].lastIndexOf(2) == 2"#,
            Match,
        ),
        (r#"[].min() == 1"#, Error("min called on empty list")),
        (
            r#""abc 123".find("[0-9]+") == "123" && "1a2".findAll("[0-9]", 1) == ["1"]"#,
            Match,
        ),
        (r#""é".matches("^\\w$")"#, NoMatch),
        (r#""a".matches("(")"#, Error("Illegal regex")),
        (
            r#"[5, 6].all(i, v, v == i + 5) && [5, 6].exists(i, v, i == 1 && v == 6)"#,
            Match,
        ),
        (
            r#"["a", "b"].existsOne(i, v, v == "b") && !["a", "a"].exists_one(i, v, v == "a")"#,
            Match,
        ),
        (
            r#"[1, 2].transformList(i, v, i > 0, v * 10) == [20]"#,
            Match,
        ),
        (r#"[1, 2].transformMap(i, v, v * 2) == {0: 2, 1: 4}"#, Match),
        (
            r#"{"a": "b"}.transformMapEntry(k, v, {v: k}) == {"b": "a"}"#,
            Match,
        ),
        (
            r#"["a", "a"].transformMapEntry(i, v, {v: i}).size() == 1"#,
            Error("insert failed"),
        ),
        (
            r#"device.attributes["dra.example.com"].exists(k, v, k == "int" && v == 1)"#,
            Match,
        ),
        (
            r#"[1].all(i, i, true)"#,
            Error("duplicate variable name: i"),
        ),
        (r#"math.greatest(1, 2) == 2"#, Error("undeclared reference")),
    ];
    check(cases);
}

fn check(cases: &[(&str, Expect)]) {
    let device = device(false);
    for (expression, expected) in cases {
        let outcome = evaluate(expression, &device);
        match (expected, &outcome) {
            (Match, Ok(true)) | (NoMatch, Ok(false)) => {}
            (Error(text), Err(error)) if error.to_string().contains(text) => {}
            _ => panic!("{expression}: {outcome:?}"),
        }
    }
}

#[test]
fn returns_hint_of_kube_scheduler() {
    let error = evaluate(
        r#"device.attributes["dra.example.com"].nope"#,
        &device(false),
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "CEL runtime error: no such key: nope. consider using CEL optional chaining (.? followed by orValue()) or \
         guarding the check with has() for optional fields"
    );
}

#[test]
fn exposes_allow_multiple_allocations() {
    assert_eq!(
        evaluate("device.allowMultipleAllocations", &device(true)),
        Ok(true)
    );
}

#[test]
fn survives_hostile_expressions() {
    let chain = |operator: &str, term: &str| {
        let mut text = term.to_owned();
        while text.len() + operator.len() + term.len() < MAX_EXPRESSION_BYTES - 10 {
            text = format!("{text}{operator}{term}");
        }
        text
    };
    let nested = |open: &str, close: &str| {
        let depth = (MAX_EXPRESSION_BYTES - 10) / (open.len() + close.len());
        format!("{}true{}", open.repeat(depth), close.repeat(depth))
    };
    // Stack size of a worker thread of the controller.
    let thread = std::thread::Builder::new()
        .stack_size(2 << 20)
        .spawn(move || {
            for expression in [
                chain(" && ", "true"),
                chain(" || ", "false"),
                format!("{} > 0", chain("+", "1")),
                format!("{} != ''", chain("+", "'a'")),
                chain(" ? true : ", "true"),
                nested("(", ")"),
                nested("[", "]"),
                "!".repeat(5000) + "true",
                "-".repeat(5000) + "1 < 0",
                format!("device{}", ".a".repeat(4000)),
                format!("device{}", "['a']".repeat(1500)),
                format!("device.attributes['a']{}", ".a".repeat(MAX_NESTING - 4)),
                format!(
                    "{}true{}",
                    "[".repeat(MAX_NESTING - 1),
                    "]".repeat(MAX_NESTING - 1)
                ),
                format!("{}1{}", "size(".repeat(1000), ")".repeat(1000)),
                format!("''{}", ".trim()".repeat(1000)),
                "\u{0}\u{ffff}'".repeat(100),
                "x".repeat(MAX_EXPRESSION_BYTES + 1),
            ] {
                let _ = evaluate(&expression, &device(false));
            }
        });
    thread.unwrap().join().unwrap();
}

#[test]
fn bounds_compiled_expressions_of_each_namespace() {
    let selectors = Selectors::default();
    let other = selectors.compile("other", "true");
    for index in 0..2 * cache::OWNER_LIMIT {
        selectors.compile("tenant", &format!("{index} == 1"));
    }
    let cached = selectors.compiled.lock().unwrap().len();
    assert!(cached <= cache::OWNER_LIMIT + 1, "{cached}");
    assert!(Arc::ptr_eq(&selectors.compile("other", "true"), &other));
}

#[test]
fn stops_expensive_evaluations() {
    let list = format!("[{}]", vec!["1"; 100].join(", "));
    let exceeded = Err(SelectorError::Runtime(drava_cel::EXCEEDED.to_owned()));
    for expression in [
        format!("{list}.all(a, {list}.all(b, {list}.all(c, a == b)))"),
        // The error of the exhausted budget is not a value that an operator may absorb.
        format!("{list}.all(a, {list}.all(b, {list}.all(c, a == b))) || true"),
        format!("{list}.all(i, a, {list}.all(j, b, {list}.transformList(k, c, c).size() > 0))"),
        "lists.range(1000000).size() > 0".to_owned(),
        format!("{list}.all(x, 'a'.matches('a'))"),
        format!(
            "cel.bind(a, '{}', cel.bind(b, a.replace('a', a), b.replace('a', a) != ''))",
            "a".repeat(1000)
        ),
    ] {
        assert_eq!(
            evaluate(&expression, &device(false)),
            exceeded,
            "{expression:.200}"
        );
    }
}

#[test]
fn limits_units_of_expensive_selector() {
    let selectors = Selectors::default();
    let list = format!("[{}]", vec!["1"; 150].join(", "));
    let selector = selectors.compile("", &format!("{list}.all(a, {list}.all(b, a == b))"));
    let device = device(false);
    let allowed = (0..10_000)
        .take_while(|_| {
            let matched = selectors.matches(&selector, &device, &mut Turn::endless());
            matched.is_ok()
        })
        .count() as u64;
    let per_evaluation = 150 * 151 + 151;
    assert_eq!(allowed, SELECTOR_UNITS / per_evaluation + 1);
}
