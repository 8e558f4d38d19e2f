//! Manifests as text: YAML or JSON, several documents per file.

use std::io::Read as _;
use std::path::Path;

use anyhow::Context;
use drava_api::compatibility::Settings;
use serde_json::Value;

/// Reads the objects of a file; `-` is standard input.
///
/// # Errors
/// If the file cannot be read or a document is not YAML.
pub(crate) fn read(file: &Path) -> anyhow::Result<Vec<Value>> {
    let mut text = String::new();
    if file == Path::new("-") {
        std::io::stdin()
            .read_to_string(&mut text)
            .context("cannot read standard input")?;
    } else {
        text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
    }
    parse(&text).with_context(|| format!("cannot parse {}", file.display()))
}

/// Reads the settings of the translation.
///
/// # Errors
/// If the file cannot be read or has an unknown or invalid field.
pub(crate) fn read_settings(file: &Path) -> anyhow::Result<Settings> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_saphyr::from_str(&text).with_context(|| format!("cannot parse {}", file.display()))
}

/// Parses YAML documents; empty documents are skipped.
///
/// # Errors
/// If a document is not YAML or not an object.
pub(crate) fn parse(text: &str) -> anyhow::Result<Vec<Value>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple_with_options(text, options())?;
    for document in &documents {
        anyhow::ensure!(
            document.is_object(),
            "a document is {document}, expected a Kubernetes object"
        );
    }
    Ok(documents)
}

/// Formats objects as YAML documents that every YAML 1.1 and 1.2 parser reads alike.
///
/// # Errors
/// If the serializer fails.
pub(crate) fn format(objects: &[Value]) -> anyhow::Result<String> {
    let mut text = String::new();
    for (index, object) in objects.iter().enumerate() {
        if index > 0 {
            text.push_str("---\n");
        }
        let options = serde_saphyr::ser_options! { folded_wrap_chars: usize::MAX };
        text.push_str(&serde_saphyr::to_string_with_options(object, options)?);
    }
    Ok(text)
}

/// kubectl reads numbers like 0644 as octal.
fn options() -> serde_saphyr::Options {
    serde_saphyr::options! { legacy_octal_numbers: true }
}
