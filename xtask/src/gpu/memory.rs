//! Every allocation path, one at a time, until a request is denied, and libvgpu's account of it against NVML.

use std::cell::RefCell;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use drava_nvml::{GpuLibrary as _, GpuUuid, Library, Memory, ProcessMemory};
use drava_vgpu_abi::Limits;
use serde::Deserialize;
use serde_json::Value;

use super::handles;
use super::report::Row;
use super::rows::{Needed, Rows};
use super::setup::{Gpu, Preload, Running, Setup, Share, json, limits};

const MIB: u64 = 1 << 20;

/// Paths that end with a denial at the limit.
pub(super) const PATHS: [&str; 10] = [
    "plain", "pitch", "managed", "async", "pool", "vmm", "array", "mipmap", "globals", "graph",
];

/// Paths that are compared with NVML only: they allocate a fixed amount, or round more than the others.
const OTHER_PATHS: [&str; 6] = ["nothing", "threads", "steps", "heap", "stack", "local"];

/// Name of the file with what NVML reported.
const SAMPLES: &str = "nvml-memory.json";

/// GPU memory that the driver may use beyond the account of a process, for itself, and by which granularities may round the
/// account up.
pub(super) const DRIVER_ALLOWANCE: u64 = 64 * MIB;

/// Time after which NVML no longer lists a killed process.
const LONGEST_RELEASE: Duration = Duration::from_secs(10);

/// Output of `gpu-suite memory`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Taken {
    free_bytes_before: u64,
    total_bytes: u64,
    taken_bytes: u64,
    free_bytes_after: u64,
    refusal: Option<String>,
}

pub(super) fn rows(setup: &Setup, rows: &mut Rows<'_>) -> Result<()> {
    let gpu = setup.gpu()?;
    let limit = limit_bytes(&gpu);
    let nvml = Needed::new(|| setup.nvml());
    let context = Needed::new(|| observe(setup, nvml.get()?, None, "nothing"));
    let limits = Needed::new(|| {
        Ok(Limits {
            // What the node driver estimates.
            driver_reserve_bytes: context.get()?.nvml.unwrap_or(0),
            ..limits(limit, 0)?
        })
    });
    rows.run("GPU memory that is not free with one context", || {
        Ok(vec![context_row(&context.get()?.taken, gpu.free_bytes)])
    })?;
    let raw = RefCell::new(Vec::new());
    for path in PATHS.into_iter().chain(OTHER_PATHS) {
        rows.compare(&format!("{path}: "), |preload| {
            let share = setup.preloaded(preload, limits.get()?)?;
            let seen = observe(setup, nvml.get()?, Some(&share), path)?;
            if preload == Preload::Own {
                raw.borrow_mut().push(seen.raw(path));
            }
            let title = format!("{path}: limit of {} MiB", limit / MIB);
            let exact = PATHS
                .contains(&path)
                .then(|| exact(title, &seen.taken, limit));
            Ok(exact
                .into_iter()
                .chain([against_nvml(path, &seen)])
                .collect())
        })?;
    }
    setup.save(SAMPLES, &Value::Array(raw.into_inner()))?;
    rows.run("memory of a killed process", || {
        Ok(vec![killed(
            setup,
            nvml.get()?,
            &setup.share(limits.get()?)?,
        )?])
    })?;
    let kinds: Vec<String> = handles::KINDS
        .iter()
        .map(|kind| format!("{kind}: "))
        .collect();
    let kinds: Vec<&str> = kinds.iter().map(String::as_str).collect();
    rows.run_any(&kinds, || {
        Ok(handles::rows(setup, &setup.share(limits.get()?)?))
    })
}

/// Memory of a process with one context by NVML, as the node driver estimates it; 0 if NVML does not say.
pub(super) fn context_bytes(setup: &Setup, nvml: &(Library, GpuUuid)) -> Result<u64> {
    let context = observe(setup, nvml, None, "nothing");
    let context = context.context("cannot create a context without limits")?;
    Ok(context.nvml.unwrap_or(0))
}

/// Limit of a share whose allocations are checked: no multiple of any granularity.
pub(super) fn limit_bytes(gpu: &Gpu) -> u64 {
    (gpu.free_bytes / 4).min(8 << 30) / MIB * MIB + 4096
}

/// Allocations up to the limit, and none beyond it.
pub(super) fn exact(title: String, taken: &Taken, limit: u64) -> Row {
    let reachable = taken.free_bytes_before;
    // The smallest request is 2 MiB, and a path may round each to its granularity.
    let is_exact = taken.taken_bytes <= reachable && taken.taken_bytes + 64 * MIB > reachable;
    let is_denied = taken.refusal.as_deref() == Some("CUDA_ERROR_OUT_OF_MEMORY");
    Row::checked(
        title,
        taken.total_bytes == limit && is_exact && is_denied,
        format!(
            "{} of {} MiB after the context, then {}",
            taken.taken_bytes / MIB,
            reachable / MIB,
            taken.refusal.as_deref().unwrap_or("no error")
        ),
    )
}

/// A process that holds what it has allocated.
struct Seen {
    taken: Taken,
    /// Bytes that are not free for the process: those in the account, if it has a share.
    account: u64,
    /// Bytes of the process by NVML.
    nvml: Option<u64>,
    /// Used bytes of the GPU by NVML, without and with the process.
    gpu: [Option<u64>; 2],
}

/// Runs a path until it is denied, and reads the account and NVML while its process holds the memory.
fn observe(
    setup: &Setup,
    (nvml, gpu): &(Library, GpuUuid),
    share: Option<&Share>,
    path: &str,
) -> Result<Seen> {
    let used = || -> Result<Option<u64>> {
        Ok(match nvml.memory(gpu)? {
            Memory::Dedicated { used_bytes, .. } => Some(used_bytes),
            Memory::NotSupported => None,
        })
    };
    let before = used()?;
    let command = setup.suite(share, &["memory", "--path", path, "--hold"]);
    let mut program = Running::start(command)?;
    let taken: Taken = program.json()?;
    let account = taken.total_bytes.saturating_sub(taken.free_bytes_after);
    let listed = nvml.processes(gpu)?;
    let own = listed
        .iter()
        .find(|process| process.pid == program.pid())
        .map(|process| process.memory);
    let seen = Seen {
        taken,
        account,
        nvml: match own {
            Some(ProcessMemory::Used { bytes }) => Some(bytes),
            Some(ProcessMemory::NotAvailable) | None => None,
        },
        gpu: [before, used()?],
    };
    program.end()?;
    Ok(seen)
}

/// How far the account may be from NVML's value, bytes.
#[derive(Clone, Copy)]
struct Bounds {
    above: u64,
    below: u64,
}

impl Bounds {
    /// Paths whose memory the driver takes later than it is charged, or that only the node agent charges; all others are
    /// charged what they take. [`DRIVER_ALLOWANCE`] is added in both directions.
    fn of(path: &str, taken_bytes: u64) -> Self {
        let (above, below) = match path {
            // Managed memory is on the host until a kernel uses it, and the heap is taken by the first kernel that uses it.
            "managed" | "heap" => (taken_bytes, 0),
            // The stacks replace those of 1 KiB per thread, a quarter of them, which the context already has.
            "stack" => (taken_bytes / 4, 0),
            // The driver takes it for a launch; the node agent sees it.
            "local" => (0, taken_bytes),
            _ => (0, 0),
        };
        Self {
            above: above + DRIVER_ALLOWANCE,
            below: below + DRIVER_ALLOWANCE,
        }
    }

    const fn contain(self, account: u64, nvml: u64) -> bool {
        account <= nvml + self.above && nvml <= account + self.below
    }
}

/// The account is close to NVML's value, and the path took its memory.
fn against_nvml(path: &str, seen: &Seen) -> Row {
    let title = format!("{path}: account against NVML");
    let Some(nvml) = seen.nvml else {
        return Row::not_run(title, "NVML does not list the process with its memory");
    };
    let bounds = Bounds::of(path, seen.taken.taken_bytes);
    let refusal = seen.taken.refusal.as_deref();
    let mut detail = format!(
        "account {} MiB, NVML {} MiB; at most {} MiB above it and {} MiB below",
        seen.account / MIB,
        nvml / MIB,
        bounds.above / MIB,
        bounds.below / MIB
    );
    // Fixed amounts fit into the share; all others end with a denial.
    let is_as_expected = match path {
        "nothing" | "threads" | "heap" | "stack" | "local" => refusal.is_none(),
        _ => refusal == Some("CUDA_ERROR_OUT_OF_MEMORY"),
    };
    if !is_as_expected {
        detail += "; request: ";
        detail += refusal.unwrap_or("never denied");
    }
    Row::checked(
        title,
        is_as_expected && bounds.contain(seen.account, nvml),
        detail,
    )
}

impl Seen {
    fn raw(&self, path: &str) -> Value {
        let [before, after] = self.gpu;
        serde_json::json!({
            "path": path,
            "takenBytes": self.taken.taken_bytes,
            "accountBytes": self.account,
            "processBytes": self.nvml,
            "usedBytesBefore": before,
            "usedBytes": after,
        })
    }
}

/// A process that is killed while it holds all memory of its share; then another one that allocates it.
fn killed(setup: &Setup, (nvml, gpu): &(Library, GpuUuid), share: &Share) -> Result<Row> {
    const PATH: [&str; 3] = ["memory", "--path", "plain"];
    let mut command = setup.suite(Some(share), &PATH);
    command.arg("--hold");
    let mut program = Running::start(command)?;
    let first: Taken = program.json()?;
    let pid = program.pid();
    program.kill()?;
    let start = Instant::now();
    while nvml
        .processes(gpu)?
        .iter()
        .any(|process| process.pid == pid)
        && start.elapsed() < LONGEST_RELEASE
    {
        sleep(Duration::from_millis(1));
    }
    let listed = start.elapsed();
    let second: Taken = json(setup.suite(Some(share), &PATH))?;
    Ok(Row::checked(
        "memory of a killed process is free again",
        listed < LONGEST_RELEASE
            && second.free_bytes_before == first.free_bytes_before
            && second.taken_bytes == first.taken_bytes,
        format!(
            "NVML lists it for {} ms; then {} of {} MiB",
            listed.as_millis(),
            second.taken_bytes / MIB,
            first.taken_bytes / MIB
        ),
    ))
}

/// Memory of one context, by the driver's own values.
fn context_row(taken: &Taken, free_bytes: u64) -> Row {
    let bytes = taken.total_bytes.saturating_sub(taken.free_bytes_before);
    Row::measured(
        "GPU memory that is not free with one context",
        format!(
            "{} MiB ({} MiB free at start)",
            bytes / MIB,
            free_bytes / MIB
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::{Bounds, DRIVER_ALLOWANCE, MIB};

    #[test]
    fn bounds_account_in_both_directions() {
        let taken = 256 * MIB;
        let exact = Bounds::of("plain", taken);
        assert!(exact.contain(taken, taken + DRIVER_ALLOWANCE));
        assert!(!exact.contain(taken, taken + DRIVER_ALLOWANCE + 1));
        assert!(!exact.contain(taken + DRIVER_ALLOWANCE + 1, taken));
        assert!(Bounds::of("heap", taken).contain(taken, 0));
        assert!(!Bounds::of("local", taken).contain(taken, 0));
        assert!(Bounds::of("local", taken).contain(0, taken));
        assert!(!Bounds::of("stack", taken).contain(taken, 0));
    }
}
