//! Resolves every entry point that is known or exported, in every way: see [`crate::lookup`].
//!
//! The difference between runs with and without libvgpu is the set of functions that libvgpu replaces.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_void};

use anyhow::Result;
use serde::Serialize;

use crate::exports;
use crate::lookup::{Driver, Library};

/// Names and classes; libvgpu's tests use the same table.
const TABLE: &str = include_str!("../../../libvgpu/entry-points.tsv");

/// The functions that libvgpu replaces, among them those of NVML, which have no table.
const REPLACED: &str = include_str!("../../../libvgpu/src/driver_api/functions.rs");

/// Suffixes that the table omits.
const SUFFIXES: [&str; 3] = ["", "_ptsz", "_ptds"];

/// Class of an exported function that the table does not contain.
const UNKNOWN: &str = "unknown";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    name: String,
    class: &'static str,
    /// Whether the library's ELF file defines it.
    is_exported: bool,
    /// The result of `dlsym`; absent if the library has no such symbol.
    #[serde(skip_serializing_if = "Option::is_none")]
    symbol: Option<Location>,
    /// The results of `cuGetProcAddress`, with the forms, versions and flags that return them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    procedures: BTreeMap<String, Vec<String>>,
}

/// An address that can be compared between processes.
#[derive(Serialize, PartialEq, Eq, PartialOrd, Ord, Clone)]
struct Location(String);

impl Location {
    fn of(address: *const c_void) -> Self {
        // SAFETY: all zeroes is a value of this plain C struct.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: writes the struct; any address may be asked for.
        let found = unsafe { libc::dladdr(address, &raw mut info) };
        if found == 0 || info.dli_fname.is_null() {
            return Self("nowhere".to_owned());
        }
        // SAFETY: not null, hence a terminated string that lives as long as the library.
        let path = unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy();
        let file = path.rsplit('/').next().unwrap_or_default();
        // The build number at the end of the file name of NVIDIA's library is irrelevant.
        let library = file.split(".so").next().unwrap_or(file);
        let offset = address.addr() - info.dli_fbase.addr();
        Self(format!("{library}+{offset:#x}"))
    }
}

pub(crate) fn run() -> Result<()> {
    let mut entries = of_cuda()?;
    entries.extend(of_nvml()?);
    crate::print(&entries)
}

/// Entry points of the CUDA driver API. The library exports the interface of debuggers (`cudbg…`), too, which is not part of
/// that API.
fn of_cuda() -> Result<Vec<Entry>> {
    let driver = Driver::open()?;
    let classes = classes();
    let exported = exported("libcuda.so", |name| {
        let rest = name.strip_prefix("cu").and_then(|rest| rest.chars().next());
        rest.is_some_and(|first| first.is_ascii_uppercase())
    })?;
    let known = classes.keys().flat_map(|base| {
        let name = |suffix: &&str| format!("{base}{suffix}");
        SUFFIXES.iter().map(name).collect::<Vec<_>>()
    });
    let names: BTreeSet<String> = known.chain(exported.iter().cloned()).collect();
    let mut entries = Vec::new();
    for name in names {
        let base = SUFFIXES
            .iter()
            .rev()
            .find_map(|suffix| name.strip_suffix(suffix));
        let base = base.unwrap_or(&name);
        let symbol = driver.library.symbol(&name)?;
        let mut procedures = BTreeMap::<String, Vec<String>>::new();
        if base == name {
            for procedure in driver.procedures(&name)? {
                let Location(location) = Location::of(procedure.address);
                let lookups = procedures.entry(location).or_default();
                lookups.push(procedure.to_string());
            }
        }
        if symbol.is_some() || !procedures.is_empty() {
            entries.push(Entry {
                class: classes.get(base).copied().unwrap_or(UNKNOWN),
                is_exported: exported.contains(&name),
                symbol: symbol.map(|symbol| Location::of(symbol)),
                procedures,
                name,
            });
        }
    }
    Ok(entries)
}

/// Classes of CUDA's functions, by their names without [`SUFFIXES`].
fn classes() -> BTreeMap<&'static str, &'static str> {
    let lines = TABLE.lines().filter(|line| !line.starts_with('#'));
    let rows = lines.filter_map(|line| {
        let mut columns = line.split('\t');
        Some((columns.next()?, columns.next()?))
    });
    rows.collect()
}

/// Exported functions of NVML; none if it is not installed. Programs find them by `dlsym` only.
fn of_nvml() -> Result<Vec<Entry>> {
    let Ok(library) = Library::open(c"libnvidia-ml.so.1") else {
        return Ok(Vec::new());
    };
    let replaced: BTreeSet<&str> = REPLACED
        .lines()
        .filter_map(|line| line.split_once(" Nvml ")?.1.split('(').next())
        .collect();
    let replaced_bases: BTreeSet<&str> =
        replaced.iter().map(|name| without_version(name)).collect();
    let exported = exported("libnvidia-ml.so", |name| name.starts_with("nvml"))?;
    let entries = exported.into_iter().map(|name| {
        let class = if replaced.contains(name.as_str()) {
            "virtualized"
        } else if replaced_bases.contains(without_version(&name)) {
            // Another version of a replaced function.
            UNKNOWN
        } else {
            "passed"
        };
        Ok(Entry {
            class,
            is_exported: true,
            symbol: library.symbol(&name)?.map(|symbol| Location::of(symbol)),
            procedures: BTreeMap::new(),
            name,
        })
    });
    entries.collect()
}

/// Returns a name without `_v2`.
fn without_version(name: &str) -> &str {
    let base = name.trim_end_matches(|last: char| last.is_ascii_digit());
    base.strip_suffix("_v").unwrap_or(name)
}

/// Names that a library exports and `is_included` accepts.
fn exported(library: &str, is_included: impl Fn(&str) -> bool) -> Result<BTreeSet<String>> {
    let file = std::fs::read(exports::file_of(library)?)?;
    let mut names = exports::functions(&file)?;
    names.retain(|name| is_included(name));
    Ok(names)
}
