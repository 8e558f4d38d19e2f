//! Images that try to make the hook, which is root on the node, write or read outside the image, or hang.

use std::fs;
use std::os::unix::fs::FileTypeExt;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::bundle::{Bundle, OURS, failure};

const PRELOAD: [&str; 3] = ["preload", "--library", OURS];

fn bundle() -> Bundle {
    let bundle = Bundle::new();
    bundle.hello("first", OURS);
    bundle
}

#[test]
fn resolves_etc_link_to_host_inside_the_image() {
    for climb in ["", "../../../../../../../../../.."] {
        let bundle = bundle();
        let victim = bundle.outside("victim");
        fs::create_dir(&victim).unwrap();
        bundle.link("/etc", format!("{climb}{}", victim.display()));
        // The link's target does not exist in the image, so the hook cannot write to it.
        let line = bundle.hook_fails(&PRELOAD);
        assert!(line.contains("/etc"), "{line}");

        // Once the image has the target, the container's loader and the hook use it.
        fs::create_dir_all(bundle.root().join(victim.strip_prefix("/").unwrap())).unwrap();
        bundle.hook_succeeds(&PRELOAD);
        assert_eq!(bundle.probe(&[]), ["first"]);
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 0, "{climb}");
    }
}

#[test]
fn replaces_link_to_host_file_without_following() {
    let bundle = bundle();
    let secret = bundle.outside("secret");
    fs::write(&secret, "/opt/secret.so\n").unwrap();
    for target in [
        secret.clone(),
        format!("../../../../../../../../..{}", secret.display()).into(),
    ] {
        bundle.link("/etc/ld.so.preload", &target);
        bundle.hook_succeeds(&PRELOAD);
        assert_eq!(
            bundle.read("/etc/ld.so.preload"),
            format!("{OURS}\n"),
            "{target:?}"
        );
        assert_eq!(fs::read_to_string(&secret).unwrap(), "/opt/secret.so\n");
        fs::remove_file(bundle.at("/etc/ld.so.preload")).unwrap();
    }
}

#[test]
fn reads_and_replaces_link_within_the_image() {
    let bundle = bundle();
    bundle.hello("other", "/opt/libother.so");
    bundle.write("/opt/preload", "/opt/libother.so\n");
    bundle.link("/etc/ld.so.preload", "/opt/preload");
    bundle.hook_succeeds(&PRELOAD);
    assert_eq!(bundle.probe(&[]), ["other", "first"]);
    assert_eq!(bundle.read("/opt/preload"), "/opt/libother.so\n");
}

#[test]
fn rejects_link_cycles() {
    let bundle = bundle();
    bundle.link("/etc/ld.so.preload", "ld.so.preload");
    bundle.hook_succeeds(&PRELOAD);
    assert_eq!(bundle.probe(&[]), ["first"]);

    let bundle = bundle_with_etc_circle();
    let line = bundle.hook_fails(&PRELOAD);
    assert!(
        line.contains("/etc") && line.contains("symbolic links"),
        "{line}"
    );
}

fn bundle_with_etc_circle() -> Bundle {
    let bundle = bundle();
    bundle.link("/etc", "/etc");
    bundle
}

#[test]
fn keeps_magic_links_of_proc_inside_the_image() {
    let bundle = bundle();
    let victim = bundle.outside("victim");
    fs::create_dir(&victim).unwrap();
    fs::create_dir(bundle.root().join("proc")).unwrap();
    let mount = "mount --rbind /proc \"$ROOT/proc\"";
    // `/proc/self/root` of the hook is the host's root.
    bundle.link("/etc", format!("/proc/self/root{}", victim.display()));
    let line = failure(&bundle.hook_after(mount, &PRELOAD));
    assert!(line.contains("/etc"), "{line}");
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);

    fs::remove_file(bundle.root().join("etc")).unwrap();
    fs::write(victim.join("secret"), "/opt/secret.so").unwrap();
    bundle.link(
        "/etc/ld.so.preload",
        format!("/proc/self/root{}/secret", victim.display()),
    );
    let output = bundle.hook_after(mount, &PRELOAD);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(bundle.read("/etc/ld.so.preload"), format!("{OURS}\n"));
}

#[test]
fn does_not_block_on_fifos() {
    let bundle = bundle();
    bundle.answer("/opt/driver/libanswer.so.1");
    for path in ["/etc/ld.so.preload", "/etc/ld.so.cache"] {
        mknodat(
            CWD,
            bundle.at(path),
            FileType::Fifo,
            Mode::from_raw_mode(0o666),
            0,
        )
        .unwrap();
    }
    bundle.hook_succeeds(&PRELOAD);
    bundle.hook_succeeds(&["ldcache", "--library", "/opt/driver/libanswer.so.1"]);
    assert_eq!(
        bundle.probe(&["libanswer.so.1"]),
        ["first", "libanswer.so.1: /opt/driver/libanswer.so.1"]
    );

    // A FIFO at the path of a library is not a library.
    mknodat(
        CWD,
        bundle.at("/opt/fifo.so"),
        FileType::Fifo,
        Mode::from_raw_mode(0o666),
        0,
    )
    .unwrap();
    let line = bundle.hook_fails(&["ldcache", "--library", "/opt/fifo.so"]);
    assert!(
        line.contains("/opt/fifo.so is not in the container"),
        "{line}"
    );
    let line = bundle.hook_fails(&["preload", "--library", "/opt/fifo.so"]);
    assert!(
        line.contains("/opt/fifo.so is not in the container"),
        "{line}"
    );
}

#[test]
fn replaces_sockets_and_reports_directories() {
    let bundle = bundle();
    drop(std::os::unix::net::UnixListener::bind(bundle.at("/etc/ld.so.preload")).unwrap());
    assert!(
        fs::metadata(bundle.at("/etc/ld.so.preload"))
            .unwrap()
            .file_type()
            .is_socket()
    );
    bundle.hook_succeeds(&PRELOAD);
    assert_eq!(bundle.probe(&[]), ["first"]);

    fs::remove_file(bundle.at("/etc/ld.so.preload")).unwrap();
    fs::create_dir(bundle.at("/etc/ld.so.preload")).unwrap();
    let line = bundle.hook_fails(&PRELOAD);
    assert!(
        line.contains("/etc/ld.so.preload") && line.contains("a directory of the image"),
        "{line}"
    );
}

#[test]
fn does_not_write_through_a_planted_temporary_file() {
    let bundle = bundle();
    let victim = bundle.outside("victim");
    fs::write(&victim, "precious").unwrap();
    bundle.link("/etc/.ld.so.preload.drava", &victim);
    bundle.hook_succeeds(&PRELOAD);
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert_eq!(bundle.probe(&[]), ["first"]);

    fs::remove_file(bundle.at("/etc/ld.so.preload")).unwrap();
    fs::create_dir(bundle.at("/etc/.ld.so.preload.drava")).unwrap();
    let line = bundle.hook_fails(&PRELOAD);
    assert!(line.contains("/etc/ld.so.preload"), "{line}");
}

#[test]
fn rejects_oversized_files_without_reading_them() {
    let bundle = bundle();
    bundle.answer("/opt/driver/libanswer.so.1");
    let sparse = |path: &str, size: u64| {
        fs::File::create(bundle.at(path))
            .unwrap()
            .set_len(size)
            .unwrap()
    };
    sparse("/etc/ld.so.preload", 1 << 40);
    let line = bundle.hook_fails(&PRELOAD);
    assert!(
        line.contains("/etc/ld.so.preload in the container is larger than 1048576 bytes"),
        "{line}"
    );
    sparse("/etc/ld.so.cache", 1 << 40);
    let line = bundle.hook_fails(&["ldcache", "--library", "/opt/driver/libanswer.so.1"]);
    assert!(
        line.contains("/etc/ld.so.cache in the container is larger than 16777216 bytes"),
        "{line}"
    );
}

#[test]
fn creates_links_inside_the_image_only() {
    let bundle = bundle();
    let victim = bundle.outside("victim");
    fs::create_dir(&victim).unwrap();
    bundle.link("/usr/lib/driver", &victim);
    let line = bundle.hook_fails(&["symlinks", "--link", "x::/usr/lib/driver/libanswer.so"]);
    assert!(line.contains("/usr/lib/driver"), "{line}");
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
}

#[test]
fn reports_invalid_state_in_one_line() {
    let bundle = bundle();
    fs::write(bundle.outside("config.json"), "{\"root\": \n{}}").unwrap();
    let line = bundle.hook_fails(&PRELOAD);
    assert!(
        line.contains("config.json") && line.contains("missing field `path`"),
        "{line}"
    );
    fs::write(
        bundle.outside("config.json"),
        r#"{"root": {"path": "missing\nroot"}}"#,
    )
    .unwrap();
    let line = bundle.hook_fails(&PRELOAD);
    assert!(line.contains("missing\u{fffd}root"), "{line}");
    let line = bundle.hook_fails(&["run"]);
    assert!(line.contains("usage"), "{line}");
}
