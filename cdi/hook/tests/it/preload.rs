//! `/etc/ld.so.preload` as read by the loader.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::bundle::{Bundle, OURS, failure};

const OTHER: &str = "/opt/libother.so";
const PRELOAD: &str = "/etc/ld.so.preload";
const ARGUMENTS: [&str; 3] = ["preload", "--library", OURS];

fn bundle() -> Bundle {
    let bundle = Bundle::new();
    bundle.hello("first", OURS);
    bundle.hello("other", OTHER);
    bundle
}

#[test]
fn loader_loads_ours_in_image_without_preload() {
    let bundle = bundle();
    assert_eq!(bundle.probe(&[]), [""; 0]);
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(bundle.probe(&[]), ["first"]);
    assert_eq!(
        fs::metadata(bundle.at(PRELOAD))
            .unwrap()
            .permissions()
            .mode()
            & 0o7777,
        0o644
    );
}

#[test]
fn keeps_the_images_libraries_behind_ours() {
    let bundle = bundle();
    bundle.write(PRELOAD, format!("# of the image\n{OTHER}"));
    assert_eq!(bundle.probe(&[]), ["other"]);
    bundle.hook_succeeds(&ARGUMENTS);
    // Constructors run from the last library to the first.
    assert_eq!(bundle.probe(&[]), ["other", "first"]);
    assert_eq!(
        bundle.read(PRELOAD),
        format!("{OURS}\n# of the image\n{OTHER}\n")
    );
}

#[test]
fn second_run_changes_nothing() {
    let bundle = bundle();
    bundle.write(PRELOAD, OTHER);
    bundle.hook_succeeds(&ARGUMENTS);
    let before = fs::metadata(bundle.at(PRELOAD)).unwrap();
    bundle.hook_succeeds(&ARGUMENTS);
    let after = fs::metadata(bundle.at(PRELOAD)).unwrap();
    assert_eq!(before.modified().unwrap(), after.modified().unwrap());
    assert_eq!(bundle.probe(&[]), ["other", "first"]);
}

#[test]
fn ignores_leftover_of_killed_run() {
    let bundle = bundle();
    bundle.write("/etc/.ld.so.preload.drava", "half");
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(bundle.probe(&[]), ["first"]);
    assert!(!bundle.at("/etc/.ld.so.preload.drava").exists());
}

#[test]
fn creates_file_readable_despite_umask() {
    let bundle = bundle();
    let output = bundle.hook_after("umask 077", &ARGUMENTS);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        fs::metadata(bundle.at(PRELOAD))
            .unwrap()
            .permissions()
            .mode()
            & 0o7777,
        0o644
    );
}

#[test]
fn works_in_user_namespace() {
    let bundle = bundle();
    bundle.write(PRELOAD, OTHER);
    let output = bundle.hook_in_user_namespace(&ARGUMENTS);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(bundle.probe(&[]), ["other", "first"]);
}

#[test]
fn rejects_container_without_library() {
    let bundle = Bundle::new();
    let line = bundle.hook_fails(&ARGUMENTS);
    assert!(
        line.contains(OURS) && line.contains("mount is missing"),
        "{line}"
    );
    assert!(!bundle.at(PRELOAD).exists());
}

#[test]
fn reports_read_only_etc_unless_ours_is_present() {
    let bundle = bundle();
    fs::create_dir(bundle.root().join("etc")).unwrap();
    let read_only =
        "mount --bind \"$ROOT/etc\" \"$ROOT/etc\"; mount -o remount,bind,ro \"$ROOT/etc\"";
    let line = failure(&bundle.hook_after(read_only, &ARGUMENTS));
    assert!(
        line.contains(PRELOAD) && line.contains("read-only mount"),
        "{line}"
    );

    bundle.hook_succeeds(&ARGUMENTS);
    let output = bundle.hook_after(read_only, &ARGUMENTS);
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn reports_volume_mounted_over_the_file() {
    let bundle = bundle();
    bundle.write(PRELOAD, OTHER);
    let line = failure(&bundle.hook_after(
        "mount --bind \"$ROOT/etc/ld.so.preload\" \"$ROOT/etc/ld.so.preload\"",
        &ARGUMENTS,
    ));
    assert!(
        line.contains("cannot replace /etc/ld.so.preload")
            && line.contains("volume is mounted at that path"),
        "{line}"
    );
    assert_eq!(bundle.read(PRELOAD), OTHER);
    assert!(!bundle.at("/etc/.ld.so.preload.drava").exists());
}

#[test]
fn works_before_runtime_makes_root_read_only() {
    let bundle = bundle();
    fs::write(
        bundle.outside("config.json"),
        r#"{"root": {"path": "rootfs", "readonly": true}}"#,
    )
    .unwrap();
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(bundle.probe(&[]), ["first"]);
}
