//! Classifies every function and field of NVML, and compares the classes with the hooks.
//!
//! | Class | Meaning |
//! |---|---|
//! | `answered` | reports the share; hooked |
//! | `hidden` | NVML has the value of the whole GPU with all shares only: not supported in a share; hooked |
//! | `passed` | not hooked: a property of the GPU, the state of its board, or about the caller; the note gives the reason where the name suggests another class |
//! | `privileged` | not hooked: changes the GPU, which NVIDIA's driver permits to administrators of the node only |

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use simulator_machine::testing::python;

use crate::{read, source_of_crate};

/// Rows of a table: the fields of each by its name.
fn rows(file: &str) -> BTreeMap<String, Vec<String>> {
    let text = read(file);
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let rows: Vec<(String, Vec<String>)> = lines
        .map(|line| {
            let mut fields = line.split('\t').map(str::to_owned);
            (fields.next().unwrap(), fields.collect())
        })
        .collect();
    let (count, map) = (rows.len(), BTreeMap::from_iter(rows));
    assert_eq!(map.len(), count, "{file} has a name twice");
    map
}

/// Class and note of each function.
fn functions() -> BTreeMap<String, (String, String)> {
    let row = |(name, fields): (String, Vec<String>)| {
        let class = fields[0].clone();
        let is_known = ["answered", "hidden", "passed", "privileged"].contains(&class.as_str());
        assert!(is_known, "{name} has the unknown class {class}");
        (name, (class, fields.get(1).cloned().unwrap_or_default()))
    };
    rows("nvml-entry-points.tsv").into_iter().map(row).collect()
}

fn is_hooked(class: &str) -> bool {
    matches!(class, "answered" | "hidden")
}

#[test]
fn hooks_exactly_the_functions_of_the_share() {
    let table = read("src/driver_api/functions.rs");
    let hook = |line: &str| {
        let (_, hook) = line.strip_prefix("    ")?.split_once("Nvml ")?;
        Some(hook.split('(').next()?.to_owned())
    };
    let hooked: BTreeSet<String> = table.lines().filter_map(hook).collect();
    let classified = functions().into_iter();
    let expected: BTreeSet<String> = classified
        .filter(|(_, (class, _))| is_hooked(class))
        .map(|(name, _)| name)
        .collect();
    assert_eq!(hooked, expected);
}

/// Names that begin with `prefix` in the newest binding of NVIDIA; `None` without Python.
fn in_binding(script: &str) -> Option<BTreeSet<String>> {
    if python::is_unavailable() {
        return None;
    }
    let interpreter = python::clients().unwrap().join("python");
    let output = Command::new(interpreter).args(["-c", script]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    Some(text.split_whitespace().map(str::to_owned).collect())
}

/// Names in the binding of the crate nvml-wrapper-sys, which has old versions of functions, too.
fn in_public_header() -> BTreeSet<String> {
    let source = source_of_crate("nvml-wrapper-sys", "bindings.rs");
    let names = source.split("b\"nvml").skip(1);
    names
        .filter_map(|rest| {
            rest.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
                .next()
        })
        .map(|name| format!("nvml{name}"))
        .collect()
}

#[test]
fn classifies_every_function_of_nvml() {
    let mut public = in_public_header();
    assert!(public.len() > 390, "{}", public.len());
    let looked_up = r#"
import pynvml, re
print(*re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"', open(pynvml.__file__).read()))"#;
    public.extend(in_binding(looked_up).unwrap_or_default());
    let known = functions();
    let unknown: Vec<_> = public
        .iter()
        .filter(|name| !known.contains_key(*name))
        .collect();
    assert!(
        unknown.is_empty(),
        "not in nvml-entry-points.tsv: {unknown:?}"
    );
    if !python::is_unavailable() {
        let gone: Vec<_> = known
            .keys()
            .filter(|name| !public.contains(*name))
            .collect();
        assert!(gone.is_empty(), "no functions of NVML: {gone:?}");
    }
}

#[test]
fn justifies_every_function_that_may_show_other_shares() {
    let suspicious = [
        "Util",
        "Usage",
        "Process",
        "Pids",
        "Session",
        "Stats",
        "Sample",
        "Throughput",
        "Counter",
        "Memory",
        "Capacity",
        "Energy",
        "Limits",
        "Metrics",
        "Xid",
        "Event",
        "Vgpu",
    ];
    for (name, (class, note)) in functions() {
        let is_suspicious = suspicious.iter().any(|word| name.contains(word));
        if class == "passed" && is_suspicious {
            assert!(!note.is_empty(), "{name} is not hooked and has no note");
        }
    }
}

#[test]
fn classifies_every_field_of_nvml() {
    let known = rows("nvml-fields.tsv");
    let fields = "
import pynvml
ids = {n: v for n, v in vars(pynvml).items() if n.startswith('NVML_FI_') and n != 'NVML_FI_MAX'}
print(*(f'{n}={v}' for n, v in ids.items() if not n.startswith('NVML_FI_DEV_CLOCKS_EVENT_REASON_S') or v > 100))";
    let Some(fields) = in_binding(fields) else {
        return;
    };
    let listed: BTreeSet<String> = known
        .iter()
        .map(|(name, fields)| format!("{name}={}", fields[0]))
        .collect();
    let missing: Vec<_> = fields.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&fields).collect();
    assert!(
        missing.is_empty() && gone.is_empty(),
        "{missing:?} {gone:?}"
    );
    // Counters of traffic are those of all shares.
    for (name, fields) in known {
        let is_traffic = [
            "BANDWIDTH",
            "THROUGHPUT",
            "_BYTES",
            "_PACKETS",
            "_BLOCKS",
            "STALL",
        ];
        let is_traffic = is_traffic.iter().any(|word| name.contains(word));
        assert_eq!(
            fields[1],
            if is_traffic { "hidden" } else { "passed" },
            "{name}"
        );
    }
}
