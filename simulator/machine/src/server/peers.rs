//! Connections: sockets and channels by token.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::channel::Channel;
use crate::kernel::ClientId;
use crate::protocol::Command;
use crate::server::view::Namespace;
use crate::wire::{self, WireError};

/// One connection.
#[derive(Debug)]
pub(super) struct Peer {
    socket: OwnedFd,
    role: Role,
    namespace: Namespace,
    /// PID and user.
    process: Option<(u32, u32)>,
}

#[derive(Debug)]
enum Role {
    Library(Option<Channel>),
    Controller,
}

impl Peer {
    pub(super) fn new(
        socket: OwnedFd,
        library: bool,
        namespace: Namespace,
        process: Option<(u32, u32)>,
    ) -> Self {
        let role = if library {
            Role::Library(None)
        } else {
            Role::Controller
        };
        Self {
            socket,
            role,
            namespace,
            process,
        }
    }

    /// PID namespace of the peer.
    pub(super) fn namespace(&self) -> Namespace {
        self.namespace
    }

    /// PID and user of a library.
    pub(super) fn process(&self) -> Option<(u32, u32)> {
        self.process
    }

    pub(super) fn is_controller(&self) -> bool {
        matches!(self.role, Role::Controller)
    }

    pub(super) fn open_channel(&mut self, channel: Channel) {
        self.role = Role::Library(Some(channel));
    }

    pub(super) fn channel(&self) -> Option<&Channel> {
        match &self.role {
            Role::Library(channel) => channel.as_ref(),
            Role::Controller => None,
        }
    }

    pub(super) fn receive<T: DeserializeOwned>(
        &self,
        buffer: &mut Vec<u8>,
    ) -> Result<(T, Vec<OwnedFd>), WireError> {
        wire::receive(self.socket.as_fd(), buffer)
    }

    /// A peer that does not read its messages is disconnected instead of blocking the daemon.
    pub(super) fn send(
        &self,
        message: &impl Serialize,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), WireError> {
        match wire::send(self.socket.as_fd(), message, fds) {
            Err(WireError::Socket(Errno::AGAIN)) => Err(WireError::Closed),
            sent => sent,
        }
    }
}

/// All connections by token; the token of a library is its [`ClientId`].
#[derive(Debug, Default)]
pub(super) struct Peers(BTreeMap<u64, Peer>);

impl Peers {
    pub(super) fn insert(&mut self, token: u64, peer: Peer) {
        self.0.insert(token, peer);
    }

    pub(super) fn remove(&mut self, token: u64) -> Option<Peer> {
        self.0.remove(&token)
    }

    pub(super) fn get(&self, token: u64) -> Option<&Peer> {
        self.0.get(&token)
    }

    pub(super) fn get_mut(&mut self, token: u64) -> Option<&mut Peer> {
        self.0.get_mut(&token)
    }

    pub(super) fn channels(&self) -> impl Iterator<Item = &Channel> {
        self.0.values().filter_map(Peer::channel)
    }

    pub(super) fn with_channel(&self, client: ClientId, action: impl FnOnce(&Channel)) {
        if let Some(channel) = self.get(client.0).and_then(Peer::channel) {
            action(channel);
        }
    }

    pub(super) fn answer_doorbell(&self, token: u64) {
        self.with_channel(ClientId(token), Channel::answer_doorbell);
    }

    /// Takes the pending commands of all channels; peers with malformed data are added to `faulty`.
    pub(super) fn take_commands(
        &self,
        commands: &mut Vec<(ClientId, Command)>,
        faulty: &mut Vec<ClientId>,
    ) {
        // Most commands of one client per round.
        const BATCH: usize = 4096;
        for (token, peer) in &self.0 {
            let client = ClientId(*token);
            let Some(channel) = peer.channel() else {
                continue;
            };
            for _ in 0..BATCH {
                match channel.take() {
                    Ok(Some(command)) => commands.push((client, command)),
                    Ok(None) => break,
                    Err(_) => {
                        faulty.push(client);
                        break;
                    }
                }
            }
        }
    }
}
