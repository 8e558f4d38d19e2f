//! The report: rows of measurements, as JSON and as Markdown.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::Args;
use super::package::output_of;
use super::setup::Gpu;

/// One row.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    /// Subject of the row.
    pub(crate) what: String,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
    /// The same with the other library.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer: Option<Outcome>,
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
            peer: None,
        }
    }

    pub(crate) fn measured(what: impl Into<String>, value: impl Into<String>) -> Self {
        let value = value.into();
        Self {
            what: what.into(),
            outcome: Outcome::Measured { value },
            peer: None,
        }
    }

    pub(crate) fn not_run(what: impl Into<String>, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self {
            what: what.into(),
            outcome: Outcome::NotRun { reason },
            peer: None,
        }
    }

    /// Adds the result of the row with the same title, or the error instead of all rows.
    pub(crate) fn join(&mut self, rows: &Result<Vec<Self>>) {
        self.peer = match rows {
            Err(error) => Some(Outcome::Checked {
                held: false,
                detail: format!("{error:#}"),
            }),
            Ok(rows) => {
                let row = rows.iter().find(|row| row.what == self.what);
                row.map(|row| row.outcome.clone())
            }
        };
    }
}

impl Outcome {
    /// Text and verdict for a table.
    fn cells(&self) -> (&str, &str) {
        match self {
            Self::Checked { held: true, detail } => (detail, "holds"),
            Self::Checked {
                held: false,
                detail,
            } => (detail, "**broken**"),
            Self::Measured { value } => (value, ""),
            Self::NotRun { reason } => (reason, "not run"),
        }
    }
}

/// All rows.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    bench: &'static str,
    commit: String,
    machine: Gpu,
    simulated: bool,
    /// File of the other library.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<PathBuf>,
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
    pub(crate) fn new(gpu: Gpu, args: &Args, commit: String) -> Result<Self> {
        Ok(Self {
            bench: "gpu",
            commit,
            machine: gpu,
            simulated: args.simulated,
            peer: args.peer.clone(),
            date: output_of(Command::new("date").args(["-u", "+%Y-%m-%d"]))?,
            command: format!(
                "cargo xtask {}",
                std::env::args().skip(1).collect::<Vec<_>>().join(" ")
            ),
            results: Vec::new(),
        })
    }

    /// Adds rows to a part.
    pub(crate) fn add(&mut self, title: &'static str, rows: Vec<Row>) {
        match self.results.iter_mut().find(|part| part.title == title) {
            Some(part) => part.rows.extend(rows),
            None => self.results.push(Part { title, rows }),
        }
    }

    /// Adds another library's results to the rows of a group, whose titles begin with its name.
    pub(crate) fn join(&mut self, group: &str, results: &Result<Vec<Row>>) {
        let rows = self.results.iter_mut().flat_map(|part| &mut part.rows);
        for row in rows.filter(|row| row.what.starts_with(group)) {
            row.join(results);
        }
    }

    /// Whether a part has rows.
    pub(crate) fn has(&self, title: &str) -> bool {
        let mut parts = self.results.iter();
        parts.any(|part| part.title == title && !part.rows.is_empty())
    }

    /// The title of each row.
    pub(crate) fn titles(&self) -> impl Iterator<Item = &str> {
        let rows = self.results.iter().flat_map(|part| &part.rows);
        rows.map(|row| row.what.as_str())
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
            let _ = write!(text, "\n## {}\n", part.title);
            text += match &self.peer {
                None => "| What | Result | |\n|---|---|---|\n",
                Some(_) => "| What | Result | | Other library | |\n|---|---|---|---|---|\n",
            };
            for row in &part.rows {
                let (result, mark) = row.outcome.cells();
                let _ = write!(text, "| {} | {result} | {mark} |", row.what);
                if self.peer.is_some() {
                    let (result, mark) = row.peer.as_ref().map(Outcome::cells).unwrap_or_default();
                    let _ = write!(text, " {result} | {mark} |");
                }
                text.push('\n');
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
