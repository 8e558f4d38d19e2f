//! Output of all commands: tables, JSON, YAML, standard output.

use std::io::{ErrorKind, Write as _};

use anyhow::Context;
use clap::ValueEnum;

/// Format of a command's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// A table.
    Table,
    /// A table with more columns, where a command has them.
    Wide,
    /// One JSON document.
    Json,
    /// One YAML document.
    Yaml,
    /// A CustomCostResponse of OpenCost's plugins in JSON (cost only).
    Opencost,
}

impl Output {
    /// Formats a value as a document, JSON by default.
    pub(crate) fn document(self, value: &impl serde::Serialize) -> anyhow::Result<String> {
        match self {
            Self::Yaml => self.format(value, String::new),
            Self::Table | Self::Wide | Self::Json | Self::Opencost => json(value),
        }
    }

    /// Formats a value as a document, or by `table`.
    pub(crate) fn format(
        self,
        value: &impl serde::Serialize,
        table: impl FnOnce() -> String,
    ) -> anyhow::Result<String> {
        match self {
            Self::Table | Self::Wide => Ok(table()),
            Self::Json | Self::Opencost => json(value),
            Self::Yaml => {
                let options = serde_saphyr::ser_options! { folded_wrap_chars: usize::MAX };
                serde_saphyr::to_string_with_options(value, options).context("cannot write YAML")
            }
        }
    }
}

/// Formats a value as one JSON document.
pub(crate) fn json(value: &impl serde::Serialize) -> anyhow::Result<String> {
    let mut text = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    text.push('\n');
    Ok(text)
}

/// Whether a text was printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Printed {
    /// It was.
    Whole,
    /// The reader has closed the pipe (`| head -1`), which is not an error.
    Closed,
}

/// Writes to standard output.
pub(crate) fn print(text: &str) -> anyhow::Result<Printed> {
    let mut out = std::io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(Printed::Whole),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(Printed::Closed),
        Err(error) => Err(error).context("cannot write to standard output"),
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
        assert_eq!(format(Output::Wide), "MODE\n");
        let json: serde_json::Value = serde_json::from_str(&format(Output::Json)).expect("JSON");
        let yaml: serde_json::Value = serde_saphyr::from_str(&format(Output::Yaml)).expect("YAML");
        assert_eq!((json, yaml), (value.clone(), value.clone()));
    }
}
