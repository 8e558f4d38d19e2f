//! `/etc/ld.so.cache`: adds libraries under their file names and removes the image's entries of those names. A cache that is
//! older than the image's configuration gets the libraries of the configuration, too.

use drava_cdi::elf::{self, Machine};
use drava_cdi::ldcache::{Entry, LdCache, ParseError};

use crate::ldconf;
use crate::root::{Root, RootError};

const CACHE: &str = "/etc/ld.so.cache";
/// Size limit of the cache; that of a full desktop has some hundred KiB.
const MAX_BYTES: u64 = 16 << 20;

/// The libraries cannot be added to the cache.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LdCacheError {
    #[error("{0} is not in the container; its mount or link is missing")]
    NoLibrary(String),
    #[error("{0} is not a shared library for this machine")]
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
    let entries = libraries.iter().map(|library| entry(root, library));
    add(root, entries.collect::<Result<_, _>>()?)
}

/// Returns the path of the library `name` in the cache.
pub(crate) fn find(root: &Root, name: &str) -> Result<Option<String>, LdCacheError> {
    let present = root.read(CACHE, MAX_BYTES)?;
    let cache = present
        .as_deref()
        .map(LdCache::parse)
        .and_then(Result::ok)
        .unwrap_or_default();
    let mut entries = cache.entries().iter();
    let entry = entries.find(|entry| entry.name == name.as_bytes());
    Ok(entry.and_then(|entry| String::from_utf8(entry.path.clone()).ok()))
}

/// Adds the entries, each in the place of all entries of its name.
pub(crate) fn add(root: &Root, entries: Vec<Entry>) -> Result<(), LdCacheError> {
    let present = root.read(CACHE, MAX_BYTES)?;
    // The loader ignores a malformed cache, so its contents can be dropped.
    let mut cache = present
        .as_deref()
        .map(LdCache::parse)
        .and_then(Result::ok)
        .unwrap_or_default();
    ldconf::add_missing(root, CACHE, &mut cache);
    for entry in entries {
        cache.insert(entry);
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
