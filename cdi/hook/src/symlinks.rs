//! Symbolic links beside the driver's libraries, such as `libcuda.so.1`.

use crate::arguments::Link;
use crate::root::{Root, RootError};

pub(crate) fn apply(root: &Root, links: &[Link]) -> Result<(), RootError> {
    for Link { target, path } in links {
        // What an image has there is of another driver version, or equal already.
        if root.link_target(path)?.as_deref() != Some(target.as_bytes()) {
            root.link(path, target)?;
        }
    }
    Ok(())
}
