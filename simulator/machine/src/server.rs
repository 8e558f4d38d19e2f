//! The daemon: sockets, memory files and time around [`Kernel`].
//!
//! One thread with one `epoll` loop answers requests in arrival order; there is no lock that a
//! dying process could hold. Client data is untrusted: a malformed or out-of-order message
//! disconnects that client only.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};
use rustix::thread::set_current_timer_slack;
use rustix::time::{ClockId, clock_gettime};

use crate::channel::Channel;
use crate::control::{self, Answer};
use crate::description::MachineDescription;
use crate::kernel::{ClientId, Effect, Kernel};
use crate::protocol::{ClientKind, ExportId, MemoryLimitsRequest, Nanos, Refusal, Reply, Request};
use crate::root::{DriverRoot, Files, LayOutError, Layout, PciDevice};
use crate::wire::WireError;

mod cgroups;
mod exports;
mod files;
mod instances;
mod peers;
mod stop_signal;
mod view;

use cgroups::{Cgroups, is_administrator};
use exports::Exports;
pub(crate) use files::listener;
use files::{lock, memory_file, watch};
use peers::{Peer, Peers};
use view::Namespace;

const AT_ONCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// Error of the daemon.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The driver root cannot be written.
    #[error(transparent)]
    LayOut(#[from] LayOutError),
    /// Another daemon serves this root.
    #[error("a simulated machine already serves {}; stop it or use another --root", root.display())]
    AlreadyServed {
        /// Driver root.
        root: PathBuf,
    },
    /// The root has files that no daemon laid out.
    #[error("cannot lay out a driver root over {}, which is not of a simulated machine; use an empty directory as --root", found.display())]
    Foreign {
        /// Directory of others.
        found: PathBuf,
    },
    /// A file or socket cannot be created.
    #[error("cannot {action} {}", path.display())]
    File {
        /// Attempted action.
        action: &'static str,
        /// Path.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// A system call without a path failed.
    #[error("cannot {action}")]
    System {
        /// Attempted action.
        action: &'static str,
        /// Cause.
        #[source]
        source: io::Error,
    },
}

fn system(action: &'static str) -> impl FnOnce(Errno) -> ServeError {
    move |errno| ServeError::System {
        action,
        source: errno.into(),
    }
}

/// A daemon whose sockets accept connections. Dropping it removes them.
#[derive(Debug)]
pub struct Server {
    root: DriverRoot,
    kernel: Kernel,
    cgroups: Cgroups,
    memory: Vec<OwnedFd>,
    epoll: OwnedFd,
    libraries: OwnedFd,
    controllers: OwnedFd,
    _stop: OwnedFd,
    peers: Peers,
    exports: Exports,
    next_token: u64,
    /// Replies delayed by a fault, by due time.
    delayed: BTreeMap<(Nanos, u64), Reply>,
    buffer: Vec<u8>,
    _lock: OwnedFd,
}

const LIBRARIES: u64 = 0;
const CONTROLLERS: u64 = 1;
const STOP: u64 = 2;
const STARTER: u64 = 3;
const FIRST_PEER: u64 = 4;
/// Token of an export descriptor: this bit plus the export id.
const EXPORT: u64 = 1 << 62;
/// Token of a doorbell: this bit plus the peer's token.
const DOORBELL: u64 = 1 << 63;

impl Server {
    /// Lays out the driver root and opens the sockets. From here on SIGTERM and SIGINT stop
    /// [`Self::run`].
    ///
    /// # Errors
    /// If the root cannot be written, has files of others or is already served.
    pub fn start(
        description: MachineDescription,
        root: DriverRoot,
        files: Files<'_>,
    ) -> Result<Self, ServeError> {
        let stop = stop_signal::descriptor().map_err(|source| ServeError::System {
            action: "watch for SIGTERM",
            source,
        })?;
        // Completions are precise to the microsecond; the default slack of 50 µs is only less
        // exact.
        let _ = set_current_timer_slack(NonZeroU64::new(1000));
        if let Some(found) = root.foreign_directory() {
            return Err(ServeError::Foreign { found });
        }
        let lock = lock(&root)?;
        let memory = (0..description.gpus.len())
            .map(|_| memory_file())
            .collect::<Result<_, _>>()?;
        root.lay_out(&Layout {
            devices: &PciDevice::gpus(&description),
            switches: &PciDevice::switches(&description),
            driver_version: &description.driver_version,
            has_memory_limits: description.has_memory_limits(),
            files,
            has_mps: description.mps.installed,
            capability_nodes: description.capability_nodes,
        })?;
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("create an epoll"))?;
        let controllers = listener(&root.control_socket())?;
        let library_socket = listener(&root.socket())?;
        for (fd, token) in [
            (&library_socket, LIBRARIES),
            (&controllers, CONTROLLERS),
            (&stop, STOP),
        ] {
            watch(&epoll, fd, token)?;
        }
        Ok(Self {
            root,
            cgroups: Cgroups::new(description.memory_limits.clone()),
            kernel: Kernel::new(description, now()),
            memory,
            epoll,
            libraries: library_socket,
            controllers,
            _stop: stop,
            peers: Peers::default(),
            exports: Exports::default(),
            next_token: FIRST_PEER,
            delayed: BTreeMap::new(),
            buffer: Vec::new(),
            _lock: lock,
        })
    }

    /// Stops [`Self::run`] when the other end of a pipe is closed, so that the daemon ends with the
    /// process that holds it.
    ///
    /// # Errors
    /// If the descriptor cannot be watched.
    pub fn stop_when_closed(&mut self, pipe: &impl AsFd) -> Result<(), ServeError> {
        watch(&self.epoll, pipe, STARTER)
    }

    /// Serves until a stop signal.
    ///
    /// # Errors
    /// If the event loop fails.
    pub fn run(&mut self) -> Result<(), ServeError> {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
        loop {
            self.work();
            let timeout = self.time_to_sleep();
            events.clear();
            let buffer = rustix::buffer::spare_capacity(&mut events);
            // epoll times out in whole milliseconds; kernels end in between.
            let mut ready = [PollFd::new(&self.epoll, PollFlags::IN)];
            let waited = poll(&mut ready, timeout.as_ref());
            match waited.and_then(|_| epoll::wait(&self.epoll, buffer, Some(&AT_ONCE))) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(system("wait for events")(errno)),
            }
            for channel in self.peers.channels() {
                let _ = channel.set_asleep(false);
            }
            for event in &events {
                match event.data.u64() {
                    LIBRARIES => self.accept(LIBRARIES),
                    CONTROLLERS => self.accept(CONTROLLERS),
                    STOP | STARTER => return Ok(()),
                    token => self.serve(token),
                }
            }
        }
    }

    /// Executes the commands of all channels in submission order and advances GPU time to now.
    fn work(&mut self) {
        let mut commands = Vec::new();
        let mut faulty = Vec::new();
        self.peers.take_commands(&mut commands, &mut faulty);
        commands.sort_by_key(|(_, command)| command.at);
        let now = now();
        for (client, command) in commands {
            if self.kernel.command(client, command, now).is_err() {
                faulty.push(client);
            }
        }
        self.kernel.advance(now);
        self.send_delayed(now);
        for client in faulty {
            self.drop_peer(client.0);
        }
        self.apply_effects();
    }

    /// Time until the next change; zero if commands are pending.
    fn time_to_sleep(&self) -> Option<Timespec> {
        let mut waiting = false;
        for channel in self.peers.channels() {
            waiting |= channel.set_asleep(true);
        }
        if waiting {
            return Some(AT_ONCE);
        }
        let due = self.delayed.keys().next().map(|(due, _)| *due);
        let next = self.kernel.next_change().into_iter().chain(due).min()?;
        Timespec::try_from(Duration::from_nanos(next.saturating_sub(now()))).ok()
    }

    /// Accepts a connection. A failure affects only that client.
    fn accept(&mut self, listener: u64) {
        let libraries = listener == LIBRARIES;
        let source = if libraries {
            &self.libraries
        } else {
            &self.controllers
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = accept_with(source, flags) else {
            return;
        };
        let token = self.next_token;
        if watch(&self.epoll, &socket, token).is_err() {
            return;
        }
        self.next_token += 1;
        let (mut namespace, mut process) = (Namespace::Own, None);
        if libraries {
            let peer = socket_peercred(&socket).ok();
            let pid = peer.map_or(0, |peer| peer.pid.as_raw_nonzero().get());
            let pid = pid.unsigned_abs();
            namespace = Namespace::of(pid);
            process = peer.map(|peer| (pid, peer.uid.as_raw()));
            self.kernel.connect(ClientId(token), pid);
        }
        self.peers
            .insert(token, Peer::new(socket, libraries, namespace, process));
    }

    /// Answers all pending messages of a peer.
    fn serve(&mut self, token: u64) {
        if token & EXPORT != 0 && token & DOORBELL == 0 {
            self.end_export(ExportId(token & !EXPORT));
            self.apply_effects();
            return;
        }
        if token & DOORBELL != 0 {
            self.peers.answer_doorbell(token & !DOORBELL);
            return;
        }
        loop {
            match self.answer(token) {
                Ok(()) => self.apply_effects(),
                Err(WireError::Socket(Errno::AGAIN)) => return,
                Err(_) => {
                    self.drop_peer(token);
                    self.apply_effects();
                    return;
                }
            }
        }
    }

    fn answer(&mut self, token: u64) -> Result<(), WireError> {
        let peer = self.peers.get(token).ok_or(WireError::Closed)?;
        if peer.is_controller() {
            let (command, _) = peer.receive::<control::Command>(&mut self.buffer)?;
            let answer = carry_out(&mut self.kernel, &command);
            self.sync_after_command(&command);
            return peer.send(&answer, &[]);
        }
        let (mut request, fds) = peer.receive::<Request>(&mut self.buffer)?;
        let (policy, namespace) = (self.kernel.description().process_ids, peer.namespace());
        view::widen(&mut request, policy, namespace, self.kernel.pids());
        let client = ClientId(token);
        self.kernel.set_now(now());
        let mut reply = match request {
            Request::Import => {
                let export = self.exports.first(&fds);
                let unknown = Reply::Refused(Refusal::NotFound);
                export.map_or(unknown, |export| self.kernel.import(client, export))
            }
            _ => {
                let prepared = self.prepare(token, &mut request);
                prepared.map_or_else(Reply::Refused, |()| self.kernel.handle(client, &request))
            }
        };
        if let Reply::Exported { export } = reply {
            return self.send_export(token, export);
        }
        view::restrict(&mut reply, policy, namespace);
        self.sync_after_request(&request, &reply);
        let welcomed = matches!(reply, Reply::Welcome { .. });
        if welcomed && self.kernel.kind(client) == Some(ClientKind::Cuda) {
            return self.welcome(token, &reply);
        }
        let delay = self.kernel.delay(&request);
        if delay.is_zero() {
            let peer = self.peers.get(token).ok_or(WireError::Closed)?;
            return peer.send(&reply, &[]);
        }
        let due = u64::try_from(delay.as_nanos())
            .unwrap_or(u64::MAX)
            .saturating_add(now());
        self.delayed.insert((due, token), reply);
        Ok(())
    }

    /// Tells the kernel the cgroups that a request is about.
    fn prepare(&mut self, token: u64, request: &mut Request) -> Result<(), Refusal> {
        let process = self.peers.get(token).and_then(Peer::process);
        if self.cgroups.are_counted() {
            let cgroup = process.and_then(|(pid, _)| self.cgroups.of(pid));
            self.kernel.set_cgroup(ClientId(token), cgroup);
        }
        let is_administrator = || process.is_some_and(|(pid, uid)| is_administrator(pid, uid));
        if matches!(request, Request::SetComputeMode { .. }) && !is_administrator() {
            return Err(Refusal::NoPermission);
        }
        let Request::MemoryLimits {
            cgroup, request, ..
        } = request
        else {
            return Ok(());
        };
        if matches!(request, MemoryLimitsRequest::Set(_)) && !is_administrator() {
            return Err(Refusal::NoPermission);
        }
        if !self.cgroups.are_counted() {
            return Err(Refusal::NotSupported);
        }
        let limited: Vec<String> = self.kernel.limited_cgroups().map(str::to_owned).collect();
        for gone in limited.iter().filter(|cgroup| !self.cgroups.exists(cgroup)) {
            self.kernel.forget_cgroup(gone);
        }
        *cgroup = self.cgroups.resolve(cgroup)?;
        Ok(())
    }

    /// Sends delayed replies that are due.
    fn send_delayed(&mut self, now: Nanos) {
        let later = self.delayed.split_off(&(now, u64::MAX));
        for ((_, token), reply) in std::mem::replace(&mut self.delayed, later) {
            // The peer may be gone.
            let _ = self.peers.get(token).map(|peer| peer.send(&reply, &[]));
        }
    }

    /// Sends a CUDA client the memory files and its channel.
    fn welcome(&mut self, token: u64, reply: &Reply) -> Result<(), WireError> {
        let channel = Channel::new()?;
        watch(&self.epoll, &channel, token | DOORBELL).map_err(|_| WireError::Closed)?;
        let memory = self.memory.iter().chain(channel.descriptors());
        let fds: Vec<_> = memory.map(AsFd::as_fd).collect();
        let peer = self.peers.get_mut(token).ok_or(WireError::Closed)?;
        let sent = peer.send(reply, &fds);
        peer.open_channel(channel);
        sent
    }

    fn drop_peer(&mut self, token: u64) {
        let Some(peer) = self.peers.remove(token) else {
            return;
        };
        if let Some(channel) = peer.channel() {
            // The client may hold the doorbell longer than the daemon.
            let _ = epoll::delete(&self.epoll, channel);
        }
        self.kernel.disconnect(ClientId(token));
    }

    fn apply_effects(&mut self) {
        for effect in self.kernel.take_effects() {
            match effect {
                Effect::Forget { gpu, offset, bytes } => {
                    let index = usize::try_from(gpu.0).ok();
                    if let Some(file) = index.and_then(|index| self.memory.get(index)) {
                        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                        // Bytes that remain cost memory, not correctness: ranges are never reused.
                        let _ = fallocate(file, hole, offset, bytes);
                    }
                }
                Effect::Lock { client, locked } => {
                    self.peers
                        .with_channel(client, |channel| channel.set_locked(locked));
                }
                Effect::Fail { client, error } => {
                    self.peers
                        .with_channel(client, |channel| channel.fail(error));
                }
                Effect::Push { client, message } => {
                    if let Some(peer) = self.peers.get(client.0) {
                        // A client that does not read its events loses them, as on hardware.
                        let _ = peer.send(&message, &[]);
                    }
                }
                Effect::Completed {
                    client,
                    stream,
                    ticket,
                } => {
                    self.peers
                        .with_channel(client, |channel| channel.complete(stream, ticket));
                }
                Effect::Recorded {
                    client,
                    event,
                    recording,
                    at,
                } => {
                    self.peers
                        .with_channel(client, |channel| channel.record(event, recording, at));
                }
                Effect::HostCall {
                    client,
                    stream,
                    ticket,
                } => {
                    self.peers
                        .with_channel(client, |channel| channel.call_host(stream, ticket));
                }
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for socket in [self.root.socket(), self.root.control_socket()] {
            // The next daemon replaces a leftover socket.
            let _ = fs::remove_file(socket);
        }
    }
}

/// Nanoseconds of the clock of client timestamps.
#[must_use]
pub fn now() -> Nanos {
    let time = clock_gettime(ClockId::Monotonic);
    let (seconds, nanos) = (time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs());
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}

fn carry_out(kernel: &mut Kernel, command: &control::Command) -> Answer {
    match command {
        control::Command::Status => Answer::Status(kernel.status()),
        control::Command::Raise(event) => done(kernel.raise(*event)),
        control::Command::Reset { gpu } => done(kernel.reset(*gpu)),
        control::Command::ResetPeak { gpu } => done(kernel.reset_peak(*gpu)),
        control::Command::Mig { gpu, request } => done(kernel.administer(*gpu, *request)),
        control::Command::Break { gpu, faults } => done(kernel.set_faults(*gpu, faults.clone())),
    }
}

fn done(result: Result<(), Refusal>) -> Answer {
    match result {
        Ok(()) => Answer::Done,
        Err(refusal) => Answer::Refused(refusal),
    }
}
