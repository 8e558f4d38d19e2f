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

/// One process for all actions of a device.
#[test]
fn runs_actions_in_order_up_to_first_error() {
    let bundle = Bundle::new();
    let (driver, link) = ("/opt/driver/libanswer.so.1", "/opt/driver/libanswer.so.2");
    bundle.answer(driver);
    // The link precedes the cache that leads to it, and the marker follows both.
    let linked = format!("libanswer.so.1::{link}");
    let actions = [
        "symlinks",
        "--link",
        &linked,
        "then",
        "ldcache",
        "--library",
        link,
        "then",
        "mark",
        "--file",
        FILE,
    ];
    let mut wrong_order = actions;
    wrong_order.rotate_left(4);
    wrong_order[7..].copy_from_slice(&["then", "symlinks", "--link", &linked]);
    let line = bundle.hook_fails(&wrong_order);
    assert!(line.contains(link) && line.contains("missing"), "{line}");
    assert!(!bundle.at(FILE).exists());
    bundle.hook_succeeds(&actions);
    assert_eq!(
        bundle.probe(&["libanswer.so.2"]),
        [format!("libanswer.so.2: {link}")]
    );
    assert!(bundle.at(FILE).exists());
}
