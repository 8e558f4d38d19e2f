//! Tells when somebody comes to a share that has no processes, so that the agent need not look for it ten times a second.
//!
//! libvgpu opens its share's usage region when a process asks for the card for the first time, long before that launches
//! anything; and whoever wants to damage a region opens, cuts, renames or removes it. inotify tells of that, **once for
//! each time that a share has been deserted**: a tenant that does so all day long costs the agent nothing.
//!
//! Where inotify is not to be had shares are looked at as if they had processes.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

/// Bytes for events that are read at once.
const EVENTS: usize = 4096;

/// What somebody who comes does to the directory of a region, or to the files there.
const SIGNS: WatchFlags = WatchFlags::OPEN
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE);

/// The deserted shares of a node, which `K` names.
#[derive(Debug)]
pub struct Arrivals<K> {
    inotify: Option<OwnedFd>,
    awaited: BTreeMap<i32, K>,
}

impl<K> Default for Arrivals<K> {
    fn default() -> Self {
        Self {
            inotify: inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok(),
            awaited: BTreeMap::new(),
        }
    }
}

impl<K> Arrivals<K> {
    /// Waits for whoever comes next to a share, whose region lies in that directory. Returns whether that is possible.
    pub fn wait_for(&mut self, key: K, usage_dir: &Path) -> bool {
        let Some(inotify) = &self.inotify else {
            return false;
        };
        let once = WatchFlags::ONESHOT | WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW;
        match inotify::add_watch(inotify, usage_dir, SIGNS | once) {
            Ok(watch) => {
                self.awaited.insert(watch, key);
                true
            }
            Err(_) => false,
        }
    }

    /// Shares to which somebody has come since the last call.
    pub fn take(&mut self) -> Vec<K> {
        let Some(inotify) = self.inotify.as_ref().filter(|_| !self.awaited.is_empty()) else {
            return Vec::new();
        };
        let mut arrived = Vec::new();
        let mut buffer = [MaybeUninit::uninit(); EVENTS];
        let mut events = Reader::new(inotify, &mut buffer);
        // Each watch gives two events at most, so this ends.
        while let Ok(event) = events.next() {
            if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                arrived.extend(std::mem::take(&mut self.awaited).into_values());
            } else if let Some(key) = self.awaited.remove(&event.wd()) {
                arrived.push(key);
            }
        }
        arrived
    }
}
