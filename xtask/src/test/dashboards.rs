//! Checks the queries of `kubectl drava cost` and `recommend`, of pages, and of the dashboards of the chart: every query returns data
//! (promtool) for the series of `tests/dashboards/series.yaml`, and the metrics of pages and dashboards are documented. Panels do not
//! overlap, and the files of the dashboards have the fields and types of Grafana's schema.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use drava_cluster::{Kubernetes, workspace_root};
use serde_json::{Value, json};

use super::libtest::Outcome;
use super::log::Log;

/// Directory of the dashboards below the repository root.
const DIRECTORY: &str = "deploy/helm/drava/files/dashboards";

/// The dashboard with the amounts of `kubectl drava cost`.
const COST_DASHBOARD: &str = "costs.json";

/// Values of its variables in the test.
const PRICES: [(&str, &str); 2] = [("gpu_hour", "3"), ("memory_gib_hour", "0.01")];

/// Values of its first panels with these prices, for the series of all namespaces and of `team`: 3 for 1.8 and 1.3 GPUs, and 0.01 for 91
/// and 89 GiB; 3 for 0.6 idle GPUs.
const COST_VALUES: [[f64; 2]; 2] = [[6.31, 4.79], [1.8, 1.8]];

/// Queries of `kubectl drava cost`, each with its value for the series.
const COSTS: [(&str, f64); 5] = [
    (
        include_str!("../../../cli/src/cost/requested_gpus.promql"),
        1.8,
    ),
    (
        include_str!("../../../cli/src/cost/requested_memory.promql"),
        97_710_505_984.0,
    ),
    (
        include_str!("../../../cli/src/cost/used_gpus.promql"),
        0.4 + 20.0 / 60.0,
    ),
    // All of GPU-2, and of GPU-1 what its only share that runs takes.
    (include_str!("../../../cli/src/cost/watts.promql"), 500.0),
    (include_str!("../../../cli/src/cost/partitions.promql"), 1.0),
];

/// The query of `kubectl drava recommend` for a metric, with values of the metric for the series.
const BY_REQUEST: &str = include_str!("../../../cli/src/recommend/by_request.promql");
const BY_REQUEST_VALUES: [(&str, f64); 4] = [
    ("drava_share_memory_peak_bytes", 5_368_709_120.0),
    // 8 GiB, 1 GiB and 2 GiB, without what is lent.
    (
        "drava_share_memory_limit_bytes - (drava_share_burst_bytes or drava_share_memory_limit_bytes * 0)",
        11_811_160_064.0,
    ),
    ("drava_share_gpu_time_guaranteed_ratio", 0.3),
    ("rate(drava_share_gpu_time_seconds_total[5m])", 20.0 / 60.0),
];

/// Pages with queries, each in a fence `promql`, or in the configuration of an autoscaler.
const PAGES: [&str; 2] = ["docs/alerts.md", "docs/operations.md"];

/// Directory of the manifests of autoscalers, whose metrics are those of the recipe.
const AUTOSCALERS: &str = "deploy/examples/autoscaling";

/// The recipe.
const RECIPE: &str = "docs/operations.md";

/// What is checked of a dashboard.
struct Dashboard {
    file: PathBuf,
    variables: Vec<Variable>,
    /// PromQL expressions of all panels.
    queries: Vec<String>,
}

/// A variable: the values of a label, as Grafana's `label_values(metric, label)`.
struct Variable {
    name: String,
    metric: String,
    label: String,
}

/// Runs the task.
pub(crate) fn check(log: &mut Log) -> Result<Outcome> {
    let promtool = drava_cluster::promtool().context("build promtool")?;
    let root = workspace_root();
    let dashboards = dashboards()?;
    let path = root.join("tests/dashboards/series.yaml");
    let series = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let test = root.join("target/dashboards.yaml");
    let mut queries = all_queries(&dashboards, &series)?;
    let mut of_pages = Vec::new();
    for page in PAGES {
        let text = fs::read_to_string(root.join(page)).with_context(|| format!("read {page}"))?;
        let found = queries_of(&text).with_context(|| format!("read {page}"))?;
        ensure!(!found.is_empty(), "{page} has no query");
        of_pages.extend(found);
    }
    let recipe = fs::read_to_string(root.join(RECIPE))?;
    let autoscalers = autoscalers()?;
    let mut outcome = Outcome::of_check(
        "metrics of autoscalers",
        check_autoscalers(&autoscalers, &recipe),
    );
    for autoscaler in &autoscalers {
        add_queries(autoscaler, &mut of_pages);
    }
    queries.extend(of_pages.iter().cloned());
    fs::write(
        &test,
        test_of(&queries, &cost_values(&dashboards)?, &series),
    )
    .with_context(|| format!("write {}", test.display()))?;
    let mut command = Command::new(&promtool);
    command.args(["test", "rules"]).arg(&test);
    outcome += log.check(command)?;
    outcome += log.check(schema(&dashboards)?)?;
    let metrics = fs::read_to_string(root.join("docs/reference/metrics.md"))?;
    let documented = check_metrics(&dashboards, &of_pages, &metrics);
    outcome += Outcome::of_check("metrics of the dashboards", documented);
    outcome += Outcome::of_check("costs of the dashboard", check_costs(&dashboards));
    Ok(outcome)
}

/// Reads the objects of the example with autoscalers.
fn autoscalers() -> Result<Vec<Value>> {
    let directory = workspace_root().join(AUTOSCALERS);
    let mut objects = Vec::new();
    for entry in fs::read_dir(&directory).with_context(|| format!("read {AUTOSCALERS}"))? {
        let file = entry?.path();
        if file
            .extension()
            .is_some_and(|extension| extension == "yaml")
        {
            let text = fs::read_to_string(&file)?;
            let read: Vec<Value> = serde_saphyr::from_multiple(&text)
                .with_context(|| format!("read {}", file.display()))?;
            objects.extend(read);
        }
    }
    Ok(objects)
}

/// Checks that autoscalers ask for what the recipe provides: a HorizontalPodAutoscaler for the metrics of its rules, and a
/// ScaledObject with its queries, where only the namespace differs. One of them starts the first pod.
fn check_autoscalers(objects: &[Value], recipe: &str) -> Result<()> {
    let of_kind = |kind: &str| {
        let kind = kind.to_owned();
        objects.iter().filter(move |object| object["kind"] == kind)
    };
    let metrics = of_kind("HorizontalPodAutoscaler").flat_map(|object| {
        let metrics = object["spec"]["metrics"].as_array();
        metrics.into_iter().flatten()
    });
    let metrics: Vec<&str> = metrics
        .filter_map(|metric| metric["pods"]["metric"]["name"].as_str())
        .collect();
    ensure!(!metrics.is_empty(), "no metric of pods");
    for metric in metrics {
        let rule = format!("name: {{as: {metric}}}");
        ensure!(recipe.contains(&rule), "{RECIPE} has no rule for {metric}");
    }
    let mut scales_to_zero = false;
    for object in of_kind("ScaledObject") {
        let mut queries = Vec::new();
        add_queries(object, &mut queries);
        ensure!(!queries.is_empty(), "a ScaledObject without a query");
        for query in queries {
            let query = query.replace("\"default\"", "\"research\"");
            ensure!(recipe.contains(&query), "{RECIPE} lacks {query}");
        }
        let triggers = object["spec"]["triggers"].as_array();
        let mut triggers = triggers.into_iter().flatten();
        let activates = triggers.any(|trigger| {
            let metadata = &trigger["metadata"];
            // GPU time is none without a pod.
            let query = metadata["query"].as_str().unwrap_or_default();
            metadata["activationThreshold"].is_string() && !query.contains("drava_")
        });
        scales_to_zero |= object["spec"]["minReplicaCount"] == 0 && activates;
    }
    ensure!(scales_to_zero, "no ScaledObject scales to zero and back");
    Ok(())
}

/// Returns the queries of a page: those in fences, and those that autoscalers are configured with.
fn queries_of(page: &str) -> Result<Vec<String>> {
    let mut queries: Vec<String> = fenced(page, "promql").map(str::to_owned).collect();
    for fence in fenced(page, "yaml") {
        let document = serde_saphyr::from_str(fence).with_context(|| format!("read {fence}"))?;
        add_queries(&document, &mut queries);
    }
    Ok(queries)
}

/// Returns the texts of the fences of this language.
fn fenced<'a>(page: &'a str, language: &str) -> impl Iterator<Item = &'a str> {
    let start = format!("```{language}\n");
    let fences: Vec<&str> = page.split(start.as_str()).skip(1).collect();
    fences
        .into_iter()
        .filter_map(|fence| fence.split("```").next())
}

/// Adds the queries of prometheus-adapter, as it asks for a pod, and of KEDA.
fn add_queries(document: &Value, queries: &mut Vec<String>) {
    const FIELDS: [&str; 3] = ["seriesQuery", "metricsQuery", "query"];
    match document {
        Value::Object(fields) => {
            for (field, value) in fields {
                match value.as_str().filter(|_| FIELDS.contains(&field.as_str())) {
                    Some(query) => {
                        let of_pod = r#"namespace="team",pod="p""#;
                        queries.push(query.replace("<<.LabelMatchers>>", of_pod));
                    }
                    None => add_queries(value, queries),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| add_queries(item, queries)),
        _ => {}
    }
}

/// Reads all dashboards.
fn dashboards() -> Result<Vec<Dashboard>> {
    let directory = workspace_root().join(DIRECTORY);
    let files =
        fs::read_dir(&directory).with_context(|| format!("read {}", directory.display()))?;
    let read = |file: PathBuf| {
        let text = fs::read_to_string(&file)?;
        let content = serde_json::from_str(&text)?;
        let dashboard = parse(file.clone(), &content);
        dashboard.with_context(|| format!("check {}", file.display()))
    };
    let dashboards = files.map(|file| read(file?.path()));
    let dashboards = dashboards.collect::<Result<Vec<_>>>()?;
    ensure!(!dashboards.is_empty(), "{} is empty", directory.display());
    Ok(dashboards)
}

/// Returns variables and queries of a dashboard whose panels do not overlap and whose queries use declared variables only.
fn parse(file: PathBuf, content: &Value) -> Result<Dashboard> {
    let mut cells = BTreeSet::new();
    let mut queries = Vec::new();
    for panel in list(&content["panels"])? {
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|name| panel["gridPos"][name].as_u64());
        let (Some(x), Some(y), Some(w), Some(h)) = (x, y, w, h) else {
            bail!("a panel has no position: {panel}");
        };
        let columns = x..x + w;
        let own = columns.flat_map(|column| (y..y + h).map(move |row| (column, row)));
        for cell in own {
            ensure!(
                cell.0 < 24 && cells.insert(cell),
                "panels overlap: {}",
                panel["title"]
            );
        }
        for target in list(&panel["targets"])? {
            queries.push(text(&target["expr"])?.to_owned());
        }
    }
    let declared = list(&content["templating"]["list"])?;
    let of_type = |kind: &'static str| declared.iter().filter(move |one| one["type"] == kind);
    let variables = of_type("query").map(variable);
    let variables = variables.collect::<Result<Vec<_>>>()?;
    for number in of_type("textbox") {
        let name = text(&number["name"])?;
        let price = PRICES.iter().find(|(of, _)| *of == name);
        let (_, price) = price.with_context(|| format!("no value for {name}"))?;
        for query in &mut queries {
            *query = query.replace(&format!("${name}"), price);
        }
    }
    for query in &queries {
        let names = variables.iter();
        let rest = names.fold(query.clone(), |rest, variable| {
            rest.replace(&format!("${}\"", variable.name), "\"")
        });
        ensure!(!rest.contains('$'), "undeclared variable: {query}");
    }
    Ok(Dashboard {
        file,
        variables,
        queries,
    })
}

fn variable(variable: &Value) -> Result<Variable> {
    let query = text(&variable["query"]["query"])?;
    let arguments = query.strip_prefix("label_values(");
    let arguments = arguments.and_then(|rest| rest.strip_suffix(')'));
    let arguments = arguments.and_then(|arguments| arguments.split_once(", "));
    let (metric, label) = arguments.with_context(|| format!("not label_values: {query}"))?;
    Ok(Variable {
        name: text(&variable["name"])?.to_owned(),
        metric: metric.to_owned(),
        label: label.to_owned(),
    })
}

fn list(value: &Value) -> Result<&Vec<Value>> {
    value
        .as_array()
        .with_context(|| format!("not a list: {value}"))
}

fn text(value: &Value) -> Result<&str> {
    value
        .as_str()
        .with_context(|| format!("not a text: {value}"))
}

/// Returns the check of the files against the types that Grafana generates from its schema.
fn schema(dashboards: &[Dashboard]) -> Result<Command> {
    let source = workspace_root().join("tests/dashboards/schema");
    let schema = drava_cluster::build_program(&source, "schema", Kubernetes::default());
    let mut command = Command::new(schema.context("build the check of dashboards")?);
    command.args(dashboards.iter().map(|dashboard| &dashboard.file));
    Ok(command)
}

impl Dashboard {
    /// Returns the queries, with `value` for each variable.
    fn queries(&self, value: impl Fn(&Variable) -> String) -> Vec<String> {
        let with_values = |query: &String| {
            let variables = self.variables.iter();
            variables.fold(query.clone(), |query, variable| {
                query.replace(&format!("${}", variable.name), &value(variable))
            })
        };
        self.queries.iter().map(with_values).collect()
    }
}

/// Returns the queries for all values of the variables, and for one value of each that the series have.
fn all_queries(dashboards: &[Dashboard], series: &str) -> Result<Vec<String>> {
    let mut queries = Vec::new();
    for dashboard in dashboards {
        for variable in &dashboard.variables {
            first_value(series, variable).with_context(|| {
                format!(
                    "the series have no {} with label {}",
                    variable.metric, variable.label
                )
            })?;
        }
        queries.extend(dashboard.queries(|_| ".*".to_owned()));
        let first = |variable: &Variable| first_value(series, variable).unwrap_or_default();
        queries.extend(dashboard.queries(|variable| first(variable).to_owned()));
    }
    Ok(queries)
}

/// Returns the first value of a variable.
fn first_value<'a>(series: &'a str, variable: &Variable) -> Option<&'a str> {
    let metric = format!("series: '{}{{", variable.metric);
    let mut labels = series
        .lines()
        .filter_map(|line| line.split_once(&metric).map(|(_, labels)| labels));
    labels.find_map(|labels| {
        let (_, rest) = labels.split_once(&format!("{}=\"", variable.label))?;
        rest.split_once('"').map(|(value, _)| value)
    })
}

/// Returns the dashboard of costs.
fn cost_dashboard(dashboards: &[Dashboard]) -> Result<&Dashboard> {
    let mut dashboards = dashboards.iter();
    let dashboard = dashboards.find(|dashboard| dashboard.file.ends_with(COST_DASHBOARD));
    dashboard.with_context(|| format!("no {COST_DASHBOARD}"))
}

/// Returns the queries of the dashboard of costs that have an expected value, with it.
fn cost_values(dashboards: &[Dashboard]) -> Result<Vec<(String, f64)>> {
    let dashboard = cost_dashboard(dashboards)?;
    let [all, team] = [".*", "team"].map(|value| dashboard.queries(|_| value.to_owned()));
    let expected = COST_VALUES.into_iter().zip(all.into_iter().zip(team));
    let values = expected.flat_map(|(values, (all, team))| [(all, values[0]), (team, values[1])]);
    // Money has no more digits.
    let rounded = values.map(|(query, value)| (format!("round(sum({query}), 0.001)"), value));
    Ok(rounded.collect())
}

/// Returns a test file of promtool that expects data from every query, given the series (a YAML list), and these values from these.
fn test_of(queries: &[String], values: &[(String, f64)], series: &str) -> String {
    let expected: Vec<Value> = queries
        .iter()
        .map(|query| {
            json!({
                "expr": format!("count({query}) > bool 0"), "eval_time": "1h",
                "exp_samples": [{"labels": "{}", "value": 1}],
            })
        })
        .collect();
    let costs = COSTS
        .iter()
        .map(|(query, value)| ((*query).to_owned(), value));
    let by_request = BY_REQUEST_VALUES
        .iter()
        .map(|(metric, value)| (BY_REQUEST.replace("VALUE", metric), value));
    let values = values.iter().map(|(query, value)| (query.clone(), value));
    let values = costs.chain(by_request).chain(values).map(|(query, value)| {
        json!({
            "expr": format!("sum({query})"), "eval_time": "1h",
            "exp_samples": [{"labels": "{}", "value": value}],
        })
    });
    // JSON is YAML.
    let expected: Value = expected.into_iter().chain(values).collect();
    let series: String = series.lines().map(|line| format!("  {line}\n")).collect();
    format!(
        "evaluation_interval: 1m\ntests:\n- interval: 1m\n  promql_expr_test: {expected}\n  input_series:\n{series}"
    )
}

/// Checks that the dashboard of costs asks for each amount as the command does.
fn check_costs(dashboards: &[Dashboard]) -> Result<()> {
    let dashboard = cost_dashboard(dashboards)?;
    for (query, _) in COSTS {
        let words: Vec<&str> = query.split_whitespace().collect();
        let query = words.join(" ");
        let mut panels = dashboard.queries.iter();
        ensure!(
            panels.any(|panel| panel.contains(&query)),
            "{COST_DASHBOARD} has no panel of {query}"
        );
    }
    Ok(())
}

/// Checks that every metric of a query or variable, and of a query of a page, is in the reference.
fn check_metrics(dashboards: &[Dashboard], of_pages: &[String], reference: &str) -> Result<()> {
    let variables = dashboards.iter().flat_map(|dashboard| &dashboard.variables);
    let metrics = variables.map(|variable| variable.metric.clone());
    let queries = dashboards
        .iter()
        .flat_map(|dashboard| dashboard.queries.iter().cloned());
    for query in queries.chain(metrics).chain(of_pages.iter().cloned()) {
        let words = query.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        for name in words.filter(|word| word.starts_with("drava_")) {
            let metric = name.strip_suffix("_bucket").unwrap_or(name);
            ensure!(
                reference.contains(&format!("| `{metric}` |")),
                "docs/reference/metrics.md has no metric {metric}, which a dashboard or page shows"
            );
        }
    }
    Ok(())
}
