//! Checks that programs load libvgpu through mounted stubs.
//!
//! If two devices mount a file at one path, a container gets one of the files. The device of a whole GPU mounts the
//! NVIDIA libraries at the paths where a share's device has stubs; then only `ld.so.preload` enforces the share's
//! limits.

use drava_cdi::elf;

use crate::root::{Root, RootError};

/// A stub cannot be checked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StubError {
    #[error("cannot read the stub {path}")]
    Read {
        path: String,
        source: std::io::Error,
    },
    #[error(transparent)]
    Root(#[from] RootError),
}

/// Returns whether `stub` is a shared library that needs `library` first.
pub(crate) fn leads_to(root: &Root, stub: &str, library: &str) -> Result<bool, StubError> {
    let Some(file) = root.file(stub)? else {
        return Ok(false);
    };
    let shared = elf::inspect(&file).map_err(|source| StubError::Read {
        path: stub.to_owned(),
        source,
    })?;
    let first = shared.and_then(|shared| shared.needed.into_iter().next());
    Ok(first.as_deref() == Some(library))
}
