//! `docs/demo.md` lists the prerequisites that the code checks.

use std::fs;

use drava_cluster::{prerequisite, workspace_root};

#[test]
fn page_lists_prerequisites_of_code() {
    let page = fs::read_to_string(workspace_root().join("docs/demo.md")).unwrap();
    let table = prerequisite::table();
    assert!(
        page.contains(&table),
        "docs/demo.md lacks this table:\n{table}"
    );
}
