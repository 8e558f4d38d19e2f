//! Which rows run, and where they go: the report is written after each group of rows, so that a run that is cut off keeps
//! what it has measured.

use std::cell::OnceCell;
use std::path::Path;

use anyhow::{Result, bail};
use clap::ValueEnum as _;
use drava_cluster::Progress;

use super::Part;
use super::report::{Report, Row};
use super::setup::Preload;

/// What `--only` names: parts, and rows by the start of their title. Everything if it names nothing.
#[derive(Debug, Default)]
pub(crate) struct Selection {
    parts: Vec<Part>,
    rows: Vec<String>,
}

impl Selection {
    pub(crate) fn new(only: &[String]) -> Self {
        let mut selection = Self::default();
        for name in only {
            match Part::from_str(name, false) {
                Ok(part) => selection.parts.push(part),
                Err(_) => selection.rows.push(name.clone()),
            }
        }
        selection
    }

    /// Whether a part has rows that are named. A row's part is not known by its name.
    pub(crate) fn may_have(&self, part: Part) -> bool {
        !self.rows.is_empty() || self.has_all(part)
    }

    fn has_all(&self, part: Part) -> bool {
        self.parts.contains(&part) || (self.parts.is_empty() && self.rows.is_empty())
    }

    /// Whether a group of rows, whose titles begin with its name, has one that is named.
    fn has_group(&self, part: Part, group: &str) -> bool {
        let mut rows = self.rows.iter();
        self.has_all(part)
            || rows.any(|row| row.starts_with(group) || group.starts_with(row.as_str()))
    }

    fn has_row(&self, part: Part, title: &str) -> bool {
        self.has_all(part) || self.rows.iter().any(|row| title.starts_with(row.as_str()))
    }

    /// # Errors
    /// When a row is named that the report does not have.
    pub(crate) fn demand(&self, report: &Report) -> Result<()> {
        let is_missing =
            |row: &&String| !report.titles().any(|title| title.starts_with(row.as_str()));
        match self.rows.iter().find(is_missing) {
            None => Ok(()),
            Some(row) => {
                let parts = Part::value_variants()
                    .iter()
                    .filter_map(Part::to_possible_value);
                let parts: Vec<String> = parts.map(|part| part.get_name().to_owned()).collect();
                bail!(
                    "no part is named {row:?} and no row begins with it; the parts are {}",
                    parts.join(", ")
                )
            }
        }
    }
}

/// The rows of a part.
pub(crate) struct Rows<'a> {
    pub(crate) part: Part,
    pub(crate) selection: &'a Selection,
    pub(crate) report: &'a mut Report,
    pub(crate) progress: &'a Progress,
    /// Directory of the report.
    pub(crate) out: &'a Path,
    pub(crate) has_peer: bool,
}

impl Rows<'_> {
    /// Measures a group of rows, whose titles begin with its name. A failure is a broken row, and the run goes on.
    pub(crate) fn run(
        &mut self,
        group: &str,
        measure: impl FnOnce() -> Result<Vec<Row>>,
    ) -> Result<()> {
        self.run_any(&[group], measure)
    }

    /// The same with rows whose titles begin with one of these names.
    pub(crate) fn run_any(
        &mut self,
        groups: &[&str],
        measure: impl FnOnce() -> Result<Vec<Row>>,
    ) -> Result<()> {
        let mut wanted = groups.iter();
        let Some(group) = wanted.find(|group| self.selection.has_group(self.part, group)) else {
            return Ok(());
        };
        self.progress.note(*group);
        let rows = measure()
            .unwrap_or_else(|error| vec![Row::checked(*group, false, format!("{error:#}"))]);
        let rows = rows.into_iter();
        let rows = rows.filter(|row| self.selection.has_row(self.part, &row.what));
        self.report.add(self.part.title(), rows.collect());
        self.report.write(self.out)
    }

    /// The same with the product's library, and with the other one if there is one.
    pub(crate) fn compare(
        &mut self,
        group: &str,
        measure: impl Fn(Preload) -> Result<Vec<Row>>,
    ) -> Result<()> {
        self.run(group, || measure(Preload::Own))?;
        if !self.has_peer || !self.selection.has_group(self.part, group) {
            return Ok(());
        }
        let rows = measure(Preload::Peer);
        self.report.join(group, &rows);
        self.report.write(self.out)
    }
}

/// A value that the first row that needs it makes, so that a run without such a row does not.
pub(crate) struct Needed<T, F> {
    value: OnceCell<T>,
    make: F,
}

impl<T, F: Fn() -> Result<T>> Needed<T, F> {
    pub(crate) const fn new(make: F) -> Self {
        Self {
            value: OnceCell::new(),
            make,
        }
    }

    pub(crate) fn get(&self) -> Result<&T> {
        match self.value.get() {
            Some(value) => Ok(value),
            None => {
                let value = (self.make)()?;
                Ok(self.value.get_or_init(|| value))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Part;
    use super::Selection;

    #[test]
    fn selects_parts_and_rows() {
        let all = Selection::new(&[]);
        assert!(all.may_have(Part::Memory) && all.has_row(Part::Memory, "plain: limit"));
        let some = Selection::new(&["loads".to_owned(), "plain: account".to_owned()]);
        assert!(
            some.has_row(Part::Loads, "captures beside it"),
            "a whole part"
        );
        assert!(
            some.has_group(Part::Memory, "plain: "),
            "a group with a named row"
        );
        assert!(some.has_row(Part::Memory, "plain: account against NVML"));
        assert!(!some.has_row(Part::Memory, "plain: limit of 8192 MiB"));
        assert!(!some.has_group(Part::Memory, "pitch: "));
        let only = Selection::new(&["memory".to_owned()]);
        assert!(only.may_have(Part::Memory) && !only.may_have(Part::Compute));
    }
}
