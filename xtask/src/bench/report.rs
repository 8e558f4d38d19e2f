//! Results of a bench: tables of rows, as JSON and as Markdown.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use drava_cluster::process::{self, Limit};
use serde::Serialize;
use serde_json::{Map, Value};

/// One measured point: columns and their values, in order.
pub(crate) type Row = Vec<(&'static str, Value)>;

/// All results of a bench.
#[derive(Serialize)]
pub(crate) struct Report {
    bench: &'static str,
    command: String,
    commit: String,
    machine: String,
    results: Vec<Map<String, Value>>,
    #[serde(skip)]
    parts: Vec<Part>,
}

/// A table.
struct Part {
    title: String,
    note: String,
    rows: Vec<Row>,
}

impl Report {
    /// Returns an empty report of that bench on this machine.
    pub(crate) fn new(bench: &'static str) -> Result<Self> {
        Ok(Self {
            bench,
            command: command(std::env::args()),
            commit: commit()?,
            machine: machine(),
            results: Vec::new(),
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
        let mut object = Map::new();
        object.insert("part".into(), part.title.clone().into());
        for (name, value) in &row {
            object.insert((*name).into(), value.clone());
        }
        self.results.push(object);
        part.rows.push(row);
    }

    /// Returns the tables as Markdown.
    pub(crate) fn markdown(&self) -> String {
        let mut text = format!(
            "# Bench: {}\n\n`{}` at commit {}, on simulated GPUs, on {}.\n",
            self.bench, self.command, self.commit, self.machine
        );
        for part in &self.parts {
            // Writing to a string cannot fail.
            let _ = write!(text, "\n## {}\n{}\n\n", part.title, part.note);
            let Some(first) = part.rows.first() else {
                continue;
            };
            let names: Vec<&str> = first.iter().map(|(name, _)| *name).collect();
            let _ = writeln!(text, "| {} |", names.join(" | "));
            let _ = writeln!(text, "|{}", "---|".repeat(names.len()));
            for row in &part.rows {
                let cells: Vec<String> = row.iter().map(|(_, value)| cell(value)).collect();
                let _ = writeln!(text, "| {} |", cells.join(" | "));
            }
        }
        text
    }

    /// Writes the tables as Markdown.
    pub(crate) fn write_markdown(&self, path: &Path) -> Result<()> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(path, self.markdown()).with_context(|| format!("write {}", path.display()))
    }

    /// Writes the rows as one JSON object.
    pub(crate) fn write_json(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }
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
    use super::*;

    #[test]
    fn names_command_without_its_files() {
        let arguments = "xtask bench share --json a.json --only agent --markdown=b.md --seconds 5";
        let arguments = arguments.split(' ').map(str::to_owned);
        assert_eq!(
            command(arguments),
            "cargo xtask bench share --only agent --seconds 5"
        );
    }
}
