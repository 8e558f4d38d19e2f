//! Modules of a crate do not depend on each other in cycles, and in libvgpu only in one direction; the policies of the node
//! agent do no I/O. Read from `use` declarations and from paths that begin with `crate`.
//!
//! In each folder of modules, a module depends on a sibling when a file of the module names the sibling, or something
//! below it. Items of the parent are no dependency: siblings share them. Tests do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

/// A module: the names from the crate's root.
type Module = Vec<String>;

/// Modules of a crate with their sources.
type Sources = BTreeMap<Module, String>;

/// A group of sibling modules that depend on each other.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Cycle {
    parent: String,
    modules: Vec<String>,
}

/// Dependencies between the children of each parent.
type Edges = BTreeMap<Module, BTreeMap<String, BTreeSet<String>>>;

/// Returns the dependencies between siblings.
fn edges(sources: &Sources) -> Edges {
    let mut edges = Edges::new();
    for (module, source) in sources {
        for path in uses(source) {
            let Some(target) = resolve(sources, module, &path) else {
                continue;
            };
            let shared = module
                .iter()
                .zip(&target)
                .take_while(|(from, to)| from == to)
                .count();
            if let (Some(from), Some(to)) = (module.get(shared), target.get(shared)) {
                let siblings = edges.entry(module[..shared].to_vec()).or_default();
                siblings.entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    edges
}

/// Returns every cycle between siblings.
fn cycles(sources: &Sources) -> BTreeSet<Cycle> {
    let mut found = BTreeSet::new();
    for (parent, siblings) in &edges(sources) {
        for start in siblings.keys() {
            let reached = reachable(siblings, start);
            if reached.contains(start) {
                let modules = reached
                    .into_iter()
                    .filter(|other| reachable(siblings, other).contains(start));
                found.insert(Cycle {
                    parent: parent.join("::"),
                    modules: modules.collect(),
                });
            }
        }
    }
    found
}

/// The modules that `start` depends on, directly or not.
fn reachable(edges: &BTreeMap<String, BTreeSet<String>>, start: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut open = vec![start];
    while let Some(module) = open.pop() {
        for next in edges.get(module).into_iter().flatten() {
            if reached.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    reached
}

/// The module that a path in `module` leads to; none for another crate.
fn resolve(sources: &Sources, module: &[String], path: &[String]) -> Option<Module> {
    let mut target: Module;
    let mut rest = path;
    match path.first()?.as_str() {
        "crate" => {
            target = vec![];
            rest = &path[1..];
        }
        "self" => {
            target = module.to_vec();
            rest = &path[1..];
        }
        "super" => target = module.to_vec(),
        first => {
            target = module.to_vec();
            target.push(first.to_owned());
            if !sources.contains_key(&target) {
                return None;
            }
            rest = &path[1..];
        }
    }
    for segment in rest {
        if segment == "super" {
            target.pop();
            continue;
        }
        target.push(segment.clone());
        if !sources.contains_key(&target) {
            target.pop();
            break;
        }
    }
    Some(target)
}

/// The paths of every `use` declaration outside tests, and of every expression that begins with `crate`.
fn uses(source: &str) -> Vec<Vec<String>> {
    let mut paths = vec![];
    let mut declaration: Option<String> = None;
    for line in without_tests(source) {
        let line = line.split("//").next().unwrap_or(line).trim();
        match &mut declaration {
            Some(text) => text.push_str(line),
            None => {
                declaration = declared(line).map(str::to_owned);
                if declaration.is_none() {
                    paths.extend(inline_paths(line));
                }
            }
        }
        if let Some(text) = declaration.take_if(|text| text.ends_with(';')) {
            expand(vec![], text.trim_end_matches(';'), &mut paths);
        }
    }
    paths
}

/// The paths in a line that begin with `crate`. `$crate` in a macro is a dependency of its callers.
fn inline_paths(line: &str) -> impl Iterator<Item = Vec<String>> {
    let starts = line.match_indices("crate::");
    let starts = starts.filter(|(start, _)| !line[..*start].ends_with('$'));
    starts.map(|(start, _)| {
        let is_path = |character: char| character.is_alphanumeric() || "_:".contains(character);
        let path = line[start..].split(|character| !is_path(character)).next();
        let segments = path.unwrap_or_default().split("::");
        segments.map(str::to_owned).collect()
    })
}

/// The lines of a source up to its tests.
fn without_tests(source: &str) -> impl Iterator<Item = &str> {
    let mut lines = source.lines().peekable();
    std::iter::from_fn(move || {
        let line = lines.next()?;
        let is_test = line.trim() == "#[cfg(test)]"
            && lines
                .peek()
                .is_some_and(|next| next.starts_with("mod ") && next.ends_with('{'));
        (!is_test).then_some(line)
    })
}

/// The path of a line that starts a `use` declaration.
fn declared(line: &str) -> Option<&str> {
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.trim_start(),
        None => line,
    };
    line.strip_prefix("use ")
}

/// Adds the paths of a use tree such as `a::{b, c::{self, d}}`.
fn expand(prefix: Vec<String>, tree: &str, paths: &mut Vec<Vec<String>>) {
    let tree = tree.trim();
    let Some((head, group)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap_or(tree);
        let segments = path.split("::").map(str::trim).map(str::to_owned);
        paths.push(prefix.into_iter().chain(segments).collect());
        return;
    };
    let segments = head
        .split("::")
        .map(str::trim)
        .filter(|segment| !segment.is_empty());
    let prefix: Vec<String> = prefix
        .into_iter()
        .chain(segments.map(str::to_owned))
        .collect();
    let group = group.trim_end().strip_suffix('}').unwrap_or(group);
    let (mut depth, mut begin) = (0, 0);
    for (end, character) in group.char_indices().chain([(group.len(), ',')]) {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !group[begin..end].trim().is_empty() {
                    expand(prefix.clone(), &group[begin..end], paths);
                }
                begin = end + 1;
            }
            _ => {}
        }
    }
}

/// Reads the modules of a crate from its `src` folder.
fn read(folder: &Path) -> Result<Sources> {
    let mut sources = Sources::new();
    collect(folder, &[], &mut sources).with_context(|| format!("read {}", folder.display()))?;
    Ok(sources)
}

fn collect(folder: &Path, module: &[String], sources: &mut Sources) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().context("a file without a name")?;
        let name = name
            .to_str()
            .context("a name that is not UTF-8")?
            .to_owned();
        if name == "tests" || name == "bin" {
            continue;
        }
        let mut inner = module.to_vec();
        if !(module.is_empty() && ["lib", "main"].contains(&name.as_str())) {
            inner.push(name);
        }
        if path.is_dir() {
            collect(&path, &inner, sources)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path)?;
            sources.entry(inner).or_default().push_str(&text);
        }
    }
    Ok(())
}

/// Names and folders of the workspace's crates.
fn crates() -> Result<Vec<(String, PathBuf)>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--locked"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()?;
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    packages
        .iter()
        .map(|package| {
            let name = package["name"].as_str().context("no name")?;
            let manifest = package["manifest_path"].as_str().context("no manifest")?;
            let folder = Path::new(manifest).parent().context("no folder")?;
            Ok((name.to_owned(), folder.join("src")))
        })
        .collect()
}

#[test]
fn crates_have_no_module_cycles() {
    let crates = crates().unwrap();
    let found: BTreeSet<(String, Cycle)> = crates
        .iter()
        .flat_map(|(name, folder)| {
            let cycles = cycles(&read(folder).unwrap()).into_iter();
            cycles.map(|cycle| (name.clone(), cycle))
        })
        .collect();
    assert!(found.is_empty(), "cycles between modules: {found:#?}");
}

/// Top-level modules of crates in the direction of their dependencies: each depends only on those before it.
const ORDERS: [(&str, &[&str]); 3] = [
    (
        "libvgpu",
        &[
            "system",
            "driver_api",
            "accounts",
            "limits",
            "meter",
            "process",
            "current",
            "hooks",
            "wiring",
            "entry",
        ],
    ),
    (
        "drava-dra-driver",
        &[
            "gpus",
            "node",
            "mps",
            "prepare",
            "gpu_health",
            "report",
            "kubelet",
            "agent",
            "suspend",
            "repair",
            "operate",
            "metrics",
            "publish",
            "driver",
        ],
    ),
    (
        "drava-controller",
        &[
            "fixture",
            "pods",
            "watch",
            "action",
            "operate",
            "decide",
            "write",
            "admit",
            "explanations",
            "recommendations",
            "leader",
            "command",
        ],
    ),
];

/// Returns the dependencies of modules on later ones.
fn reversed(sources: &Sources, order: &[&str]) -> Vec<(String, String)> {
    let place = |module: &str| order.iter().position(|other| *other == module);
    let top = edges(sources).remove(&Module::new()).unwrap_or_default();
    let pairs = top.into_iter().flat_map(|(from, targets)| {
        let pair = move |to| (from.clone(), to);
        targets.into_iter().map(pair)
    });
    pairs
        .filter(|(from, to)| place(from).zip(place(to)).is_some_and(|(a, b)| a < b))
        .collect()
}

fn crate_sources(name: &str) -> Result<Sources> {
    let mut crates = crates()?.into_iter();
    let (_, folder) = crates.find(|(of, _)| of == name).context("no crate")?;
    read(&folder)
}

#[test]
fn crates_depend_in_one_direction() {
    for (name, order) in ORDERS {
        let sources = crate_sources(name).unwrap();
        let top = sources.keys().filter(|module| module.len() == 1);
        let mut modules: Vec<&str> = top.map(|module| module[0].as_str()).collect();
        modules.sort_unstable();
        let mut ordered = order.to_vec();
        ordered.sort_unstable();
        assert_eq!(modules, ordered, "{name}");
        assert_eq!(reversed(&sources, order), [], "{name}");
    }
}

/// What the policies of the node agent do not use: files, clocks, threads, NVML, logs, and the I/O of the agent.
const IMPURE: [&str; 8] = [
    "std::fs",
    "std::io",
    "std::time",
    "std::thread",
    "rustix",
    "tracing",
    "drava_nvml",
    "crate::agent::node",
];

#[test]
fn agent_policies_do_no_io() {
    let sources = crate_sources("drava-dra-driver").unwrap();
    let policies: Vec<_> = sources
        .iter()
        .filter(|(module, _)| module.join("::").starts_with("agent::policy::"))
        .collect();
    assert!(policies.len() > 10, "{}", policies.len());
    for (module, source) in policies {
        for path in uses(source) {
            let path = path.join("::");
            let is_impure = |name: &&str| path.starts_with(*name) || source.contains(*name);
            let found: Vec<_> = IMPURE.iter().filter(|name| is_impure(name)).collect();
            assert!(found.is_empty(), "{module:?} uses {found:?}");
        }
    }
}

#[test]
fn finds_reversed_dependency_by_inline_path() {
    let modules = [
        ("low", "fn f() { crate::high::g(&crate::other::X) }"),
        ("high", "use crate::low::f;"),
        ("other", ""),
    ];
    let pair = ("low".to_owned(), "high".to_owned());
    assert_eq!(reversed(&sources(&modules), &["low", "high"]), [pair]);
}

fn sources(modules: &[(&str, &str)]) -> Sources {
    let module = |path: &str| -> Module {
        let segments = path.split("::").filter(|segment| !segment.is_empty());
        segments.map(str::to_owned).collect()
    };
    modules
        .iter()
        .map(|(path, source)| (module(path), (*source).to_owned()))
        .collect()
}

fn found(modules: &[(&str, &str)]) -> Vec<(String, Vec<String>)> {
    let cycles = cycles(&sources(modules)).into_iter();
    cycles.map(|cycle| (cycle.parent, cycle.modules)).collect()
}

fn cycle(parent: &str, modules: &[&str]) -> (String, Vec<String>) {
    let modules = modules.iter().map(|module| (*module).to_owned());
    (parent.to_owned(), modules.collect())
}

#[test]
fn finds_cycle_of_top_level_modules() {
    let modules = [
        ("a", "use crate::b::c::X;"),
        ("b", ""),
        ("b::c", "pub(crate) use crate::d;"),
        ("d", "use super::a::Y;"),
        ("e", "use crate::a::Y;"),
    ];
    assert_eq!(found(&modules), [cycle("", &["a", "b", "d"])]);
}

#[test]
fn finds_cycle_of_nested_modules() {
    let modules = [
        ("a", "mod b; mod c; use b::X; use c::Y;"),
        ("a::b", "use super::c::{self, Y};"),
        ("a::c", "use crate::a::b::X as Z;"),
    ];
    assert_eq!(found(&modules), [cycle("a", &["b", "c"])]);
}

#[test]
fn accepts_parents_children_and_other_crates() {
    let modules = [
        ("", "use a::X;"),
        ("a", "use a::b; use std::b::Y;"),
        ("a::b", "use super::X; use crate::a::Z;"),
        ("b", "use crate::a::X;"),
    ];
    assert_eq!(found(&modules), []);
}

#[test]
fn ignores_tests_and_comments() {
    let test = "#[cfg(test)]\nmod tests {\n    use crate::b::X;\n}\n";
    let modules = [
        ("a", test),
        ("b", "use crate::a::X;"),
        ("c", "// use crate::b::X;\n"),
    ];
    assert_eq!(found(&modules), []);
}

#[test]
fn reads_grouped_declarations_over_lines() {
    let source = "use crate::{\n    a::{self, B as C},\n    d,\n};\npub use e::*;";
    let paths: Vec<String> = uses(source).iter().map(|path| path.join("::")).collect();
    assert_eq!(paths, ["crate::a::self", "crate::a::B", "crate::d", "e::*"]);
}
