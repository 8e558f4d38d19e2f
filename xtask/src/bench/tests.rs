//! Each bench has a page and its measurements, and `docs/results/README.md` names them.

use std::collections::BTreeSet;
use std::fs;

use clap::Parser;

use super::*;

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    args: Args,
}

fn args(line: &str) -> Args {
    CommandLine::parse_from(line.split(' ')).args
}

#[test]
fn writes_measurements_beside_page() {
    let (page, measurements) = args("bench hook").files();
    assert!(page.ends_with("docs/results/raw/hook.md"), "{page:?}");
    assert_eq!(measurements, page.with_extension("json"));
    let (page, measurements) = args("bench share-agent --only two --markdown a/two.md").files();
    assert_eq!(page, PathBuf::from("a/two.md"));
    assert_eq!(measurements, PathBuf::from("a/two.json"));
}

#[test]
fn gives_each_bench_a_page_of_its_own() {
    let names: Vec<Name> = Name::benches().collect();
    let pages: BTreeSet<PathBuf> = names
        .iter()
        .map(|name| args(&format!("bench {}", name.text())).files().0)
        .collect();
    assert_eq!(pages.len(), names.len(), "{pages:?}");
}

#[test]
fn pages_show_their_measurements() {
    let differences: Vec<String> = Name::benches()
        .filter_map(|name| {
            let (page, json) = args(&format!("bench {}", name.text())).files();
            let difference = report::check(&page, &json).err()?;
            Some(format!("{difference:#}"))
        })
        .collect();
    assert!(differences.is_empty(), "{differences:#?}");
}

/// Files of `docs/results/raw` with that extension.
fn results(extension: &str) -> BTreeSet<String> {
    let folder = drava_cluster::workspace_root().join("docs/results/raw");
    let names = fs::read_dir(folder).unwrap().map(|entry| {
        let name = entry.unwrap().file_name();
        name.into_string().unwrap()
    });
    names.filter(|name| name.ends_with(extension)).collect()
}

#[test]
fn summary_names_every_file() {
    let path = drava_cluster::workspace_root().join("docs/results/README.md");
    let summary = fs::read_to_string(path).unwrap();
    let mut files = results(".json");
    files.extend(results(".md"));
    assert!(files.len() > 20, "{files:?}");
    files.retain(|file| !summary.contains(&format!("](raw/{file})")));
    assert!(files.is_empty(), "not in the summary: {files:?}");
}

#[test]
fn summary_lists_page_of_every_bench() {
    let path = drava_cluster::workspace_root().join("docs/results/README.md");
    let summary = fs::read_to_string(path).unwrap();
    let rows: BTreeSet<&str> = summary
        .lines()
        .filter_map(|line| {
            line.strip_prefix("| `cargo xtask bench ")?
                .split('`')
                .next()
        })
        .collect();
    let benches: BTreeSet<&str> = Name::benches().map(Name::text).collect();
    assert_eq!(rows, benches);
}
