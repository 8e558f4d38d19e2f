//! Validates a specification: the rules of runtimes, and contradictions between edits.
//!
//! Source: SPEC.md of CDI and the checks of its Go implementation, which containerd and CRI-O use.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use crate::{ContainerEdits, Spec};

/// A value that a runtime would reject, or that contradicts another value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct Invalid {
    /// Path of the field, such as `devices[a].containerEdits.mounts[/x].hostPath`.
    pub field: String,
    /// Cause.
    pub reason: String,
}

fn invalid<T>(field: impl Into<String>, reason: impl Into<String>) -> Result<T, Invalid> {
    Err(Invalid {
        field: field.into(),
        reason: reason.into(),
    })
}

pub(crate) fn spec(spec: &Spec) -> Result<(), Invalid> {
    let Some((vendor, class)) = spec.kind().split_once('/') else {
        return invalid("kind", format!("{:?} is not <vendor>/<class>", spec.kind()));
    };
    label("kind", vendor, First::Letter, "_-.")?;
    label("kind", class, First::Letter, "_-.")?;
    annotations("annotations", spec.annotations())?;
    edits("containerEdits", spec.container_edits())?;
    if spec.devices().is_empty() {
        return invalid("devices", "is empty; a spec needs at least one device");
    }
    let mut names = BTreeSet::new();
    for device in spec.devices() {
        let field = format!("devices[{}]", device.name);
        label(
            &format!("{field}.name"),
            &device.name,
            First::LetterOrDigit,
            "_-.:",
        )?;
        if !names.insert(&device.name) {
            return invalid(field, "occurs twice");
        }
        annotations(&format!("{field}.annotations"), &device.annotations)?;
        if device.container_edits.is_empty() {
            return invalid(
                format!("{field}.containerEdits"),
                "is empty; a device needs at least one edit",
            );
        }
        edits(&format!("{field}.containerEdits"), &device.container_edits)?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum First {
    Letter,
    LetterOrDigit,
}

/// Checks a name: `first` as first character, letters, digits and `inner` inside, a letter or digit at the end.
fn label(field: &str, name: &str, first: First, inner: &str) -> Result<(), Invalid> {
    let starts = name.chars().next().is_some_and(|c| match first {
        First::Letter => c.is_ascii_alphabetic(),
        First::LetterOrDigit => c.is_ascii_alphanumeric(),
    });
    let ends = name
        .chars()
        .next_back()
        .is_some_and(|c| c.is_ascii_alphanumeric());
    if starts
        && ends
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || inner.contains(c))
    {
        return Ok(());
    }
    let start = match first {
        First::Letter => "start with a letter",
        First::LetterOrDigit => "start with a letter or digit",
    };
    invalid(
        field,
        format!(
            "{name:?} must {start}, end with a letter or digit and contain only those and {inner:?}"
        ),
    )
}

/// Checks Kubernetes' rule for annotation keys, which CDI adopted: an optional DNS prefix, a name of at most 63
/// characters.
fn annotations(field: &str, annotations: &BTreeMap<String, String>) -> Result<(), Invalid> {
    for key in annotations.keys() {
        let (prefix, name) = key
            .split_once('/')
            .map_or((None, key.as_str()), |(prefix, name)| (Some(prefix), name));
        let of = format!("{field}[{key}]");
        label(&of, name, First::LetterOrDigit, "_-.")?;
        if name.len() > 63 {
            return invalid(of, "has a name of more than 63 characters");
        }
        let dns = |prefix: &str| {
            prefix.len() <= 253
                && prefix.split('.').all(|part| {
                    !part.is_empty()
                        && !part.starts_with('-')
                        && !part.ends_with('-')
                        && part
                            .chars()
                            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
                })
        };
        if !prefix.is_none_or(dns) {
            return invalid(of, "has a prefix that is not a DNS name");
        }
    }
    Ok(())
}

fn edits(field: &str, edits: &ContainerEdits) -> Result<(), Invalid> {
    let mut names = BTreeSet::new();
    for pair in &edits.env {
        let name = env(&format!("{field}.env"), pair)?;
        if !names.insert(name) {
            return invalid(
                format!("{field}.env"),
                format!("{name} is set to two values"),
            );
        }
    }
    let mut paths = BTreeSet::new();
    for node in &edits.device_nodes {
        let of = format!("{field}.deviceNodes[{}]", node.path);
        path(&format!("{of}.path"), &node.path)?;
        if let Some(host_path) = &node.host_path {
            path(&format!("{of}.hostPath"), host_path)?;
        }
        // Runtimes take the host's node where the major number is 0.
        if node.number.is_some_and(|number| number.major == 0) {
            return invalid(format!("{of}.major"), "is 0");
        }
        if node
            .permissions
            .as_ref()
            .is_some_and(|letters| letters.is_empty() || letters.contains(|c| !"rwm".contains(c)))
        {
            return invalid(
                format!("{of}.permissions"),
                "contains letters other than rwm",
            );
        }
        if !paths.insert(&node.path) {
            return invalid(of, "occurs twice with different contents");
        }
    }
    let mut paths = BTreeSet::new();
    for mount in &edits.mounts {
        let of = format!("{field}.mounts[{}]", mount.container_path);
        path(&format!("{of}.containerPath"), &mount.container_path)?;
        path(&format!("{of}.hostPath"), &mount.host_path)?;
        if !paths.insert(&mount.container_path) {
            return invalid(of, "occurs twice with different contents");
        }
    }
    for hook in &edits.hooks {
        let of = format!("{field}.hooks[{}]", hook.args.join(" "));
        path(&format!("{of}.path"), &hook.path)?;
        for pair in &hook.env {
            env(&format!("{of}.env"), pair)?;
        }
        if hook.args.iter().any(|argument| argument.contains('\0')) {
            return invalid(format!("{of}.args"), "contains a zero byte");
        }
    }
    Ok(())
}

/// Returns the name in a `NAME=value` pair.
fn env<'a>(field: &str, pair: &'a str) -> Result<&'a str, Invalid> {
    match pair.split_once('=') {
        Some((name, value))
            if !name.is_empty() && !name.contains('\0') && !value.contains('\0') =>
        {
            Ok(name)
        }
        Some(_) | None => invalid(field, format!("{pair:?} is not NAME=value")),
    }
}

/// Checks that a path is absolute and has no `.`, `..` or doubled slashes, so that each file has one path.
fn path(field: &str, text: &str) -> Result<(), Invalid> {
    let normal = Path::new(text)
        .components()
        .all(|component| matches!(component, Component::RootDir | Component::Normal(_)));
    let rebuilt: std::path::PathBuf = Path::new(text).components().collect();
    if text.starts_with('/') && normal && rebuilt.as_os_str() == text && !text.contains('\0') {
        return Ok(());
    }
    invalid(
        field,
        format!("{text:?} is not an absolute path in its shortest form"),
    )
}
