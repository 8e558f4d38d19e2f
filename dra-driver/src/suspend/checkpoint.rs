//! Calls of libcuda's checkpoints, each in a process of its own: libcuda is never loaded here, and a call that hangs holds up
//! nothing else.

use std::ffi::{OsStr, OsString};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use drava_nvml::checkpoint::{self, CallError};

use crate::node::process;
use crate::prepare::HeldProcess;

pub use drava_nvml::checkpoint::{Action, FIRST_RELEASE, ProcessState};

/// First argument of the process that makes the call.
const COMMAND: &str = "checkpoint-process";

/// How long a lock waits for running calls of a process.
pub const LOCK_TIMEOUT_MS: u32 = 200;

/// Time limit of a call that copies no memory.
const SHORT: Duration = Duration::from_secs(15);

/// Time limit of a call that copies memory: 200 GB at 1 GB/s.
const LONG: Duration = Duration::from_secs(200);

/// Time between two looks at whether a call has ended.
const POLL: Duration = Duration::from_millis(2);

/// `CUDA_ERROR_NOT_SUPPORTED`: such as managed memory, or memory that other processes have open.
const NOT_SUPPORTED: i32 = 801;

/// `CUDA_ERROR_TIMEOUT`
const TIMEOUT: i32 = 909;

/// Why a call about a process failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// libcuda refused: there is no such process on the GPU, or it is in another state.
    #[error("libcuda returned error {0}")]
    Cuda(i32),
    /// Running calls of the process did not end in time.
    #[error("its running CUDA calls did not end within {LOCK_TIMEOUT_MS} ms")]
    Busy,
    /// A thread of the process is in uninterruptible sleep, in which libcuda would wait for it without a limit.
    #[error(
        "a thread of it is in uninterruptible sleep (state D), as while a device or a file system does not answer, and libcuda waits for it \
         without a limit"
    )]
    Uninterruptible,
    /// The process cannot be checkpointed.
    #[error(
        "libcuda cannot checkpoint it: it uses managed memory, memory of other processes or another feature without checkpoints"
    )]
    NotSupported,
    /// libcuda has no checkpoints, or cannot be used on this node.
    #[error("{0}")]
    Unavailable(String),
    /// The process has ended; another one may have its PID.
    #[error("the process has ended")]
    Ended,
    /// The call came to no end, or its process could not be started.
    #[error("{0}")]
    Failed(String),
}

impl CheckpointError {
    /// Returns whether another attempt is useless.
    #[must_use]
    pub const fn is_final(&self) -> bool {
        matches!(self, Self::NotSupported | Self::Unavailable(_))
    }
}

/// Makes calls by processes of a program.
#[derive(Debug, Clone)]
pub struct Checkpointer {
    program: PathBuf,
    proc_root: PathBuf,
}

impl Checkpointer {
    /// Returns the caller whose processes run `program`, which is the node driver. `proc_root` is `/proc` of the node.
    #[must_use]
    pub const fn new(program: PathBuf, proc_root: PathBuf) -> Self {
        Self { program, proc_root }
    }

    /// Makes one call about this process, with the libcuda at this path, and returns the state of the process.
    ///
    /// # Errors
    /// [`CheckpointError`]
    pub fn call(
        &self,
        library: &Path,
        action: Action,
        process: HeldProcess,
    ) -> Result<ProcessState, CheckpointError> {
        let failed = |error: String| CheckpointError::Failed(format!("{action}: {error}"));
        let HeldProcess { pid, start_time } = process;
        let mut process = Command::new(&self.program)
            .args([OsStr::new(COMMAND), library.as_os_str()])
            .args([action.as_str(), &pid.to_string(), &start_time.to_string()])
            .arg(&self.proc_root)
            // Nothing of the driver's environment, such as the addresses of its cluster, is for libcuda.
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| failed(format!("cannot start its process: {error}")))?;
        let limit = match action {
            Action::Checkpoint | Action::Restore => LONG,
            Action::Look | Action::Lock | Action::Unlock => SHORT,
        };
        if !has_ended(&mut process, limit) {
            // Fails only for a process that has ended.
            let _ = process.kill();
            // A call that cannot be killed is waited for elsewhere.
            std::thread::spawn(move || process.wait());
            return Err(failed(format!("no end within {} s", limit.as_secs())));
        }
        let mut output = String::new();
        if let Some(mut stdout) = process.stdout.take() {
            let read = stdout.read_to_string(&mut output);
            read.map_err(|error| failed(error.to_string()))?;
        }
        parse(output.trim()).unwrap_or_else(|| Err(failed(format!("unexpected end: {output:?}"))))
    }
}

fn has_ended(process: &mut Child, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    loop {
        match process.try_wait() {
            Ok(Some(_)) => return true,
            Ok(None) if Instant::now() < end => std::thread::sleep(POLL),
            Ok(None) | Err(_) => return false,
        }
    }
}

fn parse(line: &str) -> Option<Result<ProcessState, CheckpointError>> {
    let (kind, rest) = line.split_once(' ')?;
    Some(match kind {
        "state" => Ok(match rest {
            "running" => ProcessState::Running,
            "locked" => ProcessState::Locked,
            "checkpointed" => ProcessState::Checkpointed,
            "failed" => ProcessState::Failed,
            _ => return None,
        }),
        "cuda" => Err(match rest.parse().ok()? {
            NOT_SUPPORTED => CheckpointError::NotSupported,
            TIMEOUT => CheckpointError::Busy,
            code => CheckpointError::Cuda(code),
        }),
        "ended" => Err(CheckpointError::Ended),
        "unavailable" => Err(CheckpointError::Unavailable(rest.to_owned())),
        _ => return None,
    })
}

/// Makes the call that the arguments of this process ask for, and prints its outcome. `None` if they ask for none.
#[must_use]
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    let mut arguments = arguments.into_iter().skip(1);
    if arguments.next()? != COMMAND {
        return None;
    }
    // A call ends with its node driver, because the next node driver may decide otherwise. The signal is valid, so this succeeds.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let library = PathBuf::from(arguments.next()?);
    let action = arguments.next()?.to_str()?.parse().ok()?;
    let pid: u32 = arguments.next()?.to_str()?.parse().ok()?;
    let start_time: u64 = arguments.next()?.to_str()?.parse().ok()?;
    let proc_root = PathBuf::from(arguments.next()?);
    let is_there = || process::start_time(&proc_root, pid) == Some(start_time);
    let called = checkpoint::call(
        &library,
        action,
        i32::try_from(pid).ok()?,
        LOCK_TIMEOUT_MS,
        is_there,
    );
    let line = match called {
        Ok(ProcessState::Running) => "state running".to_owned(),
        Ok(ProcessState::Locked) => "state locked".to_owned(),
        Ok(ProcessState::Checkpointed) => "state checkpointed".to_owned(),
        Ok(ProcessState::Failed) => "state failed".to_owned(),
        Err(CallError::Cuda(code)) => format!("cuda {code}"),
        Err(CallError::Ended) => "ended process".to_owned(),
        Err(error) => format!("unavailable {error}"),
    };
    println!("{line}");
    Some(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_call_that_does_not_end() {
        let mut process = Command::new("sleep").arg("600").spawn().unwrap();
        assert!(!has_ended(&mut process, Duration::from_millis(20)));
        process.kill().unwrap();
        assert!(has_ended(&mut process, SHORT));
    }

    #[test]
    fn tells_refusals_from_failures() {
        assert_eq!(parse("state locked"), Some(Ok(ProcessState::Locked)));
        for (line, is_final) in [
            ("cuda 801", true),
            ("unavailable libcuda has no cuCheckpointProcessLock", true),
            ("cuda 909", false),
            ("cuda 2", false),
        ] {
            let error = parse(line).unwrap().unwrap_err();
            assert_eq!(error.is_final(), is_final, "{line}");
        }
        assert_eq!(parse(""), None);
    }

    #[test]
    fn runs_only_for_its_command() {
        let arguments = |list: &[&str]| list.iter().map(OsString::from).collect::<Vec<_>>();
        assert!(run(arguments(&["driver", "--node-name=a"])).is_none());
        assert!(run(arguments(&["driver"])).is_none());
    }
}
