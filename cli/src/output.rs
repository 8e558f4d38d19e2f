//! Output of all commands: tables, JSON, YAML, standard output.

use std::io::{ErrorKind, Write as _};

use anyhow::Context;
use clap::ValueEnum;
use comfy_table::{Table, presets};

/// Format of a command's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// A table.
    Table,
    /// One JSON document.
    Json,
    /// One YAML document.
    Yaml,
}

impl Output {
    /// Formats a value as a document, or by `table`.
    pub(crate) fn format(
        self,
        value: &impl serde::Serialize,
        table: impl FnOnce() -> String,
    ) -> anyhow::Result<String> {
        match self {
            Self::Table => Ok(table()),
            Self::Json => json(value),
            Self::Yaml => {
                let options = serde_saphyr::ser_options! { folded_wrap_chars: usize::MAX };
                serde_saphyr::to_string_with_options(value, options).context("cannot write YAML")
            }
        }
    }
}

/// Formats rows in columns like kubectl: three spaces apart, without borders.
pub(crate) fn table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_header(header.to_vec())
        .add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 3));
    }
    let mut text = table.trim_fmt();
    text.push('\n');
    text
}

/// Formats a value as one JSON document.
pub(crate) fn json(value: &impl serde::Serialize) -> anyhow::Result<String> {
    let mut text = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    text.push('\n');
    Ok(text)
}

/// Writes to standard output. A closed pipe (`| head -1`) is not an error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_documents() {
        let value = serde_json::json!({"gpus": [{"mode": "free"}]});
        let format = |output: Output| output.format(&value, || "MODE\n".to_owned()).expect("text");
        assert_eq!(format(Output::Table), "MODE\n");
        let json: serde_json::Value = serde_json::from_str(&format(Output::Json)).expect("JSON");
        let yaml: serde_json::Value = serde_saphyr::from_str(&format(Output::Yaml)).expect("YAML");
        assert_eq!((json, yaml), (value.clone(), value.clone()));
    }

    #[test]
    fn aligns_columns() {
        let rows = vec![
            vec!["n1".to_owned(), "8 GiB".to_owned(), String::new()],
            vec!["node-2".to_owned(), "–".to_owned(), "x".to_owned()],
        ];
        assert_eq!(
            table(&["NODE", "MEMORY", "CLAIMS"], rows),
            "NODE     MEMORY   CLAIMS\nn1       8 GiB\nnode-2   –        x\n"
        );
    }
}
