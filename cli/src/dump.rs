//! Files of `kubectl drava dump`.

use std::path::Path;

use anyhow::Context as _;
use drava_explanation::snapshot::Objects;

/// Reads a dump.
pub(crate) fn read(file: &Path) -> anyhow::Result<Objects> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is no output of `kubectl drava dump`", file.display()))
}
