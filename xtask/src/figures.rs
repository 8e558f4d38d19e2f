//! `cargo xtask figures`: how large the crates are. Files and lines count without tests, lines also without comments and blank
//! lines; types, structs and enums, per 1,000 of all lines.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Folders of crates that are no part of the product.
const NO_PRODUCT: [&str; 4] = ["tests", "simulator", "xtask", "findings"];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Checkout to measure, for example a worktree of an older commit.
    #[arg(default_value = ".")]
    checkout: PathBuf,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Figures {
    files: usize,
    lines: usize,
    all_files: usize,
    all_lines: usize,
    types: usize,
}

impl Figures {
    fn add(&mut self, other: Self) {
        self.files += other.files;
        self.lines += other.lines;
        self.all_files += other.all_files;
        self.all_lines += other.all_lines;
        self.types += other.types;
    }

    /// Returns the line of the table.
    fn row(self, name: &str) -> String {
        let tenths = self.types * 10_000 / self.all_lines.max(1);
        format!(
            "{name:<24} {:>6} {:>7} {:>10} {:>10} {:>9}.{}",
            self.files,
            self.lines,
            self.all_files,
            self.all_lines,
            tenths / 10,
            tenths % 10
        )
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let crates = crates(&args.checkout)?;
    println!("crate                     files   lines  all files  all lines types/1,000");
    let mut product = Figures::default();
    for (folder, figures) in &crates {
        let is_product = !NO_PRODUCT.iter().any(|other| folder.starts_with(other));
        if is_product {
            product.add(*figures);
            println!("{}", figures.row(&folder.display().to_string()));
        }
    }
    println!("{}", product.row("product"));
    let mut others: BTreeMap<&str, Figures> = BTreeMap::new();
    for (folder, figures) in &crates {
        if let Some(of) = NO_PRODUCT.iter().find(|other| folder.starts_with(other)) {
            others.entry(of).or_default().add(*figures);
        }
    }
    for (name, figures) in others {
        println!("{}", figures.row(name));
    }
    Ok(())
}

/// Returns the figures of every crate with sources, by its folder.
fn crates(checkout: &Path) -> Result<BTreeMap<PathBuf, Figures>> {
    let mut found: BTreeMap<PathBuf, Figures> = BTreeMap::new();
    let mut open = vec![(checkout.to_owned(), PathBuf::new())];
    while let Some((folder, mut of)) = open.pop() {
        let sources = folder.join("src");
        if folder.join("Cargo.toml").is_file() && sources.is_dir() {
            of = folder.strip_prefix(checkout).unwrap_or(&folder).to_owned();
            measure(&sources, found.entry(of.clone()).or_default())?;
        }
        for (name, path) in entries(&folder)? {
            if path.is_dir() && !name.starts_with('.') && name != "target" {
                open.push((path, of.clone()));
            } else if name.ends_with(".rs") {
                let figures = found.entry(of.clone()).or_default();
                let source = read(&path)?;
                figures.all_files += 1;
                figures.all_lines += source.lines().count();
                figures.types += source.lines().filter(|line| is_type(line)).count();
            }
        }
    }
    Ok(found)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

/// Returns whether the line begins a struct or an enum.
fn is_type(line: &str) -> bool {
    let line = line.trim_start();
    let item = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ").map_or("", |(_, item)| item),
        Some(rest) => rest.trim_start(),
        None => line,
    };
    ["struct ", "enum ", "union "]
        .iter()
        .any(|keyword| item.starts_with(keyword))
}

/// Adds the modules of a folder that are no tests.
fn measure(folder: &Path, figures: &mut Figures) -> Result<()> {
    let mut folders = Vec::new();
    let mut tests = BTreeSet::from(["tests".to_owned()]);
    let mut sources = Vec::new();
    for (name, path) in entries(folder)? {
        if path.is_dir() {
            folders.push((name, path));
        } else if let Some(module) = name.strip_suffix(".rs") {
            let text = read(&path)?;
            // A module of the crate's root is beside it, one of another file in its folder.
            if ["lib", "main"].contains(&module) {
                tests.extend(test_modules(&text));
            }
            sources.push((module.to_owned(), text));
        }
    }
    tests.extend(
        parent_source(folder)?
            .iter()
            .flat_map(|text| test_modules(text)),
    );
    for (_, text) in sources.iter().filter(|(module, _)| !tests.contains(module)) {
        figures.add(of_source(text));
    }
    for (name, path) in folders {
        if !tests.contains(&name) {
            measure(&path, figures)?;
        }
    }
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let read = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    read.map(|entry| {
        let entry = entry?;
        Ok((
            entry.file_name().to_string_lossy().into_owned(),
            entry.path(),
        ))
    })
    .collect()
}

/// Returns the source of the module whose submodules are in this folder.
fn parent_source(folder: &Path) -> Result<Option<String>> {
    let source = folder.with_extension("rs");
    if !source.is_file() {
        return Ok(None);
    }
    let text = fs::read_to_string(&source);
    Ok(Some(
        text.with_context(|| format!("read {}", source.display()))?,
    ))
}

/// Returns the names of the modules in other files that are built for tests only.
fn test_modules(source: &str) -> impl Iterator<Item = String> {
    let lines = source.lines().zip(source.lines().skip(1));
    lines
        .filter(|(line, _)| line.trim() == "#[cfg(test)]")
        .filter_map(|(_, next)| Some(next.split_once("mod ")?.1.strip_suffix(';')?.to_owned()))
}

/// Counts the lines up to the tests.
fn of_source(source: &str) -> Figures {
    let mut figures = Figures {
        files: 1,
        ..Figures::default()
    };
    let mut lines = source.lines().map(str::trim).peekable();
    while let Some(line) = lines.next() {
        let begins_tests = |next: &&str| next.starts_with("mod ") && next.ends_with('{');
        if line == "#[cfg(test)]" && lines.peek().is_some_and(begins_tests) {
            break;
        }
        if line.is_empty() || line.starts_with("//") {
            continue;
        }
        figures.lines += 1;
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_lines_and_types() {
        let source = "//! A module.\n\nuse a::b;\n\n/// A type.\npub(crate) struct A;\nenum B {}\n\n#[cfg(test)]\nmod tests {\n    struct C;\n}\n";
        let expected = Figures {
            files: 1,
            lines: 3,
            ..Figures::default()
        };
        assert_eq!(of_source(source), expected);
        assert_eq!(source.lines().filter(|line| is_type(line)).count(), 3);
    }

    #[test]
    fn finds_modules_of_tests() {
        let source = "mod a;\n#[cfg(test)]\nmod fixture;\n#[cfg(test)]\npub(crate) mod model;\n";
        assert_eq!(
            test_modules(source).collect::<Vec<_>>(),
            ["fixture", "model"]
        );
    }
}
