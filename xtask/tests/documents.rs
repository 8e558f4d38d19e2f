//! Documents name what exists: files, headings, commands, chart values, reason codes.

#![allow(
    clippy::expect_used,
    reason = "the files of the repository are there, or the test fails"
)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is below the repository root")
        .to_owned()
}

/// The documents with their paths below the repository root.
fn documents() -> Vec<(PathBuf, String)> {
    let root = root();
    let mut paths = ["README.md", "CONTRIBUTING.md", "libvgpu/README.md"]
        .map(PathBuf::from)
        .to_vec();
    for folder in [
        "docs",
        "docs/reference",
        "docs/adr",
        "docs/results",
        "docs/results/raw",
    ] {
        let entries = fs::read_dir(root.join(folder)).expect(folder);
        let names = entries.map(|entry| entry.expect(folder).file_name());
        paths.extend(
            names
                .map(|name| Path::new(folder).join(name))
                .filter(|path| path.extension().is_some_and(|extension| extension == "md")),
        );
    }
    paths.sort();
    let read = |path: PathBuf| {
        let text = fs::read_to_string(root.join(&path)).expect("the document is readable");
        (path, text)
    };
    paths.into_iter().map(read).collect()
}

/// Lines outside of blocks that are fenced by backticks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// Returns the targets of the links of a document.
fn links(text: &str) -> Vec<&str> {
    let mut links = Vec::new();
    for line in prose(text) {
        for part in line.split("](").skip(1) {
            links.extend(part.split_once(')').map(|(target, _)| target));
        }
    }
    links
}

/// Returns the anchors of a document's headings, as on GitHub.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let title = heading.trim_start_matches('#').trim().to_lowercase();
        title
            .chars()
            .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect()
    };
    headings.map(anchor).collect()
}

/// Returns the words that follow `command` in the documents, with the document.
fn words_after(command: &str) -> BTreeSet<(String, PathBuf)> {
    let mut words = BTreeSet::new();
    for (path, text) in documents() {
        for part in text.split(command).skip(1) {
            let word: String = part
                .chars()
                .take_while(|c| c.is_ascii_lowercase() || *c == '-')
                .collect();
            if !word.is_empty() && !word.starts_with('-') {
                words.insert((word, path.clone()));
            }
        }
    }
    assert!(words.len() > 3, "{command}: {words:?}");
    words
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut broken = Vec::new();
    for (path, text) in documents() {
        let folder = root().join(path.parent().expect("a file has a folder"));
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = folder.join(file);
            let target = if file.is_empty() {
                root().join(&path)
            } else {
                target
            };
            let is_found = target.exists()
                && (anchor.is_empty()
                    || fs::read_to_string(&target)
                        .is_ok_and(|text| anchors(&text).contains(anchor)));
            if !is_found {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// One screen for each question: what is added goes into `docs`, or replaces something.
#[test]
fn readme_stays_short() {
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    let words = readme.split_whitespace().count();
    assert!(words <= 900, "README.md has {words} words");
}

#[test]
fn index_names_every_page() {
    let index = fs::read_to_string(root().join("docs/README.md")).expect("docs/README.md");
    let targets = links(&index);
    let missing: Vec<_> = documents()
        .into_iter()
        .filter_map(|(path, _)| Some(path.strip_prefix("docs").ok()?.to_owned()))
        .filter(|page| !page.starts_with("adr") && !page.starts_with("results"))
        .filter(|page| page != Path::new("README.md"))
        .filter(|page| !targets.iter().any(|target| Path::new(target) == page))
        .collect();
    assert!(missing.is_empty(), "docs/README.md lacks {missing:?}");
}

#[test]
fn examples_have_a_row() {
    let page = fs::read_to_string(root().join("docs/examples.md")).expect("docs/examples.md");
    let targets = links(&page);
    let examples = fs::read_dir(root().join("deploy/examples")).expect("the examples");
    let missing: Vec<_> = examples
        .map(|example| example.expect("an example").file_name())
        .map(|name| format!("../deploy/examples/{}", name.to_string_lossy()))
        .filter(|example| !targets.contains(&example.as_str()))
        .collect();
    assert!(missing.is_empty(), "docs/examples.md lacks {missing:?}");
}

/// Who has no demo replaces the image of the examples by the command of the page.
#[test]
fn examples_have_the_image_that_their_page_replaces() {
    let page = fs::read_to_string(root().join("docs/examples.md")).expect("docs/examples.md");
    let (_, image) = page.split_once("\nsed 's#").expect("a command");
    let (image, _) = image.split_once('#').expect("the image of the demo");
    let examples = fs::read_dir(root().join("deploy/examples")).expect("the examples");
    let files = examples.flat_map(|example| {
        let folder = example.expect("an example").path();
        fs::read_dir(folder).expect("the files of an example")
    });
    let mut pods = 0;
    for file in files {
        let path = file.expect("a file").path();
        let text = fs::read_to_string(&path).unwrap_or_default();
        let images = text
            .lines()
            .filter_map(|line| line.trim_start().strip_prefix("image: "));
        for found in images {
            assert_eq!(found, image, "{}", path.display());
            pods += 1;
        }
    }
    assert!(pods > 40, "{pods} images");
}

/// All Rust sources of a folder.
fn sources(folder: &Path) -> String {
    let entries = fs::read_dir(folder).expect("a folder of sources");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .map(|path| {
            if path.is_dir() {
                sources(&path)
            } else {
                fs::read_to_string(&path).expect("a source")
            }
        })
        .collect()
}

/// Replaces the values of format strings, such as `{name}` and `{name:?}`, as the pages do.
fn without_values(source: &str) -> String {
    let mut parts = source.split('{');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let value = part.split_once('}').filter(|(name, _)| {
            let is_part = |letter: char| letter.is_alphanumeric() || "_:?".contains(letter);
            !name.is_empty() && name.chars().all(is_part)
        });
        match value {
            Some((_, rest)) => text.extend(["…", rest]),
            None => text.extend(["{", part]),
        }
    }
    text
}

#[test]
fn troubleshooting_quotes_texts_of_node_driver() {
    let text = fs::read_to_string(root().join("docs/troubleshooting.md")).expect("troubleshooting");
    let (_, section) = text
        .split_once("## The container does not start")
        .expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    // The driver passes on the texts of discovery, and the runtime those of the hook.
    let folders = ["dra-driver/src", "cdi/src", "cdi/hook/src"];
    let sources: String = folders
        .iter()
        .map(|folder| sources(&root().join(folder)))
        .collect();
    let sources = without_values(&sources);
    let quoted: Vec<&str> = section
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .filter(|text| !text.starts_with("DRA driver")) // kubelet's
        .collect();
    assert!(quoted.len() > 4, "{quoted:?}");
    let unknown: Vec<_> = quoted
        .into_iter()
        .filter(|text| !sources.contains(text))
        .collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn commands_of_xtask_exist() {
    let help = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .arg("--help")
        .output()
        .expect("xtask runs");
    let help = String::from_utf8(help.stdout).expect("help is UTF-8");
    let commands: BTreeSet<&str> = help
        .lines()
        .filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next())
        .collect();
    let unknown: Vec<_> = words_after("cargo xtask ")
        .into_iter()
        .filter(|(word, _)| !commands.contains(word.as_str()))
        .collect();
    assert!(unknown.is_empty(), "{unknown:?} of {commands:?}");
}

#[test]
fn commands_of_kubectl_plugin_exist() {
    let source = fs::read_to_string(root().join("cli/src/main.rs")).expect("cli/src/main.rs");
    let (_, variants) = source.split_once("enum Command {").expect("the commands");
    let (variants, _) = variants.split_once("\n}").expect("their end");
    let commands: BTreeSet<String> = variants
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .filter(|line| line.starts_with(char::is_uppercase))
        .map(|line| {
            let name: String = line.chars().take_while(|c| c.is_alphanumeric()).collect();
            let mut kebab = String::new();
            for (index, c) in name.chars().enumerate() {
                if c.is_uppercase() && index > 0 {
                    kebab.push('-');
                }
                kebab.extend(c.to_lowercase());
            }
            kebab
        })
        .collect();
    let unknown: Vec<_> = words_after("kubectl drava ")
        .into_iter()
        .filter(|(word, _)| !commands.contains(word) && word != "is")
        .collect();
    assert!(unknown.is_empty(), "{unknown:?} of {commands:?}");
}

#[test]
fn chart_values_exist() {
    let values = ["drava", "gpu-simulator"].map(|chart| {
        let file = root().join(format!("deploy/helm/{chart}/values.yaml"));
        let values = fs::read_to_string(file).expect("values");
        serde_saphyr::from_str::<Value>(&values).expect("values are YAML")
    });
    let mut unknown = Vec::new();
    for (path, text) in documents() {
        for part in text.split("--set ").skip(1) {
            let Some((name, _)) = part.split_once('=') else {
                continue;
            };
            // A quoted name may select an element of a list.
            let name = name.trim_start_matches(['\'', '"']);
            let list = name.split('[').next().unwrap_or(name);
            let pointer = format!("/{}", list.replace('.', "/"));
            let is_known = values.iter().any(|chart| chart.pointer(&pointer).is_some());
            if !is_known {
                unknown.push(format!("{}: {name}", path.display()));
            }
        }
    }
    assert!(unknown.is_empty(), "{unknown:#?}");
}

#[test]
fn troubleshooting_names_existing_reasons() {
    let reference = fs::read_to_string(root().join("docs/reference/events.md")).expect("events");
    let text = fs::read_to_string(root().join("docs/troubleshooting.md")).expect("troubleshooting");
    let is_code = |word: &str| {
        let mut chars = word.chars();
        chars.next().is_some_and(char::is_uppercase)
            && word.chars().all(char::is_alphanumeric)
            && chars.any(char::is_uppercase)
            && word.chars().any(char::is_lowercase)
    };
    // What the first words in backticks of Kubernetes and of claims are.
    let foreign = ["ASan", "RuntimeClass", "SchedulingGated"];
    let codes: BTreeSet<&str> = text
        .split('`')
        .skip(1)
        .step_by(2)
        .filter_map(|span| span.split_whitespace().next())
        .filter(|word| is_code(word) && !foreign.contains(word))
        .collect();
    assert!(codes.len() > 15, "{codes:?}");
    let unknown: Vec<_> = codes
        .iter()
        .filter(|code| !reference.contains(&format!("`{code}`")))
        .collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    // Each reason for which a pod waits has a row with what helps.
    let (_, reasons) = reference
        .split_once("\n## Reason codes\n")
        .expect("the reasons");
    let (reasons, _) = reasons.split_once("\n## ").unwrap_or((reasons, ""));
    let missing: Vec<&str> = reasons
        .lines()
        .filter_map(|row| row.strip_prefix("| `")?.split('`').next())
        .filter(|code| !text.contains(&format!("`{code}")))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}
