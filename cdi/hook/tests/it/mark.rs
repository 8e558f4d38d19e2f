//! The file that shows whether the runtime has applied the edits.

use std::fs;

use crate::bundle::{Bundle, stderr};

const FILE: &str = "/run/drava/a/usage/pending";
const MARK: [&str; 3] = ["mark", "--files", "/run/drava/*/usage/pending"];

#[test]
fn empties_file_of_each_mounted_share() {
    let bundle = Bundle::empty();
    let mounts = ["/proc", "/run/drava/a/usage", "/run/drava/b/usage"];
    bundle.mounts(&mounts);
    for share in ["a", "b", "unmounted", "b/usage/inner"] {
        bundle.write(&format!("/run/drava/{share}/usage/pending"), "x");
    }
    for _ in 0..2 {
        bundle.hook_succeeds(&MARK);
        let content = |share: &str| bundle.read(&format!("/run/drava/{share}/usage/pending"));
        let contents = ["a", "b", "unmounted", "b/usage/inner"].map(content);
        assert_eq!(contents, ["", "", "x", "x"]);
    }
    // Another container has removed it.
    fs::remove_file(bundle.at(FILE)).unwrap();
    bundle.hook_succeeds(&MARK);
    assert!(!bundle.at(FILE).exists());
}

#[test]
fn rejects_container_without_mounted_share() {
    let bundle = Bundle::empty();
    bundle.write(FILE, "x");
    for mounts in [
        &[][..],
        &["/run/drava", "/run/drava/a/limits", "/run/drava//usage"],
    ] {
        bundle.mounts(mounts);
        let line = bundle.hook_fails(&MARK);
        assert!(
            line.contains("nothing is mounted at /run/drava/*/usage")
                && line.contains("without limits"),
            "{line}"
        );
    }
}

/// A tenant can put anything into the directory.
#[test]
fn changes_no_file_outside_the_container() {
    let bundle = Bundle::empty();
    bundle.mounts(&["/run/drava/a/usage"]);
    let victim = bundle.outside("victim");
    fs::write(&victim, "precious").unwrap();
    bundle.link(FILE, &victim);
    bundle.hook_succeeds(&MARK);
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    fs::remove_file(bundle.at(FILE)).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        bundle.at(FILE),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    bundle.hook_succeeds(&MARK);
}

/// Another container of the share has put something else at the path: no file of this container changes, and it starts.
#[test]
fn empties_no_other_file_of_the_container() {
    const VICTIM: &str = "/data/db.sqlite";
    let bundle = Bundle::empty();
    bundle.mounts(&["/run/drava/a/usage"]);
    bundle.write(VICTIM, "precious");
    for target in [VICTIM, "../../../../data/db.sqlite", "/nowhere", "pending"] {
        bundle.link(FILE, target);
        bundle.hook_succeeds(&MARK);
        assert_eq!(bundle.read(VICTIM), "precious", "{target}");
        fs::remove_file(bundle.at(FILE)).unwrap();
    }
    fs::create_dir(bundle.at(FILE)).unwrap();
    bundle.hook_succeeds(&MARK);
    fs::remove_dir(bundle.at(FILE)).unwrap();

    // A link to a file, and a file, that cannot be written.
    let read_only =
        "mount --bind \"$ROOT$FROM\" \"$ROOT$FROM\"\nmount -o remount,bind,ro \"$ROOT$FROM\"";
    bundle.link(FILE, VICTIM);
    for from in [VICTIM, FILE] {
        let output = bundle.hook_after(&read_only.replace("$FROM", from), &MARK);
        assert!(output.status.success(), "{from}: {}", stderr(&output));
        assert_eq!(bundle.read(VICTIM), "precious");
        fs::remove_file(bundle.at(FILE)).unwrap();
        bundle.write(FILE, "x");
    }
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
        MARK[0],
        MARK[1],
        MARK[2],
    ];
    bundle.mounts(&["/run/drava/a/usage"]);
    bundle.write(FILE, "x");
    let mut wrong_order = actions;
    wrong_order.rotate_left(4);
    wrong_order[7..].copy_from_slice(&["then", "symlinks", "--link", &linked]);
    let line = bundle.hook_fails(&wrong_order);
    assert!(line.contains(link) && line.contains("missing"), "{line}");
    assert_eq!(bundle.read(FILE), "x");
    bundle.hook_succeeds(&actions);
    assert_eq!(
        bundle.probe(&["libanswer.so.2"]),
        [format!("libanswer.so.2: {link}")]
    );
    assert_eq!(bundle.read(FILE), "");
}
