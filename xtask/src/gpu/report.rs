//! The report: rows of measurements, as JSON and as Markdown.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::package::output_of;
use super::setup::Card;

/// One row.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    /// Subject of the row.
    pub(crate) what: String,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
}

/// Result of a row.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase", tag = "outcome")]
pub(crate) enum Outcome {
    /// A guarantee that holds or not.
    Checked { held: bool, detail: String },
    /// A value without a goal.
    Measured { value: String },
    /// What this machine lacks.
    NotRun { reason: String },
}

impl Row {
    pub(crate) fn checked(what: impl Into<String>, held: bool, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self {
            what: what.into(),
            outcome: Outcome::Checked { held, detail },
        }
    }

    pub(crate) fn measured(what: impl Into<String>, value: impl Into<String>) -> Self {
        let value = value.into();
        Self {
            what: what.into(),
            outcome: Outcome::Measured { value },
        }
    }

    pub(crate) fn not_run(what: impl Into<String>, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self {
            what: what.into(),
            outcome: Outcome::NotRun { reason },
        }
    }
}

/// All rows.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    bench: &'static str,
    commit: String,
    machine: Card,
    simulated: bool,
    date: String,
    command: String,
    results: Vec<Part>,
}

#[derive(Debug, Serialize)]
struct Part {
    title: &'static str,
    rows: Vec<Row>,
}

impl Report {
    pub(crate) fn new(card: Card, simulated: bool, commit: String) -> Result<Self> {
        Ok(Self {
            bench: "gpu",
            commit,
            machine: card,
            simulated,
            date: output_of(Command::new("date").args(["-u", "+%Y-%m-%d"]))?,
            command: format!(
                "cargo xtask {}",
                std::env::args().skip(1).collect::<Vec<_>>().join(" ")
            ),
            results: Vec::new(),
        })
    }

    pub(crate) fn add(&mut self, title: &'static str, rows: Vec<Row>) {
        self.results.push(Part { title, rows });
    }

    pub(crate) fn markdown(&self) -> String {
        let mut text = format!(
            "# libvgpu on {}{}\n\n`{}`, commit {}, {}. {}.\n",
            self.machine.name,
            if self.simulated { " (simulated)" } else { "" },
            self.command,
            self.commit,
            self.date,
            self.machine,
        );
        for part in &self.results {
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                "\n## {}\n| What | Result | |\n|---|---|---|\n",
                part.title
            );
            for Row { what, outcome } in &part.rows {
                let (result, mark) = match outcome {
                    Outcome::Checked { held: true, detail } => (detail, "holds"),
                    Outcome::Checked {
                        held: false,
                        detail,
                    } => (detail, "**broken**"),
                    Outcome::Measured { value } => (value, ""),
                    Outcome::NotRun { reason } => (reason, "not run"),
                };
                let _ = writeln!(text, "| {what} | {result} | {mark} |");
            }
        }
        text
    }

    pub(crate) fn write(&self, out: &Path) -> Result<()> {
        let write = |name: &str, text: String| {
            let path = out.join(name);
            fs::write(&path, text).with_context(|| format!("write {}", path.display()))
        };
        write("gpu.json", serde_json::to_string_pretty(self)? + "\n")?;
        write("gpu.md", self.markdown())
    }

    /// # Errors
    /// When a guarantee does not hold; names all of them.
    pub(crate) fn verdict(&self) -> Result<()> {
        let broken: Vec<&str> = self
            .results
            .iter()
            .flat_map(|part| &part.rows)
            .filter(|row| matches!(row.outcome, Outcome::Checked { held: false, .. }))
            .map(|row| row.what.as_str())
            .collect();
        if broken.is_empty() {
            return Ok(());
        }
        bail!("does not hold: {}", broken.join("; "))
    }
}
