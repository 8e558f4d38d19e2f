//! The first table of a page: goals and whether they are met, misses first.

use serde_json::{Value, json};

use super::report::Report;

/// Whether a goal is met.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Outcome {
    Missed,
    NotMeasured,
    /// No miss in fewer rounds than the goal asks for.
    Fewer,
    Met,
}

impl Outcome {
    /// Returns whether a figure was measured that meets the goal.
    pub(super) const fn of(is_met: bool) -> Self {
        match is_met {
            true => Self::Met,
            false => Self::Missed,
        }
    }

    /// Returns the outcome of `misses` in `rounds`, of which the goal asks for `wanted`.
    pub(super) const fn of_rounds(misses: u64, rounds: u64, wanted: u64) -> Self {
        match misses {
            0 if rounds >= wanted => Self::Met,
            0 => Self::Fewer,
            _ => Self::Missed,
        }
    }

    const fn text(self) -> &'static str {
        match self {
            Self::Missed => "missed",
            Self::NotMeasured => "not measured",
            Self::Fewer => "no miss in fewer rounds",
            Self::Met => "met",
        }
    }
}

/// A goal with its figure.
pub(super) struct Goal {
    pub(super) what: &'static str,
    pub(super) goal: &'static str,
    pub(super) figure: Value,
    pub(super) outcome: Outcome,
}

/// Adds the table of goals.
pub(super) fn add(report: &mut Report, note: &str, mut goals: Vec<Goal>) {
    report.part("Goals", note);
    goals.sort_by_key(|goal| goal.outcome);
    for goal in goals {
        report.row(vec![
            ("what", json!(goal.what)),
            ("goal", json!(goal.goal)),
            ("figure", goal.figure),
            ("outcome", json!(goal.outcome.text())),
        ]);
    }
}
