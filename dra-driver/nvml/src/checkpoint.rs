//! Checkpoints of other processes by libcuda (NVIDIA driver 570 and later): lock, checkpoint to host memory, restore, unlock.
//!
//! Calls can take minutes or hang, and libcuda keeps the GPUs open until its process ends. So a short-lived process makes one
//! call, see [`call`], and its parent ends it after a limit.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr;
use std::str::FromStr;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// First release of the NVIDIA driver with checkpoints.
pub const FIRST_RELEASE: u32 = 570;

/// What is done with a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Nothing: its state is read.
    Look,
    /// Its calls of libcuda block once those that run have ended.
    Lock,
    /// Its GPU memory moves to host memory of the process.
    Checkpoint,
    /// Its GPU memory moves back.
    Restore,
    /// Its calls go on.
    Unlock,
}

impl Action {
    const ALL: [Self; 5] = [
        Self::Look,
        Self::Lock,
        Self::Checkpoint,
        Self::Restore,
        Self::Unlock,
    ];

    /// Returns the name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Look => "look",
            Self::Lock => "lock",
            Self::Checkpoint => "checkpoint",
            Self::Restore => "restore",
            Self::Unlock => "unlock",
        }
    }

    const fn symbol(self) -> &'static str {
        match self {
            Self::Look => "cuCheckpointProcessGetState",
            Self::Lock => "cuCheckpointProcessLock",
            Self::Checkpoint => "cuCheckpointProcessCheckpoint",
            Self::Restore => "cuCheckpointProcessRestore",
            Self::Unlock => "cuCheckpointProcessUnlock",
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Action {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut all = Self::ALL.into_iter();
        let found = all.find(|action| action.as_str() == text);
        found.ok_or_else(|| format!("unknown action {text:?}"))
    }
}

/// State of a process: `CUprocessState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProcessState {
    /// It runs.
    Running,
    /// Its calls block.
    Locked,
    /// Its calls block, and it has no GPU memory.
    Checkpointed,
    /// Its GPU state is lost, or is in a state that this build does not know.
    Failed,
}

impl ProcessState {
    const fn of(state: c_uint) -> Self {
        match state {
            0 => Self::Running,
            1 => Self::Locked,
            2 => Self::Checkpointed,
            _ => Self::Failed,
        }
    }
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// libcuda could not be loaded.
    #[error("cannot load libcuda: {0}")]
    Load(String),
    /// The NVIDIA driver is too old.
    #[error("libcuda has no {0}: checkpoints need NVIDIA driver {FIRST_RELEASE} or later")]
    Missing(&'static str),
    /// libcuda cannot be used here.
    #[error("libcuda cannot be initialized: error {0}")]
    Init(c_int),
    /// libcuda refused.
    #[error("libcuda returned error {0}")]
    Cuda(c_int),
    /// The process has ended; another one may have its PID.
    #[error("the process has ended")]
    Ended,
}

/// `CUcheckpointLockArgs`
#[repr(C)]
struct LockArguments {
    timeout_ms: c_uint,
    reserved: [c_uint; 15],
}

type Init = unsafe extern "C" fn(c_uint) -> c_int;
type Change = unsafe extern "C" fn(c_int, *mut c_void) -> c_int;
type GetState = unsafe extern "C" fn(c_int, *mut c_uint) -> c_int;

fn symbol<T: Copy>(library: &Library, name: &'static str) -> Result<T, CallError> {
    // SAFETY: each caller names the type of the function in the header of CUDA.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found
        .map(|symbol| *symbol)
        .map_err(|_| CallError::Missing(name))
}

fn check(code: c_int) -> Result<(), CallError> {
    match code {
        0 => Ok(()),
        code => Err(CallError::Cuda(code)),
    }
}

/// Loads the libcuda at this path, makes one call about a process, and returns the state of the process after it. A lock waits
/// for running calls up to `lock_timeout_ms`.
///
/// Loading takes long enough for a PID to go to another process, so `is_there` says directly before and after the call whether it is
/// still that of the process that is meant. Another process that was locked nevertheless is unlocked.
///
/// # Errors
/// [`CallError`]
pub fn call(
    library: &Path,
    action: Action,
    pid: c_int,
    lock_timeout_ms: c_uint,
    is_there: impl Fn() -> bool,
) -> Result<ProcessState, CallError> {
    // SAFETY: the libcuda of the NVIDIA driver, whose initializers any CUDA program runs.
    let library = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL) };
    let library = library.map_err(|error| CallError::Load(error.to_string()))?;
    // Never unloaded: libcuda may have threads, and the process ends anyway.
    let library = ManuallyDrop::new(library);
    let look: GetState = symbol(&library, Action::Look.symbol())?;
    let change = match action {
        Action::Look => None,
        _ => Some(symbol::<Change>(&library, action.symbol())?),
    };
    let unlock: Change = symbol(&library, Action::Unlock.symbol())?;
    let init: Init = symbol(&library, "cuInit")?;
    // SAFETY: flags must be 0.
    let initialized = unsafe { init(0) };
    if initialized != 0 {
        return Err(CallError::Init(initialized));
    }
    if !is_there() {
        return Err(CallError::Ended);
    }
    if let Some(change) = change {
        let mut arguments = LockArguments {
            timeout_ms: lock_timeout_ms,
            reserved: [0; 15],
        };
        let arguments = match action {
            Action::Lock => (&raw mut arguments).cast(),
            // Optional for the others.
            _ => ptr::null_mut(),
        };
        // SAFETY: the arguments of this function, which outlive the call.
        check(unsafe { change(pid, arguments) })?;
        if !is_there() {
            if action == Action::Lock {
                // SAFETY: the arguments are optional. Fails only for a process that has ended, too.
                unsafe { unlock(pid, ptr::null_mut()) };
            }
            return Err(CallError::Ended);
        }
    }
    let mut state = c_uint::MAX;
    // SAFETY: writes one integer.
    check(unsafe { look(pid, &raw mut state) })?;
    Ok(ProcessState::of(state))
}
