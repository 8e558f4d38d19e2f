//! The comparison finds defects of an allocator.

#![expect(
    clippy::unwrap_used,
    reason = "a failure of the harness fails the test"
)]

use std::io::Write as _;

use drava_cluster::Kubernetes;
use drava_oracle::batch::{self, Range};
use drava_oracle::generator::Class;
use drava_oracle::mutation::Mutation;
use drava_oracle::program;

fn finds(test: &str, mutation: Mutation, class: Class) {
    if let Some(reason) = program::missing_prerequisite() {
        let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
        return;
    }
    let range = Range {
        seed: 1,
        first: 0,
        cases: 150,
    };
    let report = batch::run(Kubernetes::V1_37, class, range, Some(mutation)).unwrap();
    assert!(!report.differences.is_empty(), "{mutation:?}: {report}");
}

#[test]
fn finds_missing_rounding() {
    finds(
        "finds_missing_rounding",
        Mutation::DropRounding,
        Class::Rounding,
    );
}

#[test]
fn finds_counters_charged_twice() {
    finds(
        "finds_counters_charged_twice",
        Mutation::CountSharedCountersTwice,
        Class::Shares,
    );
}

#[test]
fn finds_missing_distinct_attribute() {
    finds(
        "finds_missing_distinct_attribute",
        Mutation::SkipDistinct,
        Class::Constraints,
    );
}
