//! Builds `libvgpu.so` in its own profile, and the test programs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use drava_cdi::elf::{self, Machine};
use drava_vgpu_abi::paths;
use gpu_tenants::library;

/// `libvgpu.so` as shipped, built on the first call.
pub(crate) fn library() -> &'static Path {
    library::shipped().unwrap()
}

/// `libvgpu.so` that kills its process after the step in `DRAVA_KILL_AFTER`, built on the first call.
pub(crate) fn library_with_kill_points() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // A separate directory, so that it does not replace the shipped library.
        let directory = concat!(env!("CARGO_TARGET_TMPDIR"), "/kill-points");
        library::build(&["--features", "kill-points", "--target-dir", directory]).unwrap()
    })
}

/// The test process, compiled on the first call.
pub(crate) fn test_process() -> &'static Path {
    static TEST_PROCESS: OnceLock<PathBuf> = OnceLock::new();
    TEST_PROCESS.get_or_init(|| compile("test_process"))
}

/// The process of the stress test, compiled on the first call.
pub(crate) fn stress() -> &'static Path {
    static STRESS: OnceLock<PathBuf> = OnceLock::new();
    STRESS.get_or_init(|| compile("stress"))
}

/// The multithreaded process, compiled on the first call.
pub(crate) fn threads() -> &'static Path {
    static THREADS: OnceLock<PathBuf> = OnceLock::new();
    THREADS.get_or_init(|| compile("threads"))
}

/// The test process, built with AddressSanitizer on the first call; `None` if the compiler does not have it.
pub(crate) fn sanitized() -> Option<&'static Path> {
    static SANITIZED: OnceLock<Option<PathBuf>> = OnceLock::new();
    let built = SANITIZED.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/limits/test_process.c");
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sanitized");
        let output = Command::new("cc")
            .args(["-std=gnu11", "-O1", "-fsanitize=address", "-o"])
            .args([&target, &source])
            .args(["-ldl", "-lpthread"])
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        let is_missing = error.contains("asan");
        assert!(output.status.success() || is_missing, "{error}");
        output.status.success().then_some(target)
    });
    built.as_deref()
}

/// Writes a stub as the node driver does.
pub(crate) fn write_stub(stub: paths::Stub, path: &Path) {
    let link_names: Vec<&str> = stub.link_names().collect();
    let stub = elf::Stub {
        machine: Machine::HOST,
        soname: stub.soname.to_str().unwrap(),
        needed: &[paths::LIBRARY, stub.original_path.to_str().unwrap()],
        link_names: &link_names,
    };
    std::fs::write(path, stub.to_bytes()).unwrap();
}

fn compile(name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/limits/{name}.c"));
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let status = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .args([&target, &source])
        .args(["-ldl", "-lpthread"])
        .status()
        .unwrap();
    assert!(
        status.success(),
        "cc could not compile {}",
        source.display()
    );
    target
}
