//! Checks that programs load libvgpu through the mounted stubs.
//!
//! If two devices mount a file at one path, a container gets one of the files. The device of a whole GPU mounts the
//! NVIDIA libraries at the paths where a share's device has stubs; then only `ld.so.preload` enforces the share's
//! limits.

use drava_cdi::elf;

use crate::preload::{self, PreloadError};
use crate::root::{Root, RootError};

/// The stubs cannot be checked, or the library cannot be inserted into `ld.so.preload`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ShimError {
    #[error("cannot read the stub {path}")]
    Read {
        path: String,
        source: std::io::Error,
    },
    #[error(
        "{0} is not in the container; its mount is missing, and programs would run without limits"
    )]
    NoLibrary(String),
    #[error(transparent)]
    Preload(#[from] PreloadError),
    #[error(transparent)]
    Root(#[from] RootError),
}

pub(crate) fn apply(root: &Root, library: &str, stubs: &[String]) -> Result<(), ShimError> {
    // Without the library no program could load the stubs; the container's start reports that once.
    if root.file(library)?.is_none() {
        return Err(ShimError::NoLibrary(library.to_owned()));
    }
    for stub in stubs {
        if !leads_to(root, stub, library)? {
            preload::apply(root, library)?;
            break;
        }
    }
    Ok(())
}

/// Returns whether `stub` is a shared library that needs `library` first.
fn leads_to(root: &Root, stub: &str, library: &str) -> Result<bool, ShimError> {
    let Some(file) = root.file(stub)? else {
        return Ok(false);
    };
    let shared = elf::inspect(&file).map_err(|source| ShimError::Read {
        path: stub.to_owned(),
        source,
    })?;
    let first = shared.and_then(|shared| shared.needed.into_iter().next());
    Ok(first.as_deref() == Some(library))
}
