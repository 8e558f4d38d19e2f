//! Objects whose handles recur, and the account after them.

use serde::Deserialize;

use super::report::Row;
use super::setup::{Setup, Share, json};

/// Output of `gpu-suite handles` about one kind.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Recurrence {
    kind: String,
    rounds: u64,
    distinct_values: u64,
    free_bytes_before: u64,
    free_bytes_after: u64,
}

/// The kinds of `gpu-suite handles`.
pub(super) const KINDS: [&str; 8] = [
    "memory handle",
    "device pointer",
    "array",
    "pool",
    "stream",
    "event",
    "context",
    "graph",
];

pub(super) fn rows(setup: &Setup, share: &Share) -> Vec<Row> {
    match json::<Vec<Recurrence>>(setup.suite(Some(share), &["handles"])) {
        Ok(kinds) => kinds
            .iter()
            .map(|kind| row(kind, setup.is_simulated()))
            .collect(),
        Err(error) => vec![Row::checked(
            "recurring handles",
            false,
            format!("{error:#}"),
        )],
    }
}

/// The account returns to its start although values recur. Values of the simulated GPU do recur; a GPU on which none does
/// proves nothing.
fn row(seen: &Recurrence, is_simulated: bool) -> Row {
    let title = format!("{}: account after its values recur", seen.kind);
    let recurred = seen.rounds.saturating_sub(seen.distinct_values);
    let is_balanced = seen.free_bytes_after == seen.free_bytes_before;
    if is_balanced && recurred == 0 && !is_simulated {
        let rounds = seen.rounds;
        return Row::not_run(title, format!("no value recurred in {rounds} rounds"));
    }
    Row::checked(
        title,
        is_balanced && recurred > 0,
        format!(
            "{recurred} of {} recurred; {} bytes less free",
            seen.rounds,
            i128::from(seen.free_bytes_before) - i128::from(seen.free_bytes_after)
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::super::report::Outcome;
    use super::{Recurrence, row};

    fn outcome(distinct_values: u64, free_bytes_after: u64, is_simulated: bool) -> Option<bool> {
        let seen = Recurrence {
            kind: "stream".to_owned(),
            rounds: 10,
            distinct_values,
            free_bytes_before: 5,
            free_bytes_after,
        };
        match row(&seen, is_simulated).outcome {
            Outcome::Checked { held, .. } => Some(held),
            Outcome::Measured { .. } | Outcome::NotRun { .. } => None,
        }
    }

    #[test]
    fn reports_absent_recurrence_as_no_success() {
        assert_eq!(outcome(10, 5, false), None);
        assert_eq!(outcome(10, 5, true), Some(false));
        assert_eq!(outcome(10, 4, false), Some(false));
        assert_eq!(outcome(9, 5, false), Some(true));
        assert_eq!(outcome(9, 4, false), Some(false));
    }
}
