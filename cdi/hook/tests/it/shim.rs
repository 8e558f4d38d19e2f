//! Stubs that lead to libvgpu, and what is done where something else has their place.

use drava_cdi::elf::{Machine, Stub};

use crate::bundle::{Bundle, OURS, failure};

const PRELOAD: &str = "/etc/ld.so.preload";
const CUDA: &str = "/usr/lib/libcuda.so.1";
const NVML: &str = "/usr/lib/libnvidia-ml.so.1";
const ARGUMENTS: [&str; 7] = ["shim", "--library", OURS, "--stub", CUDA, "--stub", NVML];

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
fn with_stubs_nothing_is_preloaded() {
    let bundle = bundle();
    bundle.hook_succeeds(&ARGUMENTS);
    assert!(!bundle.at(PRELOAD).exists());
    assert_eq!(bundle.probe(&[]), [""; 0]);
}

#[test]
fn what_the_image_preloads_stays() {
    let bundle = bundle();
    bundle.write(PRELOAD, "/opt/libother.so");
    bundle.hook_succeeds(&ARGUMENTS);
    assert_eq!(bundle.read(PRELOAD), "/opt/libother.so");
}

#[test]
fn anything_else_in_the_place_of_a_stub_makes_the_library_preloaded() {
    for (place, contents) in [
        // The driver's own, from a whole card's device.
        (CUDA, stub(&["libc.so.6"])),
        (NVML, stub(&[])),
        // Ours must come first.
        (CUDA, stub(&["/opt/libcuda.so.1", OURS])),
        (NVML, b"no library".to_vec()),
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
fn without_the_library_the_container_does_not_start() {
    let bundle = bundle();
    std::fs::remove_file(bundle.at(OURS)).unwrap();
    let message = failure(&bundle.hook(&ARGUMENTS));
    assert!(
        message.contains("libvgpu.so is not in the container"),
        "{message}"
    );
}
