//! Memory exported as file descriptors.
//!
//! The descriptor is the write end of a pipe; the daemon keeps the read end. The pipe hangs up
//! exactly when the last copy of the descriptor is closed, in any process or message. Nothing is
//! written through it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll;
use rustix::fs::fstat;

use super::{EXPORT, Server};
use crate::protocol::{ExportId, Refusal, Reply};
use crate::wire::WireError;

/// The reading ends.
#[derive(Debug, Default)]
pub(super) struct Exports(BTreeMap<ExportId, OwnedFd>);

impl Exports {
    /// Creates the descriptor of an export.
    fn create(&mut self, export: ExportId, epoll: &OwnedFd) -> io::Result<OwnedFd> {
        let (kept, given) = io::pipe()?;
        let (kept, given) = (OwnedFd::from(kept), OwnedFd::from(given));
        // Hang-ups are always reported; written data is ignored.
        let nothing_else = epoll::EventFlags::empty();
        let data = epoll::EventData::new_u64(EXPORT | export.0);
        epoll::add(epoll, &kept, data, nothing_else)?;
        self.0.insert(export, kept);
        Ok(given)
    }

    /// Finds the export of a descriptor: both ends of a pipe are one inode.
    fn find(&self, descriptor: &impl AsFd) -> Option<ExportId> {
        let wanted = fstat(descriptor).ok()?;
        let same = |kept: &OwnedFd| {
            fstat(kept)
                .is_ok_and(|kept| (kept.st_dev, kept.st_ino) == (wanted.st_dev, wanted.st_ino))
        };
        let mut exports = self.0.iter();
        exports
            .find(|(_, kept)| same(kept))
            .map(|(export, _)| *export)
    }

    /// The export of the first descriptor of a message.
    pub(super) fn first(&self, descriptors: &[OwnedFd]) -> Option<ExportId> {
        descriptors.first().and_then(|one| self.find(one))
    }

    fn remove(&mut self, export: ExportId) {
        self.0.remove(&export);
    }
}

impl Server {
    /// Sends a client the descriptor of an export.
    pub(super) fn send_export(&mut self, token: u64, export: ExportId) -> Result<(), WireError> {
        let peer = self.peers.get(token).ok_or(WireError::Closed)?;
        match self.exports.create(export, &self.epoll) {
            Ok(descriptor) => peer.send(&Reply::Exported { export }, &[descriptor.as_fd()]),
            Err(_) => {
                self.kernel.unexport(export);
                peer.send(&Reply::Refused(Refusal::OutOfMemory), &[])
            }
        }
    }

    /// Removes an export whose last descriptor was closed.
    pub(super) fn end_export(&mut self, export: ExportId) {
        self.exports.remove(export);
        self.kernel.unexport(export);
    }
}
