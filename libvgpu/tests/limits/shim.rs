//! Delivery `shim`: nothing is preloaded and no variable is set; stubs in place of NVIDIA's libraries load the
//! interposer.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use drava_cdi::elf::Machine;
use drava_cdi::ldcache::{Entry, LdCache};
use drava_vgpu_abi::paths;
use simulator_machine::testing::python;

use crate::interposer;
use crate::loaders::build_library;
use crate::robustness::is_root;
use crate::test_process::{Container, GIB, MIB, TestProcess};

/// Directory of NVIDIA's libraries in the container, per its `ld.so.cache`.
const LIBRARIES: &str = "/usr/local/lib/nvidia";
/// The version in the libraries' file names.
const VERSION: &str = "580.65.06";

/// A container whose root is laid out as the node driver does it.
struct ShimContainer {
    container: Container,
    /// The mounted files, and the mount point of the root.
    files: tempfile::TempDir,
    /// Directory of NVIDIA's libraries.
    driver: PathBuf,
}

impl ShimContainer {
    /// A container with one share of the first GPU; `None` without the privilege to mount.
    fn with_memory(limit_bytes: u64) -> Option<Self> {
        if !is_root() {
            return None;
        }
        let container = Container::with_memory(limit_bytes);
        let files = tempfile::tempdir().unwrap();
        for (stub, stem) in [
            (paths::CUDA_STUB, "libcuda.so"),
            (paths::NVML_STUB, "libnvidia-ml.so"),
        ] {
            interposer::write_stub(stub, &files.path().join(stem));
        }
        fs::create_dir(files.path().join("root")).unwrap();
        fs::write(files.path().join("ld.so.cache"), cache()).unwrap();
        let driver = container.machine.lib_dir();
        Some(Self {
            container,
            files,
            driver,
        })
    }

    /// A program in the container, with an empty environment.
    fn command(&self, program: impl AsRef<Path>, arguments: &[&str]) -> Command {
        self.command_with("", program, arguments)
    }

    fn command_with(
        &self,
        environment: &str,
        program: impl AsRef<Path>,
        arguments: &[&str],
    ) -> Command {
        let script = format!(
            "set -e
            mount --make-rprivate /
            mount -t tmpfs none {root}
            cd {root}
            for place in /*; do
                name=${{place#/}}
                case $name in dev | etc | run) continue ;; esac
                if [ -L $place ]; then cp -P $place $name
                elif [ -d $place ]; then mkdir $name; mount --rbind $place $name
                fi
            done
            mkdir -p dev etc run/drava run/nvidia-persistenced
            for node in null zero urandom; do touch dev/$node; mount --bind /dev/$node dev/$node; done
            for node in {machine}/dev/nvidia*; do touch dev/${{node##*/}}; done
            cp -a /etc/. etc/
            rm -f etc/ld.so.preload
            cp {files}/ld.so.cache etc/ld.so.cache
            mount --bind {run} run/drava
            mount --bind {machine}/run/nvidia-persistenced run/nvidia-persistenced
            mount -t tmpfs none usr/local/lib
            for place in /usr/local/lib/*/; do
                mkdir .$place
                mount --rbind $place .$place
            done
            mkdir -p .{driver} .{LIBRARIES}
            place() {{ touch .$2; mount --bind $1 .$2; mount -o remount,bind,ro .$2; }}
            place {libvgpu} {library}
            for stem in libcuda.so libnvidia-ml.so; do
                place {real}/$stem.1 {driver}/$stem.1
                place {files}/$stem {LIBRARIES}/$stem.{VERSION}
                ln -s $stem.{VERSION} .{LIBRARIES}/$stem.1
                ln -s $stem.1 .{LIBRARIES}/$stem
            done
            exec chroot . /usr/bin/env -i {environment} \"$@\"",
            root = self.files.path().join("root").display(),
            machine = self.container.machine.root().display(),
            files = self.files.path().display(),
            run = self.container.run_dir().display(),
            driver = Path::new(paths::CUDA_STUB.original_path.to_str().unwrap())
                .parent()
                .unwrap()
                .display(),
            libvgpu = interposer::library().display(),
            library = paths::LIBRARY,
            real = self.driver.display(),
        );
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", &script, "sh"])
            .arg(program.as_ref())
            .args(arguments);
        command
    }

    /// A test process with a context on the first GPU that resolves functions by `route`.
    fn start(&self, route: &str) -> TestProcess {
        let mut process = TestProcess::spawn(self.command(interposer::test_process(), &[route]));
        process.init(0);
        process
    }

    /// Runs a program and returns its output.
    fn output(&self, program: impl AsRef<Path>, arguments: &[&str]) -> String {
        let output = self.command(program, arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        String::from_utf8(output.stdout).unwrap()
    }
}

/// The host's `ld.so.cache` with the container's libraries.
fn cache() -> Vec<u8> {
    let mut cache = LdCache::parse(&fs::read("/etc/ld.so.cache").unwrap()).unwrap();
    for stem in ["libcuda.so", "libnvidia-ml.so"] {
        for name in [
            stem.to_owned(),
            format!("{stem}.1"),
            format!("{stem}.{VERSION}"),
        ] {
            let path = format!("{LIBRARIES}/{name}");
            cache.insert(Entry::new(name, path, Machine::HOST));
        }
    }
    cache.to_bytes().unwrap()
}

/// Allocates exactly the limit, and frees it.
fn is_limited(process: &mut TestProcess, limit_bytes: u64, how: &str) {
    assert_eq!(process.memory_info(), (limit_bytes, limit_bytes), "{how}");
    process.denied(&format!("alloc {}", limit_bytes + 1));
    process.alloc(limit_bytes);
    process.denied("alloc 1");
    assert_eq!(process.memory_info(), (0, limit_bytes), "{how}");
}

#[test]
fn limits_every_way_without_preload_and_environment() {
    let Some(shim) = ShimContainer::with_memory(GIB) else {
        return;
    };
    let file = format!("open={LIBRARIES}/libcuda.so.{VERSION}");
    let versioned = format!("open=libcuda.so.{VERSION}");
    for route in [
        "dlsym",
        "procaddress",
        "next",
        "dlmopen",
        "restricted",
        "open=libcuda.so",
        &versioned,
        &file,
    ] {
        let mut process = shim.start(route);
        is_limited(&mut process, GIB, route);
        assert!(process.end().success(), "{route}");
        shim.container.wait_for_ledger_bytes(0);
    }
}

#[test]
fn resolves_hooks_and_unhooked_functions_by_stub() {
    let Some(shim) = ShimContainer::with_memory(GIB) else {
        return;
    };
    let mut process = shim.start("dlsym");
    assert_eq!(process.request("lookup cuMemAlloc_v2"), "0 libvgpu.so");
    // Functions that libvgpu does not hook come from the driver, even if no header declares them. Unknown names are not
    // found.
    for name in ["cuDeviceGetName", "cuMemAllocUnlisted"] {
        let found = process.request(&format!("lookup {name}"));
        assert_eq!(found, "0 libcuda.so.1", "{name}");
    }
    assert_eq!(process.request("lookup cuNoSuchFunction"), "0 none");
    // The names for `ld` resolve to nothing: the simulated CUDA version lacks this function.
    assert!(
        paths::CUDA_STUB
            .link_names()
            .any(|name| name == "cuProfilerStart")
    );
    assert_eq!(process.request("lookup cuProfilerStart"), "0 none");
    assert_eq!(
        process.request("procaddress cuMemAlloc 12080 0"),
        "0 libvgpu.so cuMemAlloc_v2"
    );
}

#[test]
fn limits_library_reopened_after_close() {
    let Some(shim) = ShimContainer::with_memory(GIB) else {
        return;
    };
    let mut process = shim.start("dlsym");
    process.alloc(GIB / 2);
    process.ok("reopen 1");
    assert_eq!(process.request("lookup cuMemAlloc_v2"), "0 libvgpu.so");
    process.denied(&format!("alloc {}", GIB / 2 + 1));
    process.alloc(GIB / 2);
    process.denied("alloc 1");
}

/// Each namespace has its own interposer; both count in the share.
#[test]
fn shares_limit_among_namespaces_of_one_process() {
    let Some(shim) = ShimContainer::with_memory(4 * GIB) else {
        return;
    };
    let mut process = shim.start("dlsym");
    process.alloc(GIB);
    process.ok("namespace");
    process.init(0);
    let (free, total) = process.memory_info();
    assert_eq!(total, 4 * GIB);
    assert_eq!(free, 3 * GIB);
    process.denied(&format!("alloc {}", free + 1));
    process.alloc(free);
    process.denied("alloc 1");
    let mut other = shim.start("dlsym");
    other.denied("alloc 1");
    // The memory of both namespaces is reclaimed when the process is killed.
    process.kill();
    shim.container
        .wait_for_ledger_bytes(crate::test_process::CONTEXT_BYTES);
    other.alloc(4 * GIB);
}

#[test]
fn limits_deeply_bound_library() {
    let Some(shim) = ShimContainer::with_memory(GIB) else {
        return;
    };
    // Linked with NVIDIA's own library, as a library built on another machine.
    let libraries = shim.container.machine.lib_dir().display().to_string();
    let source = include_str!("plugin.c");
    let arguments = [&format!("-L{libraries}"), "-l:libcuda.so.1"];
    let plugin = build_library(shim.files.path(), "plugin", source, &arguments);
    let mut command = shim.command(interposer::test_process(), &["dlsym"]);
    command.arg(&plugin);
    let mut process = TestProcess::spawn(command);
    process.init(0);
    process.denied(&format!("plugin {}", GIB + 1));
    process.ok(&format!("plugin {}", GIB / 2));
    process.denied(&format!("alloc {}", GIB / 2 + 1));
    process.alloc(GIB / 2);
    process.denied("plugin 1");
}

/// The ways in which a program in a container cannot see the directory of the shares, which the node driver mounted.
const HIDDEN: [&str; 3] = [
    // As systemd and sandboxes do it. The simulated driver keeps its own directory.
    "mkdir /kept && mount --bind /run/nvidia-persistenced /kept && mount -t tmpfs none /run
     mkdir /run/nvidia-persistenced && mount --bind /kept /run/nvidia-persistenced",
    "mount -t tmpfs none /run/drava",
    "umount /run/drava && rmdir /run/drava",
];

#[test]
fn denies_memory_where_shares_are_hidden() {
    let Some(shim) = ShimContainer::with_memory(GIB) else {
        return;
    };
    let preloaded = format!("echo {} > /etc/ld.so.preload", paths::LIBRARY);
    for delivery in ["true", &preloaded] {
        for hide in HIDDEN {
            let script = format!("{delivery}\n{hide}\nexec \"$0\" \"$@\"");
            let program = interposer::test_process().display().to_string();
            let arguments = ["-ec", &script, &program, "dlsym"];
            // A variable of the program does not replace the limits.
            let mut command = shim.command_with("DRAVA_MEMORY_LIMIT=64Gi", "/bin/sh", &arguments);
            let errors = shim.files.path().join("stderr");
            command.stderr(fs::File::create(&errors).unwrap());
            let mut process = TestProcess::spawn(command);
            process.denied("init 0");
            process.denied("init 0");
            process.end();
            let errors = fs::read_to_string(errors).unwrap();
            assert_eq!(
                errors,
                "libvgpu: the limits of the share are hidden from this process: /run/drava has none, because of a mount \
                 on /run, a sandbox or a removed directory; denying GPU memory\n",
                "{hide}"
            );
        }
    }
}

/// Nothing is preloaded, so AddressSanitizer is the first library.
#[test]
fn limits_program_with_address_sanitizer_as_it_is() {
    let Some(program) = interposer::sanitized() else {
        return;
    };
    let Some(shim) = ShimContainer::with_memory(GIB) else {
        return;
    };
    let mut process = TestProcess::spawn(shim.command(program, &["dlsym"]));
    process.init(0);
    is_limited(&mut process, GIB, "sanitized");
}

/// Compiles `linked.c`.
fn linked(directory: &Path, name: &str, arguments: &[&str]) -> PathBuf {
    let program = directory.join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/limits/linked.c");
    let built = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .args([&program, &source])
        .args(arguments)
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "cc could not build {name}: {error}");
    program
}

#[test]
fn limits_programs_linked_with_libcuda() {
    let Some(shim) = ShimContainer::with_memory(GIB) else {
        return;
    };
    let files = shim.files.path().display().to_string();
    let real = shim.container.machine.lib_dir().display().to_string();
    // Linked elsewhere with NVIDIA's library, and in the container, where `ld` finds the stub, as Triton does. Ubuntu's
    // compiler links with `--as-needed`, which drops a library if no symbol of it is used.
    for (name, directory, library) in [
        ("elsewhere", &real, "-l:libcuda.so.1"),
        ("here", &files, "-l:libcuda.so"),
    ] {
        let directory = format!("-L{directory}");
        let program = linked(
            shim.files.path(),
            name,
            &["-Wl,--as-needed", &directory, library],
        );
        let mut process = TestProcess::spawn(shim.command(&program, &[]));
        process.init(0);
        is_limited(&mut process, GIB, name);
        assert!(process.end().success());
        shim.container.wait_for_ledger_bytes(0);
    }
}

#[test]
fn limits_static_runtime() {
    let Some(shim) = ShimContainer::with_memory(GIB) else {
        return;
    };
    let directory = shim.files.path();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/limits/runtime.c");
    let object = directory.join("runtime.o");
    let archive = directory.join("libruntime.a");
    for command in [
        Command::new("cc")
            .args(["-c", "-O1", "-o"])
            .args([&object, &source]),
        Command::new("ar").arg("rcs").args([&archive, &object]),
    ] {
        assert!(command.status().unwrap().success());
    }
    let archive = archive.display().to_string();
    let program = linked(directory, "runtime", &["-DRUNTIME", &archive, "-ldl"]);
    let mut process = TestProcess::spawn(shim.command(&program, &[]));
    process.init(0);
    is_limited(&mut process, GIB, "static runtime");
}

#[test]
fn limits_python_program_and_reports_share_in_nvml() {
    if python::is_unavailable() {
        return;
    }
    let Some(shim) = ShimContainer::with_memory(8 * GIB) else {
        return;
    };
    let mut process = shim.start("dlsym");
    process.alloc(3 * GIB);
    assert_eq!(
        process.ok("nvml 0 1"),
        [8 * GIB, 5 * GIB, 3 * GIB].map(u64::cast_signed)
    );
    let clients = python::clients().unwrap();
    let shown = shim.output(clients.join("gpustat"), &["--json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["gpus"][0]["memory.total"], 8192, "{shown}");
    assert_eq!(shown["gpus"][0]["memory.used"], 3072, "{shown}");
    let program = format!(
        "import ctypes
cuda = ctypes.CDLL('libcuda.so.1')
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
allocate = lambda size: cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
print(allocate({too_much}), allocate({rest}), allocate(1))",
        too_much = 5 * GIB + 1,
        rest = 5 * GIB,
    );
    let shown = shim.output(clients.join("python3"), &["-c", &program]);
    assert_eq!(shown.trim(), "2 0 2");
}

#[test]
fn loads_nothing_into_program_without_gpu() {
    let Some(shim) = ShimContainer::with_memory(GIB) else {
        return;
    };
    let maps = shim.output("/bin/cat", &["/proc/self/maps"]);
    assert!(maps.contains("libc.so"), "{maps}");
    assert!(
        !maps.contains("drava") && !maps.contains("nvidia"),
        "{maps}"
    );
}

/// A pod can have both if another claim of it was prepared before the node changed its delivery mode.
#[test]
fn counts_once_with_stub_and_preload() {
    let Some(shim) = ShimContainer::with_memory(GIB) else {
        return;
    };
    let preload = format!("LD_PRELOAD={}", paths::LIBRARY);
    for route in ["dlsym", "procaddress", "next"] {
        let mut process =
            TestProcess::spawn(shim.command_with(&preload, interposer::test_process(), &[route]));
        process.init(0);
        is_limited(&mut process, GIB, route);
        assert_eq!(shim.container.processes_of("share").len(), 1);
        assert!(process.end().success());
        shim.container.wait_for_ledger_bytes(0);
    }
}

/// NVIDIA's own file is mounted, and a program that opens it by path is not limited (see `docs/security.md`). A
/// preloaded interposer limits it.
#[test]
fn does_not_limit_driver_file_opened_by_path() {
    let Some(shim) = ShimContainer::with_memory(GIB) else {
        return;
    };
    let route = format!("open={}", paths::CUDA_STUB.original_path.to_str().unwrap());
    let mut process = shim.start(&route);
    process.alloc(GIB + 2 * MIB);
    let taken = crate::test_process::CONTEXT_BYTES + GIB + 2 * MIB;
    shim.container.wait_for_ledger_bytes(taken);

    let preload = format!("LD_PRELOAD={}", paths::LIBRARY);
    let command = shim.command_with(&preload, interposer::test_process(), &[&route]);
    let mut process = TestProcess::spawn(command);
    process.init(0);
    is_limited(&mut process, GIB, "preloaded");
}

/// With the stub, `dlsym` finds hooks of functions that an old driver lacks.
#[test]
fn returns_not_supported_for_missing_driver_function() {
    if python::is_unavailable() {
        return;
    }
    let Some(mut shim) = ShimContainer::with_memory(GIB) else {
        return;
    };
    let old = tempfile::tempdir().unwrap();
    for (name, function, soname) in [
        ("libcuda", "cuInit", "libcuda.so.1"),
        ("libnvidia-ml", "nvmlInit_v2", "libnvidia-ml.so.1"),
    ] {
        let source = format!("int {function}(void) {{ return 0; }}");
        let soname_argument = format!("-Wl,-soname,{soname}");
        let library = build_library(old.path(), name, &source, &[&soname_argument]);
        fs::rename(library, old.path().join(soname)).unwrap();
    }
    old.path().clone_into(&mut shim.driver);
    let mut process = TestProcess::spawn(shim.command(interposer::test_process(), &["dlsym"]));
    assert_eq!(process.ok("initonly"), [0; 0]);
    assert_eq!(process.query("alloc 1")[0], 801);
    assert_eq!(process.request("lookup cuDeviceGetName"), "0 none");
    let program = "import ctypes
nvml = ctypes.CDLL('libnvidia-ml.so.1')
print(nvml.nvmlInit_v2(), nvml.nvmlDeviceGetMemoryInfo(None, None))";
    let python = python::clients().unwrap().join("python3");
    assert_eq!(shim.output(python, &["-c", program]).trim(), "0 13");
}
