//! Limits without Kubernetes: from environment variables, when no limits page is there.
//!
//! | Variable | Meaning |
//! |---|---|
//! | `DRAVA_MEMORY_LIMIT` | memory of each card: bytes, or a quantity such as `4Gi` or `500M` |
//! | `DRAVA_CORES` | percent of each card's GPU time, 1 to 99; 0 or 100 for no limit |
//! | `DRAVA_MEMORY_POLICY` | `hard`, or `spill`: plain allocations beyond the limit come from the host |
//! | `DRAVA_COMPUTE_POLICY` | `fixed`, `balance`, `token` or `none`; default: `fixed` where cores are limited |
//! | `DRAVA_PRIORITY` | −100 to 100, higher first |
//! | `DRAVA_JOB` | processes with the same value share one limit; default: the process group |
//! | `DRAVA_RUN_DIR` | where to look for shares if `/run/drava` has none |
//! | `CUDA_DEVICE_MEMORY_LIMIT` | as `DRAVA_MEMORY_LIMIT`, with `k`, `m`, `g` as powers of 1024 |
//! | `CUDA_DEVICE_MEMORY_LIMIT_<i>` | the same for CUDA device `i` alone |
//! | `CUDA_DEVICE_SM_LIMIT`, `CUDA_DEVICE_SM_LIMIT_<i>` | as `DRAVA_CORES`, of all cards or of one |
//! | `CUDA_OVERSUBSCRIBE` | `true` is `DRAVA_MEMORY_POLICY=spill` |
//! | `GPU_CORE_UTILIZATION_POLICY` | `force`, `default`, `disable` are `fixed`, `balance`, `none` |
//! | `CUDA_TASK_PRIORITY` | 1 is the default, 0 the higher one |
//!
//! The region of a job lies in `/dev/shm`, or in `/tmp` where that is missing, readable by its user only:
//! `drava-<uid>-<job>-<card UUID>`. A process group is what a shell makes of one command line, and children
//! inherit it. Regions that no living process uses are removed by the next job of the same user.
//!
//! A variable that cannot be understood refuses GPU memory: a limit that was meant is not ignored.
//! Programs with elevated privileges (set-user-ID) ignore the environment.

use core::ffi::{CStr, c_char};
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use drava_vgpu_abi::region::SLOTS_OFFSET;
use drava_vgpu_abi::{
    ComputePolicy, Cores, DeviceUuid, Limits, MemoryPolicy, Priority, REGION_SIZE,
};

use crate::log;
use crate::path::{EntryBuffer, PathBuffer, names};
use crate::share::Unusable;
use crate::shares::{Shares, Source};
use crate::sys;

/// CUDA devices that can have a variable of their own.
const DEVICES: usize = 16;

/// Directories for regions, in order of preference.
const REGION_DIRECTORIES: [&CStr; 2] = [c"/dev/shm", c"/tmp"];

/// How often a region that another process removed meanwhile is made again.
const ATTEMPTS: u32 = 4;

unsafe extern "C" {
    fn secure_getenv(name: *const c_char) -> *const c_char;
}

/// What the variables say. All zeroes is nothing.
pub(crate) struct Environment {
    /// Limit of each card in bytes, 0 for none.
    memory_bytes: AtomicU64,
    /// The same for single devices.
    device_memory_bytes: [AtomicU64; DEVICES],
    /// Percent of each card's GPU time, 0 for no limit.
    cores: AtomicU64,
    /// The same for single devices.
    device_cores: [AtomicU64; DEVICES],
    /// One more than the index in [`MEMORY_POLICIES`], 0 for none named.
    memory_policy: AtomicU64,
    /// One more than the index in [`COMPUTE_POLICIES`], 0 for none named.
    compute_policy: AtomicU64,
    /// One more than the distance to [`LOWEST_PRIORITY`], 0 for none named.
    priority: AtomicU64,
}

const MEMORY_POLICIES: [MemoryPolicy; 2] = [MemoryPolicy::Hard, MemoryPolicy::Spill];
const COMPUTE_POLICIES: [ComputePolicy; 4] = [
    ComputePolicy::None,
    ComputePolicy::Balance,
    ComputePolicy::Fixed,
    ComputePolicy::Token,
];
const LOWEST_PRIORITY: i32 = -100;

/// How a card got its share.
pub(crate) enum Attached {
    /// It has one now.
    Share,
    /// No variable limits it.
    NoLimit,
    /// It should have one, but there is no room for it.
    Failed,
}

impl Environment {
    /// Gives the card a share of its own. The caller holds the process's guard.
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
        let mut outcome = Err(Unusable::Open);
        for directory in REGION_DIRECTORIES {
            let Some(path) = region_path(directory, format_args!("{uuid}")) else {
                continue;
            };
            remove_unused(directory);
            for _ in 0..ATTEMPTS {
                outcome = share.attach_region(path, true);
                if !matches!(outcome, Err(Unusable::Removed)) {
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
    pub(crate) fn read(&self) -> Source {
        let mut source = Source::Nothing;
        for (name, parse, target) in self.choices() {
            match variable(name).map(|text| parse(text.to_bytes())) {
                None => {}
                Some(Some(choice)) => target.store(choice, Ordering::Relaxed),
                Some(None) => {
                    report(name);
                    source = Source::BrokenEnvironment;
                }
            }
        }
        let mut set = |name: &CStr, parse: fn(&[u8]) -> Option<u64>, target: &AtomicU64| {
            let Some(text) = variable(name) else { return };
            let Some(bytes) = parse(text.to_bytes()) else {
                report(name);
                source = Source::BrokenEnvironment;
                return;
            };
            target.store(bytes, Ordering::Relaxed);
            if bytes != 0 && source == Source::Nothing {
                source = Source::Environment;
            }
        };
        set(c"CUDA_DEVICE_MEMORY_LIMIT", parse_hami, &self.memory_bytes);
        set(c"DRAVA_MEMORY_LIMIT", parse_quantity, &self.memory_bytes);
        for (index, target) in self.device_memory_bytes.iter().enumerate() {
            if let Some(name) = PathBuffer::new(format_args!("CUDA_DEVICE_MEMORY_LIMIT_{index}")) {
                set(name.as_c_str(), parse_hami, target);
            }
        }
        set(c"CUDA_DEVICE_SM_LIMIT", parse_cores, &self.cores);
        set(c"DRAVA_CORES", parse_cores, &self.cores);
        for (index, target) in self.device_cores.iter().enumerate() {
            if let Some(name) = PathBuffer::new(format_args!("CUDA_DEVICE_SM_LIMIT_{index}")) {
                set(name.as_c_str(), parse_cores, target);
            }
        }
        source
    }

    /// Variables that limit nothing by themselves; later ones win.
    fn choices(&self) -> [(&'static CStr, Parse, &AtomicU64); 6] {
        [
            (
                c"CUDA_OVERSUBSCRIBE",
                parse_oversubscribe,
                &self.memory_policy,
            ),
            (
                c"DRAVA_MEMORY_POLICY",
                parse_memory_policy,
                &self.memory_policy,
            ),
            (
                c"GPU_CORE_UTILIZATION_POLICY",
                parse_utilization_policy,
                &self.compute_policy,
            ),
            (
                c"DRAVA_COMPUTE_POLICY",
                parse_compute_policy,
                &self.compute_policy,
            ),
            (c"CUDA_TASK_PRIORITY", parse_task_priority, &self.priority),
            (c"DRAVA_PRIORITY", parse_priority, &self.priority),
        ]
    }

    /// Whether any variable limits GPU time.
    pub(crate) fn limits_cores(&self) -> bool {
        self.device_cores
            .iter()
            .chain([&self.cores])
            .any(|cores| cores.load(Ordering::Relaxed) != 0)
    }

    /// Whether any variable limits memory.
    pub(crate) fn limits_memory(&self) -> bool {
        self.device_memory_bytes
            .iter()
            .chain([&self.memory_bytes])
            .any(|bytes| bytes.load(Ordering::Relaxed) != 0)
    }

    /// What limits that device, if anything does.
    fn limits_of(&self, ordinal: Option<u32>) -> Option<Limits> {
        let of = |devices: &[AtomicU64; DEVICES], all: &AtomicU64| {
            let of_device = ordinal
                .and_then(|ordinal| devices.get(usize::try_from(ordinal).ok()?))
                .map_or(0, |value| value.load(Ordering::Relaxed));
            [of_device, all.load(Ordering::Relaxed)]
                .into_iter()
                .find(|&value| value != 0)
        };
        let memory_limit_bytes = of(&self.device_memory_bytes, &self.memory_bytes);
        let cores = of(&self.device_cores, &self.cores)
            .and_then(|cores| Cores::new(u32::try_from(cores).ok()?));
        if memory_limit_bytes.is_none() && cores.is_none() {
            return None;
        }
        Some(Limits {
            memory_limit_bytes,
            cores: cores.unwrap_or(Cores::BEST_EFFORT),
            compute_policy: match cores {
                Some(_) => {
                    chosen(&COMPUTE_POLICIES, &self.compute_policy).unwrap_or(ComputePolicy::Fixed)
                }
                None => ComputePolicy::None,
            },
            memory_policy: chosen(&MEMORY_POLICIES, &self.memory_policy)
                .unwrap_or(MemoryPolicy::Hard),
            priority: self.priority(),
            ..Limits::memory(0)
        })
    }
}

type Parse = fn(&[u8]) -> Option<u64>;

impl Environment {
    fn priority(&self) -> Priority {
        let chosen = self.priority.load(Ordering::Relaxed);
        let distance = chosen
            .checked_sub(1)
            .and_then(|distance| i32::try_from(distance).ok());
        distance
            .and_then(|distance| Priority::new(LOWEST_PRIORITY.saturating_add(distance)))
            .unwrap_or(Priority::DEFAULT)
    }
}

fn chosen<T: Copy>(choices: &[T], choice: &AtomicU64) -> Option<T> {
    let index = choice.load(Ordering::Relaxed).checked_sub(1)?;
    choices.get(usize::try_from(index).ok()?).copied()
}

fn report(name: &CStr) {
    log::line(format_args!(
        "{} cannot be understood: GPU memory is refused",
        name.to_str().unwrap_or("?")
    ));
}

/// Where shares are looked for besides the standard place.
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

/// Whether a job's name can be a part of a file name.
fn is_plain(job: &str) -> bool {
    !job.is_empty()
        && job.len() <= 64
        && job
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

/// Removes this user's regions in which nobody has a slot. Whoever opened one just now finds it removed after
/// taking a slot, and makes another.
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
    // SAFETY: not null, terminated, and the environment outlives the few calls that it is read for.
    let value = unsafe { CStr::from_ptr(value) };
    (!value.is_empty()).then_some(value)
}

/// Bytes, or a Kubernetes quantity with a binary (`Ki`…`Ti`) or decimal (`k`…`T`) suffix.
fn parse_quantity(text: &[u8]) -> Option<u64> {
    let (number, suffix) = split_number(text)?;
    let unit = match suffix {
        b"" => 1,
        b"Ki" => 1 << 10,
        b"Mi" => 1 << 20,
        b"Gi" => 1 << 30,
        b"Ti" => 1 << 40,
        b"k" => 1_000,
        b"M" => 1_000_000,
        b"G" => 1_000_000_000,
        b"T" => 1_000_000_000_000,
        _ => return None,
    };
    number.checked_mul(unit)
}

/// Bytes, or with a suffix `k`, `m`, `g` of either case a power of 1024.
fn parse_hami(text: &[u8]) -> Option<u64> {
    let (number, suffix) = split_number(text)?;
    let unit = match suffix {
        b"" => 1,
        b"k" | b"K" => 1 << 10,
        b"m" | b"M" => 1 << 20,
        b"g" | b"G" => 1 << 30,
        _ => return None,
    };
    number.checked_mul(unit)
}

/// Percent of a card; 0 if that is no limit.
fn parse_cores(text: &[u8]) -> Option<u64> {
    match split_number(text)? {
        (percent @ 1..=99, b"" | b"%") => Some(percent),
        (0 | 100, b"" | b"%") => Some(0),
        _ => None,
    }
}

fn parse_memory_policy(text: &[u8]) -> Option<u64> {
    match text {
        b"hard" => Some(1),
        b"spill" => Some(2),
        _ => None,
    }
}

fn parse_oversubscribe(text: &[u8]) -> Option<u64> {
    match text {
        b"false" | b"0" => Some(1),
        b"true" | b"1" => Some(2),
        _ => None,
    }
}

fn parse_compute_policy(text: &[u8]) -> Option<u64> {
    match text {
        b"none" => Some(1),
        b"balance" => Some(2),
        b"fixed" => Some(3),
        b"token" => Some(4),
        _ => None,
    }
}

fn parse_utilization_policy(text: &[u8]) -> Option<u64> {
    match text {
        b"disable" => Some(1),
        b"default" => Some(2),
        b"force" => Some(3),
        _ => None,
    }
}

fn parse_priority(text: &[u8]) -> Option<u64> {
    let value: i32 = core::str::from_utf8(text).ok()?.parse().ok()?;
    Priority::new(value)?;
    let distance = value.checked_sub(LOWEST_PRIORITY)?;
    u64::try_from(distance).ok()?.checked_add(1)
}

/// Lower numbers go first, and 1 is the default.
fn parse_task_priority(text: &[u8]) -> Option<u64> {
    match text {
        b"0" => parse_priority(b"1"),
        b"1" => parse_priority(b"0"),
        _ => None,
    }
}

fn split_number(text: &[u8]) -> Option<(u64, &[u8])> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (number, suffix) = text.split_at_checked(digits)?;
    let number = core::str::from_utf8(number).ok()?.parse().ok()?;
    Some((number, suffix))
}
