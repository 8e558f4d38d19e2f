//! Events on usage regions.

use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes};
use std::path::Path;
use std::time::SystemTime;

use drava_dra_driver::agent::node::ShareKey;
use drava_dra_driver::agent::node::region_watch::RegionWatch;
use drava_dra_driver::agent::policy::rate_limiter::{BURST, REFILL_US};
use drava_vgpu_abi::paths;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const KEY: ShareKey = ShareKey(7);
const NOW_US: u64 = 1_000_000_000;

fn usage_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(paths::REGION_FILE), "").unwrap();
    dir
}

fn open_region(dir: &Path) {
    File::open(dir.join(paths::REGION_FILE)).unwrap();
}

/// Notifies as libvgpu does.
fn notify(dir: &Path) {
    let region = File::options()
        .append(true)
        .open(dir.join(paths::REGION_FILE))
        .unwrap();
    let now = SystemTime::now();
    let times = FileTimes::new().set_accessed(now).set_modified(now);
    region.set_times(times).unwrap();
}

fn is_readable(watch: &RegionWatch) -> bool {
    let events = watch.pollable(NOW_US).unwrap().unwrap();
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::from_borrowed_fd(events, PollFlags::IN)];
    poll(&mut fds, Some(&at_once)).unwrap() > 0
}

#[test]
fn reports_first_process_of_empty_share_once() {
    let (mut watch, dir) = (RegionWatch::default(), usage_dir());
    for _ in 0..3 {
        assert!(watch.await_process(KEY, dir.path()));
        assert_eq!(watch.started(), []);
        (0..100).for_each(|_| open_region(dir.path()));
        assert_eq!(watch.started(), [KEY]);
        open_region(dir.path());
        assert_eq!(watch.started(), []);
    }
    // Damage is an event, too.
    assert!(watch.await_process(KEY, dir.path()));
    fs::remove_file(dir.path().join(paths::REGION_FILE)).unwrap();
    assert_eq!(watch.started(), [KEY]);
}

#[test]
fn receives_notifications_of_selected_shares_only() {
    let (mut watch, dir) = (RegionWatch::default(), usage_dir());
    let selected = BTreeMap::from([(KEY, dir.path())]);
    assert!(watch.set_notifiers(&selected));
    open_region(dir.path());
    assert!(!is_readable(&watch), "an access is no notification");
    notify(dir.path());
    assert!(is_readable(&watch));
    watch.accept(NOW_US);
    assert!(!is_readable(&watch));
    assert_eq!(watch.started(), []);
    assert!(watch.set_notifiers(&BTreeMap::new()));
    watch.accept(NOW_US);
    notify(dir.path());
    assert!(!is_readable(&watch));
}

#[test]
fn watches_one_share_for_processes_and_notifications() {
    for awaits_first in [false, true] {
        let (mut watch, dir) = (RegionWatch::default(), usage_dir());
        let selected = BTreeMap::from([(KEY, dir.path())]);
        if awaits_first {
            assert!(watch.await_process(KEY, dir.path()));
        }
        assert!(watch.set_notifiers(&selected));
        if !awaits_first {
            assert!(watch.await_process(KEY, dir.path()));
        }
        open_region(dir.path());
        assert_eq!(watch.started(), [KEY], "awaits first: {awaits_first}");
        notify(dir.path());
        assert!(is_readable(&watch), "awaits first: {awaits_first}");
        watch.accept(NOW_US);
        assert_eq!(watch.started(), []);
        // The end of notifications does not end the wait for a process, and vice versa.
        assert!(watch.await_process(KEY, dir.path()));
        assert!(watch.set_notifiers(&BTreeMap::new()));
        open_region(dir.path());
        assert_eq!(watch.started(), [KEY], "awaits first: {awaits_first}");
    }
}

#[test]
fn reports_missing_directory_as_unwatched() {
    let mut watch = RegionWatch::default();
    let missing = Path::new("/missing");
    assert!(!watch.await_process(KEY, missing));
    assert!(!watch.set_notifiers(&BTreeMap::from([(KEY, missing)])));
}

#[test]
fn pauses_after_burst_of_notifications() {
    let mut watch = RegionWatch::default();
    for _ in 0..BURST {
        assert!(watch.pollable(NOW_US).is_ok());
        watch.accept(NOW_US);
    }
    assert_eq!(watch.pollable(NOW_US).unwrap_err(), NOW_US + REFILL_US);
}
