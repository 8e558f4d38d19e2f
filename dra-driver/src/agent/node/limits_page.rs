//! The limits page of a share, which the agent changes in place.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use drava_vgpu_abi::bucket::TokenSlice;
use drava_vgpu_abi::contention::OwnTime;
use drava_vgpu_abi::page::{self, LimitsPage, PAGE_SIZE, PageWrite};
use drava_vgpu_abi::{Limits, paths};

/// The limits page of a share. The node driver changes it, too, so each change applies to its current content.
pub struct Page {
    path: PathBuf,
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
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        let mut content = [0; PAGE_SIZE];
        file.read_exact_at(&mut content, 0)?;
        let decoded = page::decode(&content).map_err(io::Error::other)?;
        Ok(Self {
            path,
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

    /// Whether it still is the page at its path. A removed or retired page is replaced by another.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let Ok(held) = self.file.metadata() else {
            return false;
        };
        let has_successor = || fs::metadata(&self.path).is_ok_and(|at| at.ino() != held.ino());
        held.nlink() > 0 && !(self.decoded.retired && has_successor())
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

    /// Grants the share its next token slice, or a longer one.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn grant_token(&mut self, slice: TokenSlice) -> io::Result<()> {
        page::token_slice(slice)
            .iter()
            .try_for_each(|write| self.write(write))
    }

    /// Ends the token slice of the share at `until_us`. A time in the past means that another share has the token.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn revoke_token(&mut self, until_us: u64) -> io::Result<()> {
        self.write(&page::token(until_us))
    }

    /// Returns which part of the time measured by events is the share's own.
    #[must_use]
    pub fn own_time(&self) -> OwnTime {
        let word = self.content[page::OWN_TIME_OFFSET..].first_chunk();
        word.map_or(OwnTime::ALL, |word| {
            OwnTime::from_word(u64::from_le_bytes(*word))
        })
    }

    /// Sets which part of the time measured by events is the share's own.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn set_own_time(&mut self, own_time: OwnTime) -> io::Result<()> {
        self.write(&page::own_time(own_time))
    }

    /// Sets until when the share yields, µs; 0 if it does not.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn set_yield(&mut self, until_us: u64) -> io::Result<()> {
        self.set(&page::yield_until(until_us))
    }

    /// Sets how much GPU time of the share may be queued on the GPU, µs, 0 for any, and whether the share notifies the
    /// agent when it starts to use the GPU.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn set_priority_role(&mut self, window_us: u32, notifies: bool) -> io::Result<()> {
        self.set(&page::window(window_us))?;
        self.set(&page::notify(notifies))
    }

    /// Sets whether other shares use the share's time, so that it notifies the agent when it resumes.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn set_lent(&mut self, is_lent: bool) -> io::Result<()> {
        self.set(&page::lent(is_lent))
    }

    /// Writes a word that only the agent writes, if it changes.
    fn set(&mut self, write: &PageWrite) -> io::Result<()> {
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
