//! Compares every way to look up an entry point with the table of entry points, and allocates through each.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::report::Row;
use super::rows::Rows;
use super::setup::{Setup, Share, json, limits};

/// Output of `gpu-suite entry-points` about one name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Entry {
    name: String,
    class: String,
    is_exported: bool,
    #[serde(default)]
    symbol: Option<String>,
    #[serde(default)]
    procedures: BTreeMap<String, Vec<String>>,
}

/// Output of `gpu-suite pointers` about one function.
#[derive(Debug, Deserialize)]
struct Called {
    name: String,
    lookups: usize,
    failures: Vec<String>,
}

const OURS: &str = "libvgpu+";

/// Export of the simulated libraries that the table does not know: tests bypass libvgpu with it.
const UNKNOWN_OF_SIMULATOR: [&str; 1] = ["cuMemAllocUnlisted"];

pub(super) fn rows(setup: &Setup, rows: &mut Rows<'_>) -> Result<()> {
    let gpu = setup.gpu()?;
    let share = setup.share(&limits(gpu.total_bytes / 4, 50)?)?;
    let groups = [
        "functions that",
        "every exported",
        "entry points",
        "no entry point",
        "every lookup",
    ];
    rows.run_any(&groups, || lookups(setup, &share))?;
    rows.run("cu", || {
        let called: Vec<Called> = json(setup.suite(Some(&share), &["pointers"]))?;
        Ok(called.iter().map(moves_account).collect())
    })
}

/// What each way to look a function up finds.
fn lookups(setup: &Setup, share: &Share) -> Result<Vec<Row>> {
    let bare: Vec<Entry> = json(setup.suite(None, &["entry-points"]))?;
    let hooked: Vec<Entry> = json(setup.suite(Some(share), &["entry-points"]))?;
    let dump = setup.out.join("entry-points.json");
    let text = serde_json::to_string_pretty(&serde_json::json!({"bare": bare, "hooked": hooked}))?;
    fs::write(&dump, text + "\n").with_context(|| format!("write {}", dump.display()))?;

    let names = |entries: &[Entry]| {
        entries
            .iter()
            .map(|e| e.name.clone())
            .collect::<BTreeSet<_>>()
    };
    let vanished: Vec<String> = names(&bare).difference(&names(&hooked)).cloned().collect();
    let (unknown, wrong) = (unknown(&bare), wrong(&bare, &hooked));
    let tolerated: &[&str] = if setup.is_simulated() {
        &UNKNOWN_OF_SIMULATOR
    } else {
        &[]
    };
    let exported = |is_of_library: fn(&str) -> bool| {
        let exported = bare.iter().filter(|entry| entry.is_exported);
        exported.filter(|entry| is_of_library(&entry.name)).count()
    };
    let of_nvml = exported(|name| name.starts_with("nvml"));
    let of_cuda = exported(|name| name.starts_with("cu"));
    let ours = hooked.iter().filter(|entry| is_ours(entry)).count();
    Ok(vec![
        Row::measured(
            "functions that the libraries export",
            format!("{of_cuda} of libcuda, {of_nvml} of NVML"),
        ),
        Row::checked(
            "every exported function is in the table of entry points",
            of_cuda > 0 && unknown == tolerated,
            format!("unknown: {}", list(&unknown)),
        ),
        Row::measured("entry points of the driver", bare.len().to_string()),
        Row::measured("entry points replaced under a limit", ours.to_string()),
        Row::checked(
            "no entry point is missing",
            vanished.is_empty(),
            list(&vanished),
        ),
        Row::checked(
            "every lookup agrees with the table of entry points",
            wrong.is_empty(),
            list(&wrong),
        ),
    ])
}

fn moves_account(called: &Called) -> Row {
    let title = format!("{}: each pointer moves the account", called.name);
    if called.lookups == 0 {
        return Row::not_run(title, "the driver has no such function");
    }
    Row::checked(
        title,
        called.failures.is_empty(),
        format!(
            "{} lookups; wrong: {}",
            called.lookups,
            list(&called.failures)
        ),
    )
}

/// Exported functions that are not in the table, in order.
fn unknown(bare: &[Entry]) -> Vec<String> {
    let unknown = bare.iter().filter(|entry| entry.class == "unknown");
    let mut names: Vec<String> = unknown.map(|entry| entry.name.clone()).collect();
    names.sort_unstable();
    names
}

fn is_ours(entry: &Entry) -> bool {
    let symbol = entry.symbol.iter();
    symbol
        .chain(entry.procedures.keys())
        .any(|place| place.starts_with(OURS))
}

/// Names whose lookups disagree with the table.
///
/// The table lists symbols. A result of `cuGetProcAddress` is compared by its symbol in the bare driver: `cuMemFree` of
/// CUDA 3.2 and later is `cuMemFree_v2`.
fn wrong(bare: &[Entry], hooked: &[Entry]) -> Vec<String> {
    let is_hooked = |entry: &Entry| {
        matches!(
            entry.class.as_str(),
            "counted" | "metered" | "virtualized" | "lookup"
        )
    };
    let hooked_places: BTreeSet<&str> = bare
        .iter()
        .filter(|entry| is_hooked(entry))
        .filter_map(|entry| entry.symbol.as_deref())
        .collect();
    let is_right = |before: &str, after: &str| {
        if hooked_places.contains(before) {
            after.starts_with(OURS)
        } else {
            after == before
        }
    };
    let bare: BTreeMap<&str, &Entry> = bare.iter().map(|e| (e.name.as_str(), e)).collect();
    hooked
        .iter()
        .filter(|entry| {
            let Some(before) = bare.get(entry.name.as_str()) else {
                return false;
            };
            let symbols = before.symbol.iter().zip(&entry.symbol);
            let (before, after) = (by_version(before), by_version(entry));
            !symbols
                .map(|(before, after)| (before.as_str(), after.as_str()))
                .chain(before.iter().map(|(version, before)| {
                    (*before, after.get(version).copied().unwrap_or_default())
                }))
                .all(|(before, after)| is_right(before, after))
        })
        .map(|entry| entry.name.clone())
        .collect()
}

/// Results of `cuGetProcAddress`, by version and flags.
fn by_version(entry: &Entry) -> BTreeMap<&str, &str> {
    entry
        .procedures
        .iter()
        .flat_map(|(place, versions)| {
            versions
                .iter()
                .map(move |version| (version.as_str(), place.as_str()))
        })
        .collect()
}

fn list(names: &[String]) -> String {
    const SHOWN: usize = 12;
    match names.len() {
        0 => "none".to_owned(),
        count if count <= SHOWN => names.join(", "),
        count => format!(
            "{} and {} more",
            names
                .iter()
                .take(SHOWN)
                .cloned()
                .collect::<Vec<_>>()
                .join(", "),
            count - SHOWN
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, class: &str, symbol: &str, procedure: &str) -> Entry {
        Entry {
            name: name.to_owned(),
            class: class.to_owned(),
            is_exported: true,
            symbol: Some(symbol.to_owned()),
            procedures: [(procedure.to_owned(), vec!["12000/0".to_owned()])].into(),
        }
    }

    #[test]
    fn reports_exports_without_class() {
        let bare = [
            entry("cuNew_v2", "unknown", "libcuda+0x2", "libcuda+0x2"),
            entry("cuMemAlloc_v2", "counted", "libcuda+0x1", "libcuda+0x1"),
        ];
        assert_eq!(unknown(&bare), ["cuNew_v2"]);
    }

    #[test]
    fn reports_missing_and_superfluous_hooks() {
        let bare = [
            entry("cuMemAlloc_v2", "counted", "libcuda+0x1", "libcuda+0x1"),
            entry("cuMemFree_v2", "counted", "libcuda+0x2", "libcuda+0x2"),
            entry("cuEventCreate", "passed", "libcuda+0x3", "libcuda+0x3"),
            entry("cuEventQuery", "passed", "libcuda+0x4", "libcuda+0x4"),
            // An old symbol; a lookup of its name returns the second version.
            entry("cuMemFree", "passed", "libcuda+0x5", "libcuda+0x2"),
        ];
        let hooked = [
            entry("cuMemAlloc_v2", "counted", "libvgpu+0x1", "libvgpu+0x1"),
            entry("cuMemFree_v2", "counted", "libvgpu+0x2", "libcuda+0x2"),
            entry("cuEventCreate", "passed", "libcuda+0x3", "libcuda+0x3"),
            entry("cuEventQuery", "passed", "libvgpu+0x4", "libcuda+0x4"),
            entry("cuMemFree", "passed", "libcuda+0x5", "libvgpu+0x2"),
        ];
        assert_eq!(wrong(&bare, &hooked), ["cuMemFree_v2", "cuEventQuery"]);
    }
}
