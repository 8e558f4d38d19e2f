//! Symbolic links in the directories of the NVIDIA libraries, such as `libcuda.so.1`.

use crate::arguments::Link;
use crate::root::{Root, RootError};

pub(crate) fn apply(root: &Root, links: &[Link]) -> Result<(), RootError> {
    for Link { target, path } in links {
        // A file of the image belongs to another driver version, or is equal.
        if root.link_target(path)?.as_deref() != Some(target.as_bytes()) {
            root.link(path, target)?;
        }
    }
    Ok(())
}
