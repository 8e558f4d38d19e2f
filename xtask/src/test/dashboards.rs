//! Checks the dashboards: their metrics are documented, every query returns data (promtool) for the series of
//! `tests/dashboards/series.yaml`, and the files have the fields and types of Grafana's schema.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use drava_cluster::{Kubernetes, workspace_root};
use serde_json::{Value, json};

use super::libtest::Outcome;
use super::log::Log;
use crate::codegen::dashboards;
use crate::codegen::dashboards::tables::{self, Variable};

/// Runs the task.
pub(crate) fn check(log: &mut Log) -> Result<Outcome> {
    let promtool = drava_cluster::promtool().context("build promtool")?;
    let root = workspace_root();
    let path = root.join("tests/dashboards/series.yaml");
    let series = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let test = root.join("target/dashboards.yaml");
    fs::write(&test, test_of(&all_queries(&series)?, &series))
        .with_context(|| format!("write {}", test.display()))?;
    let mut command = Command::new(&promtool);
    command.args(["test", "rules"]).arg(&test);
    let mut outcome = log.check(command)?;
    outcome += log.check(schema()?)?;
    let metrics = fs::read_to_string(root.join("docs/reference/metrics.md"))?;
    outcome += Outcome::of_check("metrics of the dashboards", check_metrics(&metrics));
    Ok(outcome)
}

/// Returns the check of the files against the types that Grafana generates from its schema.
fn schema() -> Result<Command> {
    let root = workspace_root();
    let source = root.join("tests/dashboards/schema");
    let schema = drava_cluster::build_program(&source, "schema", Kubernetes::default());
    let mut command = Command::new(schema.context("build the check of dashboards")?);
    for (file, _) in dashboards::files() {
        command.arg(root.join(file));
    }
    Ok(command)
}

/// Returns the queries, with `value` for each variable.
fn queries(value: impl Fn(&Variable) -> String) -> impl Iterator<Item = String> {
    tables::ALL.iter().flat_map(move |dashboard| {
        let values: Vec<(String, String)> = dashboard
            .variables
            .iter()
            .map(|variable| (format!("${}", variable.name), value(variable)))
            .collect();
        let panels = dashboard.panels.iter().flat_map(|panel| panel.queries);
        panels.map(move |(_, query)| {
            let query = (*query).to_owned();
            values
                .iter()
                .fold(query, |query, (name, value)| query.replace(name, value))
        })
    })
}

/// Returns the queries for all values of the variables, and for one value of each that the series have.
fn all_queries(series: &str) -> Result<Vec<String>> {
    let variables = tables::ALL.iter().flat_map(|dashboard| dashboard.variables);
    for variable in variables {
        first_value(series, variable).with_context(|| {
            format!(
                "the series have no {} with label {}",
                variable.metric, variable.name
            )
        })?;
    }
    let of_all = queries(|_| ".*".to_owned());
    let of_one = queries(|variable| first_value(series, variable).unwrap_or_default().to_owned());
    Ok(of_all.chain(of_one).collect())
}

/// Returns the first value of a variable, as Grafana's `label_values(metric, label)`.
fn first_value<'a>(series: &'a str, variable: &Variable) -> Option<&'a str> {
    let metric = format!("series: '{}{{", variable.metric);
    let mut labels = series
        .lines()
        .filter_map(|line| line.split_once(&metric).map(|(_, labels)| labels));
    labels.find_map(|labels| {
        let (_, rest) = labels.split_once(&format!("{}=\"", variable.name))?;
        rest.split_once('"').map(|(value, _)| value)
    })
}

/// Returns a test file of promtool that expects data from every query, given the series (a YAML list).
fn test_of(queries: &[String], series: &str) -> String {
    let expected: Vec<Value> = queries
        .iter()
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
    for query in queries(|_| ".*".to_owned()).chain(variables) {
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
