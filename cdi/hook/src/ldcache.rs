//! `/etc/ld.so.cache`: each library under its file name, in place of the image's own of that name.

use drava_cdi::elf::{self, Machine};
use drava_cdi::ldcache::{Entry, LdCache, ParseError};

use crate::root::{Root, RootError};

const CACHE: &str = "/etc/ld.so.cache";
/// Largest cache that is read; that of a full desktop has some hundred KiB.
const MAX_BYTES: u64 = 16 << 20;

/// The libraries could not be made known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LdCacheError {
    #[error("{0} is not in the container: its mount or link is missing")]
    NoLibrary(String),
    #[error("{0} is no shared library for this machine")]
    NotForThisMachine(String),
    #[error("cannot read the library {path}")]
    Read {
        path: String,
        source: std::io::Error,
    },
    #[error("cannot build {CACHE}")]
    Build(#[source] ParseError),
    #[error(transparent)]
    Root(#[from] RootError),
}

pub(crate) fn apply(root: &Root, libraries: &[String]) -> Result<(), LdCacheError> {
    let present = root.read(CACHE, MAX_BYTES)?;
    // The loader takes no notice of a broken cache, so neither are its contents missed.
    let mut cache = present
        .as_deref()
        .map(LdCache::parse)
        .and_then(Result::ok)
        .unwrap_or_default();
    for library in libraries {
        cache.insert(entry(root, library)?);
    }
    let wanted = cache.to_bytes().map_err(LdCacheError::Build)?;
    if present.as_deref() != Some(&wanted) {
        root.replace(CACHE, &wanted)?;
    }
    Ok(())
}

fn entry(root: &Root, library: &str) -> Result<Entry, LdCacheError> {
    let file = root
        .file(library)?
        .ok_or_else(|| LdCacheError::NoLibrary(library.to_owned()))?;
    let shared = elf::inspect(&file).map_err(|source| LdCacheError::Read {
        path: library.to_owned(),
        source,
    })?;
    if !shared.is_some_and(|shared| shared.machine == Machine::HOST) {
        return Err(LdCacheError::NotForThisMachine(library.to_owned()));
    }
    let name = library.rsplit_once('/').map_or(library, |(_, name)| name);
    Ok(Entry::new(name, library, Machine::HOST))
}
