//! Events that several processes record and wait for.
//!
//! Each has a page that the processes map. Who records it takes the next number there; when the
//! card reaches the recording, the daemon writes the number beside it. A process that dies leaves
//! nobody waiting for what it recorded.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::{Errno, pread, pwrite};

use super::Server;
use crate::kernel::{ClientId, Nanos};
use crate::protocol::{ClientKind, Refusal, Reply, Request, SharedEventId};
use crate::wire::WireError;

/// Length of a page.
pub const PAGE_LENGTH: usize = 4096;
/// Where the words of a page lie: how often the event was recorded, by which client last, which
/// recording was reached, and when.
pub const RECORDED: usize = 0;
/// See [`RECORDED`].
pub const RECORDER: usize = 1;
/// See [`RECORDED`].
pub const REACHED: usize = 2;
/// See [`RECORDED`].
pub const AT: usize = 3;

/// All of them.
#[derive(Debug, Default)]
pub(super) struct SharedEvents {
    events: BTreeMap<SharedEventId, SharedEvent>,
    next: u64,
}

#[derive(Debug)]
struct SharedEvent {
    page: OwnedFd,
    /// Processes, and which of their events it is.
    members: BTreeSet<(ClientId, u32)>,
}

impl SharedEvent {
    fn read(&self, word: usize) -> u64 {
        let mut bytes = [0; 8];
        match pread(&self.page, &mut bytes, word as u64 * 8) {
            Ok(8) => u64::from_ne_bytes(bytes),
            _ => 0,
        }
    }

    /// The time first: whoever sees the recording sees its time.
    fn reach(&self, recording: u64, at: Nanos) {
        for (word, value) in [(AT, at), (REACHED, recording)] {
            // The page is a sealed memory file: this cannot fail.
            let _ = pwrite(&self.page, &value.to_ne_bytes(), word as u64 * 8);
        }
    }
}

impl SharedEvents {
    /// Makes an event of a process one that others can open.
    pub(super) fn create(&mut self, owner: ClientId, event: u32) -> Result<SharedEventId, Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let page = memfd_create("simulated-gpu-event", flags)?;
        ftruncate(&page, PAGE_LENGTH as u64)?;
        fcntl_add_seals(&page, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        self.next += 1;
        let id = SharedEventId(self.next);
        let members = BTreeSet::from([(owner, event)]);
        self.events.insert(id, SharedEvent { page, members });
        Ok(id)
    }

    /// Lets a process take part with an event of its own; false when there is no such event.
    pub(super) fn join(&mut self, id: SharedEventId, client: ClientId, event: u32) -> bool {
        let shared = self.events.get_mut(&id);
        shared.is_some_and(|shared| shared.members.insert((client, event)))
    }

    pub(super) fn page(&self, id: SharedEventId) -> Option<&impl AsFd> {
        self.events.get(&id).map(|shared| &shared.page)
    }

    /// An event of a process was reached.
    pub(super) fn reach(&self, client: ClientId, event: u32, recording: u64, at: Nanos) {
        let of_event = |shared: &&SharedEvent| shared.members.contains(&(client, event));
        for shared in self.events.values().filter(of_event) {
            shared.reach(recording, at);
        }
    }

    /// A process is gone.
    pub(super) fn forget(&mut self, client: ClientId, now: Nanos) {
        self.events.retain(|_, shared| {
            shared.members.retain(|(member, _)| *member != client);
            if shared.read(RECORDER) == client.0 {
                shared.reach(shared.read(RECORDED), now);
            }
            !shared.members.is_empty()
        });
    }
}

impl Server {
    /// Gives a client the page of an event that it shares or opens.
    pub(super) fn share_event(&mut self, token: u64, request: &Request) -> Result<(), WireError> {
        let client = ClientId(token);
        let shared = match *request {
            _ if self.kernel.kind(client) != Some(ClientKind::Cuda) => None,
            Request::ShareEvent { event } => self.shared_events.create(client, event).ok(),
            Request::OpenEvent { shared, event } => {
                let joined = self.shared_events.join(shared, client, event);
                joined.then_some(shared)
            }
            _ => None,
        };
        let peer = self.peers.get(token).ok_or(WireError::Closed)?;
        let found = shared.and_then(|id| Some((id, self.shared_events.page(id)?)));
        match found {
            Some((shared, page)) => {
                let member = token;
                peer.send(&Reply::EventShared { shared, member }, &[page.as_fd()])
            }
            None => peer.send(&Reply::Refused(Refusal::NotFound), &[]),
        }
    }
}
