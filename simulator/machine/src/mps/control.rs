//! The control daemon: offers servers to clients and answers the shell.
//!
//! One thread. Without the option for all users, one server at a time serves the clients of one user; clients of other users wait
//! until its clients are gone, in order of arrival.

use std::fs;
use std::io::{BufRead, BufReader, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::geteuid;

use crate::client::{Connection, connected};
use crate::protocol::{
    ClientKind, MpsReply, MpsRequest, MpsServerKey, MpsServerState, Refusal, Reply, Request,
    ThreadPercentage,
};
use crate::root::{DriverRoot, MPS_SERVER};
use crate::server::listener;
use crate::wire::{self, WireError};

use super::background::{self, Forked};
use super::client::{own_percentage, parse_key};
use super::command::Command;
use super::log::Log;
use super::message::{FromDaemon, ToDaemon};
use super::report::{self, Reported};
use super::{
    SHARED_MEMORY, control_socket, log_directory, pipe_directory, root_of, server, sibling,
};

/// Interval of checks while something waits for the end of clients.
const BUSY_INTERVAL: Duration = Duration::from_millis(5);
/// Interval of checks that the servers live.
const IDLE_INTERVAL: Duration = Duration::from_millis(200);

/// How to run the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mode {
    pub(super) is_in_background: bool,
    /// Whether clients of all users share one server.
    pub(super) is_multi_user: bool,
}

/// Runs the daemon; in the background, returns once it accepts clients.
pub(super) fn run(program: &Path, mode: Mode) -> anyhow::Result<()> {
    let (pipes, logs) = (pipe_directory(), log_directory());
    for directory in [&pipes, &logs] {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
    }
    ensure!(
        connected(&control_socket()).is_err(),
        "An instance of this daemon is already running"
    );
    let mut log = Log::open(&logs.join("control.log"), "Control")?;
    let readiness = match mode.is_in_background {
        false => None,
        true => match background::fork()? {
            Forked::Parent(true) => return Ok(()),
            Forked::Parent(false) => bail!("the daemon has failed; see {}", logs.display()),
            Forked::Child(readiness) => Some(readiness),
        },
    };
    let started = Daemon::start(program, mode, &pipes, &logs, &mut log);
    let mut daemon =
        started.inspect_err(|error| log.line(&format!("Failed to start: {error:#}")))?;
    if let Some(readiness) = readiness {
        background::detach(log.file())?;
        readiness.report();
    }
    daemon.serve(&mut log)
}

struct Daemon {
    root: DriverRoot,
    server_program: PathBuf,
    server_log: PathBuf,
    is_multi_user: bool,
    pid_file: PathBuf,
    listener: OwnedFd,
    peers: Vec<Peer>,
    servers: Vec<ServerProcess>,
    percentage: ThreadPercentage,
    quit: Option<Quit>,
}

struct Peer {
    socket: OwnedFd,
    user: u32,
    role: Role,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Has not asked for a server: a shell.
    Unknown,
    /// A client without a server.
    Waiting,
    /// A client that is about to join the server with this PID.
    Joining(u32),
}

struct ServerProcess {
    process: Child,
    user: u32,
    key: MpsServerKey,
    /// Its file in shared memory.
    shared: String,
    /// Whether it ends with its last client.
    is_closing: bool,
}

impl ServerProcess {
    /// Removes its file in shared memory, which it leaves if it is killed.
    fn remove_shared(&self) {
        let _ = fs::remove_file(Path::new(SHARED_MEMORY).join(&self.shared));
    }
}

/// The daemon ends once its clients are gone.
struct Quit {
    /// Time at which it ends with clients.
    at: Option<Instant>,
}

/// Use of a server, which decides how the first waiting client is served.
#[derive(Clone, Copy, Debug)]
struct Occupancy {
    user: u32,
    is_idle: bool,
    /// Whether the machine has forgotten it.
    is_lost: bool,
}

/// How to serve the first waiting client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Offer(usize),
    Start,
    Stop(usize),
    Wait,
}

/// Decides how to serve a client of a user.
fn next(servers: &[Occupancy], user: u32) -> Next {
    let mut live = servers.iter().enumerate().filter(|(_, one)| !one.is_lost);
    if let Some((own, _)) = live.find(|(_, server)| server.user == user) {
        return Next::Offer(own);
    }
    match servers.iter().position(|one| one.is_idle || one.is_lost) {
        Some(useless) => Next::Stop(useless),
        None if servers.is_empty() => Next::Start,
        None => Next::Wait,
    }
}

impl Daemon {
    fn start(
        program: &Path,
        mode: Mode,
        pipes: &Path,
        logs: &Path,
        log: &mut Log<fs::File>,
    ) -> anyhow::Result<Self> {
        let socket = control_socket();
        let listener = listener(&socket)?;
        let pid_file = pipes.join("nvidia-cuda-mps-control.pid");
        fs::write(&pid_file, format!("{}\n", std::process::id()))?;
        log.line(&format!(
            "Starting control daemon using socket {}",
            socket.display()
        ));
        log.line(&format!(
            "To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={}",
            pipes.display()
        ));
        Ok(Self {
            root: root_of(program),
            server_program: sibling(program, MPS_SERVER),
            server_log: logs.join("server.log"),
            is_multi_user: mode.is_multi_user,
            pid_file,
            listener,
            peers: Vec::new(),
            servers: Vec::new(),
            percentage: own_percentage().unwrap_or(ThreadPercentage::ALL),
            quit: None,
        })
    }

    fn serve(&mut self, log: &mut Log<fs::File>) -> anyhow::Result<()> {
        loop {
            self.remove_ended_servers(log);
            self.offer_servers(log);
            self.end_idle_servers(log);
            if self.has_quit() {
                break;
            }
            self.receive(log)?;
        }
        while !self.servers.is_empty() {
            self.stop(0, log);
        }
        for file in [control_socket(), self.pid_file.clone()] {
            // The next daemon replaces a leftover file.
            let _ = fs::remove_file(file);
        }
        log.line("Exit");
        Ok(())
    }

    /// Waits for messages and handles them.
    fn receive(&mut self, log: &mut Log<fs::File>) -> anyhow::Result<()> {
        let is_waiting = self.quit.is_some()
            || self.servers.iter().any(|server| server.is_closing)
            || self.peers.iter().any(|peer| peer.role != Role::Unknown);
        let interval = if is_waiting {
            BUSY_INTERVAL
        } else {
            IDLE_INTERVAL
        };
        let timeout = Timespec::try_from(interval)?;
        let sockets = self.peers.iter().map(|peer| &peer.socket);
        let sockets = [&self.listener].into_iter().chain(sockets);
        let mut ready: Vec<PollFd<'_>> = sockets
            .map(|socket| PollFd::new(socket, PollFlags::IN))
            .collect();
        match poll(&mut ready, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let ready: Vec<bool> = ready.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (accepts, peers) = ready.split_first().context("no socket")?;
        // From the end, as peers are removed.
        for (index, _) in peers.iter().enumerate().rev().filter(|(_, ready)| **ready) {
            if self.answer(index, log).is_err() {
                self.peers.remove(index);
            }
        }
        if *accepts {
            self.accept(log);
        }
        Ok(())
    }

    fn accept(&mut self, log: &mut Log<fs::File>) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = accept_with(&self.listener, flags) else {
            return;
        };
        log.line("Accepting connection...");
        if let Ok(user) = super::credentials::user_of(&socket) {
            let role = Role::Unknown;
            self.peers.push(Peer { socket, user, role });
        }
    }

    /// Answers a message of a peer.
    fn answer(&mut self, index: usize, log: &mut Log<fs::File>) -> Result<(), WireError> {
        let peer = self.peers.get_mut(index).ok_or(WireError::Closed)?;
        let message = match wire::receive(peer.socket.as_fd(), &mut Vec::new()) {
            Err(WireError::Socket(Errno::AGAIN)) => return Ok(()),
            message => message?.0,
        };
        match (message, peer.role) {
            (ToDaemon::Connect, Role::Unknown) => {
                log.line(&format!("NEW CLIENT from user {}", peer.user));
                peer.role = Role::Waiting;
                Ok(())
            }
            (ToDaemon::Command(line), Role::Unknown) => {
                log.line("NEW UI");
                log.line(&format!("Cmd:{line}"));
                // The server works for the daemon's user.
                let is_permitted = [0, geteuid().as_raw()].contains(&peer.user);
                let parsed = match is_permitted {
                    true => Command::parse(&line),
                    false => Err("User did not send valid credentials".to_owned()),
                };
                let text = match parsed {
                    Ok(Command::Quit { timeout }) => {
                        let at = timeout.map(|timeout| Instant::now() + timeout);
                        self.quit = Some(Quit { at });
                        // The end of the daemon is the answer.
                        return Ok(());
                    }
                    Ok(command) => self
                        .execute(&command, log)
                        .unwrap_or_else(|error| error.to_string()),
                    Err(error) => error,
                };
                for answer in text.lines() {
                    log.line(answer);
                }
                log.line("UI closed");
                self.send(index, &FromDaemon::Text(text))
            }
            _ => Err(WireError::Malformed),
        }
    }

    fn send(&self, index: usize, message: &FromDaemon) -> Result<(), WireError> {
        let peer = self.peers.get(index).ok_or(WireError::Closed)?;
        wire::send(peer.socket.as_fd(), message, &[])
    }

    /// Executes a command and returns its answer.
    fn execute(&mut self, command: &Command, log: &mut Log<fs::File>) -> anyhow::Result<String> {
        Ok(match *command {
            Command::ServerList => report::pids(self.servers.iter().map(|one| one.process.id())),
            Command::ServerStatus { server } => {
                report::status(self.reported(server)?.state.status).into()
            }
            Command::ClientList { server } => {
                let clients = self.reported(server)?.state.clients;
                report::pids(clients.into_iter().map(|client| client.pid))
            }
            Command::DeviceClientList { server } => {
                let servers = match server {
                    Some(server) => vec![self.reported(server)?],
                    None => self.all_reported(),
                };
                report::clients_by_gpu(&servers, &self.uuids()?)
            }
            Command::Processes { client } => {
                report::processes(&self.all_reported(), &self.uuids()?, client)
            }
            Command::DefaultPercentage => self.percentage.to_string(),
            Command::SetDefaultPercentage(percentage) => {
                self.percentage = percentage;
                percentage.to_string()
            }
            Command::Percentage { server } => self.reported(server)?.state.percentage.to_string(),
            Command::SetPercentage { server, percentage } => {
                let key = self.server(server)?.key;
                self.ask(MpsRequest::SetPercentage { key, percentage })?;
                percentage.to_string()
            }
            Command::StartServer { user } => {
                let user = if self.is_multi_user {
                    geteuid().as_raw()
                } else {
                    user
                };
                match next(&self.occupancies(), user) {
                    Next::Offer(_) => {}
                    Next::Start => self.start_server(user, log)?,
                    Next::Stop(index) => {
                        self.stop(index, log);
                        self.start_server(user, log)?;
                    }
                    Next::Wait => bail!("A server of another user has clients"),
                }
                String::new()
            }
            Command::ShutdownServer { server, is_forced } => {
                let key = self.server(server)?.key;
                self.ask(MpsRequest::Close { key })?;
                let at = self
                    .servers
                    .iter()
                    .position(|one| one.process.id() == server);
                match at {
                    Some(index) if is_forced => self.stop(index, log),
                    Some(index) => {
                        if let Some(server) = self.servers.get_mut(index) {
                            server.is_closing = true;
                        }
                    }
                    None => {}
                }
                String::new()
            }
            Command::TerminateClient { server, client } => {
                let key = self.server(server)?.key;
                let asked = self.ask(MpsRequest::Terminate { key, pid: client });
                asked.with_context(|| format!("Cannot find client {client}"))?;
                "0".to_owned()
            }
            Command::Quit { .. } => String::new(),
        })
    }

    /// Sends a request to the machine.
    fn ask(&self, request: MpsRequest) -> anyhow::Result<Reply> {
        let (mut connection, _) = Connection::open(&self.root, ClientKind::Mps)?;
        Ok(connection.request(&Request::Mps(request))?)
    }

    fn uuids(&self) -> anyhow::Result<Vec<String>> {
        let (_, welcome) = Connection::open(&self.root, ClientKind::Mps)?;
        Ok(welcome
            .machine
            .gpus
            .into_iter()
            .map(|gpu| gpu.uuid)
            .collect())
    }

    fn server(&self, pid: u32) -> anyhow::Result<&ServerProcess> {
        let mut servers = self.servers.iter();
        let found = servers.find(|server| server.process.id() == pid);
        found.with_context(|| format!("Cannot find server {pid}"))
    }

    fn state(&self, key: MpsServerKey) -> anyhow::Result<MpsServerState> {
        match self.ask(MpsRequest::State { key })? {
            Reply::Mps(MpsReply::State(state)) => Ok(state),
            reply => bail!("unexpected answer {reply:?}"),
        }
    }

    fn reported(&self, pid: u32) -> anyhow::Result<Reported> {
        let state = self.state(self.server(pid)?.key)?;
        Ok(Reported { pid, state })
    }

    fn all_reported(&self) -> Vec<Reported> {
        let pids = self.servers.iter().map(|server| server.process.id());
        pids.filter_map(|pid| self.reported(pid).ok()).collect()
    }

    fn occupancies(&self) -> Vec<Occupancy> {
        let servers = self.servers.iter();
        servers.map(|server| self.occupancy(server)).collect()
    }

    fn occupancy(&self, server: &ServerProcess) -> Occupancy {
        let joining = Role::Joining(server.process.id());
        let state = self.state(server.key).ok();
        let has_clients = state
            .as_ref()
            .is_some_and(|state| !state.clients.is_empty());
        Occupancy {
            user: server.user,
            is_idle: !has_clients && self.peers.iter().all(|peer| peer.role != joining),
            is_lost: state.is_none(),
        }
    }

    /// Serves the waiting clients in order of arrival, as far as possible.
    fn offer_servers(&mut self, log: &mut Log<fs::File>) {
        while let Some(index) = self
            .peers
            .iter()
            .position(|peer| peer.role == Role::Waiting)
        {
            let Some(peer) = self.peers.get(index) else {
                return;
            };
            if self.quit.is_some() {
                // The client may be gone.
                let _ = self.send(index, &FromDaemon::Refused(Refusal::MpsNotReady));
                self.peers.remove(index);
                continue;
            }
            let user = if self.is_multi_user {
                geteuid().as_raw()
            } else {
                peer.user
            };
            match next(&self.occupancies(), user) {
                Next::Offer(server) => self.offer(index, server),
                Next::Stop(server) => self.stop(server, log),
                Next::Wait => return,
                Next::Start => {
                    if let Err(error) = self.start_server(user, log) {
                        log.line(&format!("Server has failed: {error:#}"));
                        let _ = self.send(index, &FromDaemon::Refused(Refusal::NotFound));
                        self.peers.remove(index);
                    }
                }
            }
        }
    }

    fn offer(&mut self, index: usize, server: usize) {
        let Some(server) = self.servers.get(server) else {
            return;
        };
        let role = Role::Joining(server.process.id());
        let shared = server.shared.clone();
        if self.send(index, &FromDaemon::Server { shared }).is_err() {
            self.peers.remove(index);
        } else if let Some(peer) = self.peers.get_mut(index) {
            peer.role = role;
        }
    }

    fn start_server(&mut self, user: u32, log: &mut Log<fs::File>) -> anyhow::Result<()> {
        let messages = Log::open(&self.server_log, "Server")?;
        let mut command = Process::new(&self.server_program);
        command.args([server::PERCENTAGE, &self.percentage.to_string()]);
        if self.is_multi_user {
            command.arg(server::MULTI_USER);
        }
        if user != geteuid().as_raw() {
            command.uid(user);
        }
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(messages.file().try_clone()?)
            .spawn()?;
        let pid = process.id();
        log.line(&format!("Starting new server {pid} for user {user}"));
        let mut line = String::new();
        let output = process.stdout.take().context("no output")?;
        BufReader::new(output).read_line(&mut line)?;
        let ready = line
            .split_once(' ')
            .and_then(|(shared, key)| Some((shared, parse_key(key)?)));
        let Some((shared, key)) = ready else {
            let status = process.wait()?;
            bail!("Server {pid} exited: {status}");
        };
        log.line(&format!("NEW SERVER {pid}: Ready"));
        self.servers.push(ServerProcess {
            process,
            user,
            key,
            shared: shared.to_owned(),
            is_closing: false,
        });
        Ok(())
    }

    /// Ends a server, with or without clients.
    fn stop(&mut self, index: usize, log: &mut Log<fs::File>) {
        let mut server = self.servers.remove(index);
        if let Some(mut input) = server.process.stdin.take() {
            // One that has ended reads nothing.
            let _ = input.write_all(server::STOP);
        }
        let ended = server.process.wait();
        server.remove_shared();
        if let Ok(status) = ended {
            log.line(&format!(
                "Server {} exited with {status}",
                server.process.id()
            ));
        }
    }

    fn remove_ended_servers(&mut self, log: &mut Log<fs::File>) {
        self.servers
            .retain_mut(|server| match server.process.try_wait() {
                Ok(Some(status)) => {
                    log.line(&format!(
                        "Server {} exited with {status}",
                        server.process.id()
                    ));
                    server.remove_shared();
                    false
                }
                _ => true,
            });
    }

    fn end_idle_servers(&mut self, log: &mut Log<fs::File>) {
        let closing = |server: &ServerProcess| server.is_closing && self.occupancy(server).is_idle;
        let ended: Vec<bool> = self.servers.iter().map(closing).collect();
        // From the end, as servers are removed.
        for (index, _) in ended.iter().enumerate().rev().filter(|(_, ended)| **ended) {
            self.stop(index, log);
        }
    }

    fn has_quit(&self) -> bool {
        let Some(quit) = &self.quit else {
            return false;
        };
        quit.at.is_some_and(|at| at <= Instant::now())
            || self.occupancies().iter().all(|server| server.is_idle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serves_one_user_at_a_time() {
        let server = |user, is_idle, is_lost| Occupancy {
            user,
            is_idle,
            is_lost,
        };
        assert_eq!(next(&[], 7), Next::Start);
        assert_eq!(next(&[server(7, false, false)], 7), Next::Offer(0));
        assert_eq!(next(&[server(7, true, false)], 7), Next::Offer(0));
        assert_eq!(next(&[server(7, false, true)], 7), Next::Stop(0));
        assert_eq!(next(&[server(8, true, false)], 7), Next::Stop(0));
        assert_eq!(next(&[server(8, false, false)], 7), Next::Wait);
    }
}
