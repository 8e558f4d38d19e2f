//! The files of an image.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use tar::{EntryType, Header};

use super::libraries;

/// Files by absolute path, in the merged layout with all directories below `/usr`.
#[derive(Clone, Debug, Default)]
pub struct Layer {
    entries: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug)]
enum Entry {
    Directory { mode: u32 },
    File { bytes: Vec<u8>, mode: u32 },
    Link { target: String },
}

impl Layer {
    /// Returns a layer with the usual directories, where `/bin`, `/lib`, `/lib64` and `/sbin` are links into `/usr`.
    #[must_use]
    pub fn with_merged_usr() -> Self {
        let mut layer = Self::default();
        for name in ["bin", "lib", "lib64", "sbin"] {
            layer.directory(&format!("/usr/{name}"), 0o755);
            layer.link(&format!("/{name}"), &format!("usr/{name}"));
        }
        for name in ["/dev", "/proc", "/sys", "/etc", "/run", "/var"] {
            layer.directory(name, 0o755);
        }
        layer.directory("/tmp", 0o1777);
        layer
    }

    /// Adds a directory.
    pub fn directory(&mut self, path: &str, mode: u32) {
        self.parents(path);
        self.entries.insert(merged(path), Entry::Directory { mode });
    }

    /// Adds a file.
    pub fn file(&mut self, path: &str, bytes: Vec<u8>, mode: u32) {
        self.parents(path);
        self.entries
            .insert(merged(path), Entry::File { bytes, mode });
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.parents(path);
        // The path is not resolved: this call creates the link /bin itself.
        self.entries.insert(
            path.to_owned(),
            Entry::Link {
                target: target.to_owned(),
            },
        );
    }

    /// Adds a copy of the host's file `source`.
    pub fn copy(&mut self, path: &str, source: &Path, mode: u32) -> Result<()> {
        let bytes = fs::read(source).with_context(|| format!("read {}", source.display()))?;
        self.file(path, bytes, mode);
        Ok(())
    }

    /// Adds the host's program or library `source`, the shared libraries that it loads at start, and the loader.
    pub fn program(&mut self, path: &str, source: &Path) -> Result<()> {
        self.copy(path, source, 0o755)?;
        for library in libraries::needed(source)? {
            self.copy(&library.display().to_string(), &library, 0o755)?;
        }
        Ok(())
    }

    /// Adds the host's libraries `names` from the directory of the C library, which a program added earlier.
    pub fn companions(&mut self, names: &[&str]) -> Result<()> {
        let libc = self
            .entries
            .keys()
            .find(|path| path.ends_with("/libc.so.6"))
            .context("the layer has no C library: add a program first")?;
        let merged = libc.trim_end_matches("libc.so.6").to_owned();
        let unmerged = merged.trim_start_matches("/usr").to_owned();
        for name in names {
            let places = [&merged, &unmerged].map(|dir| PathBuf::from(format!("{dir}{name}")));
            let source = places
                .iter()
                .find(|place| place.exists())
                .with_context(|| format!("{name} is not in {merged}"))?;
            self.copy(&format!("{merged}{name}"), source, 0o755)?;
        }
        Ok(())
    }

    fn parents(&mut self, path: &str) {
        let path = merged(path);
        for (end, _) in path.match_indices('/').filter(|(at, _)| *at > 0) {
            if let Some(parent) = path.get(..end) {
                self.entries
                    .entry(parent.to_owned())
                    .or_insert(Entry::Directory { mode: 0o755 });
            }
        }
    }

    /// Returns the layer as a tar archive.
    pub(super) fn tar(&self) -> Result<Vec<u8>> {
        let mut tar = tar::Builder::new(vec![]);
        for (path, entry) in &self.entries {
            let name = path.trim_start_matches('/');
            match entry {
                Entry::Directory { mode } => {
                    let mut header = header(*mode, 0);
                    header.set_entry_type(EntryType::Directory);
                    tar.append_data(&mut header, format!("{name}/"), &[][..])?;
                }
                Entry::File { bytes, mode } => {
                    tar.append_data(&mut header(*mode, bytes.len()), name, bytes.as_slice())?
                }
                Entry::Link { target } => {
                    let mut header = header(0o777, 0);
                    header.set_entry_type(EntryType::Symlink);
                    tar.append_link(&mut header, name, target)?;
                }
            }
        }
        Ok(tar.into_inner()?)
    }
}

/// Header of a regular file without time and owner.
pub(super) fn header(mode: u32, length: usize) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(mode);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(length as u64);
    header
}

/// Returns the path with `/bin`, `/lib…` and `/sbin` resolved into `/usr`.
fn merged(path: &str) -> String {
    let linked = ["/bin/", "/lib/", "/lib64/", "/sbin/"]
        .iter()
        .any(|dir| path.starts_with(dir));
    if linked {
        format!("/usr{path}")
    } else {
        path.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_parents_before_children() {
        let mut layer = Layer::with_merged_usr();
        layer.file("/opt/drava/lib/libvgpu.so", vec![1], 0o755);
        let tar = layer.tar().unwrap();
        let mut archive = tar::Archive::new(tar.as_slice());
        let paths: Vec<_> = archive
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().display().to_string())
            .collect();
        let position = |path: &str| {
            paths
                .iter()
                .position(|known| known == path)
                .unwrap_or_else(|| panic!("{path} in {paths:?}"))
        };
        assert!(position("opt/drava/") < position("opt/drava/lib/"));
        assert!(position("opt/drava/lib/") < position("opt/drava/lib/libvgpu.so"));
        assert!(position("usr/") < position("usr/bin/"));
    }

    #[test]
    fn places_libraries_of_unmerged_host_below_usr() {
        let mut layer = Layer::with_merged_usr();
        layer.file("/lib/x86_64-linux-gnu/libc.so.6", vec![1], 0o755);
        assert!(
            layer
                .entries
                .contains_key("/usr/lib/x86_64-linux-gnu/libc.so.6")
        );
        assert!(matches!(&layer.entries["/lib"], Entry::Link { target } if target == "usr/lib"));
    }

    #[test]
    fn adds_libraries_and_loader_of_program() {
        let mut layer = Layer::with_merged_usr();
        layer.program("/bin/sh", Path::new("/bin/sh")).unwrap();
        let has = |part: &str| layer.entries.keys().any(|path| path.contains(part));
        assert!(has("/usr/bin/sh") && has("libc.so") && has("/ld-linux"));
    }
}
