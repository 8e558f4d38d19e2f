//! Archives that depend on their files and one time only.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use flate2::{Compression, GzBuilder};
use tar::{EntryType, Header};

/// A file of an archive.
#[derive(Debug)]
pub(super) struct Entry {
    path: String,
    bytes: Vec<u8>,
    mode: u32,
}

impl Entry {
    pub(super) fn read(file: &Path, path: &str, mode: u32) -> Result<Self> {
        let bytes = fs::read(file).with_context(|| format!("read {}", file.display()))?;
        Ok(Self {
            path: path.to_owned(),
            bytes,
            mode,
        })
    }
}

/// An archive of files.
pub(super) struct Archive {
    /// Modification time of all files, seconds since 1970.
    time_s: u64,
    entries: Vec<Entry>,
}

impl Archive {
    pub(super) fn new(time_s: u64, mut entries: Vec<Entry>) -> Self {
        entries.sort_by(|left, right| left.path.cmp(&right.path));
        Self { time_s, entries }
    }

    /// Returns the archive as a compressed tar.
    pub(super) fn gzip(&self) -> Result<Vec<u8>> {
        let gzip = GzBuilder::new().write(Vec::new(), Compression::best());
        let mut tar = tar::Builder::new(gzip);
        for entry in &self.entries {
            let mut header = Header::new_gnu();
            header.set_entry_type(EntryType::Regular);
            header.set_mode(entry.mode);
            header.set_mtime(self.time_s);
            header.set_uid(0);
            header.set_gid(0);
            header.set_size(entry.bytes.len() as u64);
            tar.append_data(&mut header, &entry.path, entry.bytes.as_slice())?;
        }
        Ok(tar.into_inner()?.finish()?)
    }
}

/// Reads the files below a directory, as files below `name`.
pub(super) fn entries(directory: &Path, name: &str) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let listed = fs::read_dir(directory);
    for entry in listed.with_context(|| format!("list {}", directory.display()))? {
        let entry = entry?;
        let path = format!("{name}/{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            entries.extend(self::entries(&entry.path(), &path)?);
        } else {
            entries.push(Entry::read(&entry.path(), &path, 0o644)?);
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn equal_files_give_equal_archives() {
        let archive = |names: [&str; 3], mode: u32| {
            let directory = tempfile::tempdir().unwrap();
            fs::create_dir(directory.path().join("templates")).unwrap();
            for name in names {
                let file = directory.path().join(name);
                fs::write(&file, name).unwrap();
                fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            }
            let entries = entries(directory.path(), "chart").unwrap();
            Archive::new(1_700_000_000, entries).gzip().unwrap()
        };
        let one = archive(["templates/a.yaml", "Chart.yaml", "values.yaml"], 0o644);
        let other = archive(["values.yaml", "templates/a.yaml", "Chart.yaml"], 0o600);
        assert_eq!(one, other);

        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(one.as_slice()));
        let mut found = Vec::new();
        for entry in tar.entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            assert_eq!(entry.header().mtime().unwrap(), 1_700_000_000);
            assert_eq!(entry.header().mode().unwrap(), 0o644);
            found.push((path, text));
        }
        let expected = ["Chart.yaml", "templates/a.yaml", "values.yaml"];
        let expected = expected.map(|name| (format!("chart/{name}"), name.to_owned()));
        assert_eq!(found, expected);
    }

    #[test]
    fn archive_changes_with_time_and_content() {
        let gzip = |time_s: u64, bytes: &[u8]| {
            let entry = Entry {
                path: "a".to_owned(),
                bytes: bytes.to_vec(),
                mode: 0o755,
            };
            Archive::new(time_s, vec![entry]).gzip().unwrap()
        };
        assert_ne!(gzip(1, b"a"), gzip(2, b"a"));
        assert_ne!(gzip(1, b"a"), gzip(1, b"b"));
    }
}
