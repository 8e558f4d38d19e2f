//! The sign for the driver.

use std::fs;

use crate::bundle::Bundle;

const FILE: &str = "/run/drava/share/usage/injected";

#[test]
fn the_file_is_made_once() {
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
fn a_link_in_its_place_is_not_written_through() {
    let bundle = Bundle::empty();
    let victim = bundle.outside("victim");
    bundle.link(FILE, &victim);
    bundle.hook_succeeds(&["mark", "--file", FILE]);
    assert!(!victim.exists());
    assert!(fs::symlink_metadata(bundle.at(FILE)).unwrap().is_file());
}
