//! Stubs that lead to libvgpu, and the fallback to `ld.so.preload`.

use drava_cdi::elf::{Machine, Stub};

use crate::bundle::{Bundle, OURS, failure};

const PRELOAD: &str = "/etc/ld.so.preload";
const CUDA: &str = "/usr/lib/libcuda.so.1";
const NVML: &str = "/usr/lib/libnvidia-ml.so.1";
const ARGUMENTS: [&str; 7] = ["preload", "--library", OURS, "--stub", CUDA, "--stub", NVML];

fn stub(needed: &[&str]) -> Vec<u8> {
    Stub {
        machine: Machine::HOST,
        soname: "libcuda.so.1",
        needed,
        link_names: &[],
    }
    .to_bytes()
}

fn bundle() -> Bundle {
    let bundle = Bundle::new();
    bundle.hello("first", OURS);
    bundle.write(CUDA, stub(&[OURS, "/opt/libcuda.so.1"]));
    bundle.write(NVML, stub(&[OURS, "/opt/libnvidia-ml.so.1"]));
    bundle
}

#[test]
fn preloads_nothing_with_stubs() {
    let bundle = bundle();
    bundle.hook_succeeds(&ARGUMENTS);
    assert!(!bundle.at(PRELOAD).exists());
    assert_eq!(bundle.probe(&[]), [""; 0]);
}

#[test]
fn keeps_the_images_preload() {
    let bundle = bundle();
    bundle.write(PRELOAD, "/opt/libother.so");
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(bundle.read(PRELOAD), "/opt/libother.so");
}

#[test]
fn preloads_library_if_stub_path_has_another_file() {
    for (place, contents) in [
        // The NVIDIA library of a whole GPU's device.
        (CUDA, stub(&["libc.so.6"])),
        (NVML, stub(&[])),
        // libvgpu must come first.
        (CUDA, stub(&["/opt/libcuda.so.1", OURS])),
        (NVML, b"not a library".to_vec()),
    ] {
        let bundle = bundle();
        bundle.write(place, contents);
        bundle.hook_succeeds(&ARGUMENTS);
        assert_eq!(bundle.read(PRELOAD), format!("{OURS}\n"));
        assert_eq!(bundle.probe(&[]), ["first"]);
    }
    let bundle = bundle();
    std::fs::remove_file(bundle.at(CUDA)).unwrap();
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(bundle.probe(&[]), ["first"]);
}

#[test]
fn rejects_container_without_library() {
    let bundle = bundle();
    std::fs::remove_file(bundle.at(OURS)).unwrap();
    let message = failure(&bundle.hook(&ARGUMENTS));
    assert!(
        message.contains("libvgpu.so is not in the container"),
        "{message}"
    );
}
