//! A batch of generated cases of one class, compared with one release.

use std::collections::BTreeMap;
use std::env;
use std::fmt;
use std::str::FromStr;

use anyhow::{Context as _, Result, ensure};
use drava_cluster::Kubernetes;
use serde_json::Value;

use crate::comparison::{Comparison, Difference, Verdict};
use crate::exception::Exception;
use crate::generator::{self, Class};
use crate::mutation::Mutation;
use crate::reduction;

/// Cases per class and release without [`CASES`].
const DEFAULT_CASES: u64 = 100;
/// Seed without [`SEED`].
const DEFAULT_SEED: u64 = 1;

/// Variable with the number of cases per class and release.
pub const CASES: &str = "DRAVA_ORACLE_CASES";
/// Variable with the seed.
pub const SEED: &str = "DRAVA_ORACLE_SEED";
/// Variable with the index of the first case, which repeats one case of a seed.
pub const FIRST: &str = "DRAVA_ORACLE_FIRST";

/// Which cases are generated.
#[derive(Debug, Clone, Copy)]
pub struct Range {
    /// Seed.
    pub seed: u64,
    /// Index of the first case.
    pub first: u64,
    /// Number of cases.
    pub cases: u64,
}

impl Range {
    /// Reads the range from the environment.
    ///
    /// # Errors
    /// When a variable is not a number.
    pub fn from_environment() -> Result<Self> {
        Ok(Self {
            seed: variable(SEED)?.unwrap_or(DEFAULT_SEED),
            first: variable(FIRST)?.unwrap_or(0),
            cases: variable(CASES)?.unwrap_or(DEFAULT_CASES),
        })
    }
}

fn variable<T: FromStr>(name: &str) -> Result<Option<T>>
where
    T::Err: std::error::Error + Send + Sync + 'static,
{
    env::var(name)
        .ok()
        .map(|text| {
            text.parse()
                .with_context(|| format!("{name}: {text:?} is not a number"))
        })
        .transpose()
}

/// What a batch has found.
#[derive(Debug, Default)]
pub struct Report {
    /// Decisions with a solution by both.
    pub feasible: u64,
    /// Decisions without a solution by both.
    pub infeasible: u64,
    /// Listed differences.
    pub listed: BTreeMap<Exception, u64>,
    /// Differences that are not listed, with the index of the case.
    pub differences: Vec<(u64, Difference)>,
}

impl Report {
    /// Number of decisions.
    #[must_use]
    pub fn decisions(&self) -> u64 {
        self.feasible
            + self.infeasible
            + self.listed.values().sum::<u64>()
            + self.differences.len() as u64
    }

    fn add(&mut self, index: u64, verdict: Verdict) {
        match verdict {
            Verdict::Feasible => self.feasible += 1,
            Verdict::Infeasible => self.infeasible += 1,
            Verdict::Listed(exception) => *self.listed.entry(exception).or_default() += 1,
            Verdict::Different(difference) => self.differences.push((index, difference)),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} decisions: {} feasible, {} infeasible, listed {:?}, {} different",
            self.decisions(),
            self.feasible,
            self.infeasible,
            self.listed,
            self.differences.len()
        )
    }
}

/// Compares the cases of a range. With a mutation, our allocator has that defect.
///
/// # Errors
/// When the program cannot be started or fails.
pub fn run(
    release: Kubernetes,
    class: Class,
    range: Range,
    mutation: Option<Mutation>,
) -> Result<Report> {
    let mut comparison = Comparison::start(release, class == Class::FirstFit)?;
    let mut report = Report::default();
    for index in range.first..range.first + range.cases {
        let case = generator::case(range.seed, class, index);
        let seen = mutation.map_or_else(|| case.clone(), |mutation| mutation.apply(&case));
        let verdicts = comparison
            .compare_mutated(&case, &seen)
            .with_context(|| format!("class {class:?}, seed {}, case {index}", range.seed))?;
        for verdict in verdicts {
            report.add(index, verdict);
        }
    }
    Ok(report)
}

/// Fails with the first difference and its reduced case.
///
/// # Errors
/// With the difference.
pub fn check(release: Kubernetes, class: Class, range: Range, report: &Report) -> Result<()> {
    let Some((index, difference)) = report.differences.first() else {
        return Ok(());
    };
    let reduced = reduced(release, class, range.seed, *index, difference)
        .map_or_else(|error| error.to_string(), |case| case.to_string());
    ensure!(
        false,
        "{} differences to Kubernetes {release}; the first is case {index}; repeat it with {SEED}={} {FIRST}={index} \
         {CASES}=1\n{difference}\nreduced case: {reduced}",
        report.differences.len(),
        range.seed,
    );
    Ok(())
}

fn reduced(
    release: Kubernetes,
    class: Class,
    seed: u64,
    index: u64,
    difference: &Difference,
) -> Result<Value> {
    let mut comparison = Comparison::start(release, class == Class::FirstFit)?;
    reduction::reduce(&generator::case(seed, class, index), |case| {
        let verdicts = comparison.compare(case)?;
        Ok(verdicts.iter().any(
            |verdict| matches!(verdict, Verdict::Different(found) if found.kind == difference.kind),
        ))
    })
}
