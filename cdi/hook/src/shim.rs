//! Whether programs meet libvgpu behind the stubs that the driver has mounted.
//!
//! Of two devices that mount a file at one path, a container gets the file of one. A whole card's device mounts the
//! driver's own libraries where a share's has stubs: then only `ld.so.preload` brings the share's limits.

use drava_cdi::elf;

use crate::preload::{self, PreloadError};
use crate::root::{Root, RootError};

/// What programs would meet is not known, or the library could not be put before it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ShimError {
    #[error("cannot read the stub {path}")]
    Read {
        path: String,
        source: std::io::Error,
    },
    #[error(
        "{0} is not in the container: its mount is missing, and programs would run without limits"
    )]
    NoLibrary(String),
    #[error(transparent)]
    Preload(#[from] PreloadError),
    #[error(transparent)]
    Root(#[from] RootError),
}

pub(crate) fn apply(root: &Root, library: &str, stubs: &[String]) -> Result<(), ShimError> {
    // Without it the stubs could not be loaded; so says the container's start, not each of its programs.
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

/// Whether a shared library at `stub` needs `library` before all others.
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
