//! Manifests as text: YAML or JSON, several documents per file.

use std::ffi::OsStr;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::Context;
use drava_compatibility::Settings;
use serde::{Serialize, Serializer};
use serde_json::Value;

/// Reads the objects of a file, or of the `.json`, `.yaml` and `.yml` files of a directory in the order of their names, as
/// `kubectl apply -f` does; `-` is standard input.
///
/// # Errors
/// If a file cannot be read, a document is not YAML, or a directory has no such file.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<Value>> {
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .context("cannot read standard input")?;
        return parse(&text).context("cannot parse standard input");
    }
    if !path.is_dir() {
        return read_file(path);
    }
    let files = manifests_in(path).with_context(|| format!("cannot read {}", path.display()))?;
    anyhow::ensure!(
        !files.is_empty(),
        "{} has no .json, .yaml or .yml file",
        path.display()
    );
    let mut documents = Vec::new();
    for file in files {
        documents.extend(read_file(&file)?);
    }
    Ok(documents)
}

fn text_of(file: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

fn read_file(file: &Path) -> anyhow::Result<Vec<Value>> {
    parse(&text_of(file)?).with_context(|| format!("cannot parse {}", file.display()))
}

fn manifests_in(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let is_manifest = |file: &PathBuf| {
        let extension = file.extension().and_then(OsStr::to_str);
        matches!(extension, Some("json" | "yaml" | "yml")) && file.is_file()
    };
    let entries = std::fs::read_dir(directory)?.map(|entry| Ok(entry?.path()));
    let mut files: Vec<PathBuf> = entries.collect::<std::io::Result<_>>()?;
    files.retain(is_manifest);
    files.sort();
    Ok(files)
}

/// Reads the settings of the translation.
///
/// # Errors
/// If the file cannot be read or has an unknown or invalid field.
pub(crate) fn read_settings(file: &Path) -> anyhow::Result<Settings> {
    serde_saphyr::from_str(&text_of(file)?)
        .with_context(|| format!("cannot parse {}", file.display()))
}

/// Parses YAML documents; empty documents are skipped.
///
/// # Errors
/// If a document is not YAML or not an object.
pub(crate) fn parse(text: &str) -> anyhow::Result<Vec<Value>> {
    let documents = match json_objects(text) {
        Some(objects) => objects,
        None => serde_saphyr::from_multiple_with_options(text, options())?,
    };
    for document in &documents {
        anyhow::ensure!(
            document.is_object(),
            "a document is {document}, expected a Kubernetes object"
        );
    }
    Ok(documents)
}

/// Returns the objects of a text with nothing but JSON objects, as programs write them one after the other. kubectl reads them
/// without separators; YAML does not.
fn json_objects(text: &str) -> Option<Vec<Value>> {
    if !text.trim_start().starts_with('{') {
        return None;
    }
    let objects = serde_json::Deserializer::from_str(text).into_iter();
    objects.collect::<Result<_, _>>().ok()
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
        text.push_str(&serde_saphyr::to_string_with_options(
            &Legible(object),
            options,
        )?);
    }
    Ok(text)
}

/// A value that every parser reads alike. A block whose first line starts with a tab is none: kubectl takes the tab for
/// indentation.
struct Legible<'a>(&'a Value);

impl Serialize for Legible<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Array(items) => serializer.collect_seq(items.iter().map(Legible)),
            Value::Object(fields) => {
                serializer.collect_map(fields.iter().map(|(name, value)| (name, Legible(value))))
            }
            Value::String(text) if text.starts_with('\t') => {
                serde_saphyr::DoubleQuoted(text.as_str()).serialize(serializer)
            }
            plain => plain.serialize(serializer),
        }
    }
}

/// kubectl reads numbers like 0644 as octal.
fn options() -> serde_saphyr::Options {
    serde_saphyr::options! { legacy_octal_numbers: true }
}
