//! Checks that every test named in `docs/security.md` exists, and that every claim of its tables names one.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

use std::path::Path;

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Pairs of file and test on the page: `file.rs` `test`, and further tests of the file after it.
fn named_tests(page: &str) -> Vec<(String, String)> {
    let quoted = page.split('`').skip(1).step_by(2);
    let mut file = None;
    let mut named = Vec::new();
    for word in quoted {
        if word.ends_with(".rs") && word.contains('/') {
            file = Some(word);
        } else if let Some(file) = file.filter(|_| is_name(word)) {
            named.push((file.to_owned(), word.to_owned()));
        }
    }
    named
}

fn is_name(text: &str) -> bool {
    text.contains('_')
        && text
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

#[test]
fn names_existing_tests_on_security_page() {
    let page = std::fs::read_to_string(workspace().join("docs/security.md")).unwrap();
    let named = named_tests(&page);
    assert!(named.len() > 50, "{named:?}");
    for (file, test) in named {
        let source = std::fs::read_to_string(workspace().join(&file)).unwrap();
        assert!(
            source.split("#[").skip(1).any(|item| {
                let is_test = item.starts_with("test]") || item.starts_with("tokio::test");
                is_test && item.contains(&format!("fn {test}("))
            }),
            "{file} has no test {test}"
        );
    }
}

/// Rows of the tables of a section.
fn rows<'a>(page: &'a str, section: &str) -> Vec<&'a str> {
    let section = page.split(&format!("\n## {section}\n")).nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let section = section.split("\n### ").next().unwrap();
    let lines = section.lines().filter(|line| line.starts_with("| "));
    lines.skip(1).collect()
}

#[test]
fn names_a_test_for_each_security_claim() {
    let page = std::fs::read_to_string(workspace().join("docs/security.md")).unwrap();
    for (section, least) in [
        ("Prevented", 20),
        ("Not prevented in the process", 6),
        ("Detected on the node", 5),
        ("Memory limits by the NVIDIA driver", 10),
    ] {
        let claims = rows(&page, section);
        assert!(claims.len() >= least, "{section}: {claims:?}");
        for claim in claims {
            // Not tested: the simulated GPU has no such files, and the other programs need a root file system or libraries of
            // their own.
            let untested = [
                "| `ioctl` on the device files |",
                "| A program in another root:",
                "| A 32-bit program |",
            ];
            let has_none = untested.iter().any(|start| claim.starts_with(start));
            assert_eq!(named_tests(claim).is_empty(), has_none, "{claim}");
        }
    }
}
