//! Parses the variables of a process's environment; see [`super`].

use core::ffi::CStr;
use core::sync::atomic::{AtomicU64, Ordering};

use drava_vgpu_abi::{ComputePolicy, Cores, Limits, MemoryPolicy, Priority};

use crate::system::path::PathBuffer;

/// Number of CUDA devices that can have a variable of their own.
const DEVICES: usize = 16;

/// The parsed variables. All zeroes is none.
pub(crate) struct Environment {
    /// Memory limit of each GPU in bytes, 0 for none.
    memory_bytes: AtomicU64,
    /// Memory limits of single devices.
    device_memory_bytes: [AtomicU64; DEVICES],
    /// Percent of each GPU's time, 0 for no limit.
    cores: AtomicU64,
    /// Percent of single devices.
    device_cores: [AtomicU64; DEVICES],
    /// One more than the index in [`MEMORY_POLICIES`], 0 if unset.
    memory_policy: AtomicU64,
    /// One more than the index in [`COMPUTE_POLICIES`], 0 if unset.
    compute_policy: AtomicU64,
    /// One more than the distance to [`LOWEST_PRIORITY`], 0 if unset.
    priority: AtomicU64,
}

const MEMORY_POLICIES: [MemoryPolicy; 2] = [MemoryPolicy::Hard, MemoryPolicy::Spill];
const COMPUTE_POLICIES: [ComputePolicy; 3] = [
    ComputePolicy::None,
    ComputePolicy::Balance,
    ComputePolicy::Fixed,
];
const LOWEST_PRIORITY: i32 = -100;

/// Result of parsing all variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParsedLimits {
    /// No limit.
    None,
    /// Limits.
    Limits,
    /// At least one variable is invalid.
    Invalid,
}

impl Environment {
    /// Parses the variables that `variable` returns and passes the names of invalid ones to `report`.
    pub(crate) fn parse<'a>(
        &self,
        variable: impl Fn(&CStr) -> Option<&'a CStr>,
        report: impl Fn(&CStr),
    ) -> ParsedLimits {
        let mut parsed = ParsedLimits::None;
        for (name, parse, target) in self.policies() {
            match variable(name).map(|text| parse(text.to_bytes())) {
                None => {}
                Some(Some(choice)) => target.store(choice, Ordering::Relaxed),
                Some(None) => {
                    report(name);
                    parsed = ParsedLimits::Invalid;
                }
            }
        }
        let mut set = |name: &CStr, parse: fn(&[u8]) -> Option<u64>, target: &AtomicU64| {
            let Some(text) = variable(name) else { return };
            let Some(bytes) = parse(text.to_bytes()) else {
                report(name);
                parsed = ParsedLimits::Invalid;
                return;
            };
            target.store(bytes, Ordering::Relaxed);
            if bytes != 0 && parsed == ParsedLimits::None {
                parsed = ParsedLimits::Limits;
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
        parsed
    }

    /// Variables that limit nothing alone; later ones win.
    fn policies(&self) -> [(&'static CStr, Parse, &AtomicU64); 6] {
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

    /// Returns whether any variable limits GPU time.
    pub(crate) fn limits_cores(&self) -> bool {
        self.device_cores
            .iter()
            .chain([&self.cores])
            .any(|cores| cores.load(Ordering::Relaxed) != 0)
    }

    /// Returns whether any variable limits memory.
    pub(crate) fn limits_memory(&self) -> bool {
        self.device_memory_bytes
            .iter()
            .chain([&self.memory_bytes])
            .any(|bytes| bytes.load(Ordering::Relaxed) != 0)
    }

    /// Returns the limits of a device, if it has any.
    pub(crate) fn limits_of(&self, ordinal: Option<u32>) -> Option<Limits> {
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

/// Parses bytes, or a Kubernetes quantity with a binary (`Ki`…`Ti`) or decimal (`k`…`T`) suffix.
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

/// Parses bytes, with an optional suffix `k`, `m`, `g` of either case for a power of 1024.
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

/// Parses percent of a GPU; 0 is no limit.
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

/// Lower numbers come first; 1 is the default.
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
