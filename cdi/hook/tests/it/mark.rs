//! The file that shows that the runtime has applied the edits.

use std::fs;

use crate::bundle::Bundle;

const FILE: &str = "/run/drava/share/usage/injected";

#[test]
fn creates_file_once() {
    let bundle = Bundle::empty();
    bundle.hook_succeeds(&["mark", "--file", FILE]);
    let before = fs::metadata(bundle.at(FILE)).unwrap().modified().unwrap();
    bundle.hook_succeeds(&["mark", "--file", FILE]);
    assert_eq!(
        fs::metadata(bundle.at(FILE)).unwrap().modified().unwrap(),
        before
    );
    assert_eq!(bundle.read(FILE), "");
}

#[test]
fn replaces_link_without_following() {
    let bundle = Bundle::empty();
    let victim = bundle.outside("victim");
    bundle.link(FILE, &victim);
    bundle.hook_succeeds(&["mark", "--file", FILE]);
    assert!(!victim.exists());
    assert!(fs::symlink_metadata(bundle.at(FILE)).unwrap().is_file());
}
