//! Results of a bench: tables of rows, as JSON, and the page that shows them.
//!
//! A page is the rendering of its JSON file, followed by a section [`REMARKS`] that is written by hand, if any.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use drava_cluster::process::{self, Limit};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One measured point: columns and their values, in order.
pub(crate) type Row = Vec<(&'static str, Value)>;

/// Start of the part of a page that is written by hand.
const REMARKS: &str = "\n## Remarks\n";

/// All results of a bench.
#[derive(Serialize, Deserialize)]
pub(crate) struct Report {
    bench: String,
    command: String,
    commit: String,
    machine: String,
    parts: Vec<Part>,
}

/// A table.
#[derive(Serialize, Deserialize)]
struct Part {
    title: String,
    note: String,
    columns: Vec<String>,
    /// The values of each row, by column.
    rows: Vec<Map<String, Value>>,
}

impl Report {
    /// Returns an empty report of that bench on this machine.
    pub(crate) fn new(bench: &str) -> Result<Self> {
        Ok(Self {
            bench: bench.to_owned(),
            command: command(std::env::args()),
            commit: commit()?,
            machine: machine(),
            parts: Vec::new(),
        })
    }

    /// Starts a table; `note` explains its columns.
    pub(crate) fn part(&mut self, title: impl Into<String>, note: impl Into<String>) {
        let title = title.into();
        eprintln!("{title}");
        self.parts.push(Part {
            title,
            note: note.into(),
            columns: Vec::new(),
            rows: Vec::new(),
        });
    }

    /// Adds a row to the last table.
    pub(crate) fn row(&mut self, row: Row) {
        let Some(part) = self.parts.last_mut() else {
            return;
        };
        let cells: Vec<String> = row
            .iter()
            .map(|(name, value)| format!("{name} {}", cell(value)))
            .collect();
        eprintln!("  {}", cells.join(", "));
        for (name, _) in &row {
            if !part.columns.iter().any(|column| column == name) {
                part.columns.push((*name).to_owned());
            }
        }
        let values = row
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value));
        part.rows.push(values.collect());
    }

    /// Returns the tables as Markdown.
    fn markdown(&self) -> String {
        let mut text = format!(
            "# Bench: {}\n\n`{}` at commit {}, on simulated GPUs, on {}.\n",
            self.bench, self.command, self.commit, self.machine
        );
        for part in &self.parts {
            // Writing to a string cannot fail.
            let _ = write!(text, "\n## {}\n{}\n\n", part.title, part.note);
            if part.rows.is_empty() {
                continue;
            }
            let _ = writeln!(text, "| {} |", part.columns.join(" | "));
            let _ = writeln!(text, "|{}", "---|".repeat(part.columns.len()));
            for row in &part.rows {
                let of = |name: &String| row.get(name).map_or_else(String::new, cell);
                let cells: Vec<String> = part.columns.iter().map(of).collect();
                let _ = writeln!(text, "| {} |", cells.join(" | "));
            }
        }
        text
    }

    /// Writes the results as JSON, and the page that shows them. Returns the page. Remarks on the page stay.
    ///
    /// # Errors
    /// A table without rows, of which no measurement was reported; the files are written.
    pub(crate) fn write(&self, page: &Path, json: &Path) -> Result<String> {
        for path in [page, json] {
            if let Some(directory) = path.parent() {
                fs::create_dir_all(directory)?;
            }
        }
        let results = serde_json::to_string_pretty(self)? + "\n";
        fs::write(json, &results).with_context(|| format!("write {}", json.display()))?;
        let before = fs::read_to_string(page).unwrap_or_default();
        let remarks = before.find(REMARKS).and_then(|start| before.get(start..));
        let text = rendered(&results)? + remarks.unwrap_or_default();
        fs::write(page, &text).with_context(|| format!("write {}", page.display()))?;
        if let Some(part) = self.parts.iter().find(|part| part.rows.is_empty()) {
            bail!("no measurement for the table {:?}", part.title);
        }
        Ok(text)
    }
}

/// Returns the page of these results, without remarks.
fn rendered(json: &str) -> Result<String> {
    let report: Report = serde_json::from_str(json).context("read the results")?;
    Ok(report.markdown())
}

/// Checks that a page is the rendering of its JSON file, except for its remarks.
#[cfg(test)]
pub(crate) fn check(page: &Path, json: &Path) -> Result<()> {
    let read = |path: &Path| {
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let (text, results) = (read(page)?, read(json)?);
    let expected = rendered(&results)?;
    let shown = text.split(REMARKS).next().unwrap_or_default();
    if shown == expected {
        return Ok(());
    }
    let different = shown
        .lines()
        .zip(expected.lines())
        .find(|(shown, expected)| shown != expected);
    bail!(
        "{} is not the rendering of {}: {different:?}",
        page.display(),
        json.display()
    )
}

/// A value with two decimal places at most.
fn cell(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => {
            format!("{:.2}", number.as_f64().unwrap_or_default())
        }
        Value::Null => "–".to_owned(),
        Value::Array(values) => values.iter().map(cell).collect::<Vec<_>>().join(" : "),
        other => other.to_string(),
    }
}

/// Median, and distance between the quartiles.
pub(crate) fn median_and_spread(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |quarter: usize| {
        let index = (values.len().saturating_sub(1)) * quarter / 4;
        values.get(index).copied().unwrap_or_default()
    };
    (at(2), at(3) - at(1))
}

/// Returns the command of this process without the files that it writes.
fn command(arguments: impl IntoIterator<Item = String>) -> String {
    let mut words = vec!["cargo xtask".to_owned()];
    let mut arguments = arguments.into_iter().skip(1);
    while let Some(argument) = arguments.next() {
        let is_file = |option: &str| argument.split('=').next() == Some(option);
        if !is_file("--json") && !is_file("--markdown") {
            words.push(argument);
        } else if !argument.contains('=') {
            arguments.next();
        }
    }
    words.join(" ")
}

fn commit() -> Result<String> {
    let mut git = Command::new("git");
    git.args(["rev-parse", "--short", "HEAD"])
        .current_dir(drava_cluster::workspace_root())
        .stdin(Stdio::null());
    let output = process::output(&mut git, Limit::REQUEST)?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Processor, number of threads, and load by other programs.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let described = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = described
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unnamed processor", |(_, name)| name);
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or_default();
    format!("{model}, {cores} threads, load average {load} at the start")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report() -> Report {
        let mut report = Report::new("hook").unwrap();
        report.part("A launch", "Nanoseconds of a launch.");
        report.row(vec![
            ("variant", json!("metered")),
            ("p50", json!(1.0 / 3.0)),
        ]);
        report.row(vec![("variant", json!("two")), ("got", json!([1.5, 2.25]))]);
        report
    }

    #[test]
    fn writes_page_as_rendering_of_json_and_retains_remarks() {
        let directory = tempfile::tempdir().unwrap();
        let [page, json] = ["a/hook.md", "a/hook.json"].map(|name| directory.path().join(name));
        let report = report();
        let first = report.write(&page, &json).unwrap();
        assert!(
            first.ends_with("| variant | p50 | got |\n|---|---|---|\n| metered | 0.33 |  |\n| two |  | 1.50 : 2.25 |\n"),
            "{first}"
        );
        check(&page, &json).unwrap();
        let remarks = "\n## Remarks\nThe goal is 25 ns.\n";
        fs::write(&page, first.clone() + remarks).unwrap();
        check(&page, &json).unwrap();
        assert_eq!(report.write(&page, &json).unwrap(), first + remarks);
    }

    #[test]
    fn fails_without_measurements_of_a_table() {
        let directory = tempfile::tempdir().unwrap();
        let [page, json] = ["hook.md", "hook.json"].map(|name| directory.path().join(name));
        let mut report = report();
        report.part("A denial", "Nanoseconds of a denial.");
        let error = report.write(&page, &json).unwrap_err();
        assert!(error.to_string().contains("A denial"), "{error}");
        check(&page, &json).unwrap();
    }

    #[test]
    fn finds_page_that_was_edited() {
        let directory = tempfile::tempdir().unwrap();
        let [page, json] = ["hook.md", "hook.json"].map(|name| directory.path().join(name));
        let text = report().write(&page, &json).unwrap();
        for edited in [text.replace("0.33", "0.32"), text + "The goal is 25 ns.\n"] {
            fs::write(&page, edited).unwrap();
            assert!(check(&page, &json).is_err());
        }
        assert!(check(&page, &json.with_extension("missing")).is_err());
    }

    #[test]
    fn names_command_without_its_files() {
        let arguments = "xtask bench share --json a.json --only two --markdown=b.md --seconds 5";
        let arguments = arguments.split(' ').map(str::to_owned);
        assert_eq!(
            command(arguments),
            "cargo xtask bench share --only two --seconds 5"
        );
    }
}
