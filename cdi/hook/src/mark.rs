//! Empties a file of the node driver in the directories that it has mounted into the container.
//!
//! The file has a content until then. A container can remove it, and a container without the directory cannot: so a file with
//! content shows a runtime that has not applied the edits, whatever the container has done since.
//! Several containers can have a directory, so all its files are untrusted.

use crate::arguments::MountedFiles;
use crate::container::Container;

/// The container does not have the directories.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MarkError {
    #[error(
        "nothing is mounted at {before}*{after}: the CDI device of the share is missing; programs would run without limits"
    )]
    NoMount { before: String, after: String },
}

pub(crate) fn apply(container: &Container, files: &MountedFiles) -> Result<(), MarkError> {
    let MountedFiles {
        before,
        after,
        name,
    } = files;
    let is_directory = |mount: &&String| {
        let inner = mount.strip_prefix(before.as_str());
        let inner = inner.and_then(|rest| rest.strip_suffix(after.as_str()));
        inner.is_some_and(|inner| !inner.is_empty() && !inner.contains('/'))
    };
    let mut directories = container.mounts.iter().filter(is_directory).peekable();
    if directories.peek().is_none() {
        return Err(MarkError::NoMount {
            before: before.clone(),
            after: after.clone(),
        });
    }
    for directory in directories {
        container.root.empty(&format!("{directory}/{name}"));
    }
    Ok(())
}
