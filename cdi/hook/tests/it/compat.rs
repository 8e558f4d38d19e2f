//! CUDA compatibility libraries of the image.

use drava_cdi::elf::{Machine, Stub};
use drava_cdi::ldcache::LdCache;

use crate::bundle::{Bundle, OURS};

const NODE: &str = "/usr/lib/driver/libanswer.so.1";
const IMAGE: &str = "/usr/local/cuda/compat/libanswer.so.1";

/// Returns a container with the library of the node in its cache, and an image with CUDA of this version.
fn bundle(version: &str) -> Bundle {
    let bundle = Bundle::new();
    bundle.answer(NODE);
    bundle.answer(IMAGE);
    bundle.write(
        &format!("/usr/local/cuda/compat/libcuda.so.{version}"),
        "no library",
    );
    bundle.link("/usr/local/cuda/compat/dangling.so", "/missing");
    bundle.hook_succeeds(&["ldcache", "--library", NODE]);
    bundle
}

#[test]
fn newer_image_uses_its_own_libraries() {
    let bundle = bundle("590.44.01");
    bundle.hook_succeeds(&["compat", "--driver-version", "580.65.06"]);
    assert_eq!(
        bundle.probe(&["libanswer.so.1"]),
        [format!("libanswer.so.1: {IMAGE}")]
    );
}

#[test]
fn older_image_uses_libraries_of_the_node() {
    let bundle = bundle("535.54.03");
    bundle.hook_succeeds(&["compat", "--driver-version", "580.65.06"]);
    assert_eq!(
        bundle.probe(&["libanswer.so.1"]),
        [format!("libanswer.so.1: {NODE}")]
    );
    Bundle::empty().hook_succeeds(&["compat", "--driver-version", "580.65.06"]);
}

#[test]
fn stub_of_libcuda_stays_in_place() {
    let bundle = bundle("590.44.01");
    let (name, node) = ("libcuda.so.1", "/usr/lib/driver/libcuda.so.1");
    bundle.answer("/usr/local/cuda/compat/libcuda.so.1");
    let stub = Stub {
        machine: Machine::HOST,
        soname: name,
        needed: &[OURS, "/opt/libcuda.so.1"],
        link_names: &[],
    };
    bundle.write(node, stub.to_bytes());
    bundle.hook_succeeds(&["ldcache", "--library", node]);
    bundle.hook_succeeds(&["compat", "--driver-version", "580.65.06"]);
    let cache = std::fs::read(bundle.at("/etc/ld.so.cache")).unwrap();
    let cache = LdCache::parse(&cache).unwrap();
    let paths: Vec<_> = cache
        .entries()
        .iter()
        .filter(|entry| entry.name == name.as_bytes())
        .map(|entry| String::from_utf8_lossy(&entry.path))
        .collect();
    assert_eq!(paths, [node]);
}

#[test]
fn image_that_the_driver_satisfies_uses_libraries_of_the_node() {
    let bundle = bundle("590.44.01");
    bundle.write_config(r#""process": {"env": ["NVIDIA_REQUIRE_CUDA=cuda>=13.0 brand=tesla"]}"#);
    let run = |cuda| {
        let arguments = ["compat", "--driver-version", "580.65.06", "--cuda-version"];
        bundle.hook_succeeds(&[&arguments[..], &[cuda]].concat());
        bundle.probe(&["libanswer.so.1"])
    };
    assert_eq!(run("13.0"), [format!("libanswer.so.1: {NODE}")]);
    assert_eq!(run("12.9"), [format!("libanswer.so.1: {IMAGE}")]);
}
