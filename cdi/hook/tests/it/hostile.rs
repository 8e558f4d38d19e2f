//! Images that want the hook, which is root on the node, to write or read outside of them, or to hang.

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
fn etc_that_links_to_the_host_leads_into_the_image() {
    for climb in ["", "../../../../../../../../../.."] {
        let bundle = bundle();
        let victim = bundle.outside("victim");
        fs::create_dir(&victim).unwrap();
        bundle.link("/etc", format!("{climb}{}", victim.display()));
        // Nothing is there in the image: a dangling link is no directory to write to.
        let line = bundle.hook_fails(&PRELOAD);
        assert!(line.contains("/etc"), "{line}");

        // The same path, made in the image, is where the container's loader looks, and so does the hook.
        fs::create_dir_all(bundle.root().join(victim.strip_prefix("/").unwrap())).unwrap();
        bundle.hook_succeeds(&PRELOAD);
        assert_eq!(bundle.probe(&[]), ["first"]);
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 0, "{climb}");
    }
}

#[test]
fn a_link_to_a_file_of_the_host_is_replaced_not_followed() {
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
fn a_link_within_the_image_is_read_and_then_replaced() {
    let bundle = bundle();
    bundle.hello("other", "/opt/libother.so");
    bundle.write("/opt/preload", "/opt/libother.so\n");
    bundle.link("/etc/ld.so.preload", "/opt/preload");
    bundle.hook_succeeds(&PRELOAD);
    assert_eq!(bundle.probe(&[]), ["other", "first"]);
    assert_eq!(bundle.read("/opt/preload"), "/opt/libother.so\n");
}

#[test]
fn links_in_a_circle_end() {
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
fn magic_links_of_proc_lead_nowhere() {
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
fn fifos_do_not_hang_the_node() {
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

    // A FIFO in place of a library is no library.
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
fn sockets_are_replaced_and_directories_told() {
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
        line.contains("/etc/ld.so.preload") && line.contains("it is a directory in the image"),
        "{line}"
    );
}

#[test]
fn a_trap_in_place_of_the_temporary_file_is_not_written_through() {
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
fn huge_files_are_refused_not_read() {
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
fn links_are_made_inside_the_image_only() {
    let bundle = bundle();
    let victim = bundle.outside("victim");
    fs::create_dir(&victim).unwrap();
    bundle.link("/usr/lib/driver", &victim);
    let line = bundle.hook_fails(&["symlinks", "--link", "x::/usr/lib/driver/libanswer.so"]);
    assert!(line.contains("/usr/lib/driver"), "{line}");
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
}

#[test]
fn a_state_that_is_none_is_told_in_one_line() {
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
