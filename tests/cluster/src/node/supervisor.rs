//! Runs the node's components and reaps every process of the node.
//!
//! One loop, ten times a second: reap, start pending components, answer one request. The node's init is
//! single-threaded, so no state needs a lock.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, wait};

use super::Never;
use crate::component::{Component, Probe, Process};
use crate::config::PATH;
use crate::control::{ComponentStatus, Phase, Request, Response};

const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};
/// Time between SIGTERM and SIGKILL of a component.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
/// Delay before the restart of a component that ended by itself.
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// The components and their states.
pub(super) struct Supervisor {
    services: BTreeMap<Component, Service>,
    logs: PathBuf,
}

struct Service {
    process: Process,
    condition: Condition,
    restarts: u32,
    /// Process of the running readiness probe.
    prober: Option<Pid>,
}

enum Condition {
    /// Starts as soon as its dependencies are ready.
    Pending,
    Running {
        pid: Pid,
        answered: bool,
    },
    Failed {
        reason: String,
        again: Instant,
    },
    Stopping {
        pid: Pid,
        killed_at: Instant,
    },
    Stopped,
}

impl Supervisor {
    pub(super) fn new(processes: Vec<Process>, logs: PathBuf) -> Self {
        let service = |process: Process| {
            (
                process.component,
                Service {
                    process,
                    condition: Condition::Pending,
                    restarts: 0,
                    prober: None,
                },
            )
        };
        Self {
            services: processes.into_iter().map(service).collect(),
            logs,
        }
    }

    /// Serves requests until killed.
    pub(super) fn run(mut self, control: &UnixListener) -> Result<Never> {
        loop {
            self.reap()?;
            self.probe();
            self.advance();
            let mut waited = [PollFd::new(control, PollFlags::IN)];
            if poll(&mut waited, Some(&TICK)).is_ok_and(|ready| ready > 0)
                && let Ok((stream, _)) = control.accept()
            {
                // An error concerns only the client of this connection.
                if let Err(error) = self.serve(stream) {
                    eprintln!("drava-node: cannot serve a request: {error:#}");
                }
            }
        }
    }

    /// Collects every ended process: components change state, orphans are dropped.
    fn reap(&mut self) -> Result<()> {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => self.ended(pid, status),
                Ok(None) | Err(rustix::io::Errno::CHILD) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("wait for the node's processes"),
            }
        }
    }

    fn ended(&mut self, ended: Pid, status: WaitStatus) {
        for service in self.services.values_mut() {
            if service.prober == Some(ended) {
                service.prober = None;
                if let Condition::Running { answered, .. } = &mut service.condition {
                    *answered = status.exit_status() == Some(0);
                }
            }
            match service.condition {
                Condition::Running { pid, .. } if pid == ended => {
                    service.restarts += 1;
                    service.condition = Condition::Failed {
                        reason: describe(status),
                        again: Instant::now() + RESTART_DELAY,
                    };
                }
                Condition::Stopping { pid, .. } if pid == ended => {
                    service.condition = Condition::Stopped
                }
                _ => {}
            }
        }
    }

    fn probe(&mut self) {
        for service in self.services.values_mut() {
            if let Condition::Running {
                answered: false,
                pid,
            } = service.condition
            {
                service.condition = Condition::Running {
                    answered: service.answers(),
                    pid,
                };
            }
        }
    }

    /// Starts components whose dependencies are ready and kills those that exceed the time limit of SIGTERM.
    fn advance(&mut self) {
        for component in self.services.keys().copied().collect::<Vec<_>>() {
            let missing = self.missing(component);
            let Some(service) = self.services.get_mut(&component) else {
                continue;
            };
            let now = Instant::now();
            match service.condition {
                Condition::Pending if missing.is_none() => service.start(&self.logs),
                Condition::Failed { again, .. } if again <= now => service.start(&self.logs),
                Condition::Stopping { pid, killed_at } if killed_at <= now => {
                    // The process may have ended since; the next round reaps it.
                    let _ = kill_process(pid, Signal::KILL);
                }
                _ => {}
            }
        }
    }

    /// Returns the first dependency of `component` that is not ready.
    fn missing(&self, component: Component) -> Option<Component> {
        let needs = &self.services.get(&component)?.process.after;
        needs.iter().copied().find(|needed| {
            self.services.get(needed).is_some_and(|service| {
                !matches!(service.condition, Condition::Running { answered: true, .. })
            })
        })
    }

    fn serve(&mut self, mut stream: UnixStream) -> Result<()> {
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.set_write_timeout(Some(Duration::from_secs(1)))?;
        let mut line = String::new();
        BufReader::new(&stream)
            .read_line(&mut line)
            .context("read a command")?;
        // A client that only probes for a running node has closed the connection already.
        if line.is_empty() {
            return Ok(());
        }
        let response: Response = match serde_json::from_str::<Request>(&line) {
            Ok(request) => self
                .apply(request)
                .map(|()| self.status())
                .map_err(|error| format!("{error:#}")),
            Err(error) => Err(format!("unknown request {line:?}: {error}")),
        };
        let mut answer = serde_json::to_vec(&response)?;
        answer.push(b'\n');
        stream.write_all(&answer).context("answer a command")
    }

    fn apply(&mut self, request: Request) -> Result<()> {
        match request {
            Request::Status => Ok(()),
            Request::Start(component) => self.service(component)?.resume(),
            Request::Stop(component) => self.service(component)?.stop(),
            Request::Signal(component, signal) => self.service(component)?.signal(signal),
        }
    }

    fn service(&mut self, component: Component) -> Result<&mut Service> {
        self.services
            .get_mut(&component)
            .with_context(|| format!("the node has no component {component}"))
    }

    fn status(&self) -> Vec<ComponentStatus> {
        let listed = Component::ALL
            .into_iter()
            .filter_map(|component| Some((component, self.services.get(&component)?)));
        listed
            .map(|(component, service)| {
                let phase = service.phase(self.missing(component));
                ComponentStatus {
                    component,
                    phase,
                    restarts: service.restarts,
                }
            })
            .collect()
    }
}

impl Service {
    fn start(&mut self, logs: &Path) {
        self.condition = match spawn(&self.process, logs) {
            Ok(pid) => Condition::Running {
                pid,
                answered: false,
            },
            Err(error) => {
                self.restarts += 1;
                Condition::Failed {
                    reason: format!("{error:#}"),
                    again: Instant::now() + RESTART_DELAY,
                }
            }
        };
    }

    /// Returns whether the component is ready. A probe program is started here and reaped later.
    fn answers(&mut self) -> bool {
        match &self.process.probe {
            Probe::Tcp(address) => TcpStream::connect(address).is_ok(),
            Probe::Unix(path) => UnixStream::connect(path).is_ok(),
            Probe::Command(words) => {
                if let (None, Some((program, args))) = (self.prober, words.split_first()) {
                    let child = command(Path::new(program), args)
                        .stdout(Stdio::null())
                        .stderr(Stdio::null())
                        .spawn();
                    self.prober = child.ok().as_ref().map(Pid::from_child);
                }
                false
            }
        }
    }

    fn resume(&mut self) -> Result<()> {
        match self.condition {
            Condition::Stopped | Condition::Failed { .. } => self.condition = Condition::Pending,
            Condition::Pending | Condition::Running { .. } => {}
            Condition::Stopping { .. } => bail!("{} has not ended yet", self.process.component),
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<()> {
        match self.condition {
            Condition::Running { pid, .. } => {
                self.signal(Signal::TERM.as_raw())?;
                self.condition = Condition::Stopping {
                    pid,
                    killed_at: Instant::now() + STOP_TIMEOUT,
                };
            }
            Condition::Pending | Condition::Failed { .. } => self.condition = Condition::Stopped,
            Condition::Stopping { .. } | Condition::Stopped => {}
        }
        Ok(())
    }

    fn signal(&self, number: i32) -> Result<()> {
        let component = self.process.component;
        let Condition::Running { pid, .. } = self.condition else {
            bail!("{component} is not running")
        };
        let signal =
            Signal::from_named_raw(number).with_context(|| format!("unknown signal {number}"))?;
        kill_process(pid, signal).with_context(|| format!("signal {component}"))
    }

    fn phase(&self, missing: Option<Component>) -> Phase {
        match &self.condition {
            Condition::Pending => Phase::Waiting {
                needs: missing.unwrap_or(self.process.component),
            },
            Condition::Running {
                pid,
                answered: false,
            } => Phase::Starting {
                pid: pid.as_raw_pid(),
            },
            Condition::Running {
                pid,
                answered: true,
            } => Phase::Ready {
                pid: pid.as_raw_pid(),
            },
            Condition::Failed { reason, .. } => Phase::Failed {
                reason: reason.clone(),
            },
            Condition::Stopping { pid, .. } => Phase::Stopping {
                pid: pid.as_raw_pid(),
            },
            Condition::Stopped => Phase::Stopped,
        }
    }
}

fn spawn(process: &Process, logs: &Path) -> Result<Pid> {
    fs::create_dir_all(logs).with_context(|| format!("create {}", logs.display()))?;
    let log = logs.join(format!("{}.log", process.component));
    let output = File::options()
        .create(true)
        .append(true)
        .open(&log)
        .with_context(|| format!("open {}", log.display()))?;
    let child = command(&process.program, &process.args)
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
        .with_context(|| format!("run {}", process.program.display()))?;
    // Not awaited through `Child`: the init reaps all processes in one loop.
    Ok(Pid::from_child(&child))
}

fn command(program: &Path, args: &[String]) -> Command {
    let mut command = Command::new(program);
    command
        .args(args)
        .current_dir("/")
        .env_clear()
        .env("HOME", "/root")
        .env("PATH", PATH);
    command.stdin(Stdio::null()).process_group(0);
    command
}

fn describe(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "ended".into(),
    }
}
