//! CEL selectors give the same values and errors as in kube-scheduler.

#![expect(
    clippy::unwrap_used,
    reason = "a failure of the harness fails the test"
)]

use std::io::Write as _;

use drava_cluster::Kubernetes;
use drava_oracle::batch::Range;
use drava_oracle::expression::{self, Outcome};
use drava_oracle::program;

fn compare(test: &str, release: Kubernetes) {
    if let Some(reason) = program::missing_prerequisite() {
        let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
        return;
    }
    let range = Range::from_environment().unwrap();
    let report = expression::run(release, range).unwrap();
    let _ = writeln!(
        std::io::stderr(),
        "Kubernetes {release}, selectors, seed {}: {} devices, {report}",
        range.seed,
        range.cases
    );
    for text in report.texts.iter().take(10) {
        let _ = writeln!(std::io::stderr(), "other text, {text}");
    }
    assert!(
        report.differences.is_empty(),
        "{} differences; seed {}\n{}",
        report.differences.len(),
        range.seed,
        report
            .differences
            .iter()
            .take(20)
            .cloned()
            .collect::<Vec<_>>()
            .join("\n")
    );
    assert!(report.outcomes.contains_key(&Outcome::SameValue));
    assert!(report.outcomes.contains_key(&Outcome::SameError));
}

#[test]
fn evaluates_selectors_as_kubernetes_1_36() {
    compare("evaluates_selectors_as_kubernetes_1_36", Kubernetes::V1_36);
}

#[test]
fn evaluates_selectors_as_kubernetes_1_37() {
    compare("evaluates_selectors_as_kubernetes_1_37", Kubernetes::V1_37);
}
