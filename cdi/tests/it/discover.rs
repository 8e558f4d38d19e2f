//! Discovery under driver roots of several distributions.

use drava_cdi::ldcache::{Entry, LdCache};
use drava_cdi::{
    ContainerEdits, DeviceNumber, Driver, HookProgram, Library, METERED, Part, Substitute,
    UNMETERED,
};

use crate::driver_root::{FakeRoot, OTHER, cannot_create_devices, elf, elf_of_host};

const DEBIAN: &str = "usr/lib/x86_64-linux-gnu";

fn hook() -> HookProgram {
    HookProgram::new("/var/lib/drava/bin/0123/drava-cdi-hook")
}

fn paths(driver: &Driver, parts: &[Part]) -> Vec<String> {
    let edits = driver.edits(parts, &hook());
    edits
        .mounts
        .into_iter()
        .map(|mount| mount.container_path)
        .collect()
}

fn nodes(edits: &ContainerEdits) -> Vec<&str> {
    edits
        .device_nodes
        .iter()
        .map(|node| node.path.as_str())
        .collect()
}

#[test]
fn metered_device_gets_compute_and_utility_only() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::debian();
    let driver = root.driver();
    insta::assert_json_snapshot!(driver.edits(METERED, &hook()).normalized());
}

#[test]
fn whole_gpu_gets_all_parts() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::debian();
    let driver = root.driver();
    let metered = paths(&driver, METERED);
    let all = paths(&driver, UNMETERED);
    assert!(metered.iter().all(|path| all.contains(path)));
    let more: Vec<_> = all.iter().filter(|path| !metered.contains(path)).collect();
    assert_eq!(
        more,
        [
            "/usr/lib/x86_64-linux-gnu/libGLX_nvidia.so.580.65.06",
            "/usr/lib/x86_64-linux-gnu/libnvidia-eglcore.so.580.65.06",
            "/usr/lib/x86_64-linux-gnu/libnvidia-encode.so.580.65.06",
            "/usr/lib/x86_64-linux-gnu/libnvidia-fbc.so.580.65.06",
            "/usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.580.65.06",
            "/usr/bin/nvidia-cuda-mps-control",
        ]
    );
    assert_eq!(
        nodes(&driver.edits(METERED, &hook())),
        ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    );
    assert!(nodes(&driver.edits(UNMETERED, &hook())).contains(&"/dev/nvidia-modeset"));
}

#[test]
fn reads_version_and_names_from_files() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::debian();
    let driver = root.driver();
    assert_eq!(driver.version(), Some("580.65.06"));
    let cuda = driver
        .libraries()
        .iter()
        .find(|library| library.soname == "libcuda.so.1")
        .unwrap();
    assert_eq!(
        *cuda,
        Library {
            part: Part::Compute,
            path: format!("/{DEBIAN}/libcuda.so.580.65.06"),
            soname: "libcuda.so.1".into(),
            unversioned: Some("libcuda.so".into()),
        }
    );
}

#[test]
fn finds_libraries_in_lib64_on_red_hat() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::empty();
    root.driver_libraries("usr/lib64", "570.10");
    root.link("lib64", "usr/lib64");
    root.device("dev/nvidiactl");
    let driver = root.driver();
    assert_eq!(driver.version(), Some("570.10"));
    assert!(
        driver
            .libraries()
            .iter()
            .all(|library| library.path.starts_with("/usr/lib64/"))
    );
}

#[test]
fn searches_directories_of_the_loader_cache() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::empty();
    root.driver_libraries("opt/driver/lib", "580.65.06");
    root.device("dev/nvidiactl");
    assert!(
        Driver::discover(root.open("/")).is_err(),
        "no known directory contains the library"
    );

    let mut cache = LdCache::default();
    let name = "libcuda.so.1";
    cache.insert(Entry::new(
        name,
        format!("/opt/driver/lib/{name}"),
        drava_cdi::elf::Machine::HOST,
    ));
    root.file("etc/ld.so.cache", &cache.to_bytes().unwrap());
    assert_eq!(root.driver().libraries().len(), 12);
}

#[test]
fn excludes_other_driver_versions_and_machines() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::debian();
    root.library(
        &format!("{DEBIAN}/libnvidia-ml.so.535.54.03"),
        "libnvidia-ml.so.1",
    );
    root.library(
        &format!("{DEBIAN}/libnvidia-eglcore.so.535.54.03"),
        "libnvidia-eglcore.so.535.54.03",
    );
    root.file(
        "usr/lib64/libcuda.so.580.65.06",
        &elf(OTHER, Some("libcuda.so.1")),
    );
    root.file(
        "usr/lib64/libnvidia-nscq.so.1",
        &elf(OTHER, Some("libnvidia-nscq.so.1")),
    );
    root.file(
        "usr/lib/libnvidia-sandboxutils.so.1",
        b"/* GNU ld script */",
    );
    let driver = root.driver();
    assert_eq!(driver.version(), Some("580.65.06"));
    assert_eq!(driver.libraries().len(), 12);
    assert!(
        driver
            .libraries()
            .iter()
            .all(|library| library.path.starts_with("/usr/lib/x86_64-linux-gnu/"))
    );
    assert!(
        driver
            .libraries()
            .iter()
            .all(|library| library.path.ends_with(".580.65.06"))
    );
}

#[test]
fn library_without_soname_uses_its_link_name() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::empty();
    root.file(
        &format!("{DEBIAN}/libcuda.so.580.65.06"),
        &elf_of_host(None),
    );
    root.link(&format!("{DEBIAN}/libcuda.so.1"), "libcuda.so.580.65.06");
    root.device("dev/nvidiactl");
    assert_eq!(root.driver().libraries()[0].soname, "libcuda.so.1");
}

#[test]
fn does_not_follow_links_out_of_root_or_open_fifos() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::debian();
    root.remove(&format!("{DEBIAN}/libnvidia-ml.so.1"));
    root.remove(&format!("{DEBIAN}/libnvidia-ml.so.580.65.06"));
    root.link(
        &format!("{DEBIAN}/libnvidia-ml.so.1"),
        "../../../../../../../../../../etc/passwd",
    );
    root.fifo(&format!("{DEBIAN}/libnvidia-cfg.so.2"));
    root.fifo("etc/ld.so.cache");
    let driver = root.driver();
    assert!(
        !driver
            .libraries()
            .iter()
            .any(|library| library.soname.starts_with("libnvidia-ml"))
    );
    assert_eq!(driver.libraries().len(), 11);
}

#[test]
fn gpu_has_its_own_node_and_dri_nodes_for_graphics() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::debian();
    root.device("dev/dri/card1");
    root.device("dev/dri/renderD129");
    root.link("dev/dri/by-path/pci-0000:1b:00.0-card", "../card1");
    root.link("dev/dri/by-path/pci-0000:1b:00.0-render", "../renderD129");
    let driver = root.driver();

    let metered = driver.gpu(1, "0000:1b:00.0", METERED).unwrap();
    assert_eq!(nodes(&metered), ["/dev/nvidia1"]);
    let node = &metered.device_nodes[0];
    assert_eq!(
        node.host_path.as_deref(),
        Some("/run/nvidia/driver/dev/nvidia1")
    );
    assert_eq!(node.permissions.as_deref(), Some("rw"));
    let whole = driver.gpu(1, "0000:1b:00.0", UNMETERED).unwrap();
    assert_eq!(
        nodes(&whole),
        ["/dev/nvidia1", "/dev/dri/card1", "/dev/dri/renderD129"]
    );
    assert_eq!(
        nodes(&driver.gpu(0, "0000:3b:00.0", UNMETERED).unwrap()),
        ["/dev/nvidia0"]
    );

    let error = driver
        .gpu(7, "0000:1b:00.0", METERED)
        .unwrap_err()
        .to_string();
    assert!(error.contains("/dev/nvidia7"), "{error}");
    assert!(error.contains(&*root.path().to_string_lossy()), "{error}");
}

#[test]
fn mig_device_has_capabilities_of_both_instances() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::debian();
    let base = "proc/driver/nvidia/capabilities/gpu0/mig/gi5";
    root.file(
        &format!("{base}/access"),
        b"DeviceFileMinor: 48\nDeviceFileMode: 292\n",
    );
    root.file(
        &format!("{base}/ci0/access"),
        b"DeviceFileMinor: 49\nDeviceFileMode: 292\n",
    );
    // No program has created nodes of the capabilities.
    root.file("proc/devices", b"Character devices:\n  1 mem\n\n");
    let driver = root.driver();
    let error = driver.check_mig(0).unwrap_err().to_string();
    assert!(
        error.contains("no major number nvidia-caps") && error.contains("450 or later"),
        "{error}"
    );
    root.file(
        "proc/devices",
        b"Character devices:\n  1 mem\n237 nvidia-caps\n\nBlock devices:\n  7 loop\n",
    );
    driver.check_mig(0).unwrap();
    let error = driver.check_mig(7).unwrap_err().to_string();
    assert!(error.contains("/dev/nvidia7"), "{error}");
    let edits = driver.mig(0, 5, 0).unwrap();
    assert_eq!(
        nodes(&edits),
        [
            "/dev/nvidia0",
            "/dev/nvidia-caps/nvidia-cap48",
            "/dev/nvidia-caps/nvidia-cap49"
        ]
    );
    let numbers: Vec<_> = edits.device_nodes.iter().map(|node| node.number).collect();
    let capability = |minor| Some(DeviceNumber { major: 237, minor });
    assert_eq!(numbers, [None, capability(48), capability(49)]);
    assert_eq!(edits.device_nodes[1].host_path, None);

    let error = driver.mig(0, 6, 0).unwrap_err().to_string();
    assert!(error.contains("gpu0/mig/gi6/access"), "{error}");
}

#[test]
fn leftover_library_of_older_driver_does_not_win() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::debian();
    for leftover in ["libcuda.so.470.10", "libnvidia-ml.so.470.10"] {
        root.library(&format!("{DEBIAN}/{leftover}"), "libcuda.so.1");
    }
    let discover = |version| Driver::discover_with_devices(root.open("/"), None, version);
    for version in [None, Some("580.65.06")] {
        let driver = discover(version).unwrap();
        assert_eq!(driver.version(), Some("580.65.06"));
        let cuda = driver.library("libcuda.so.1").unwrap();
        assert!(cuda.path.ends_with("libcuda.so.580.65.06"), "{}", cuda.path);
        let paths = paths(&driver, UNMETERED);
        assert!(
            !paths.iter().any(|path| path.contains("470.10")),
            "{paths:?}"
        );
    }
    // The link is wrong, and NVML knows.
    assert_eq!(discover(Some("470.10")).unwrap().version(), Some("470.10"));
    let error = discover(Some("590.44.01")).unwrap_err().to_string();
    for part in [
        "kernel driver has the version 590.44.01",
        "the version 580.65.06",
        "install libcuda",
    ] {
        assert!(error.contains(part), "{part} is missing in: {error}");
    }
}

#[test]
fn finds_debian_packages_without_loader_cache() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::empty();
    root.driver_libraries(&format!("{DEBIAN}/nvidia/current"), "580.65.06");
    root.device("dev/nvidiactl");
    let driver = root.driver();
    let cuda = driver.library("libcuda.so.1").unwrap();
    assert!(cuda.path.contains("/nvidia/current/"), "{}", cuda.path);
}

#[test]
fn missing_driver_error_names_directories_and_remedy() {
    let root = FakeRoot::empty();
    root.file("usr/lib64/libc.so.6", b"");
    let error = Driver::discover(root.open("/")).unwrap_err().to_string();
    for part in [
        "libcuda.so.1",
        "/usr/lib64",
        "install the NVIDIA driver",
        "--driver-root",
        &root.path().to_string_lossy(),
    ] {
        assert!(error.contains(part), "{part} is missing in: {error}");
    }

    root.driver_libraries("usr/lib64", "580.65.06");
    let error = Driver::discover(root.open("/")).unwrap_err().to_string();
    assert!(error.contains("/dev/nvidiactl"), "{error}");
}

#[test]
fn substitute_takes_path_and_names_of_library() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::debian();
    let driver = root.driver();
    let substitute = Substitute {
        soname: "libcuda.so.1".to_owned(),
        host_path: "/var/lib/drava/lib/0123/libcuda.so.1".to_owned(),
        original: "/usr/local/lib/drava/driver/libcuda.so.1".to_owned(),
    };
    let place = &driver.library("libcuda.so.1").unwrap().path;
    let plain = driver.edits(METERED, &hook());
    let mut edits = plain.clone();
    edits.overlay(ContainerEdits {
        mounts: driver.substituted(std::slice::from_ref(&substitute)),
        ..Default::default()
    });

    let mounts: Vec<(&str, &str)> = edits
        .mounts
        .iter()
        .filter(|mount| !plain.mounts.contains(mount))
        .map(|mount| (mount.host_path.as_str(), mount.container_path.as_str()))
        .collect();
    let original = format!("/run/nvidia/driver{place}");
    assert_eq!(
        mounts,
        [
            (original.as_str(), substitute.original.as_str()),
            (substitute.host_path.as_str(), place.as_str())
        ]
    );
    let gone = plain
        .mounts
        .iter()
        .filter(|mount| !edits.mounts.contains(mount));
    assert_eq!(gone.count(), 1, "only libcuda moves");
    // Links and cache still lead to the original path.
    assert_eq!(edits.hooks, plain.hooks);
}

#[test]
fn whole_gpu_gets_devices_of_direct_transfers() {
    if cannot_create_devices() {
        return;
    }
    let root = FakeRoot::debian();
    let devices = [
        "/dev/gdrdrv",
        "/dev/nvidia-caps-imex-channels/channel0",
        "/dev/nvidia-fs0",
        "/dev/nvidia-fs15",
    ];
    for device in devices {
        root.device(device.trim_start_matches('/'));
    }
    // A channel of a compute domain, and a file of another kind.
    root.device("dev/nvidia-caps-imex-channels/channel1");
    root.device("dev/nvidia-fs-control");
    root.file("run/udev/data/b259:0", b"");
    let driver = root.driver();
    let whole = driver.edits(UNMETERED, &hook());
    let share = driver.edits(METERED, &hook());
    let only_whole: Vec<_> = nodes(&whole)
        .into_iter()
        .filter(|node| !nodes(&share).contains(node) && *node != "/dev/nvidia-modeset")
        .collect();
    assert_eq!(only_whole, devices);
    let database = |edits: &ContainerEdits| {
        let mut mounts = edits.mounts.iter();
        mounts.any(|mount| mount.container_path == "/run/udev")
    };
    assert!(database(&whole) && !database(&share));
}

#[test]
fn mounts_no_socket_that_ended_after_discovery() {
    if cannot_create_devices() {
        return;
    }
    const SOCKET: &str = "run/nvidia-persistenced/socket";
    let root = FakeRoot::debian();
    let driver = root.driver();
    let has_socket = || {
        paths(&driver, METERED)
            .iter()
            .any(|path| path.ends_with(SOCKET))
    };
    assert!(has_socket());
    root.remove(SOCKET);
    assert!(!has_socket(), "the container would not start");
}
