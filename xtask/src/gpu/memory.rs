//! Every allocation path, one at a time, until a request is denied.

use anyhow::{Context, Result};
use drava_cluster::Progress;
use serde::Deserialize;

use super::report::Row;
use super::setup::{Setup, Share, json, limits};

const MIB: u64 = 1 << 20;

const PATHS: [&str; 10] = [
    "plain", "pitch", "managed", "async", "pool", "vmm", "array", "mipmap", "globals", "graph",
];

/// Output of `gpu-suite memory`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Taken {
    free_bytes_before: u64,
    total_bytes: u64,
    taken_bytes: u64,
    refusal: Option<String>,
}

pub(crate) fn rows(setup: &Setup, progress: &Progress) -> Result<Vec<Row>> {
    let card = setup.card()?;
    // No multiple of any granularity.
    let limit = (card.free_bytes / 4).min(8 << 30) / MIB * MIB + 4096;
    let limits = limits(limit, 0)?;
    let mut rows = vec![context(setup, card.free_bytes)?];
    for path in PATHS {
        progress.note(path);
        let share = setup.share(&limits)?;
        let title = format!("{path}: limit of {} MiB", limit / MIB);
        let taken: Taken = match json(setup.suite(Some(&share), &["memory", "--path", path])) {
            Ok(taken) => taken,
            Err(error) => {
                rows.push(Row::checked(title, false, format!("{error:#}")));
                continue;
            }
        };
        let reachable = taken.free_bytes_before;
        // The smallest request is 2 MiB, and a path may round each to its granularity.
        let is_exact = taken.taken_bytes <= reachable && taken.taken_bytes + 64 * MIB > reachable;
        let is_denied = taken.refusal.as_deref() == Some("CUDA_ERROR_OUT_OF_MEMORY");
        rows.push(Row::checked(
            title,
            taken.total_bytes == limit && is_exact && is_denied,
            format!(
                "{} of {} MiB after the context, then {}",
                taken.taken_bytes / MIB,
                reachable / MIB,
                taken.refusal.as_deref().unwrap_or("no error")
            ),
        ));
    }
    progress.note("handles");
    rows.push(handles(setup, &setup.share(&limits)?));
    Ok(rows)
}

/// Output of `gpu-suite handles`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Recurrence {
    rounds: u64,
    distinct_handles: u64,
    free_bytes_before: u64,
    free_bytes_after: u64,
}

/// The account after many allocations whose handles recur.
fn handles(setup: &Setup, share: &Share) -> Row {
    let title = "exported memory is released with its last reference";
    match json::<Recurrence>(setup.suite(Some(share), &["handles"])) {
        Ok(seen) => Row::checked(
            title,
            seen.free_bytes_after == seen.free_bytes_before,
            format!(
                "{} MiB less free after {} allocations with {} distinct handles",
                seen.free_bytes_before.saturating_sub(seen.free_bytes_after) / MIB,
                seen.rounds,
                seen.distinct_handles
            ),
        ),
        Err(error) => Row::checked(title, false, format!("{error:#}")),
    }
}

/// Memory of one context, by the driver's own values.
fn context(setup: &Setup, free_bytes: u64) -> Result<Row> {
    let taken: Taken = json(setup.suite(None, &["memory", "--path", "nothing"]))
        .context("cannot create a context without limits")?;
    let bytes = taken.total_bytes.saturating_sub(taken.free_bytes_before);
    Ok(Row::measured(
        "GPU memory that is not free with one context",
        format!(
            "{} MiB ({} MiB free at start)",
            bytes / MIB,
            free_bytes / MIB
        ),
    ))
}
