//! The files of one share, as the agent uses them: the limits page, which it writes in place, and the usage region,
//! which it reads.
//!
//! The region belongs to the tenant, who may truncate it at any moment. **It is therefore read with `pread` and never
//! mapped**: a mapping of a file that becomes shorter is a SIGBUS, also a private one. A read costs half a microsecond,
//! gives fewer bytes where there are fewer, and what it gives cannot change while it is looked at. The file is opened so
//! that nothing else in its place (a link, a FIFO, a device) can hold the agent up.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::mem::offset_of;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use drava_vgpu_abi::bucket::TokenSlice;
use drava_vgpu_abi::ledger::MAX_BYTES;
use drava_vgpu_abi::page::{self, LimitsPage, PAGE_SIZE, PageWrite};
use drava_vgpu_abi::region::{Header, REGION_SIZE, SLOT_COUNT, SLOT_SIZE, SLOTS_OFFSET};
use drava_vgpu_abi::snapshot::{ShareUsage, Snapshot};
use drava_vgpu_abi::{Limits, paths};
use rustix::fs::{AtFlags, OFlags, statat};

use super::detect::{RegionProblem, RegionView, check};

/// The part of the header that has words.
const HEADER_BYTES: usize = 512;

const SLOTS_IN_USE: usize = offset_of!(Header<AtomicU64>, slots_in_use);
const REFILLED: usize = offset_of!(Header<AtomicU64>, refilled_us);

/// Bytes of a region, read piece by piece. One buffer serves all shares.
pub struct Scratch {
    bytes: Vec<u8>,
    /// Beyond it all bytes are zero.
    dirty: usize,
    reads: u64,
}

impl Scratch {
    /// How often a region was read so far.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.reads
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            bytes: vec![0; REGION_SIZE],
            dirty: 0,
            reads: 0,
        }
    }
}

/// The limits page of a share. The agent is not the only one who may change it, so each change is made to what the page
/// says at that moment.
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
    /// When it cannot be opened or read, or is no page.
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

    /// What it says.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.decoded.spec.limits
    }

    /// Whether it still is the page at its path: one that was removed or retired leaves its place to another.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let Ok(held) = self.file.metadata() else {
            return false;
        };
        let is_successor_there = || fs::metadata(&self.path).is_ok_and(|at| at.ino() != held.ino());
        held.nlink() > 0 && !(self.decoded.retired && is_successor_there())
    }

    /// Reads it again if somebody has changed it.
    ///
    /// # Errors
    /// When it cannot be read. It stands for what it said then.
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

    /// Changes the limits in place, if that changes anything.
    ///
    /// # Errors
    /// When it cannot be read or written. One of its records is intact then, too.
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

    /// Gives the share its next turn with the token, or a longer one.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn set_turn(&mut self, turn: TokenSlice) -> io::Result<()> {
        page::token_slice(turn)
            .iter()
            .try_for_each(|write| self.write(write))
    }

    /// Ends the share's turn at `until_us`; a moment that has passed says that somebody else has the token.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn end_turn(&mut self, until_us: u64) -> io::Result<()> {
        self.write(&page::token(until_us))
    }

    /// Says which part of what its events measure is the share's own.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn set_own_time(&mut self, parts_per_million: u32) -> io::Result<()> {
        self.write(&page::own_time(parts_per_million))
    }

    /// Says until when the share gives way to others; 0 if it does not.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn give_way(&mut self, until_us: u64) -> io::Result<()> {
        self.set(&page::yield_until(until_us))
    }

    /// Says how the share stands to those of other priorities: how much of its time may be in the card's queues, µs, 0
    /// for any, and whether it calls the agent.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn rank(&mut self, window_us: u32, calls: bool) -> io::Result<()> {
        self.set(&page::window(window_us))?;
        self.set(&page::notify(calls))
    }

    /// Says whether others use the share's time, so that it calls when it wants that back.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn lend(&mut self, is_lent: bool) -> io::Result<()> {
        self.set(&page::lent(is_lent))
    }

    /// Writes a word that nobody else does, unless it says that already.
    fn set(&mut self, write: &PageWrite) -> io::Result<()> {
        let start = usize::try_from(write.offset()).unwrap_or(usize::MAX);
        let present = self.content.get(start..);
        let is_same = present.is_some_and(|present| present.starts_with(write.bytes()));
        if is_same { Ok(()) } else { self.write(write) }
    }

    fn write(&mut self, write: &PageWrite) -> io::Result<()> {
        self.file.write_all_at(write.bytes(), write.offset())?;
        let start = usize::try_from(write.offset()).unwrap_or(usize::MAX);
        if let Some(place) = self
            .content
            .get_mut(start..)
            .and_then(|rest| rest.get_mut(..write.bytes().len()))
        {
            place.copy_from_slice(write.bytes());
        }
        Ok(())
    }
}

/// The usage region of a share.
pub struct Usage {
    dir: PathBuf,
    opened: Result<Region, RegionProblem>,
}

/// An open region.
struct Region {
    file: File,
    /// Where it lies.
    dir: File,
    /// Device and inode.
    identity: (u64, u64),
}

/// What the header says, as far as every tick needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Glance {
    /// The share's own numbers.
    pub share: ShareUsage,
    /// When the credit was last filled, µs.
    pub refilled_us: u64,
    /// How many slots were ever in use.
    pub slots_in_use: usize,
}

impl Usage {
    /// The region in a usage directory.
    #[must_use]
    pub fn open(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            opened: open(dir),
        }
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Opens the region anew if another file stands at its path, and checks its size.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn verify(&mut self) -> Result<(), RegionProblem> {
        let present = self.opened.as_ref().ok().and_then(|region| {
            let at = statat(&region.dir, paths::REGION_FILE, AtFlags::SYMLINK_NOFOLLOW).ok()?;
            ((at.st_dev, at.st_ino) == region.identity).then_some(at.st_size)
        });
        let found = match present {
            Some(size) => u64::try_from(size).unwrap_or(0),
            None => {
                self.opened = open(&self.dir);
                let region = self.opened.as_ref().map_err(Clone::clone)?;
                region.file.metadata().map_err(unreadable)?.len()
            }
        };
        let expected = REGION_SIZE as u64;
        if found == expected {
            Ok(())
        } else {
            Err(RegionProblem::Size { found, expected })
        }
    }

    /// Reads the header.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn glance(&self, scratch: &mut Scratch) -> Result<Glance, RegionProblem> {
        self.read(scratch, 0, HEADER_BYTES)?;
        let share = Snapshot::decode(&scratch.bytes)
            .map_err(RegionProblem::Content)?
            .share();
        let word = |offset: usize| {
            let word = scratch
                .bytes
                .get(offset..)
                .and_then(|rest| rest.first_chunk::<8>());
            word.map_or(0, |word| u64::from_ne_bytes(*word))
        };
        let (slots, refilled_us) = (word(SLOTS_IN_USE), word(REFILLED));
        match usize::try_from(slots) {
            Ok(slots_in_use) if slots_in_use <= SLOT_COUNT => Ok(Glance {
                share,
                refilled_us,
                slots_in_use,
            }),
            Ok(_) | Err(_) => Err(RegionProblem::Slots(slots)),
        }
    }

    /// Reads header and slots.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn view(&self, scratch: &mut Scratch) -> Result<RegionView, RegionProblem> {
        let glance = self.glance(scratch)?;
        self.read(scratch, SLOTS_OFFSET, glance.slots_in_use * SLOT_SIZE)?;
        let snapshot = Snapshot::decode(&scratch.bytes).map_err(RegionProblem::Content)?;
        let mut processes = Vec::new();
        // Beyond the highest slot that was ever in use the buffer is zero; the scan need not go there.
        if let Some(highest) = glance.slots_in_use.checked_sub(1) {
            for process in snapshot.processes() {
                let is_highest = process.slot.get() == highest;
                processes.push(process);
                if is_highest {
                    break;
                }
            }
        }
        for process in &mut processes {
            process.used_bytes = process.used_bytes.min(MAX_BYTES);
        }
        check(RegionView {
            total_bytes: glance.share.total_bytes,
            peak_bytes: glance.share.peak_bytes.min(MAX_BYTES),
            denied: glance.share.denied,
            last_demand_us: glance.share.last_demand_us,
            processes,
        })
    }

    fn read(
        &self,
        scratch: &mut Scratch,
        start: usize,
        length: usize,
    ) -> Result<(), RegionProblem> {
        let file = &self.opened.as_ref().map_err(Clone::clone)?.file;
        let (end, dirty) = (start + length, scratch.dirty);
        // What an earlier read of another region left beyond.
        if let Some(rest) = scratch.bytes.get_mut(end..dirty.max(end)) {
            rest.fill(0);
        }
        scratch.dirty = end;
        scratch.reads += u64::from(length > 0);
        let Some(place) = scratch.bytes.get_mut(start..end) else {
            return Ok(());
        };
        let mut filled = 0;
        while let Some(rest) = place.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match file.read_at(rest, (start + filled) as u64) {
                Ok(0) => {
                    rest.fill(0);
                    let found = (start + filled) as u64;
                    return Err(RegionProblem::Size {
                        found,
                        expected: REGION_SIZE as u64,
                    });
                }
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(unreadable(error)),
            }
        }
        Ok(())
    }
}

fn open(dir: &Path) -> Result<Region, RegionProblem> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let flags = flags.bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(dir.join(paths::REGION_FILE))
        .map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(RegionProblem::Unreadable("not a regular file".to_owned()));
    }
    Ok(Region {
        file,
        dir: File::open(dir).map_err(unreadable)?,
        identity: (metadata.dev(), metadata.ino()),
    })
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unreadable(error: io::Error) -> RegionProblem {
    RegionProblem::Unreadable(error.to_string())
}
