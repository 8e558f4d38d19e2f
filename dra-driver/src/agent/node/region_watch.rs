//! Events on usage regions, by one inotify instance.
//!
//! | Event | Means |
//! |---|---|
//! | any access to the directory of an empty share | a process has started, or a tenant damages the region |
//! | change of times (`utimensat`) of the region of a notifying share | the share resumes |
//!
//! libvgpu opens the region of its share when a process asks for the GPU for the first time, long before a launch. It
//! sets the times of the region to notify the agent; that needs no descriptor and no mapping.
//!
//! An event only causes an early poll. A process is reported **once per time that a share was empty**, and notifications
//! pass a [`RateLimiter`]: a tenant that causes events all the time costs the agent little.
//!
//! Without inotify, shares are polled as if they had processes.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

use super::ShareKey;
use crate::agent::policy::rate_limiter::RateLimiter;

/// Bytes of events that are read at once. The kernel merges equal successive events.
const EVENT_BYTES: usize = 4096;

/// Events read at once; later ones are read next time.
const MAX_EVENTS: usize = 4096;

/// Events of a process that starts to use a region, or of a tenant that damages it.
const ACCESS: WatchFlags = WatchFlags::OPEN
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE);

/// Events of a share that notifies the agent.
const NOTIFICATION: WatchFlags = WatchFlags::ATTRIB;

/// The watched regions of a node.
#[derive(Debug)]
pub struct RegionWatch {
    inotify: Option<OwnedFd>,
    watched: BTreeMap<ShareKey, Watched>,
    /// By watch descriptor.
    keys: BTreeMap<i32, ShareKey>,
    limiter: RateLimiter,
    /// Shares whose first process was reported and not yet taken.
    started: Vec<ShareKey>,
}

#[derive(Debug, Clone)]
struct Watched {
    dir: PathBuf,
    descriptor: i32,
    awaits_process: bool,
    notifies: bool,
}

impl Default for RegionWatch {
    fn default() -> Self {
        Self {
            inotify: inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok(),
            watched: BTreeMap::new(),
            keys: BTreeMap::new(),
            limiter: RateLimiter::default(),
            started: Vec::new(),
        }
    }
}

impl RegionWatch {
    /// Reports the next process of a share whose region is in this directory. Returns whether that is possible.
    pub fn await_process(&mut self, key: ShareKey, dir: &Path) -> bool {
        let present = self.watched.get(&key);
        let notifies = present.is_some_and(|watched| watched.notifies && watched.dir == dir);
        self.watch(key, dir, true, notifies)
    }

    /// Receives notifications of these shares, whose regions are in these directories, and of no others. Returns whether
    /// that is possible for all of them.
    pub fn set_notifiers(&mut self, notifiers: &BTreeMap<ShareKey, &Path>) -> bool {
        let ended = self.watched.iter().filter(|(key, watched)| {
            let dir = notifiers.get(key);
            watched.notifies && dir.is_none_or(|dir| *dir != watched.dir)
        });
        for (key, watched) in ended
            .map(|(key, watched)| (*key, watched.clone()))
            .collect::<Vec<_>>()
        {
            self.watch(key, &watched.dir, watched.awaits_process, false);
        }
        let mut receives_all = true;
        for (key, dir) in notifiers {
            let present = self.watched.get(key);
            if present.is_some_and(|watched| watched.notifies) {
                continue;
            }
            let awaits_process = present.is_some_and(|watched| watched.awaits_process);
            receives_all &= self.watch(*key, dir, awaits_process, true);
        }
        receives_all
    }

    /// Returns what can be polled for events, or from when on, µs.
    ///
    /// # Errors
    /// The time from which the rate limit permits the next notification.
    pub fn pollable(&self, now_us: u64) -> Result<Option<BorrowedFd<'_>>, u64> {
        let from_us = self.limiter.next_us(now_us);
        match &self.inotify {
            Some(_) if from_us > now_us => Err(from_us),
            inotify => Ok(inotify.as_ref().map(OwnedFd::as_fd)),
        }
    }

    /// Counts a notification and reads all events.
    pub fn accept(&mut self, now_us: u64) {
        self.limiter.accept(now_us);
        self.read();
    }

    /// Returns the shares whose first process has started since the last call.
    pub fn started(&mut self) -> Vec<ShareKey> {
        self.read();
        std::mem::take(&mut self.started)
    }

    /// Adds, changes or removes the watch of a share. Returns whether events are reported. A new watch on a directory that
    /// is watched already replaces the events.
    fn watch(&mut self, key: ShareKey, dir: &Path, awaits_process: bool, notifies: bool) -> bool {
        let Some(inotify) = &self.inotify else {
            return false;
        };
        let events = match (awaits_process, notifies) {
            (true, true) => Some(ACCESS),
            (true, false) => Some(ACCESS | WatchFlags::ONESHOT),
            (false, true) => Some(NOTIFICATION),
            (false, false) => None,
        };
        let descriptor = events.and_then(|events| {
            let flags = events | WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW;
            inotify::add_watch(inotify, dir, flags).ok()
        });
        let before = self.watched.remove(&key).map(|watched| watched.descriptor);
        if let Some(before) = before.filter(|before| descriptor != Some(*before)) {
            self.keys.remove(&before);
            // A watch with one event, or of a removed directory, has ended already.
            let _ = inotify::remove_watch(inotify, before);
        }
        let Some(descriptor) = descriptor else {
            return false;
        };
        self.keys.insert(descriptor, key);
        self.watched.insert(
            key,
            Watched {
                dir: dir.to_owned(),
                descriptor,
                awaits_process,
                notifies,
            },
        );
        true
    }

    fn read(&mut self) {
        // Also without watches: the end of a watch is an event.
        let Some(inotify) = &self.inotify else {
            return;
        };
        let (mut accessed, mut has_overflow) = (Vec::new(), false);
        let mut buffer = [MaybeUninit::uninit(); EVENT_BYTES];
        let mut events = Reader::new(inotify, &mut buffer);
        for _ in 0..MAX_EVENTS {
            let Ok(event) = events.next() else { break };
            has_overflow |= event.events().contains(ReadFlags::QUEUE_OVERFLOW);
            accessed.push((event.wd(), event.events().contains(ReadFlags::IGNORED)));
        }
        for (descriptor, is_removed) in accessed {
            let Some(key) = self.keys.get(&descriptor).copied() else {
                continue;
            };
            if is_removed {
                self.keys.remove(&descriptor);
                self.watched.remove(&key);
            } else {
                self.report(key);
            }
        }
        if has_overflow {
            let all: Vec<ShareKey> = self.watched.keys().copied().collect();
            all.into_iter().for_each(|key| self.report(key));
        }
    }

    /// Reports the first process of a share, and watches the share for notifications only.
    fn report(&mut self, key: ShareKey) {
        if let Some(watched) = self.watched.get(&key)
            && watched.awaits_process
        {
            let (dir, notifies) = (watched.dir.clone(), watched.notifies);
            self.started.push(key);
            self.watch(key, &dir, false, notifies);
        }
    }
}
