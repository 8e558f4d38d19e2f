//! `/etc/ld.so.cache` as read by the loader.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::bundle::Bundle;

const CACHE: &str = "/etc/ld.so.cache";
const DRIVER: &str = "/opt/driver/libanswer.so.1";
const ARGUMENTS: [&str; 3] = ["ldcache", "--library", DRIVER];

fn bundle() -> Bundle {
    let bundle = Bundle::new();
    bundle.answer(DRIVER);
    bundle
}

/// Builds the image's cache with this machine's `ldconfig`.
fn ldconfig(bundle: &Bundle, format: &str) {
    bundle.write("/etc/ld.so.conf", "/usr/lib\n/opt/image\n");
    let program = ["/sbin/ldconfig", "/usr/sbin/ldconfig"]
        .into_iter()
        .find(|path| Path::new(path).exists());
    let program = program.expect("ldconfig is part of glibc");
    // `-X` leaves links unchanged: the libraries have no SONAME.
    let status = Command::new(program)
        .arg("-X")
        .args(["-c", format])
        .arg("-r")
        .arg(bundle.root())
        .status()
        .unwrap();
    assert!(status.success());
}

#[test]
fn loader_finds_library_in_image_without_cache() {
    let bundle = bundle();
    assert_eq!(
        bundle.probe(&["libanswer.so.1"]),
        ["libanswer.so.1: not found"]
    );
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(
        bundle.probe(&["libanswer.so.1"]),
        [format!("libanswer.so.1: {DRIVER}")]
    );
}

#[test]
fn keeps_the_images_own_libraries() {
    for format in ["new", "compat", "old"] {
        let bundle = bundle();
        for name in [
            "libanswer.so.2",
            "libanswer.so.10",
            "libz.so.1",
            "libANSWER.so.1",
            "lib9.so",
        ] {
            bundle.answer(&format!("/opt/image/{name}"));
        }
        ldconfig(&bundle, format);
        let before = bundle.probe(&[
            "libanswer.so.2",
            "libanswer.so.10",
            "libz.so.1",
            "libANSWER.so.1",
            "lib9.so",
        ]);
        assert!(
            before.iter().all(|line| line.contains(": /opt/image/")),
            "{before:?}"
        );
        bundle.hook_succeeds(&ARGUMENTS);
        let after = bundle.probe(&[
            "libanswer.so.2",
            "libanswer.so.10",
            "libz.so.1",
            "libANSWER.so.1",
            "lib9.so",
        ]);
        assert_eq!(after, before, "{format}");
        assert_eq!(
            bundle.probe(&["libanswer.so.1"]),
            [format!("libanswer.so.1: {DRIVER}")],
            "{format}"
        );
    }
}

#[test]
fn driver_library_precedes_image_library_of_same_name() {
    let bundle = bundle();
    bundle.answer("/opt/image/libanswer.so.1");
    ldconfig(&bundle, "new");
    assert_eq!(
        bundle.probe(&["libanswer.so.1"]),
        ["libanswer.so.1: /opt/image/libanswer.so.1"]
    );
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(
        bundle.probe(&["libanswer.so.1"]),
        [format!("libanswer.so.1: {DRIVER}")]
    );
}

#[test]
fn adds_many_libraries_at_once() {
    let bundle = bundle();
    let paths: Vec<String> = (0..200)
        .map(|number| format!("/opt/driver/libn{number}.so.{}", number % 7))
        .collect();
    let mut arguments = vec!["ldcache"];
    for path in &paths {
        bundle.answer(path);
        arguments.extend(["--library", path]);
    }
    bundle.hook_succeeds(&arguments);
    let names: Vec<&str> = paths
        .iter()
        .map(|path| path.rsplit_once('/').unwrap().1)
        .collect();
    let expected: Vec<String> = names
        .iter()
        .zip(&paths)
        .map(|(name, path)| format!("{name}: {path}"))
        .collect();
    assert_eq!(bundle.probe(&names), expected);
}

#[test]
fn second_run_changes_nothing() {
    let bundle = bundle();
    bundle.hook_succeeds(&ARGUMENTS);
    let (before, contents) = (
        fs::metadata(bundle.at(CACHE)).unwrap(),
        fs::read(bundle.at(CACHE)).unwrap(),
    );
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(
        fs::metadata(bundle.at(CACHE)).unwrap().modified().unwrap(),
        before.modified().unwrap()
    );
    assert_eq!(fs::read(bundle.at(CACHE)).unwrap(), contents);
}

#[test]
fn replaces_malformed_cache() {
    let bundle = bundle();
    bundle.write(CACHE, "glibc-ld.so.cache1.1 and then nonsense");
    assert_eq!(
        bundle.probe(&["libanswer.so.1"]),
        ["libanswer.so.1: not found"]
    );
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(
        bundle.probe(&["libanswer.so.1"]),
        [format!("libanswer.so.1: {DRIVER}")]
    );
}

#[test]
fn names_missing_and_invalid_libraries() {
    let bundle = Bundle::new();
    let line = bundle.hook_fails(&ARGUMENTS);
    assert!(line.contains(DRIVER) && line.contains("missing"), "{line}");
    bundle.write(DRIVER, "not a library");
    let line = bundle.hook_fails(&ARGUMENTS);
    assert!(
        line.contains(DRIVER) && line.contains("not a shared library for this machine"),
        "{line}"
    );
    assert!(!bundle.at(CACHE).exists());
}

/// Sets the time of a file to the year 2020.
fn make_old(bundle: &Bundle, path: &str) {
    let status = Command::new("touch")
        .args(["-d", "2020-01-01"])
        .arg(bundle.at(path))
        .status();
    assert!(status.unwrap().success());
}

#[test]
fn finds_libraries_of_configuration_without_cache() {
    let bundle = bundle();
    bundle.write(
        "/etc/ld.so.conf",
        "# first\ninclude /etc/ld.so.conf.d/*.conf\ninclude ld.so.conf\n",
    );
    bundle.write(
        "/etc/ld.so.conf.d/x.conf",
        "/opt/x/lib/  # of x\n/missing\n",
    );
    bundle.write("/etc/ld.so.conf.d/x.off", "/opt/off\n");
    bundle.answer("/opt/x/lib/libx.so.1");
    bundle.answer("/opt/off/liboff.so.1");
    bundle.write("/opt/x/lib/libscript.so", "INPUT(libx.so.1)");
    bundle.write("/opt/x/lib/README", "text");
    let libraries = ["libanswer.so.1", "libx.so.1", "liboff.so.1"];
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(
        bundle.probe(&libraries),
        [
            &format!("libanswer.so.1: {DRIVER}"),
            "libx.so.1: /opt/x/lib/libx.so.1",
            "liboff.so.1: not found"
        ]
    );
}

/// As ldconfig does, which reports them and succeeds.
#[test]
fn skips_configuration_that_cannot_be_read() {
    let bundle = bundle();
    let (name, path) = ("x".repeat(300), "/y".repeat(3000));
    bundle.write(
        "/etc/ld.so.conf",
        format!(
            "include /{name}/*.conf /{name} {path} /loop/*.conf\n/{name}\n{path}\n/loop\n/opt/x/lib\n"
        ),
    );
    bundle.link("/loop", "loop");
    bundle.answer("/opt/x/lib/libx.so.1");
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(
        bundle.probe(&["libx.so.1"]),
        ["libx.so.1: /opt/x/lib/libx.so.1"]
    );
}

#[test]
fn finds_libraries_that_are_newer_than_the_cache() {
    let bundle = bundle();
    bundle.answer("/opt/image/libold.so.1");
    ldconfig(&bundle, "new");
    for path in [CACHE, "/etc/ld.so.conf", "/opt/image"] {
        make_old(&bundle, path);
    }
    bundle.hook_succeeds(&ARGUMENTS);
    bundle.answer("/opt/image/libnew.so.1");
    // The hook's cache is newer than the directory, as in an image whose build ran ldconfig last.
    make_old(&bundle, "/opt/image");
    let libraries = ["libold.so.1", "libnew.so.1"];
    bundle.hook_succeeds(&ARGUMENTS);
    let old = "libold.so.1: /opt/image/libold.so.1";
    assert_eq!(bundle.probe(&libraries), [old, "libnew.so.1: not found"]);

    make_old(&bundle, CACHE);
    bundle.answer("/opt/image/libnewer.so.1");
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(
        bundle.probe(&libraries),
        [old, "libnew.so.1: /opt/image/libnew.so.1"]
    );
}
