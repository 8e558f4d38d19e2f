//! Where the files of a release come from: an in-toto statement (v1) with SLSA's provenance predicate (v1).
//!
//! Without times and without the name of the build machine, so that two runs write equal statements.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// What a release is built from.
pub(super) struct Source {
    /// Address of the repository.
    pub(super) repository: String,
    /// Hash of the commit.
    pub(super) commit: String,
    /// Time of the commit, seconds since 1970.
    pub(super) time_s: u64,
    /// Checksum of `Cargo.lock`, which pins the dependencies.
    pub(super) lock_sha256: String,
    /// Version of the compiler.
    pub(super) rustc: String,
}

/// Returns the statement about files with these checksums.
pub(super) fn statement(
    source: &Source,
    profile: &str,
    architecture: &str,
    files: &BTreeMap<String, String>,
) -> Value {
    let subjects: Vec<Value> = files
        .iter()
        .map(|(name, sha256)| json!({"name": name, "digest": {"sha256": sha256}}))
        .collect();
    json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://drava.dev/release/v1",
                "externalParameters": {
                    "command": "cargo xtask release",
                    "profile": profile,
                    "platform": format!("linux/{architecture}"),
                },
                "internalParameters": {"rustc": source.rustc},
                "resolvedDependencies": [
                    {
                        "uri": format!("git+{}", source.repository),
                        "digest": {"gitCommit": source.commit},
                    },
                    {"name": "Cargo.lock", "digest": {"sha256": source.lock_sha256}},
                ],
            },
            // The signature of the statement says who built the files.
            "runDetails": {"builder": {"id": "https://drava.dev/release/v1/local"}},
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statement_names_files_and_sources() {
        let source = Source {
            repository: "https://example.com/drava".to_owned(),
            commit: "abc".to_owned(),
            time_s: 1,
            lock_sha256: "11".to_owned(),
            rustc: "rustc 1.0".to_owned(),
        };
        let files = BTreeMap::from([
            ("b.tgz".to_owned(), "bb".to_owned()),
            ("a.tar".to_owned(), "aa".to_owned()),
        ]);
        let statement = statement(&source, "release", "amd64", &files);
        assert_eq!(
            statement["subject"],
            json!([
                {"name": "a.tar", "digest": {"sha256": "aa"}},
                {"name": "b.tgz", "digest": {"sha256": "bb"}},
            ])
        );
        // The fields that SLSA requires.
        let predicate = &statement["predicate"];
        let build = &predicate["buildDefinition"];
        assert!(build["buildType"].is_string() && build["externalParameters"].is_object());
        assert!(predicate["runDetails"]["builder"]["id"].is_string());
        let source = &build["resolvedDependencies"][0];
        assert_eq!(source["uri"], "git+https://example.com/drava");
        assert_eq!(source["digest"]["gitCommit"], "abc");
    }
}
