//! Runs programs with a time limit.
//!
//! Each program runs in its own process group. A program that exceeds its limit is killed with its whole group, and
//! the error names the limit. [`kill_all`] ends every running group, for a command that is interrupted.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io::{self, Read, Seek as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open,
    pidfd_send_signal, waitid,
};

/// Interval of checks whether a program has ended.
const POLL: Duration = Duration::from_millis(20);
/// Time limit for the end of the output after the program has ended.
const DRAIN: Duration = Duration::from_secs(5);

/// Time limit of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    total: Duration,
    silence: Option<Duration>,
}

impl Limit {
    /// Limit of one request to a component, such as a kubectl command.
    pub const REQUEST: Self = Self::total(Duration::from_secs(300));
    /// Limit of a build.
    pub const BUILD: Self = Self::total(Duration::from_secs(60 * 60));

    /// Limits the run time to `total`.
    #[must_use]
    pub const fn total(total: Duration) -> Self {
        Self {
            total,
            silence: None,
        }
    }

    /// Also limits the time without output to `silence`.
    #[must_use]
    pub const fn silence(self, silence: Duration) -> Self {
        Self {
            silence: Some(silence),
            ..self
        }
    }

    /// Returns the limit exceeded by a program that started `running` ago and last printed `silent` ago.
    fn exceeded(self, running: Duration, silent: Duration) -> Option<Overrun> {
        if running >= self.total {
            return Some(Overrun::Total(self.total));
        }
        self.silence
            .filter(|silence| silent >= *silence)
            .map(Overrun::Silence)
    }
}

/// Exceeded limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overrun {
    /// The program ran for this long.
    Total(Duration),
    /// The program printed nothing for this long.
    Silence(Duration),
}

impl fmt::Display for Overrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Total(limit) => write!(f, "killed after {} s", limit.as_secs()),
            Self::Silence(limit) => write!(f, "killed after {} s without output", limit.as_secs()),
        }
    }
}

/// How a program ended.
#[derive(Clone, Debug)]
pub enum End {
    /// The program ended by itself.
    Exited(ExitStatus),
    /// The program was killed at a limit.
    Killed {
        /// The limit.
        overrun: Overrun,
        /// Processes of the group at that moment, one line each.
        processes: Vec<String>,
    },
}

/// One of a program's outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Runs a program with both outputs in one pipe and passes the output to `sink` in chunks.
///
/// # Errors
/// When the program cannot be started or `sink` fails.
pub fn run_merged(
    command: &mut Command,
    limit: Limit,
    mut sink: impl FnMut(&[u8]) -> Result<()>,
) -> Result<End> {
    let (reader, writer) = io::pipe().context("create a pipe")?;
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone().context("create a pipe")?)
        .stderr(writer);
    let program = Program::start(command)?;
    // The command owns write ends of the pipe; the reader sees no end while they are open.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let pipes: Vec<Pipe> = vec![(Stream::Stdout, Box::new(reader))];
    program.supervise(pipes, limit, |_, bytes| sink(bytes))
}

/// Runs a program and passes each line of one output to `line`; `command` sets the destination of the other output.
///
/// # Errors
/// When the program cannot be started or exceeds the limit, or `line` fails.
pub fn lines(
    command: &mut Command,
    stream: Stream,
    limit: Limit,
    mut line: impl FnMut(&str) -> Result<()>,
) -> Result<ExitStatus> {
    match stream {
        Stream::Stdout => command.stdout(Stdio::piped()),
        Stream::Stderr => command.stderr(Stdio::piped()),
    };
    let mut program = Program::start(command)?;
    let pipes = program.pipes();
    let mut rest = Vec::new();
    let end = program.supervise(pipes, limit, |_, bytes| {
        rest.extend_from_slice(bytes);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let complete: Vec<u8> = rest.drain(..=end).collect();
            line(String::from_utf8_lossy(&complete).trim_end_matches('\n'))?;
        }
        Ok(())
    })?;
    if !rest.is_empty() {
        line(&String::from_utf8_lossy(&rest))?;
    }
    exited(command, end)
}

/// Runs a program and returns its output.
///
/// # Errors
/// When the program cannot be started or exceeds the limit.
pub fn output(command: &mut Command, limit: Limit) -> Result<Output> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut program = Program::start(command)?;
    let pipes = program.pipes();
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let end = program.supervise(pipes, limit, |stream, bytes| {
        match stream {
            Stream::Stdout => stdout.extend_from_slice(bytes),
            Stream::Stderr => stderr.extend_from_slice(bytes),
        }
        Ok(())
    })?;
    let status = exited(command, end).with_context(|| {
        format!(
            "{}{}",
            String::from_utf8_lossy(&stdout),
            String::from_utf8_lossy(&stderr)
        )
    })?;
    Ok(Output {
        status,
        stdout,
        stderr,
    })
}

/// Runs a program whose outputs go to the destinations set in `command`.
///
/// # Errors
/// When the program cannot be started or exceeds the limit.
pub fn status(command: &mut Command, limit: Limit) -> Result<ExitStatus> {
    let program = Program::start(command)?;
    let end = program.supervise(vec![], limit, |_, _| Ok(()))?;
    exited(command, end)
}

/// Returns a file in memory with `input`, for a program's standard input.
///
/// # Errors
/// When memory is exhausted.
pub fn input(input: &[u8]) -> Result<Stdio> {
    let memory = rustix::fs::memfd_create("input", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = fs::File::from(memory);
    file.write_all(input)?;
    file.rewind()?;
    Ok(Stdio::from(file))
}

/// Kills a program that exchanges data with its caller when the program exceeds its limit; the caller then reads the
/// end of the output. Stops when dropped.
pub struct Watchdog(#[expect(dead_code, reason = "its end stops the thread")] Sender<()>);

impl Watchdog {
    /// Watches `child`, which must not be collected before the watchdog is dropped.
    ///
    /// # Errors
    /// When the child cannot be opened.
    pub fn start(child: &Child, limit: Duration) -> Result<Self> {
        let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
        let (sender, receiver) = mpsc::channel::<()>();
        thread::spawn(move || {
            if receiver.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                let _ = pidfd_send_signal(&process, Signal::KILL);
            }
        });
        Ok(Self(sender))
    }
}

/// Kills every running process group.
pub fn kill_all() {
    for group in groups().iter() {
        let _ = kill_process_group(*group, Signal::KILL);
    }
}

/// Running process groups.
static GROUPS: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

fn groups() -> MutexGuard<'static, Vec<Pid>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

type Pipe = (Stream, Box<dyn Read + Send>);

/// A running program and its process group.
struct Program {
    child: Child,
    group: Pid,
    collected: bool,
}

impl Program {
    fn start(command: &mut Command) -> Result<Self> {
        // The lock covers the start, so that `kill_all` misses no group.
        let mut groups = groups();
        let child = command
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot run {}", command.get_program().display()))?;
        let group = Pid::from_child(&child);
        groups.push(group);
        Ok(Self {
            child,
            group,
            collected: false,
        })
    }

    fn pipes(&mut self) -> Vec<Pipe> {
        let mut pipes: Vec<Pipe> = Vec::new();
        if let Some(pipe) = self.child.stdout.take() {
            pipes.push((Stream::Stdout, Box::new(pipe)));
        }
        if let Some(pipe) = self.child.stderr.take() {
            pipes.push((Stream::Stderr, Box::new(pipe)));
        }
        pipes
    }

    /// Leaves the exit status for [`Self::collect`]: until then no other process can get the group's id.
    fn has_ended(&self) -> Result<bool> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(self.group), options).context("wait for a program")?;
        Ok(status.is_some())
    }

    /// Kills the remaining processes of the group and collects the exit status.
    fn collect(&mut self) -> Result<ExitStatus> {
        if !self.collected {
            let _ = kill_process_group(self.group, Signal::KILL);
        }
        let status = self.child.wait().context("wait for a program")?;
        self.collected = true;
        Ok(status)
    }

    fn supervise(
        mut self,
        pipes: Vec<Pipe>,
        limit: Limit,
        mut sink: impl FnMut(Stream, &[u8]) -> Result<()>,
    ) -> Result<End> {
        let (sender, receiver) = mpsc::channel();
        for (stream, pipe) in pipes {
            let sender = sender.clone();
            thread::spawn(move || forward(stream, pipe, &sender));
        }
        drop(sender);
        let begun = Instant::now();
        let mut printed = begun;
        let mut ended: Option<Instant> = None;
        let mut has_output = true;
        loop {
            if has_output {
                match receiver.recv_timeout(POLL) {
                    Ok((stream, bytes)) => {
                        printed = Instant::now();
                        sink(stream, &bytes)?;
                        continue;
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => has_output = false,
                }
            } else if ended.is_none() {
                thread::sleep(POLL);
            }
            if ended.is_none() && self.has_ended()? {
                ended = Some(Instant::now());
            }
            match ended {
                // A child that the program left running can hold the output open.
                Some(at) if !has_output || at.elapsed() > DRAIN => {
                    return Ok(End::Exited(self.collect()?));
                }
                Some(_) => {}
                None => {
                    if let Some(overrun) = limit.exceeded(begun.elapsed(), printed.elapsed()) {
                        let processes = members(self.group);
                        return Ok(End::Killed { overrun, processes });
                    }
                }
            }
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.collect();
        groups().retain(|group| *group != self.group);
    }
}

fn forward(stream: Stream, mut pipe: Box<dyn Read + Send>, sender: &Sender<(Stream, Vec<u8>)>) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match pipe.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return,
            Ok(length) => {
                let bytes = buffer.get(..length).unwrap_or_default().to_vec();
                if sender.send((stream, bytes)).is_err() {
                    return;
                }
            }
        }
    }
}

fn exited(command: &Command, end: End) -> Result<ExitStatus> {
    match end {
        End::Exited(status) => Ok(status),
        End::Killed { overrun, processes } => {
            let arguments: Vec<_> = command.get_args().map(OsStr::to_string_lossy).collect();
            bail!(
                "{} {}: {overrun}; processes:\n{}",
                command.get_program().display(),
                arguments.join(" "),
                processes.join("\n")
            )
        }
    }
}

/// Returns the processes of a group: id, state, kernel function in which the process waits, command line.
fn members(group: Pid) -> Vec<String> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|process| {
            let read = |file: &str| fs::read(process.path().join(file)).unwrap_or_default();
            let stat = String::from_utf8_lossy(&read("stat")).into_owned();
            let (state, member_of) = state_and_group(&stat)?;
            (member_of == group.as_raw_pid()).then(|| {
                let command = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
                let wait = String::from_utf8_lossy(&read("wchan")).into_owned();
                format!(
                    "{} {state} {wait} {}",
                    process.file_name().display(),
                    command.trim_end()
                )
            })
        })
        .collect()
}

/// Returns state and process group from `/proc/PID/stat`; the name before them can contain any character.
fn state_and_group(stat: &str) -> Option<(&str, i32)> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ');
    let state = fields.next()?;
    Some((state, fields.nth(1)?.parse().ok()?))
}

#[cfg(test)]
mod tests;
