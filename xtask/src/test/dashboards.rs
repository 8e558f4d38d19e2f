//! Checks the dashboards: their metrics are documented, and every query returns data (promtool) for the series of
//! `tests/dashboards/series.yaml`.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use drava_cluster::workspace_root;
use serde_json::{Value, json};

use super::libtest::Outcome;
use super::log::Log;
use crate::codegen::dashboards::tables;

/// Runs the task.
pub(crate) fn check(log: &mut Log) -> Result<Outcome> {
    let promtool = drava_cluster::promtool().context("build promtool")?;
    let root = workspace_root();
    let path = root.join("tests/dashboards/series.yaml");
    let series = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let test = root.join("target/dashboards.yaml");
    fs::write(&test, test_of(&series)).with_context(|| format!("write {}", test.display()))?;
    let mut command = Command::new(&promtool);
    command.args(["test", "rules"]).arg(&test);
    let mut outcome = log.check(command)?;
    let metrics = fs::read_to_string(root.join("docs/reference/metrics.md"))?;
    outcome += Outcome::of_check("metrics of the dashboards", check_metrics(&metrics));
    Ok(outcome)
}

/// Returns the queries, with each variable for all values.
fn queries() -> impl Iterator<Item = String> {
    tables::ALL.iter().flat_map(|dashboard| {
        let panels = dashboard.panels.iter().flat_map(|panel| panel.queries);
        panels.map(|(_, query)| {
            let mut query = (*query).to_owned();
            for variable in dashboard.variables {
                query = query.replace(&format!("${}", variable.name), ".*");
            }
            query
        })
    })
}

/// Returns a test file of promtool that expects data from every query, given the series (a YAML list).
fn test_of(series: &str) -> String {
    let expected: Vec<Value> = queries()
        .map(|query| {
            json!({
                "expr": format!("count({query}) > bool 0"), "eval_time": "1h",
                "exp_samples": [{"labels": "{}", "value": 1}],
            })
        })
        .collect();
    // JSON is YAML.
    let expected = Value::from(expected);
    let series: String = series.lines().map(|line| format!("  {line}\n")).collect();
    format!(
        "evaluation_interval: 1m\ntests:\n- interval: 1m\n  promql_expr_test: {expected}\n  input_series:\n{series}"
    )
}

/// Checks that every metric of a query or variable is in the reference.
fn check_metrics(reference: &str) -> Result<()> {
    let variables = tables::ALL.iter().flat_map(|dashboard| dashboard.variables);
    let variables = variables.map(|variable| variable.metric.to_owned());
    for query in queries().chain(variables) {
        let words = query.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        for name in words.filter(|word| word.starts_with("drava_")) {
            let metric = name.strip_suffix("_bucket").unwrap_or(name);
            ensure!(
                reference.contains(&format!("| `{metric}` |")),
                "docs/reference/metrics.md has no metric {metric}, which a dashboard shows"
            );
        }
    }
    Ok(())
}
