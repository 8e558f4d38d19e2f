//! Links in the directories of the NVIDIA libraries.

use std::fs;
use std::path::Path;

use crate::bundle::Bundle;

const REAL: &str = "/usr/lib/driver/libanswer.so.580.65.06";
const LINKS: [&str; 5] = [
    "symlinks",
    "--link",
    "libanswer.so.580.65.06::/usr/lib/driver/libanswer.so.1",
    "--link",
    "libanswer.so.1::/usr/lib/driver/libanswer.so",
];

#[test]
fn links_and_cache_resolve_every_name() {
    let bundle = Bundle::new();
    bundle.answer(REAL);
    bundle.hook_succeeds(&LINKS);
    let (versioned, plain) = (
        "/usr/lib/driver/libanswer.so.1",
        "/usr/lib/driver/libanswer.so",
    );
    bundle.hook_succeeds(&["ldcache", "--library", versioned, "--library", plain]);
    assert_eq!(
        bundle.probe(&["libanswer.so.1", "libanswer.so"]),
        [
            format!("libanswer.so.1: {versioned}"),
            format!("libanswer.so: {versioned}")
        ]
    );
    bundle.hook_succeeds(&LINKS);
}

#[test]
fn creates_missing_directories() {
    let bundle = Bundle::empty();
    bundle.hook_succeeds(&LINKS);
    let link = bundle.root().join("usr/lib/driver/libanswer.so.1");
    assert_eq!(
        fs::read_link(link).unwrap(),
        Path::new("libanswer.so.580.65.06")
    );
}

#[test]
fn replaces_the_images_file() {
    let bundle = Bundle::empty();
    bundle.link("/usr/lib/driver/libanswer.so.1", "libanswer.so.535.54.03");
    bundle.write("/usr/lib/driver/libanswer.so", "a file of the image");
    bundle.hook_succeeds(&LINKS);
    let target =
        |name: &str| fs::read_link(bundle.root().join("usr/lib/driver").join(name)).unwrap();
    assert_eq!(
        target("libanswer.so.1"),
        Path::new("libanswer.so.580.65.06")
    );
    assert_eq!(target("libanswer.so"), Path::new("libanswer.so.1"));
}

#[test]
fn reports_directory_of_that_name() {
    let bundle = Bundle::empty();
    fs::create_dir_all(bundle.at("/usr/lib/driver/libanswer.so.1/x")).unwrap();
    let line = bundle.hook_fails(&LINKS);
    assert!(
        line.contains("/usr/lib/driver/libanswer.so.1") && line.contains("directory"),
        "{line}"
    );
}
