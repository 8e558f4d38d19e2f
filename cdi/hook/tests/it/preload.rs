//! `/etc/ld.so.preload` as read by the loader.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::bundle::{Bundle, OURS, failure, stderr};

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

#[test]
fn programs_of_nix_load_library_too() {
    const NIX: &str = "/etc/ld-nix.so.preload";
    let bundle = bundle();
    bundle.hook_succeeds(&ARGUMENTS);
    assert!(!bundle.at(NIX).exists(), "no store of Nix");
    fs::create_dir_all(bundle.at("/nix/store/0123-glibc-2.40/lib")).unwrap();
    bundle.write(NIX, OTHER);
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(bundle.read(NIX), format!("{OURS}\n{OTHER}\n"));
}

/// Makes the root read-only, runs the hook, and prints the flags of the mount.
const READ_ONLY: &str = r#"
mount --bind "$ROOT" "$ROOT"
mount -o remount,bind,ro,nosuid "$ROOT"
"$HOOK" "$@"
grep " $ROOT " /proc/self/mountinfo | cut -d ' ' -f 6
exit 0"#;

#[test]
fn writes_into_root_that_runtime_made_read_only() {
    let bundle = bundle();
    bundle.write(PRELOAD, OTHER);
    let output = bundle.hook_after(READ_ONLY, &ARGUMENTS);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(bundle.read(PRELOAD), format!("{OURS}\n{OTHER}\n"));
    let flags = String::from_utf8(output.stdout).unwrap();
    assert!(
        flags.starts_with("ro,nosuid"),
        "the root stays read-only: {flags}"
    );
}

/// Runs the hook on a volume below `/etc` and on a root of a read-only file system.
#[test]
fn reports_read_only_volume_and_file_system() {
    for script in [
        "mount --bind \"$ROOT/etc\" \"$ROOT/etc\"; mount -o remount,bind,ro \"$ROOT/etc\"",
        "mount -t tmpfs t \"$ROOT/etc\"; mount -o remount,ro \"$ROOT/etc\"",
    ] {
        let bundle = bundle();
        bundle.write("/etc/hosts", "");
        let line = failure(&bundle.hook_after(script, &ARGUMENTS));
        assert!(
            line.contains("/etc/ld.so.preload") && line.contains("read-only mount"),
            "{line}"
        );
    }
}

/// The text and the remedy in `docs/troubleshooting.md`.
#[test]
fn program_with_address_sanitizer_needs_option() {
    let dir = tempfile::tempdir().unwrap();
    let build = |name: &str, flags: &[&str]| {
        let (source, output) = (dir.path().join("main.c"), dir.path().join(name));
        fs::write(&source, "int main(void) { return 0; }").unwrap();
        let mut compiler = Command::new("cc");
        let compiled = compiler.args(flags).arg("-o").arg(&output).arg(source);
        compiled.status().unwrap().success().then_some(output)
    };
    let library = build("library.so", &["-shared", "-fPIC"]).unwrap();
    let Some(program) = build("program", &["-fsanitize=address"]) else {
        let line = b"skipped: preload: the compiler has no AddressSanitizer\n";
        // `eprintln!` would be hidden for a test that passes.
        std::io::stderr().write_all(line).unwrap();
        return;
    };
    let run = |options| {
        Command::new(&program)
            .env("LD_PRELOAD", &library)
            .env("ASAN_OPTIONS", options)
            .output()
            .unwrap()
    };
    let refused = run("");
    let text = stderr(&refused);
    assert!(
        !refused.status.success()
            && text.contains("ASan runtime does not come first in initial library list"),
        "{text}"
    );
    assert!(run("verify_asan_link_order=0").status.success());
}
