//! Creates an empty file in a directory that the node driver has mounted into the container.

use crate::root::{Root, RootError};

pub(crate) fn apply(root: &Root, file: &str) -> Result<(), RootError> {
    if root.file(file)?.is_none() {
        root.replace(file, b"")?;
    }
    Ok(())
}
