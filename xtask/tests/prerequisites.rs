//! The README lists the prerequisites that the code checks.

use std::fs;

use drava_cluster::{prerequisite, workspace_root};

#[test]
fn readme_lists_prerequisites_of_code() {
    let readme = fs::read_to_string(workspace_root().join("README.md")).unwrap();
    let table = prerequisite::table();
    assert!(
        readme.contains(&table),
        "README.md lacks this table:\n{table}"
    );
}
