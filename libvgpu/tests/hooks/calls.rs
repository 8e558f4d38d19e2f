//! Calls of every hook, on a driver that rejects every call: each reaches the driver once, and returns its result.

use std::fs::File;
use std::mem::offset_of;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicU64;

use drava_vgpu_abi::page::suspended;
use drava_vgpu_abi::region::Header;

use crate::test_process::{Container, TestProcess};
use crate::{compile_with, hooks_of, limited};

/// What the driver returns.
const NOT_SUPPORTED: &str = "801";
/// `NVML_ERROR_NOT_SUPPORTED`.
const NVML_NOT_SUPPORTED: &str = "3";

/// A process of a container with limits of memory and GPU time, on a driver that counts calls.
struct Calls {
    process: TestProcess,
    container: Container,
    _libraries: tempfile::TempDir,
}

impl Calls {
    fn new() -> Self {
        let libraries = tempfile::tempdir().unwrap();
        let paths =
            [("libcuda.so.1", "Cuda"), ("libnvidia-ml.so.1", "Nvml")].map(|(soname, library)| {
                let path = libraries.path().join(soname);
                build_stub(&path, soname, &hooks_of(library));
                path
            });
        let program = libraries.path().join("calls");
        compile_with("calls.c", &program, &["-ldl"]);
        let container = limited();
        let mut command = container.command(program);
        command.args(paths);
        Self {
            process: TestProcess::spawn(command),
            container,
            _libraries: libraries,
        }
    }

    /// Words of the answer to a request, without the first.
    fn answer(&mut self, request: &str) -> Vec<String> {
        let answer = self.process.request(request);
        answer.split(' ').skip(1).map(str::to_owned).collect()
    }
}

/// Builds a library with the functions, all of which it rejects.
fn build_stub(path: &Path, soname: &str, functions: &[String]) {
    let rejecting = functions
        .iter()
        .filter(|name| *name != "cuGraphInstantiateWithFlags");
    let list: String = rejecting.map(|name| format!("F({name})\n")).collect();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hooks/stub.c");
    let text = std::fs::read_to_string(source).unwrap();
    let generated = path.with_extension("c");
    std::fs::write(
        &generated,
        text.replace("FUNCTIONS\n", &format!("{list}\n")),
    )
    .unwrap();
    let status = Command::new("cc")
        .args([
            "-std=gnu11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-O1",
            "-shared",
            "-fPIC",
        ])
        .arg(format!("-Wl,-soname,{soname}"))
        .arg("-o")
        .args([path, &generated])
        .status()
        .unwrap();
    assert!(
        status.success(),
        "cc could not compile the stub of {soname}"
    );
}

/// Functions that a share does not have, whatever their arguments, so that the driver is not asked.
const DENIED: [&str; 1] = ["nvmlEventSetRegisterGpuOperationalEvents_v1"];

#[test]
fn every_hook_calls_driver_once_and_returns_its_result() {
    let mut calls = Calls::new();
    let mut wrong = Vec::new();
    let names: Vec<String> = ["Cuda", "Nvml"].into_iter().flat_map(hooks_of).collect();
    assert!(names.len() > 200, "{}", names.len());
    for name in &names {
        let answer = calls.answer(name);
        let expected = match DENIED.contains(&name.as_str()) {
            true => ["libvgpu.so", NVML_NOT_SUPPORTED, "0"],
            false => ["libvgpu.so", NOT_SUPPORTED, "1"],
        };
        if answer != expected {
            wrong.push(format!("{name}: {answer:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Functions that libcuda does not block while a process is suspended.
const LOOKUPS: [&str; 3] = ["cuInit", "cuGetProcAddress", "cuGetProcAddress_v2"];

#[test]
fn every_call_of_suspended_share_is_a_demand() {
    let mut calls = Calls::new();
    let (page, region) = (
        calls.container.page("share"),
        calls.container.region("share"),
    );
    let open = |path| File::options().read(true).write(true).open(path).unwrap();
    let demanded = offset_of!(Header<AtomicU64>, demanded) as u64;
    calls.answer("cuMemFree_v2");
    let (page, region) = (open(page), open(region));
    let mut wrong = Vec::new();
    let names = hooks_of("Cuda");
    for (number, name) in (1u64..).zip(&names) {
        for suspension in [0, number] {
            let write = suspended(suspension);
            page.write_all_at(write.bytes(), write.offset()).unwrap();
            region.write_all_at(&[0; 8], demanded).unwrap();
            calls.answer(name);
            let mut found = [0; 8];
            region.read_exact_at(&mut found, demanded).unwrap();
            let expected = match LOOKUPS.contains(&name.as_str()) {
                true => 0,
                false => suspension,
            };
            if u64::from_le_bytes(found) != expected {
                wrong.push(format!("{name}: {found:?} instead of {expected}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The graph has 100,000 nodes.
#[test]
fn instantiates_large_graph_without_call_per_node() {
    let mut calls = Calls::new();
    let mut queries = |request: &str| -> usize {
        let answer = calls.answer(request);
        assert_eq!(answer[0], "0");
        answer[1].parse().unwrap()
    };
    let queried = queries("graph 0");
    assert!(queried < 10_000, "{queried} queries of nodes");
    // Each node may allocate memory, which must be counted.
    let queried = queries("graph 1");
    assert!(queried >= 100_000, "{queried} queries of nodes");
}
