//! A pod fits on the same nodes as for kube-scheduler, with the same scores; quantities and label selectors are read alike.
//! `DRAVA_ORACLE_CASES` sets the cases per class, `DRAVA_ORACLE_SEED` the seed.

#![expect(
    clippy::unwrap_used,
    reason = "a failure of the harness fails the test"
)]

use std::collections::BTreeMap;
use std::io::Write as _;

use drava_oracle::batch::Range;
use drava_oracle::program;
use drava_oracle::random::Random;
use drava_oracle::scheduler::{self, Class};
use serde_json::json;

/// Returns whether the test is skipped.
fn is_skipped(test: &str) -> bool {
    let missing = program::missing_prerequisite();
    if let Some(reason) = &missing {
        let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
    }
    missing.is_some()
}

fn compare(test: &str, class: Class) {
    if is_skipped(test) {
        return;
    }
    let range = Range::from_environment().unwrap();
    let report = scheduler::run(class, range).unwrap();
    let _ = writeln!(
        std::io::stderr(),
        "{class:?}, seed {}: {report}",
        range.seed
    );
    if let Some((index, text)) = report.differences.first() {
        panic!(
            "{} differences; the first is case {index}: {text}\n{}",
            report.differences.len(),
            scheduler::generator::case(range.seed, class, *index)
        );
    }
    if range.cases >= 100 {
        let decisions = report.admitted + report.rejected;
        assert!(report.admitted > decisions / 10, "{report}");
        let has_choices = class != Class::Scores || report.choices > range.cases / 4;
        assert!(has_choices && report.rejected > 0, "{report}");
    }
}

#[test]
fn admits_nodes_as_kube_scheduler() {
    compare("admits_nodes_as_kube_scheduler", Class::NodeFit);
}

#[test]
fn respects_neighbors_as_kube_scheduler() {
    compare("respects_neighbors_as_kube_scheduler", Class::Neighbors);
}

#[test]
fn follows_volumes_as_kube_scheduler() {
    compare("follows_volumes_as_kube_scheduler", Class::Volumes);
}

#[test]
fn scores_nodes_as_kube_scheduler() {
    compare("scores_nodes_as_kube_scheduler", Class::Scores);
}

#[test]
fn reads_quantities_as_kubernetes() {
    if is_skipped("reads_quantities_as_kubernetes") {
        return;
    }
    let range = Range::from_environment().unwrap();
    let mut program = scheduler::program().unwrap();
    for index in range.first..range.first + range.cases {
        let mut random = Random::new(range.seed, 2000, index);
        let mut texts: Vec<String> = (0..20).map(|_| quantity(&mut random)).collect();
        // Kubernetes reads a number without digits as 0. A claim with such an amount is refused on purpose.
        texts.retain(|text| has_digits(text));
        let differences = scheduler::quantities(&mut program, &texts).unwrap();
        assert!(differences.is_empty(), "case {index}: {differences:#?}");
    }
}

/// Whether the number before the suffix has a digit.
fn has_digits(text: &str) -> bool {
    let number = text.split(|letter: char| letter.is_alphabetic()).next();
    number.is_some_and(|number| number.contains(|letter: char| letter.is_ascii_digit()))
}

/// Returns a number with a suffix, mostly a valid one.
fn quantity(random: &mut Random) -> String {
    let sign = random.choose(&["", "", "", "-", "+"]);
    let digits = |random: &mut Random, most: u64| -> String {
        (0..random.between(0, most))
            .map(|_| char::from(b"0123456789"[usize::try_from(random.between(0, 9)).unwrap()]))
            .collect()
    };
    let mut number = digits(random, 12);
    if random.chance(40) {
        number = format!("{number}.{}", digits(random, 11));
    }
    let suffix = random.choose(&[
        "", "", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei",
        "e3", "E-2", "e+5", "e0", "K", "mi", "B", "e", " ", "i",
    ]);
    format!("{sign}{number}{suffix}")
}

#[test]
fn matches_labels_as_kubernetes() {
    if is_skipped("matches_labels_as_kubernetes") {
        return;
    }
    let range = Range::from_environment().unwrap();
    let mut program = scheduler::program().unwrap();
    for index in range.first..range.first + range.cases {
        let mut random = Random::new(range.seed, 3000, index);
        let random = &mut random;
        let expressions: Vec<_> = (0..random.between(0, 3))
            .map(|_| {
                let operator = random.choose(&["In", "NotIn", "Exists", "DoesNotExist", "Gt"]);
                let values: Vec<&str> = (0..random.between(1, 2))
                    .map(|_| random.choose(&["a", "b", ""]))
                    .collect();
                let mut expression =
                    json!({"key": random.choose(&["x", "y"]), "operator": operator});
                if operator.ends_with("In") || random.chance(5) {
                    expression["values"] = json!(values);
                }
                expression
            })
            .collect();
        let mut selector = json!({"matchExpressions": expressions});
        if random.chance(50) {
            selector["matchLabels"] =
                json!({random.choose(&["x", "y"]): random.choose(&["a", ""])});
        }
        let labels: Vec<BTreeMap<String, String>> = (0..6)
            .map(|_| {
                let mut labels = BTreeMap::new();
                for key in ["x", "y"] {
                    if random.chance(60) {
                        labels.insert(key.to_owned(), random.choose(&["a", "b", ""]).to_owned());
                    }
                }
                labels
            })
            .collect();
        let difference = scheduler::selector(&mut program, &selector, &labels).unwrap();
        assert_eq!(difference, None, "case {index}");
    }
}
