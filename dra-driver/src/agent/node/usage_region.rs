//! The usage region of a share, which the agent reads.
//!
//! The region belongs to the tenant, which may truncate it at any time. **It is therefore read with `pread` and never
//! mapped**: access to a mapping of a truncated file raises SIGBUS. A read takes half a microsecond and returns a copy that
//! does not change. The file is opened so that a link, a FIFO or a device in its place cannot block the agent.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::offset_of;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use drava_vgpu_abi::ledger::{MAX_BYTES, Owner};
use drava_vgpu_abi::paths;
use drava_vgpu_abi::region::{Header, REGION_SIZE, SLOT_COUNT, SLOT_SIZE, SLOTS_OFFSET, SlotIndex};
use drava_vgpu_abi::snapshot::{ProcessUsage, Snapshot};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fs::{AtFlags, OFlags, statat};

use crate::agent::policy::activity::RegionHeader;
use crate::agent::policy::detection::{RegionProblem, RegionView, check};

/// The part of the header that has words.
const HEADER_BYTES: usize = 512;

const SLOTS_IN_USE: usize = offset_of!(Header<AtomicU64>, slots_in_use);
const REFILLED: usize = offset_of!(Header<AtomicU64>, refilled_us);

/// Bytes of a region. One buffer serves all shares.
pub struct ReadBuffer {
    bytes: Vec<u8>,
    /// Bytes from here on are zero.
    dirty: usize,
    reads: u64,
}

impl ReadBuffer {
    /// Returns how many times a region was read.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.reads
    }
}

impl Default for ReadBuffer {
    fn default() -> Self {
        Self {
            bytes: vec![0; REGION_SIZE],
            dirty: 0,
            reads: 0,
        }
    }
}

/// The usage region of a share.
pub struct UsageRegion {
    dir: PathBuf,
    opened: Result<OpenRegion, RegionProblem>,
}

/// Use of the memory of a share by processes that live.
#[derive(Debug, Default)]
pub struct LiveUse {
    /// Bytes charged, see [`UsageRegion::live_use`].
    pub bytes: u64,
    /// Slots whose lock a process holds, their owner or another one that has inherited it: the owners, with the bytes charged.
    pub locked: Vec<(Owner, u64)>,
}

/// An open region.
struct OpenRegion {
    file: File,
    /// Its directory.
    dir: File,
    /// Device and inode.
    identity: (u64, u64),
}

impl UsageRegion {
    /// Opens the region in a usage directory.
    #[must_use]
    pub fn open(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            opened: open(dir),
        }
    }

    /// Returns the directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Reopens the region if another file is at its path, and checks its size.
    ///
    /// # Errors
    /// The problem of the region.
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
    /// The problem of the region.
    pub fn header(&self, buffer: &mut ReadBuffer) -> Result<RegionHeader, RegionProblem> {
        self.read(buffer, 0, HEADER_BYTES)?;
        let share = Snapshot::decode(&buffer.bytes)
            .map_err(RegionProblem::Content)?
            .share();
        let word = |offset: usize| {
            let word = buffer
                .bytes
                .get(offset..)
                .and_then(|rest| rest.first_chunk::<8>());
            word.map_or(0, |word| u64::from_ne_bytes(*word))
        };
        let (slots, refilled_us) = (word(SLOTS_IN_USE), word(REFILLED));
        match usize::try_from(slots) {
            Ok(slots_in_use) if slots_in_use <= SLOT_COUNT => Ok(RegionHeader {
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
    /// The problem of the region.
    pub fn view(&self, buffer: &mut ReadBuffer) -> Result<RegionView, RegionProblem> {
        let header = self.header(buffer)?;
        self.read(buffer, SLOTS_OFFSET, header.slots_in_use * SLOT_SIZE)?;
        let snapshot = Snapshot::decode(&buffer.bytes).map_err(RegionProblem::Content)?;
        let mut processes = Vec::new();
        // Beyond the highest slot that was ever in use the buffer is zero.
        if let Some(highest) = header.slots_in_use.checked_sub(1) {
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
            total_bytes: header.share.total_bytes,
            peak_bytes: header.share.peak_bytes.min(MAX_BYTES),
            denied: header.share.denied,
            last_demand_us: header.share.last_demand_us,
            processes,
        })
    }

    /// Returns what the share was charged without the memory of processes that have ended, bytes: their charge stays in the region
    /// until another process needs memory, and the lock of its slot tells whether a process lives. Memory that an ended process
    /// had exported counts, because other processes may have it open.
    ///
    /// # Errors
    /// The problem of the region.
    pub fn live_use(&self, buffer: &mut ReadBuffer) -> Result<LiveUse, RegionProblem> {
        let before = self.view(buffer)?;
        let region = self.opened.as_ref().map_err(Clone::clone)?;
        let processes = before.processes.iter();
        let (locked, ended): (Vec<&ProcessUsage>, Vec<&ProcessUsage>) =
            processes.partition(|process| is_locked(&region.file, process.slot));
        let locked = locked.into_iter();
        let locked = locked.map(|process| (process.owner, process.used_bytes));
        let locked: Vec<_> = locked.collect();
        let ended = ended.into_iter();
        let owners: Vec<_> = ended
            .map(|process| (process.slot, process.generation))
            .collect();
        if owners.is_empty() {
            return Ok(LiveUse {
                bytes: before.total_bytes,
                locked,
            });
        }
        // A total that was read before a process ended lacks its last charges. The slot may have a new owner by now.
        let after = self.view(buffer)?;
        let ended = after.processes.iter();
        let ended = ended.filter(|process| owners.contains(&(process.slot, process.generation)));
        let ended_bytes = ended
            .map(|process| process.used_bytes.saturating_sub(process.exported_bytes))
            .fold(0, u64::saturating_add);
        Ok(LiveUse {
            bytes: after.total_bytes.saturating_sub(ended_bytes),
            locked,
        })
    }

    fn read(
        &self,
        buffer: &mut ReadBuffer,
        start: usize,
        length: usize,
    ) -> Result<(), RegionProblem> {
        let file = &self.opened.as_ref().map_err(Clone::clone)?.file;
        let (end, dirty) = (start + length, buffer.dirty);
        // Clears what a read of another region left behind.
        if let Some(rest) = buffer.bytes.get_mut(end..dirty.max(end)) {
            rest.fill(0);
        }
        buffer.dirty = end;
        buffer.reads += u64::from(length > 0);
        let Some(target) = buffer.bytes.get_mut(start..end) else {
            return Ok(());
        };
        let mut filled = 0;
        while let Some(rest) = target.get_mut(filled..).filter(|rest| !rest.is_empty()) {
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

/// Returns whether a process holds the lock of a slot. Without an answer of the kernel it counts as held.
fn is_locked(file: &File, slot: SlotIndex) -> bool {
    let range = || {
        Some(libc::flock {
            l_type: libc::c_short::try_from(libc::F_WRLCK).ok()?,
            l_whence: libc::c_short::try_from(libc::SEEK_SET).ok()?,
            l_start: libc::off_t::try_from(slot.offset()).ok()?,
            l_len: libc::off_t::try_from(SLOT_SIZE).ok()?,
            l_pid: 0,
        })
    };
    let Some(mut range) = range() else {
        return true;
    };
    let asked = fcntl(file, FcntlArg::F_OFD_GETLK(&mut range));
    asked.is_err() || libc::c_int::from(range.l_type) != libc::F_UNLCK
}

fn open(dir: &Path) -> Result<OpenRegion, RegionProblem> {
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
    Ok(OpenRegion {
        file,
        dir: File::open(dir).map_err(unreadable)?,
        identity: (metadata.dev(), metadata.ino()),
    })
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unreadable(error: io::Error) -> RegionProblem {
    RegionProblem::Unreadable(error.to_string())
}
