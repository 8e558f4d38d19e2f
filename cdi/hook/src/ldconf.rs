//! Libraries of the directories in the image's `/etc/ld.so.conf`.
//!
//! The loader reads the cache only. Images whose builds never ran `ldconfig` after their last change of the configuration,
//! or of a directory, work with NVIDIA's container toolkit, which runs it in each container. So the libraries that `ldconfig`
//! would add are added to a cache that is missing or older. Source: `elf/ldconfig.c` of glibc.

use drava_cdi::elf::{self, Machine};
use drava_cdi::ldcache::{DEFAULT_DIRECTORIES, Entry, LdCache};

use crate::root::Root;

const CONFIGURATION: &str = "/etc/ld.so.conf";
/// Size limit of a file of the configuration.
const MAX_BYTES: u64 = 64 << 10;
/// Limit of the files of the configuration, and of nested includes.
const MAX_FILES: usize = 256;
/// Limit of the directories.
const MAX_DIRECTORIES: usize = 128;
/// Limit of the files in a directory.
const MAX_NAMES: usize = 4096;

/// The configuration of an image.
#[derive(Default)]
struct Configuration {
    /// Files that have been read.
    files: Vec<String>,
    directories: Vec<String>,
}

/// Adds the libraries that an up-to-date cache would have to `cache`, which the image has at `path`. Entries of present names
/// stay. As ldconfig does, it skips files and directories that it cannot read, whatever the reason.
pub(crate) fn add_missing(root: &Root, path: &str, cache: &mut LdCache) {
    let mut configuration = Configuration::default();
    configuration.read(root, CONFIGURATION);
    let modified = |path: &str| root.modified(path).ok().flatten();
    let files = configuration.files.iter();
    let changed = files.map(|file| modified(file)).max().flatten();
    let cached = modified(path);
    for directory in &configuration.directories {
        let is_current = changed <= cached && modified(directory) <= cached;
        if is_current || DEFAULT_DIRECTORIES.contains(&directory.as_str()) {
            continue;
        }
        for name in root.names(directory, MAX_NAMES).unwrap_or_default() {
            let is_library = name.starts_with("lib") && name.contains(".so");
            let path = format!("{directory}/{name}");
            let shared = match root.file(&path) {
                Ok(Some(file)) if is_library => elf::inspect(&file).ok().flatten(),
                Ok(_) | Err(_) => None,
            };
            let Some(shared) = shared.filter(|shared| shared.machine == Machine::HOST) else {
                continue;
            };
            // Two names of one library have one entry; the name of the link that programs load comes first.
            let entry = Entry::new(shared.soname.unwrap_or(name), path, Machine::HOST);
            let is_known = |old: &Entry| old.name == entry.name && old.flags == entry.flags;
            if !cache.entries().iter().any(is_known) {
                cache.insert(entry);
            }
        }
    }
}

impl Configuration {
    /// Reads a file: directories and `include` with patterns, one a line; `#` starts a comment.
    fn read(&mut self, root: &Root, path: &str) {
        if self.files.len() == MAX_FILES || self.files.iter().any(|known| known == path) {
            return;
        }
        let Ok(Some(text)) = root.read(path, MAX_BYTES) else {
            return;
        };
        self.files.push(path.to_owned());
        for line in String::from_utf8_lossy(&text).lines() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if let Some(patterns) = line.strip_prefix("include") {
                for pattern in patterns.split_whitespace() {
                    self.include(root, pattern);
                }
            } else if line.starts_with('/') && self.directories.len() < MAX_DIRECTORIES {
                self.directories.push(line.trim_end_matches('/').to_owned());
            }
        }
    }

    /// Reads the files of a pattern with at most one `*`, in the file name. A relative pattern is one of `/etc`.
    fn include(&mut self, root: &Root, pattern: &str) {
        let pattern = match pattern.starts_with('/') {
            true => pattern.to_owned(),
            false => format!("/etc/{pattern}"),
        };
        let Some((directory, (start, end))) = pattern
            .rsplit_once('/')
            .and_then(|(directory, name)| Some((directory, name.split_once('*')?)))
        else {
            return self.read(root, &pattern);
        };
        for name in root.names(directory, MAX_NAMES).unwrap_or_default() {
            if name.starts_with(start) && name.ends_with(end) && !name.starts_with('.') {
                self.read(root, &format!("{directory}/{name}"));
            }
        }
    }
}
