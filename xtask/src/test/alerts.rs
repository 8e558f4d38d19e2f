//! Checks the alerts of the Helm chart: syntax, tests with boundaries (promtool), metrics and documentation.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use drava_cluster::workspace_root;

use super::libtest::Outcome;
use super::log::Log;

/// Files with alerts; `tests/alerts` has a file of the same name for each.
const FILES: [&str; 2] = ["driver.yaml", "controller.yaml"];

/// Runs the task.
pub(crate) fn check(log: &mut Log) -> Result<Outcome> {
    let promtool = drava_cluster::promtool().context("build promtool")?;
    let root = workspace_root();
    let mut outcome = Outcome::default();
    for file in FILES {
        let rules = root.join("deploy/helm/drava/files/alerts").join(file);
        let tests = root.join("tests/alerts").join(file);
        for (action, path) in [("check", &rules), ("test", &tests)] {
            let mut command = Command::new(&promtool);
            command.args([action, "rules"]).arg(path);
            outcome += log.check(command)?;
        }
        outcome += Outcome::of_check(file, check_references(root, &rules, &tests));
    }
    Ok(outcome)
}

/// Checks that every alert of `rules` has a section in the documentation and a test, and uses known metrics.
fn check_references(root: &Path, rules: &Path, tests: &Path) -> Result<()> {
    let read =
        |path: &Path| fs::read_to_string(path).with_context(|| format!("read {}", path.display()));
    let text = read(rules)?;
    let tests = read(tests)?;
    let runbooks = read(&root.join("docs/alerts.md"))?;
    let metrics = read(&root.join("docs/reference/metrics.md"))?;
    for alert in alerts(&text) {
        let link = format!("docs/alerts.md#{}\n", alert.to_lowercase());
        ensure!(
            text.contains(&link),
            "alert {alert} does not link to its runbook"
        );
        ensure!(
            runbooks.contains(&format!("## {alert}\n")),
            "docs/alerts.md has no section {alert}"
        );
        ensure!(
            tests.contains(&format!("alertname: {alert}\n        exp_alerts:")),
            "no test expects alert {alert}"
        );
    }
    for metric in metric_names(&text) {
        ensure!(
            metrics.contains(&format!("| `{metric}` |")),
            "docs/reference/metrics.md has no metric {metric}"
        );
    }
    Ok(())
}

/// Returns the names of the alerts.
fn alerts(rules: &str) -> impl Iterator<Item = &str> {
    rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
}

/// Returns the names of the metrics in the expressions.
fn metric_names(rules: &str) -> impl Iterator<Item = &str> {
    rules
        .split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
        .filter(|word| word.starts_with("drava_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: &str = "
      - alert: First
        expr: drava_a_bytes{x=\"y\"} / (drava_b_total - 1) > 0
      - alert: Second
        expr: up == 0
";

    #[test]
    fn lists_alerts_and_metrics() {
        assert_eq!(alerts(RULES).collect::<Vec<_>>(), ["First", "Second"]);
        assert_eq!(
            metric_names(RULES).collect::<Vec<_>>(),
            ["drava_a_bytes", "drava_b_total"]
        );
    }
}
