//! Hears shares that call: those that others give way to begin to use the card, and want that known at once.
//!
//! libvgpu sets the times of the share's region to the present, for which it needs no descriptor and no mapping, and
//! inotify tells of it. Such a call says nothing but that there is something to look at. **A tenant can call as often as
//! it likes**: beyond [`CALLS`] in a row the agent listens again only when there has been silence for [`CALL_US`] each.
//!
//! Where inotify is not to be had, shares are looked at as often as those whose time is lent.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};

use super::tenant::Key;

/// Bytes for events that are read at once. What is the same several times in a row, the kernel tells once.
const EVENTS: usize = 4096;

/// Calls in a row that are heard at once.
pub const CALLS: u32 = 64;

/// Time for which one more is heard after that, µs.
pub const CALL_US: u64 = 2_000;

/// How many calls are heard. Pure.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    left: u32,
    since_us: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            left: CALLS,
            since_us: 0,
        }
    }
}

impl Pace {
    /// When the next call is heard, µs: at once, or after a pause.
    #[must_use]
    pub fn listens_from_us(&self, now_us: u64) -> u64 {
        if self.left > 0 {
            now_us
        } else {
            (self.since_us + CALL_US).max(now_us)
        }
    }

    /// Takes note of a call that was heard at `now_us`.
    pub fn hear(&mut self, now_us: u64) {
        let more = now_us.saturating_sub(self.since_us) / CALL_US;
        let left = u64::from(self.left).saturating_add(more);
        self.since_us = match left >= u64::from(CALLS) {
            true => now_us,
            false => self.since_us + more * CALL_US,
        };
        let left = u32::try_from(left).unwrap_or(CALLS).min(CALLS);
        self.left = left.saturating_sub(1);
    }
}

/// The shares that are listened to.
#[derive(Debug)]
pub struct Calls {
    inotify: Option<OwnedFd>,
    watched: BTreeMap<Key, (PathBuf, i32)>,
    pace: Pace,
}

impl Default for Calls {
    fn default() -> Self {
        Self {
            inotify: inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok(),
            watched: BTreeMap::new(),
            pace: Pace::default(),
        }
    }
}

impl Calls {
    /// Listens to these shares, whose regions lie in those directories, and to no others. Returns whether it can hear all
    /// of them.
    pub fn listen(&mut self, shares: &BTreeMap<Key, &Path>) -> bool {
        let Some(inotify) = &self.inotify else {
            return shares.is_empty();
        };
        self.watched.retain(|key, (dir, watch)| {
            let stays = shares.get(key).is_some_and(|wanted| wanted == dir);
            if !stays {
                // One that is gone has ended by itself.
                let _ = inotify::remove_watch(inotify, *watch);
            }
            stays
        });
        for (key, dir) in shares {
            if self.watched.contains_key(key) {
                continue;
            }
            let signs = WatchFlags::ATTRIB | WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW;
            if let Ok(watch) = inotify::add_watch(inotify, *dir, signs) {
                self.watched.insert(*key, (dir.to_path_buf(), watch));
            }
        }
        self.watched.len() == shares.len()
    }

    /// What can be waited for, if it is time to listen; else from when on it is, µs.
    ///
    /// # Errors
    /// That moment.
    pub fn awaited(&self, now_us: u64) -> Result<Option<BorrowedFd<'_>>, u64> {
        let from_us = self.pace.listens_from_us(now_us);
        match &self.inotify {
            Some(_) if from_us > now_us => Err(from_us),
            inotify => Ok(inotify.as_ref().map(OwnedFd::as_fd)),
        }
    }

    /// Takes all calls that have come.
    pub fn take(&mut self, now_us: u64) {
        let Some(inotify) = &self.inotify else {
            return;
        };
        self.pace.hear(now_us);
        let mut buffer = [MaybeUninit::uninit(); EVENTS];
        let mut events = Reader::new(inotify, &mut buffer);
        // What comes while this is read is left for the next time.
        for _ in 0..EVENTS {
            if events.next().is_err() {
                return;
            }
        }
    }
}
