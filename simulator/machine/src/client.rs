//! Connection of a library to the daemon, standing for open device files.
//!
//! One request at a time; callers serialize. The descriptor is close-on-exec and inherited by
//! forked children, like the real driver's: memory lives until the last holder is gone.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::description::MachineDescription;
use crate::protocol::{ClientKind, PROTOCOL, Refusal, Reply, Request};
use crate::root::DriverRoot;
use crate::wire::{self, WireError};

/// An open connection.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    buffer: Vec<u8>,
    events: VecDeque<Reply>,
}

/// First reply of the daemon.
#[derive(Debug)]
pub struct Welcome {
    /// The machine.
    pub machine: MachineDescription,
    /// Descriptors of the message; see [`Reply::Welcome`].
    pub fds: Vec<OwnedFd>,
}

/// Error of a request.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon serves the driver root.
    #[error("cannot connect to the simulated machine at {}", path.display())]
    NoMachine {
        /// Socket path.
        path: PathBuf,
        /// Cause.
        #[source]
        source: Errno,
    },
    /// The connection broke.
    #[error("connection to the simulated machine failed")]
    Wire(#[from] WireError),
    /// The daemon rejected the request.
    #[error("rejected: {0}")]
    Refused(#[from] Refusal),
    /// The daemon sent a reply of another type.
    #[error("unexpected reply")]
    Unexpected,
}

/// A connected socket.
pub(crate) fn connected(path: &Path) -> Result<OwnedFd, ClientError> {
    let no_machine = |source| ClientError::NoMachine {
        path: path.to_owned(),
        source,
    };
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(no_machine)?;
    let address = SocketAddrUnix::new(path).map_err(no_machine)?;
    connect(&socket, &address).map_err(no_machine)?;
    Ok(socket)
}

impl Connection {
    /// Connects and identifies this process.
    ///
    /// # Errors
    /// If no daemon answers or the daemon has another protocol version.
    pub fn open(root: &DriverRoot, kind: ClientKind) -> Result<(Self, Welcome), ClientError> {
        let mut connection = Self {
            socket: connected(&root.socket())?,
            buffer: Vec::new(),
            events: VecDeque::new(),
        };
        let hello = Request::Hello {
            protocol: PROTOCOL,
            kind,
        };
        match connection.request_with_fds(&hello)? {
            (Reply::Welcome { machine }, fds) => {
                let welcome = Welcome {
                    machine: *machine,
                    fds,
                };
                Ok((connection, welcome))
            }
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Sends a request and waits for the reply.
    ///
    /// # Errors
    /// If the daemon is gone or rejects.
    pub fn request(&mut self, request: &Request) -> Result<Reply, ClientError> {
        self.request_with_fds(request).map(|(reply, _)| reply)
    }

    /// Like [`Self::request`], for replies with descriptors.
    ///
    /// # Errors
    /// If the daemon is gone or rejects.
    pub fn request_with_fds(
        &mut self,
        request: &Request,
    ) -> Result<(Reply, Vec<OwnedFd>), ClientError> {
        self.exchange(request, &[])
    }

    /// Like [`Self::request`], for requests with a descriptor.
    ///
    /// # Errors
    /// If the daemon is gone or rejects.
    pub fn request_about(
        &mut self,
        request: &Request,
        descriptor: BorrowedFd<'_>,
    ) -> Result<Reply, ClientError> {
        self.exchange(request, &[descriptor])
            .map(|(reply, _)| reply)
    }

    fn exchange(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), ClientError> {
        wire::send(self.socket.as_fd(), request, fds)?;
        loop {
            match wire::receive(self.socket.as_fd(), &mut self.buffer)? {
                (Reply::Refused(refusal), _) => return Err(refusal.into()),
                (event @ Reply::Event(_), _) => self.events.push_back(event),
                answer => return Ok(answer),
            }
        }
    }

    /// Disconnects: the daemon forgets this client. Later requests fail.
    pub fn close(&self) {
        // Fails if the daemon is gone.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Returns whether the daemon is gone.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let mut state = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut state, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Waits for the next registered event; `None` on timeout.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn next_event(&mut self, timeout: Duration) -> Result<Option<Reply>, ClientError> {
        if let Some(event) = self.events.pop_front() {
            return Ok(Some(event));
        }
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).ok();
            let mut waiting = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut waiting, left.as_ref()) {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(WireError::from(errno).into()),
                Ok(0) => return Ok(None),
                Ok(_) => {
                    let (event, _) = wire::receive(self.socket.as_fd(), &mut self.buffer)?;
                    return Ok(Some(event));
                }
            }
        }
    }
}
