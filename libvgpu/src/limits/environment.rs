//! Limits without Kubernetes: environment variables, used if there is no limits page.
//!
//! | Variable | Meaning |
//! |---|---|
//! | `DRAVA_MEMORY_LIMIT` | memory of each GPU: bytes, or a quantity such as `4Gi` or `500M` |
//! | `DRAVA_CORES` | percent of each GPU's time, 1 to 99; 0 or 100 for no limit |
//! | `DRAVA_MEMORY_POLICY` | `hard`, or `spill`: plain allocations beyond the limit come from the host |
//! | `DRAVA_COMPUTE_POLICY` | `fixed`, `balance` or `none`; default: `fixed` if cores are limited |
//! | `DRAVA_PRIORITY` | −100 to 100, higher first |
//! | `DRAVA_JOB` | processes with the same value share one limit; default: the process group |
//! | `DRAVA_RUN_DIR` | directory of the shares if `/run/drava` has none |
//! | `CUDA_DEVICE_MEMORY_LIMIT` | as `DRAVA_MEMORY_LIMIT`, with `k`, `m`, `g` as powers of 1024 |
//! | `CUDA_DEVICE_MEMORY_LIMIT_<i>` | the same for CUDA device `i` only |
//! | `CUDA_DEVICE_SM_LIMIT`, `CUDA_DEVICE_SM_LIMIT_<i>` | as `DRAVA_CORES`, of all GPUs or of one |
//! | `CUDA_OVERSUBSCRIBE` | `true` is `DRAVA_MEMORY_POLICY=spill` |
//! | `GPU_CORE_UTILIZATION_POLICY` | `force`, `default`, `disable` are `fixed`, `balance`, `none` |
//! | `CUDA_TASK_PRIORITY` | 1 is the default, 0 the higher one |
//!
//! The region of a job is in `/dev/shm`, or in `/tmp` if that is missing, readable by its user only:
//! `drava-<uid>-<job>-<GPU UUID>`. A shell starts each command line as a process group, which child processes
//! inherit. The next job of the same user removes regions without a live process.
//!
//! An invalid variable denies all GPU memory: an intended limit is never ignored. Programs with elevated privileges
//! (set-user-ID) ignore the environment.

use core::ffi::{CStr, c_char};
use core::fmt;

use drava_vgpu_abi::region::SLOTS_OFFSET;
use drava_vgpu_abi::{DeviceUuid, REGION_SIZE};

use crate::limits::share::AttachError;
use crate::limits::shares::{LimitsSource, Shares};
use crate::system::log;
use crate::system::path::{EntryBuffer, PathBuffer, names};
use crate::system::sys;

mod variables;

pub(crate) use variables::Environment;
use variables::ParsedLimits;

/// Directories for regions, in order of preference.
const REGION_DIRECTORIES: [&CStr; 2] = [c"/dev/shm", c"/tmp"];

/// Number of attempts to create a region that another process removes meanwhile.
const ATTEMPTS: u32 = 4;

unsafe extern "C" {
    fn secure_getenv(name: *const c_char) -> *const c_char;
}

/// Result of attaching a share to a GPU.
pub(crate) enum Attached {
    /// The GPU has a share.
    Share,
    /// No variable limits the GPU.
    NoLimit,
    /// The process has no room for another share.
    Failed,
}

impl Environment {
    /// Attaches a share to the GPU. The caller holds the process's guard.
    pub(crate) fn attach(
        &self,
        shares: &Shares,
        uuid: DeviceUuid,
        ordinal: Option<u32>,
    ) -> Attached {
        let Some(limits) = self.limits_of(ordinal) else {
            return Attached::NoLimit;
        };
        let Some(share) = shares.next() else {
            return Attached::Failed;
        };
        share.attach_limits(uuid, &limits);
        let mut outcome = Err(AttachError::Open);
        for directory in REGION_DIRECTORIES {
            let Some(path) = region_path(directory, format_args!("{uuid}")) else {
                continue;
            };
            remove_unused(directory);
            for _ in 0..ATTEMPTS {
                outcome = share.attach_region(path, true);
                if !matches!(outcome, Err(AttachError::Removed)) {
                    break;
                }
            }
            if outcome.is_ok() {
                break;
            }
            if let Err(error) = outcome {
                share.report_unusable(path.as_c_str(), error);
            }
        }
        shares.publish();
        Attached::Share
    }

    /// Reads the variables.
    pub(crate) fn read(&self) -> LimitsSource {
        match self.parse(variable, report) {
            ParsedLimits::None => LimitsSource::None,
            ParsedLimits::Limits => LimitsSource::Environment,
            ParsedLimits::Invalid => LimitsSource::InvalidEnvironment,
        }
    }
}

fn report(name: &CStr) {
    log::line(format_args!(
        "invalid value of {}: denying all GPU memory",
        name.to_str().unwrap_or("?")
    ));
}

/// Returns the alternative directory of shares.
pub(crate) fn run_directory() -> Option<&'static CStr> {
    variable(c"DRAVA_RUN_DIR")
}

fn region_path(directory: &CStr, uuid: fmt::Arguments<'_>) -> Option<PathBuffer> {
    let directory = directory.to_str().ok()?;
    let user = sys::user_id();
    match variable(c"DRAVA_JOB").and_then(|job| job.to_str().ok()) {
        Some(job) if is_plain(job) => {
            PathBuffer::new(format_args!("{directory}/drava-{user}-{job}-{uuid}"))
        }
        _ => {
            let group = sys::process_group();
            PathBuffer::new(format_args!("{directory}/drava-{user}-{group}-{uuid}"))
        }
    }
}

/// Returns whether a job's name can be part of a file name.
fn is_plain(job: &str) -> bool {
    !job.is_empty()
        && job.len() <= 64
        && job
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

/// Removes this user's regions without a slot in use. A process that has just opened one finds it removed after
/// taking a slot, and creates another.
fn remove_unused(directory: &CStr) {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY;
    let Some(fd) = sys::open(None, directory, flags, 0) else {
        return;
    };
    let Some(prefix) = PathBuffer::new(format_args!("drava-{}-", sys::user_id())) else {
        return;
    };
    let prefix = prefix.as_c_str().to_str().unwrap_or("?");
    let mut buffer = EntryBuffer::new();
    while let Some(length) = sys::directory_entries(fd, &mut buffer.0).filter(|&n| n > 0) {
        for name in names(buffer.0.get(..length).unwrap_or_default()) {
            if name.starts_with(prefix) {
                remove_if_unused(directory, name);
            }
        }
    }
    sys::close(fd);
}

fn remove_if_unused(directory: &CStr, name: &str) {
    let directory = directory.to_str().unwrap_or("?");
    let Some(path) = PathBuffer::new(format_args!("{directory}/{name}")) else {
        return;
    };
    let flags = libc::O_RDWR | libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let Some(region) = sys::open(None, path.as_c_str(), flags, 0) else {
        return;
    };
    if !sys::is_locked(region, SLOTS_OFFSET, REGION_SIZE - SLOTS_OFFSET) {
        sys::unlink(path.as_c_str());
    }
    sys::close(region);
}

fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the name is terminated.
    let value = unsafe { secure_getenv(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: not null, terminated, and the environment outlives the calls that read it.
    let value = unsafe { CStr::from_ptr(value) };
    (!value.is_empty()).then_some(value)
}
