//! The directory of specifications.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, Ordering};

use drava_cdi::{ContainerEdits, Device, DeviceNode, Spec, SpecDir};

fn spec(minor: u32) -> Spec {
    let node = DeviceNode::read_write(format!("/dev/nvidia{minor}"), format!("/dev/nvidia{minor}"));
    let edits = ContainerEdits {
        device_nodes: vec![node],
        ..ContainerEdits::default()
    };
    let device = Device {
        name: "a".into(),
        annotations: Default::default(),
        container_edits: edits,
    };
    Spec::new("gpu.drava.dev/claim", [device], ContainerEdits::default()).unwrap()
}

#[test]
fn writes_replaces_lists_reads_and_removes_specs() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("cdi");
    let store = SpecDir::new(&dir, "gpu.drava.dev-claim-");
    assert_eq!(
        store.list().unwrap(),
        [""; 0],
        "a missing directory has no specs"
    );
    assert_eq!(store.read("x").unwrap(), None);
    assert!(!store.remove("x").unwrap());

    let path = store.write("x", &spec(0)).unwrap();
    assert_eq!(path, dir.join("gpu.drava.dev-claim-x.json"));
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o644
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), spec(0).to_json());
    store.write("x", &spec(1)).unwrap();
    store.write("y", &spec(0)).unwrap();
    fs::write(dir.join("nvidia.yaml"), "").unwrap();
    assert_eq!(store.list().unwrap(), ["x", "y"]);
    assert_eq!(store.read("x").unwrap(), Some(spec(1)));
    assert!(store.remove("x").unwrap());
    assert!(!store.remove("x").unwrap());
    assert_eq!(store.list().unwrap(), ["y"]);
    let names: Vec<_> = fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names.len(), 2, "no temporary file remains: {names:?}");
}

#[test]
fn sweep_removes_temporary_file_of_killed_writer() {
    let dir = tempfile::tempdir().unwrap();
    let store = SpecDir::new(dir.path(), "gpu.drava.dev-claim-");
    let left = dir.path().join(".gpu.drava.dev-claim-x.tmp");
    fs::write(&left, "{").unwrap();
    fs::write(dir.path().join(".another.tmp"), "").unwrap();
    assert_eq!(store.list().unwrap(), [""; 0]);

    store.write("x", &spec(0)).unwrap();
    fs::write(&left, "{").unwrap();
    store.sweep().unwrap();
    assert!(!left.exists());
    assert!(dir.path().join(".another.tmp").exists());
    assert_eq!(store.list().unwrap(), ["x"]);
}

#[test]
fn does_not_write_through_a_planted_temporary_link() {
    let dir = tempfile::tempdir().unwrap();
    let outside = dir.path().join("outside");
    fs::write(&outside, "precious").unwrap();
    let store = SpecDir::new(dir.path(), "p-");
    let temporary = dir.path().join(temporary("p-x"));
    std::os::unix::fs::symlink(&outside, temporary).unwrap();
    assert!(store.write("x", &spec(0)).is_err());
    assert_eq!(fs::read_to_string(&outside).unwrap(), "precious");
    store.write("x", &spec(0)).unwrap();
}

/// Returns the name of the temporary file of a write by this thread.
fn temporary(name: &str) -> String {
    format!(".{name}.{}.tmp", rustix::thread::gettid())
}

#[test]
fn rejects_ids_that_leave_the_directory() {
    let store = SpecDir::new("/nonexistent", "p-");
    for id in ["", "../x", "a/b", "a\0", "ä", &"x".repeat(201)] {
        let error = store.write(id, &spec(0)).unwrap_err().to_string();
        assert!(error.contains("invalid CDI spec id"), "{id:?}: {error}");
    }
}

#[test]
fn errors_name_the_path() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let store = SpecDir::new(file.join("cdi"), "p-");
    let error = store.write("x", &spec(0)).unwrap_err().to_string();
    assert!(error.contains(&*file.to_string_lossy()), "{error}");

    let store = SpecDir::new(dir.path(), "p-");
    fs::create_dir(dir.path().join("p-x.json")).unwrap();
    let error = store.write("x", &spec(0)).unwrap_err().to_string();
    assert!(
        error.contains("cannot replace") && error.contains("p-x.json"),
        "{error}"
    );
    assert!(!dir.path().join(temporary("p-x")).exists());
    fs::write(dir.path().join("p-y.json"), "{}").unwrap();
    let error = store.read("y").unwrap_err().to_string();
    assert!(error.contains("p-y.json"), "{error}");
}

/// A reader and a writer that is stopped midway must not see a part of a file.
#[test]
fn concurrent_writers_of_one_spec_leave_whole_files() {
    let dir = tempfile::tempdir().unwrap();
    let store = SpecDir::new(dir.path(), "p-");
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let write = |minor| {
            for _ in 0..500 {
                store.write("x", &spec(minor)).unwrap();
            }
        };
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                store.read("x").unwrap();
            }
        });
        let writers = [0, 1, 2].map(|minor| scope.spawn(move || write(minor)));
        let written = writers.map(|writer| writer.join());
        is_done.store(true, Ordering::Relaxed);
        assert!(written.iter().all(Result::is_ok));
    });
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}
