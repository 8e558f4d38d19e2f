//! Classifies every function of the CUDA driver API, and compares the classes with the hooks.
//!
//! | Class | Meaning |
//! |---|---|
//! | `lookup` | returns other functions; hooked |
//! | `counted` | allocates or frees memory of the share; hooked |
//! | `metered` | uses GPU time, or affects when GPU time can be measured; hooked |
//! | `virtualized` | reports the size of memory; hooked |
//! | `blocking` | copies between host and GPU, or waits; hooked for the demand of a suspended share only |
//! | `passed` | not hooked; uses neither GPU memory nor GPU time, or the note gives the reason |
//! | `uncounted` | allocates memory that is not counted; the note gives the reason |
//! | `unmetered` | uses GPU time that is not metered; the note gives the reason |

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use crate::{read, source_of_crate};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    Lookup,
    Counted,
    Virtualized,
    Metered,
    Blocking,
    Passed,
    Uncounted,
    Unmetered,
}

struct EntryPoint {
    class: Class,
    note: String,
}

fn entry_points() -> BTreeMap<String, EntryPoint> {
    read("entry-points.tsv")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let mut fields = line.split('\t');
            let name = fields.next().unwrap().to_owned();
            let class = match fields.next().unwrap() {
                "lookup" => Class::Lookup,
                "counted" => Class::Counted,
                "virtualized" => Class::Virtualized,
                "metered" => Class::Metered,
                "blocking" => Class::Blocking,
                "passed" => Class::Passed,
                "uncounted" => Class::Uncounted,
                "unmetered" => Class::Unmetered,
                other => panic!("{name} has the unknown class {other}"),
            };
            let note = fields.next().unwrap_or_default().to_owned();
            (name, EntryPoint { class, note })
        })
        .collect()
}

/// The CUDA functions in `hooks!`, without the suffixes for per-thread streams.
fn hooked() -> BTreeSet<String> {
    read("src/driver_api/functions.rs")
        .lines()
        .filter_map(|line| {
            let (_, hook) = line.strip_prefix("    ")?.split_once("Cuda ")?;
            let name = hook
                .split('(')
                .next()
                .filter(|name| name.starts_with("cu"))?;
            let name = name.trim_end_matches("_ptsz").trim_end_matches("_ptds");
            Some(name.to_owned())
        })
        .collect()
}

#[test]
fn hooks_exactly_the_functions_classified_as_hooked() {
    let asked_for: BTreeSet<String> = entry_points()
        .into_iter()
        .filter(|(_, entry)| {
            matches!(
                entry.class,
                Class::Lookup
                    | Class::Counted
                    | Class::Virtualized
                    | Class::Metered
                    | Class::Blocking
            )
        })
        .map(|(name, _)| name)
        .collect();
    assert_eq!(hooked(), asked_for);
}

/// Driver API functions in cudarc's bindings, which are generated from NVIDIA's headers of 11.4 to 13.x.
fn in_public_headers() -> BTreeSet<String> {
    source_of_crate("cudarc", "driver/sys/mod.rs")
        .split("fn ")
        .skip(1)
        .map(|rest| rest.split(|letter: char| !letter.is_alphanumeric() && letter != '_'))
        .filter_map(|mut words| words.next())
        .filter(|name| name.starts_with("cu") && name[2..].starts_with(char::is_uppercase))
        .map(|name| name.trim_end_matches("_ptsz").trim_end_matches("_ptds"))
        .map(String::from)
        .collect()
}

#[test]
fn classifies_every_function_of_public_headers() {
    let known = entry_points();
    let public = in_public_headers();
    assert!(public.len() > 500, "{}", public.len());
    let unknown: Vec<&String> = public
        .iter()
        .filter(|name| !known.contains_key(*name))
        .collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn hooks_or_justifies_suspicious_functions() {
    let suspicious = [
        "Alloc",
        "ArrayCreate",
        "MemCreate",
        "PoolCreate",
        "Import",
        "IpcOpenMem",
        "CtxCreate",
        "Launch",
        "Memcpy",
        "Memset",
        "Prefetch",
        "Cpy",
        "Capture",
        "SetLimit",
        "Load",
        "Bind",
        "Handle",
        "Decompress",
    ];
    // Queries, and settings of attributes.
    let harmless = ["Attribute", "Info", "Params", "Symbol"];
    for (name, entry) in entry_points() {
        let is_suspicious = suspicious.iter().any(|word| name.contains(word))
            && !harmless.iter().any(|word| name.contains(word));
        match entry.class {
            Class::Passed if is_suspicious => {
                assert!(
                    !entry.note.is_empty(),
                    "{name} is not hooked and has no note"
                );
            }
            Class::Uncounted | Class::Unmetered => {
                assert!(!entry.note.is_empty(), "{name} has no note");
            }
            Class::Lookup
            | Class::Counted
            | Class::Virtualized
            | Class::Metered
            | Class::Blocking
            | Class::Passed => {}
        }
    }
}

#[test]
fn classifies_every_function_of_simulated_driver() {
    let known = entry_points();
    let library = simulator_machine::testing::built()
        .unwrap()
        .join("libsimulator_cuda.so");
    let output = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--format=posix"])
        .arg(library)
        .output()
        .unwrap();
    let unknown: Vec<String> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| name.starts_with("cu"))
        .map(|name| name.trim_end_matches("_ptsz").trim_end_matches("_ptds"))
        // Unlisted on purpose: the node agent must detect memory that it allocates.
        .filter(|name| *name != "cuMemAllocUnlisted")
        .filter(|name| !known.contains_key(*name))
        .map(String::from)
        .collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}
