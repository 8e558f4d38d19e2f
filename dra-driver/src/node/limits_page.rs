//! The limits page of a share, which the agent changes in place.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use drava_vgpu_abi::contention::OwnTime;
use drava_vgpu_abi::page::{self, LimitsPage, PAGE_SIZE, PageWrite};
use drava_vgpu_abi::{Limits, paths};

/// The limits page of a share. The node driver changes it, too, so each change applies to its current content.
pub struct Page {
    file: File,
    content: [u8; PAGE_SIZE],
    decoded: LimitsPage,
}

impl Page {
    /// Opens and reads the page in a limits directory.
    ///
    /// # Errors
    /// If it cannot be opened or read, or is not a page.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let path = dir.join(paths::PAGE_FILE);
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut content = [0; PAGE_SIZE];
        file.read_exact_at(&mut content, 0)?;
        let decoded = page::decode(&content).map_err(io::Error::other)?;
        Ok(Self {
            file,
            content,
            decoded,
        })
    }

    /// Returns its limits, as last read.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.decoded.spec.limits
    }

    /// Whether it still is the page at its path, neither removed nor replaced.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.file.metadata().is_ok_and(|held| held.nlink() > 0)
    }

    /// Reads it again if it has changed.
    ///
    /// # Errors
    /// If it cannot be read. The limits stay as last read.
    pub fn refresh(&mut self) -> io::Result<()> {
        let mut current = [0; 8];
        self.file
            .read_exact_at(&mut current, page::CURRENT_OFFSET as u64)?;
        if u64::from_le_bytes(current) == self.decoded.generation {
            return Ok(());
        }
        let mut content = [0; PAGE_SIZE];
        self.file.read_exact_at(&mut content, 0)?;
        self.decoded = page::decode(&content).map_err(io::Error::other)?;
        self.content = content;
        Ok(())
    }

    /// Changes the limits in place.
    ///
    /// # Errors
    /// If it cannot be read or written. One of its records is intact in any case.
    pub fn change(&mut self, change: impl FnOnce(&mut Limits)) -> io::Result<()> {
        self.refresh()?;
        let mut limits = *self.limits();
        change(&mut limits);
        if *self.limits() == limits {
            return Ok(());
        }
        for write in page::update(&self.content, &limits).map_err(io::Error::other)? {
            self.write(&write)?;
        }
        self.decoded = page::decode(&self.content).map_err(io::Error::other)?;
        Ok(())
    }

    /// Returns which part of the time measured by events is the share's own.
    #[must_use]
    pub fn own_time(&self) -> OwnTime {
        let word = self.content[page::OWN_TIME_OFFSET..].first_chunk();
        word.map_or(OwnTime::ALL, |word| {
            OwnTime::from_word(u64::from_le_bytes(*word))
        })
    }

    /// Returns whether processes that are not yet on the GPU wait.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.suspension() != 0
    }

    /// Returns the word that identifies the suspension of the share; 0 if it is not suspended.
    #[must_use]
    pub fn suspension(&self) -> u64 {
        let word = self.content[page::SUSPENDED_OFFSET..].first_chunk();
        word.map_or(0, |word| u64::from_le_bytes(*word))
    }

    /// Writes a word that only the agent writes, if it changes.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn set(&mut self, write: &PageWrite) -> io::Result<()> {
        let start = usize::try_from(write.offset()).unwrap_or(usize::MAX);
        let present = self.content.get(start..);
        let is_same = present.is_some_and(|present| present.starts_with(write.bytes()));
        if is_same { Ok(()) } else { self.write(write) }
    }

    fn write(&mut self, write: &PageWrite) -> io::Result<()> {
        self.file.write_all_at(write.bytes(), write.offset())?;
        let start = usize::try_from(write.offset()).unwrap_or(usize::MAX);
        let cached = self.content.get_mut(start..);
        if let Some(cached) = cached.and_then(|rest| rest.get_mut(..write.bytes().len())) {
            cached.copy_from_slice(write.bytes());
        }
        Ok(())
    }
}
