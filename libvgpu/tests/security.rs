//! Every test that `docs/security.md` names exists, and every claim of its first table names one.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

use std::path::Path;

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Pairs of a file and a test in it, as the page names them: `file.rs` `test`.
fn named_tests(page: &str) -> Vec<(String, String)> {
    let quoted: Vec<&str> = page.split('`').skip(1).step_by(2).collect();
    quoted
        .windows(2)
        .filter(|pair| pair[0].ends_with(".rs") && pair[0].contains("/tests/") && is_name(pair[1]))
        .map(|pair| (pair[0].to_owned(), pair[1].to_owned()))
        .collect()
}

fn is_name(text: &str) -> bool {
    text.contains('_')
        && text
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
}

#[test]
fn the_security_page_names_tests_that_exist() {
    let page = std::fs::read_to_string(workspace().join("docs/security.md")).unwrap();
    let named = named_tests(&page);
    assert!(named.len() > 15, "{named:?}");
    for (file, test) in named {
        let source = std::fs::read_to_string(workspace().join(&file)).unwrap();
        assert!(
            source
                .split("#[test]\n")
                .skip(1)
                .any(|rest| rest.trim_start().starts_with(&format!("fn {test}("))),
            "{file} has no test {test}"
        );
    }
}

#[test]
fn every_claim_of_prevention_names_a_test() {
    let page = std::fs::read_to_string(workspace().join("docs/security.md")).unwrap();
    let section = page.split("## Prevented").nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let claims: Vec<&str> = section
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| Claim"))
        .collect();
    assert!(claims.len() > 10, "{claims:?}");
    for claim in claims {
        assert!(!named_tests(claim).is_empty(), "no test for: {claim}");
    }
}
