//! Records that a check passed for given inputs, so that an expensive check runs only when its inputs change.
//!
//! A record is an empty file in the cache, named after the check and a hash of its inputs.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest as _, Sha256};

/// The record of one check on its present inputs.
#[derive(Debug)]
pub(crate) struct Proof {
    file: PathBuf,
}

impl Proof {
    /// The record of `check` for the files at `inputs`, which are files and folders below `root`.
    pub(crate) fn of(check: &str, root: &Path, inputs: &[&str]) -> Result<Self> {
        Ok(Self::in_directory(
            &drava_cluster::cache_dir()?.join("proofs"),
            check,
            &hash(root, inputs)?,
        ))
    }

    fn in_directory(directory: &Path, check: &str, hash: &str) -> Self {
        Self {
            file: directory.join(format!("{check}-{hash}")),
        }
    }

    /// Whether the check passed for these inputs before.
    pub(crate) fn exists(&self) -> bool {
        self.file.exists()
    }

    /// Records that the check passed.
    pub(crate) fn record(&self) -> Result<()> {
        let directory = self.file.parent().context("a record without a directory")?;
        fs::create_dir_all(directory)
            .and_then(|()| fs::write(&self.file, ""))
            .with_context(|| format!("write {}", self.file.display()))
    }
}

/// Hash of the names and contents of files.
fn hash(root: &Path, inputs: &[&str]) -> Result<String> {
    let mut files = Vec::new();
    for input in inputs {
        collect(&root.join(input), &mut files)?;
    }
    files.sort();
    let mut digest = Sha256::new();
    for file in files {
        let content = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        let name = file.strip_prefix(root).unwrap_or(&file);
        for part in [name.as_os_str().as_encoded_bytes(), &content] {
            digest.update(part.len().to_le_bytes());
            digest.update(part);
        }
    }
    let digest = digest.finalize();
    Ok(digest
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let kind = fs::symlink_metadata(path).with_context(|| format!("read {}", path.display()))?;
    if !kind.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path).with_context(|| format!("list {}", path.display()))? {
        let entry = entry?;
        if entry.file_name() != "target" {
            collect(&entry.path(), files)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("folder")).unwrap();
        fs::write(root.path().join("folder/a"), "content").unwrap();
        fs::write(root.path().join("file"), "").unwrap();
        root
    }

    #[test]
    fn hash_depends_on_names_and_contents() {
        let root = tree();
        let inputs = ["folder", "file"];
        let before = hash(root.path(), &inputs).unwrap();
        assert_eq!(hash(root.path(), &inputs).unwrap(), before);
        fs::write(root.path().join("folder/a"), "other").unwrap();
        let changed = hash(root.path(), &inputs).unwrap();
        fs::rename(root.path().join("folder/a"), root.path().join("folder/b")).unwrap();
        let renamed = hash(root.path(), &inputs).unwrap();
        assert!(before != changed && changed != renamed);
    }

    #[test]
    fn hash_fails_for_missing_input() {
        let error = hash(tree().path(), &["absent"]).unwrap_err();
        assert!(error.to_string().contains("absent"), "{error}");
    }

    #[test]
    fn records_one_set_of_inputs() {
        let directory = tempfile::tempdir().unwrap();
        let proof = Proof::in_directory(directory.path(), "check", "1");
        assert!(!proof.exists());
        proof.record().unwrap();
        assert!(proof.exists());
        assert!(!Proof::in_directory(directory.path(), "check", "2").exists());
    }
}
