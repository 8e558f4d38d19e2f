//! Generated CEL selectors, and the comparison of their results.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context as _, Result};
use drava_allocator::device::Device;
use drava_allocator::selector::{SelectorError, Selectors};
use drava_allocator::turn::Turn;
use drava_api::names;
use drava_cluster::Kubernetes;
use k8s_openapi::api::resource::v1 as dra;

use crate::batch::Range;
use crate::generator;
use crate::program::{Evaluation, Program};
use crate::random::Random;

mod libraries;

/// Number of the random sequence, different from those of the classes.
const STREAM: u64 = 100;
/// Expressions per device.
const PER_DEVICE: usize = 20;

/// Result of both evaluations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// Both select the device, or both do not.
    SameValue,
    /// Both fail with the same text.
    SameError,
    /// Both fail with different texts.
    OtherErrorText,
    /// The API server rejects the expression, because its types do not match or a name is unknown. It is never stored,
    /// so our result does not matter.
    RejectedByApiServer,
    /// Upstream cannot compare the result of `add` or `sub` of a quantity with `==`: "no such overload", or another error
    /// of the same expression. Ours can.
    ComputedQuantity,
    /// `cel.bind` evaluates its value also where the expression does not need it; upstream evaluates it when it is used.
    EagerBinding,
    /// The results differ.
    Different,
}

/// What a comparison has found.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of expressions by outcome.
    pub outcomes: BTreeMap<Outcome, u64>,
    /// Expressions with different results, with both.
    pub differences: Vec<String>,
    /// Expressions whose errors have different texts, with both.
    pub texts: Vec<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.outcomes)
    }
}

/// Compares the expressions of a range; each case is one device with several expressions.
///
/// # Errors
/// When the program cannot be started or fails.
pub fn run(release: Kubernetes, range: Range) -> Result<Report> {
    let mut program = Program::start(release)?;
    let selectors = Selectors::default();
    let mut report = Report::default();
    for index in range.first..range.first + range.cases {
        let mut random = Random::new(range.seed, STREAM, index);
        let devices = generator::devices(&mut random);
        let position = random.between(0, devices.len() as u64 - 1);
        let raw: dra::Device = devices
            .into_iter()
            .nth(usize::try_from(position)?)
            .map(serde_json::from_value)
            .context("a GPU without devices")??;
        let expressions: Vec<String> = (0..PER_DEVICE).map(|_| boolean(&mut random, 3)).collect();
        let evaluations = program.evaluate(&expressions, names::DRIVER, &raw)?;
        let device = Device::parse(&raw)?;
        for (expression, upstream) in expressions.iter().zip(&evaluations) {
            let selector = selectors.compile("", expression);
            let ours = device.selected_by(&selectors, &selector, &mut Turn::endless());
            let outcome = compare(expression, &ours, upstream);
            *report.outcomes.entry(outcome).or_default() += 1;
            let text = || {
                format!("case {index}: {expression}\n  ours: {ours:?}\n  upstream: {upstream:?}")
            };
            match outcome {
                Outcome::Different => report.differences.push(text()),
                Outcome::OtherErrorText => report.texts.push(text()),
                Outcome::SameValue
                | Outcome::SameError
                | Outcome::RejectedByApiServer
                | Outcome::ComputedQuantity
                | Outcome::EagerBinding => {}
            }
        }
    }
    Ok(report)
}

fn compare(expression: &str, ours: &Result<bool, SelectorError>, upstream: &Evaluation) -> Outcome {
    if !upstream.compile_error.is_empty() {
        return Outcome::RejectedByApiServer;
    }
    match ours {
        Err(SelectorError::Runtime(text)) if !upstream.runtime_error.is_empty() => {
            // Our text may continue with the hint of kube-scheduler.
            if text.starts_with(&upstream.runtime_error) {
                Outcome::SameError
            } else {
                Outcome::OtherErrorText
            }
        }
        Ok(selected) if upstream.runtime_error.is_empty() && *selected == upstream.selected => {
            Outcome::SameValue
        }
        Ok(_)
            if !upstream.runtime_error.is_empty()
                && (expression.contains(".add(") || expression.contains(".sub(")) =>
        {
            Outcome::ComputedQuantity
        }
        Err(SelectorError::Runtime(_)) if expression.contains("cel.bind(") => Outcome::EagerBinding,
        Ok(_) | Err(_) => Outcome::Different,
    }
}

const OWN: &str = r#"device.attributes["gpu.drava.dev"]"#;
const STANDARD: &str = r#"device.attributes["resource.kubernetes.io"]"#;
const CAPACITY: &str = r#"device.capacity["gpu.drava.dev"]"#;

/// Returns an expression of type bool.
fn boolean(random: &mut Random, depth: u64) -> String {
    let pick = random.between(0, if depth == 0 { 7 } else { 33 });
    let next = depth.saturating_sub(1);
    match pick {
        0 => random
            .choose(&["true", "false", "device.allowMultipleAllocations"])
            .to_owned(),
        1 => format!("{OWN}.oversubscribed"),
        2 => r#"device.driver == "gpu.drava.dev""#.to_owned(),
        3 => format!("has({OWN}.{})", name(random)),
        4 => format!(r#""{}" in {OWN}"#, name(random)),
        5 => format!(
            r#""{}" in device.attributes"#,
            random.choose(&["gpu.drava.dev", "example.com"])
        ),
        6 => format!("has({STANDARD}.numaNode)"),
        7 => format!("{OWN}[?\"{}\"].hasValue()", name(random)),
        8 | 9 => format!("({} && {})", boolean(random, next), boolean(random, next)),
        10 | 11 => format!("({} || {})", boolean(random, next), boolean(random, next)),
        12 => format!("!{}", boolean(random, next)),
        13 => format!(
            "({} ? {} : {})",
            boolean(random, next),
            boolean(random, next),
            boolean(random, next)
        ),
        14 | 15 => {
            let operator = random.choose(&["==", "!=", "<", "<=", ">", ">="]);
            format!(
                "{} {operator} {}",
                integer(random, next),
                integer(random, next)
            )
        }
        16 | 17 => {
            let operator = random.choose(&["==", "!=", "<", ">="]);
            format!(
                "{} {operator} {}",
                string(random, next),
                string(random, next)
            )
        }
        18 => {
            let method = random.choose(&["startsWith", "endsWith", "contains", "matches"]);
            format!("{}.{method}({})", string(random, next), string(random, 0))
        }
        19 => {
            let method = random.choose(&["isLessThan", "isGreaterThan"]);
            format!("{}.{method}({})", quantity(random), quantity(random))
        }
        20 => format!("{} == {}", quantity(random), quantity(random)),
        21 => {
            let method = random.choose(&["isLessThan", "isGreaterThan"]);
            format!("{}.{method}({})", version(random), version(random))
        }
        22 => format!("{} == {}", version(random), version(random)),
        23 => {
            let function = random.choose(&["isQuantity", "isSemver"]);
            let text = random.choose(&["1Gi", "1.2.3", "x", "", "v1.0", "-5m", "1.0.0-rc.1"]);
            format!(r#"{function}("{text}")"#)
        }
        24 => format!(
            "{}.{}(x, x {} {})",
            strings(random, next),
            random.choose(&["exists", "all", "exists_one"]),
            random.choose(&["==", "!=", "<"]),
            string(random, 0)
        ),
        25 => format!("{} in {}", string(random, next), strings(random, next)),
        26 => format!("{} in {}", integer(random, next), integers(random, next)),
        27 => match random.between(0, 3) {
            0 => format!("{}.isSorted()", integers(random, next)),
            1 => format!("{}.isSorted()", strings(random, next)),
            2 => two_variables(random, next),
            _ => libraries::address(random),
        },
        28 => format!(
            "cel.bind(b, {}, {} || b)",
            boolean(random, next),
            boolean(random, next)
        ),
        29 => format!(
            r#"sets.{}({}, {})"#,
            random.choose(&["contains", "intersects", "equivalent"]),
            strings(random, next),
            strings(random, next)
        ),
        30 => libraries::network(random),
        31 => libraries::url(random),
        32 => libraries::format(random),
        _ => format!("{OWN}.exists(k, k == {})", string(random, 0)),
    }
}

/// An expression with a two-variable comprehension.
fn two_variables(random: &mut Random, depth: u64) -> String {
    match random.between(0, 6) {
        0..=2 => format!(
            "{}.{}(i, v, i {} 1 && v != {})",
            strings(random, depth),
            random.choose(&["all", "exists", "existsOne", "exists_one"]),
            random.choose(&["<", ">=", "=="]),
            string(random, 0)
        ),
        3 => format!(
            "{}.transformList(i, v, i {} 1, v + {}).size() == {}",
            strings(random, depth),
            random.choose(&["<", ">="]),
            string(random, 0),
            random.between(0, 2)
        ),
        4 => format!(
            "{}.transformMap(i, v, v + i)[{}] > {}",
            integers(random, depth),
            random.between(0, 2),
            random.between(0, 3)
        ),
        5 => format!(
            "{}.transformMapEntry(i, v, {{v: i}}).size() == {}",
            strings(random, depth),
            random.between(1, 3)
        ),
        _ => format!(
            // Upstream cannot compare a version with a string.
            "{OWN}.exists(k, v, k == \"{}\" && v == {})",
            random.choose(&["type", "uuid", "index", "profile", "absent"]),
            string(random, 0)
        ),
    }
}

/// Name of an attribute; some exist on no device.
fn name(random: &mut Random) -> &'static str {
    random.choose(&[
        "type",
        "uuid",
        "index",
        "profile",
        "absent",
        "driverVersion",
    ])
}

fn string(random: &mut Random, depth: u64) -> String {
    let pick = random.between(0, if depth == 0 { 6 } else { 18 });
    let next = depth.saturating_sub(1);
    match pick {
        0..=2 => format!(
            r#""{}""#,
            random.choose(&[
                "gpu",
                "vgpu",
                "mig",
                "",
                "1g",
                "NVIDIA H100",
                "GPU-1",
                "é",
                " a "
            ])
        ),
        3 => format!("{OWN}.type"),
        4 => format!(
            "{OWN}.{}",
            random.choose(&["uuid", "productName", "profile"])
        ),
        5 => format!(
            r#"{OWN}.?{}.orValue("none")"#,
            random.choose(&["absent", "profile"])
        ),
        6 => {
            if random.chance(10) {
                format!("{OWN}.{}", random.choose(&["absent", "index"]))
            } else {
                format!("{STANDARD}.pcieRoot")
            }
        }
        7 => format!(
            "{}.{}()",
            string(random, next),
            random.choose(&["lowerAscii", "upperAscii", "trim"])
        ),
        8 => format!(
            "{}.replace({}, {})",
            string(random, next),
            string(random, 0),
            string(random, 0)
        ),
        9 => format!("({} + {})", string(random, next), string(random, next)),
        10 => format!(
            "{}.substring({})",
            string(random, next),
            random.between(0, 3)
        ),
        11 => format!(
            "{}.substring({}, {})",
            string(random, next),
            random.between(0, 2),
            random.between(0, 4)
        ),
        12 => format!("{}.charAt({})", string(random, next), random.between(0, 4)),
        13 => format!(
            r#"{}.split("-")[{}]"#,
            string(random, next),
            random.between(0, 1)
        ),
        14 => format!(r#"{}.join("-")"#, strings(random, next)),
        15 => format!("string({})", integer(random, next)),
        16 => match random.between(0, 2) {
            0 => format!("{}.find(\"[0-9]+\")", string(random, next)),
            1 => format!("{}.findAll(\"[a-zA-Z]\").join(\"\")", string(random, next)),
            _ => format!(
                "{}.findAll(r\"\\w\", {}).join(\"+\")",
                string(random, next),
                random.between(0, 3)
            ),
        },
        17 => format!(
            "({} ? {} : {})",
            boolean(random, 0),
            string(random, next),
            string(random, next)
        ),
        _ => format!("{}[{}]", strings(random, next), random.between(0, 2)),
    }
}

fn integer(random: &mut Random, depth: u64) -> String {
    let pick = random.between(0, if depth == 0 { 4 } else { 17 });
    let next = depth.saturating_sub(1);
    match pick {
        0..=2 => random
            .choose(&["0", "1", "2", "-1", "9223372036854775807"])
            .to_owned(),
        3 => format!("{OWN}.index"),
        4 => format!("{STANDARD}.numaNode"),
        5 => {
            let operator = random.choose(&["+", "-", "*", "/", "%"]);
            format!(
                "({} {operator} {})",
                integer(random, next),
                integer(random, next)
            )
        }
        6 => format!("size({})", string(random, next)),
        7 => format!("{}.size()", strings(random, next)),
        8 => format!("{}.indexOf({})", string(random, next), string(random, 0)),
        9 => format!(
            "{}.lastIndexOf({})",
            string(random, next),
            string(random, 0)
        ),
        10 => format!("{}.compareTo({})", quantity(random), quantity(random)),
        11 => format!("{}.asInteger()", quantity(random)),
        12 => format!("{}.sign()", quantity(random)),
        13 => format!(
            "{}.{}()",
            version(random),
            random.choose(&["major", "minor", "patch"])
        ),
        14 => format!("{}.compareTo({})", version(random), version(random)),
        15 => match random.between(0, 3) {
            0 => format!(
                "{}.{}({})",
                strings(random, next),
                random.choose(&["indexOf", "lastIndexOf"]),
                string(random, 0)
            ),
            _ => format!(
                "{}.{}()",
                integers(random, next),
                random.choose(&["sum", "min", "max"])
            ),
        },
        16 => format!("int({})", string(random, 0)),
        _ => format!("{OWN}.size()"),
    }
}

fn strings(random: &mut Random, depth: u64) -> String {
    let next = depth.saturating_sub(1);
    match random.between(0, if depth == 0 { 2 } else { 6 }) {
        0..=2 => {
            let elements: Vec<String> = (0..random.between(1, 3))
                .map(|_| string(random, next.min(1)))
                .collect();
            format!("[{}]", elements.join(", "))
        }
        3 => format!(
            r#"{}.split("{}")"#,
            string(random, next),
            random.choose(&["-", " ", ""])
        ),
        4 => format!(
            "{}.filter(x, x != {})",
            strings(random, next),
            string(random, 0)
        ),
        5 => format!(
            "{}.map(x, x + {})",
            strings(random, next),
            string(random, 0)
        ),
        _ => format!("({} + {})", strings(random, next), strings(random, next)),
    }
}

fn integers(random: &mut Random, depth: u64) -> String {
    let elements: Vec<String> = (0..random.between(1, 3))
        .map(|_| integer(random, depth.min(1)))
        .collect();
    format!("[{}]", elements.join(", "))
}

fn quantity(random: &mut Random) -> String {
    match random.between(0, 6) {
        0 => format!("{CAPACITY}.memory"),
        1 => format!("{CAPACITY}.cores"),
        2 => format!("{CAPACITY}.slots"),
        3 => format!("{CAPACITY}.memory.add({})", quantity(random)),
        4 => format!("{CAPACITY}.cores.sub({})", random.between(0, 200)),
        _ => format!(
            r#"quantity("{}")"#,
            random.choose(&[
                "8Gi", "16Gi", "8192Mi", "100", "1500m", "-1", "1e3", "0.5", "1Ti"
            ])
        ),
    }
}

fn version(random: &mut Random) -> String {
    match random.between(0, 3) {
        0 | 1 => format!("{OWN}.driverVersion"),
        2 => format!(
            r#"semver("{}")"#,
            random.choose(&[
                "580.65.6",
                "570.0.1",
                "575.0.0",
                "1.2.3-rc.1",
                "1.2.3+build"
            ])
        ),
        _ => format!(
            r#"semver("{}", true)"#,
            random.choose(&["v580.65", "570", "01.02.03", "1.2.3"])
        ),
    }
}
