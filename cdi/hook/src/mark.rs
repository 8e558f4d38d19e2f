//! A sign for the driver, in a directory of its own that it has mounted into the container.

use crate::root::{Root, RootError};

pub(crate) fn apply(root: &Root, file: &str) -> Result<(), RootError> {
    if root.file(file)?.is_none() {
        root.replace(file, b"")?;
    }
    Ok(())
}
