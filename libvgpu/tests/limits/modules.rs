//! Memory that libcuda allocates for modules, and for the heap and the stacks of a context.

use drava_vgpu_abi::Limits;

use crate::test_process::{CONTEXT_BYTES, Container, GIB, GPUS, MIB, TestProcess};

const BYTES: u64 = 512 * MIB;

/// Functions that load a module, by the number in the test process's command.
const LOADS: [(u32, &str); 4] = [
    (0, "cuModuleLoadData"),
    (1, "cuModuleLoadDataEx"),
    (2, "cuModuleLoadFatBinary"),
    (3, "cuModuleLoad"),
];

#[test]
fn denies_module_with_globals_beyond_limit() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    for (load, name) in LOADS {
        process.denied(&format!("module {} {load}", 4 * GIB));
        assert_eq!(container.ledger_bytes(), CONTEXT_BYTES, "{name}");
        assert_eq!(process.memory_info().0, GIB, "{name}");
    }
}

#[test]
fn charges_globals_until_module_is_unloaded() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    for (load, name) in LOADS {
        let module = process.ok(&format!("module {BYTES} {load}"))[0];
        assert_eq!(process.memory_info().0, GIB - BYTES, "{name}");
        process.denied(&format!("module {} {load}", BYTES + 2 * MIB));
        process.ok(&format!("unload {module}"));
        assert_eq!(process.memory_info().0, GIB, "{name}");
    }
    let context = process.ok("context 0")[0];
    process.ok(&format!("module {BYTES} 0"));
    assert_eq!(process.memory_info().0, GIB - BYTES);
    process.ok(&format!("destroy {context}"));
    process.ok("init 0");
    assert_eq!(process.memory_info().0, GIB);
}

/// Forms of images, by the number in the test process's command.
const FORMS: [(u32, &str); 5] = [
    (0, "PTX"),
    (1, "cubin"),
    (2, "container"),
    (3, "wrapper of a container"),
    (5, "container of PTX"),
];
const FILE: u32 = 3;
const WRAPPER: u32 = 3;
const COMPRESSED: u32 = 4;

#[test]
fn charges_globals_of_each_form_of_image() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    for (form, name) in FORMS {
        for (load, function) in LOADS {
            // A wrapper has an address.
            if (load, form) == (FILE, WRAPPER) {
                continue;
            }
            process.denied(&format!("module {} {load} {form}", 4 * GIB));
            assert_eq!(
                container.ledger_bytes(),
                CONTEXT_BYTES,
                "{function}, {name}"
            );
            let module = process.ok(&format!("module {BYTES} {load} {form}"))[0];
            assert_eq!(process.memory_info().0, GIB - BYTES, "{function}, {name}");
            process.ok(&format!("unload {module}"));
            assert_eq!(process.memory_info().0, GIB, "{function}, {name}");
        }
        for is_file in [0, 1] {
            if (is_file, form) == (1, WRAPPER) {
                continue;
            }
            let library = process.ok(&format!("library {} {form} {is_file}", 4 * GIB))[0];
            process.denied(&format!("kernel {library}"));
            process.ok(&format!("unloadlibrary {library}"));
            assert_eq!(process.memory_info().0, GIB, "{name}");
        }
    }
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
}

/// The agent charges what libvgpu cannot read.
#[test]
fn leaves_globals_of_compressed_images_to_agent() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.ok(&format!("module {BYTES} 0 {COMPRESSED}"));
    assert_eq!(process.memory_info().0, GIB);
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + BYTES);
}

#[test]
fn charges_globals_of_linked_images() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.denied(&format!("linked {}", 2 * GIB));
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
    let module = process.ok(&format!("linked {}", BYTES / 2))[0];
    assert_eq!(process.memory_info().0, GIB - BYTES);
    process.ok(&format!("unload {module}"));
    assert_eq!(process.memory_info().0, GIB);
}

/// Many small modules are as large as one large module.
#[test]
fn charges_small_globals_of_many_modules() {
    const EACH: u64 = 4 * MIB;
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    for _ in 0..100 {
        process.ok(&format!("module {EACH} 0"));
    }
    assert_eq!(process.memory_info().0, GIB - 100 * EACH);
}

#[test]
fn charges_globals_of_library_used_in_context() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    for uses in [
        "kernel",
        "librarymodule",
        "libraryglobal",
        "libraryfunction",
    ] {
        let library = process.ok(&format!("library {BYTES}"))[0];
        assert_eq!(process.memory_info().0, GIB, "a library is in no context");
        process.ok(&format!("{uses} {library}"));
        assert_eq!(process.memory_info().0, GIB - BYTES, "{uses}");
        process.ok(&format!("{uses} {library}"));
        assert_eq!(process.memory_info().0, GIB - BYTES, "{uses} twice");
        process.ok(&format!("unloadlibrary {library}"));
        assert_eq!(process.memory_info().0, GIB, "{uses}");
        let library = process.ok(&format!("library {}", 4 * GIB))[0];
        process.denied(&format!("{uses} {library}"));
        process.ok(&format!("unloadlibrary {library}"));
        assert_eq!(process.memory_info().0, GIB, "{uses}");
        assert_eq!(container.ledger_bytes(), CONTEXT_BYTES, "{uses}");
    }
}

/// A container with a share of each GPU.
fn with_two_shares() -> Container {
    let container = Container::with_memory(GIB);
    container.add_share("second", GPUS[1], &Limits::memory(GIB));
    container
}

/// Requests for the kernels of a library.
const KERNELS: [&str; 2] = ["kernel", "kernels"];

#[test]
fn charges_library_whose_kernel_is_older_than_context() {
    let container = Container::with_memory(GIB);
    for kernel in KERNELS {
        for context in ["init 0", "context 0"] {
            let mut process = container.start("dlsym");
            process.ok("initonly");
            let library = process.ok(&format!("library {BYTES}"))[0];
            let handle = process.ok(&format!("{kernel} {library}"))[0];
            process.ok(context);
            assert_eq!(process.memory_info().0, GIB - BYTES, "{kernel}, {context}");
            process.ok(&format!("launchkernel {handle}"));
            process.ok("sync");
            assert_eq!(process.memory_info().0, GIB - BYTES, "{kernel}, {context}");
            process.ok(&format!("unloadlibrary {library}"));
            assert_eq!(process.memory_info().0, GIB, "{kernel}, {context}");
            process.end();
            container.wait_for_ledger_bytes(0);
        }
    }
}

#[test]
fn denies_context_for_library_beyond_limit() {
    let container = Container::with_memory(GIB);
    let mut process = container.start("dlsym");
    process.ok("initonly");
    let library = process.ok(&format!("library {}", 4 * GIB))[0];
    process.ok(&format!("kernel {library}"));
    for context in ["init 0", "context 0"] {
        process.denied(context);
        assert_eq!(container.ledger_bytes(), 0, "{context}");
    }
    process.ok(&format!("unloadlibrary {library}"));
    for context in ["init 0", "context 0"] {
        process.ok(context);
        assert_eq!(process.memory_info().0, GIB, "{context}");
    }
}

#[test]
fn charges_library_in_each_context() {
    let container = with_two_shares();
    for kernel in KERNELS {
        let mut process = container.start("dlsym");
        let contexts = ["init 0", "init 1", "context 1"].map(|create| process.ok(create)[0]);
        let free = |process: &mut TestProcess| {
            contexts.map(|context| {
                process.ok(&format!("setcurrent {context}"));
                process.memory_info().0
            })
        };
        let library = process.ok(&format!("library {}", BYTES / 2))[0];
        let handle = process.ok(&format!("{kernel} {library}"))[0];
        let charged = [GIB - BYTES / 2, GIB - BYTES, GIB - BYTES];
        assert_eq!(free(&mut process), charged, "{kernel}");
        for context in contexts {
            process.ok(&format!("setcurrent {context}"));
            process.ok(&format!("launchkernel {handle}"));
            process.ok("sync");
        }
        assert_eq!(free(&mut process), charged, "{kernel}");
        process.ok(&format!("destroy {}", contexts[2]));
        process.ok(&format!("setcurrent {}", contexts[1]));
        assert_eq!(process.memory_info().0, GIB - BYTES / 2, "{kernel}");
        process.ok(&format!("unloadlibrary {library}"));
        assert_eq!(process.memory_info().0, GIB, "{kernel}");
        process.ok(&format!("setcurrent {}", contexts[0]));
        assert_eq!(process.memory_info().0, GIB, "{kernel}");
        process.end();
        container.wait_for_ledger_bytes(0);
    }
}

#[test]
fn denies_kernel_of_library_beyond_limit_of_other_gpu() {
    let container = with_two_shares();
    container.add_share("more", GPUS[0], &Limits::memory(8 * GIB));
    let mut process = container.start("dlsym");
    process.init(1);
    process.init(0);
    let library = process.ok(&format!("library {}", 4 * GIB))[0];
    process.denied(&format!("kernel {library}"));
    process.ok(&format!("unloadlibrary {library}"));
    assert_eq!(process.memory_info().0, 9 * GIB);
    assert_eq!(container.machine.gpu(1).unwrap().used_bytes, CONTEXT_BYTES);
}

/// A library of which the program got no kernel is charged nowhere, and its next kernel everywhere.
#[test]
fn charges_nothing_for_denied_kernel_of_library() {
    let container = with_two_shares();
    container.add_share("more", GPUS[0], &Limits::memory(8 * GIB));
    let mut process = container.start("dlsym");
    process.init(0);
    process.init(1);
    let full = process.alloc(GIB - MIB);
    process.ok("init 0");
    let library = process.ok(&format!("library {GIB}"))[0];
    for kernel in KERNELS {
        process.denied(&format!("{kernel} {library}"));
        assert_eq!(process.memory_info().0, 9 * GIB, "{kernel}");
        let context = process.ok("context 0")[0];
        assert_eq!(process.memory_info().0, 9 * GIB, "{kernel}");
        process.ok(&format!("destroy {context}"));
        process.ok("init 0");
    }
    process.ok(&format!("free {full}"));
    process.ok("context 0");
    process.ok(&format!("kernel {library}"));
    assert_eq!(process.memory_info().0, 7 * GIB);
    process.ok("init 1");
    assert_eq!(process.memory_info().0, 0);
}

/// A load waits for the kernels of its context. Here those of the other GPU wait for this thread.
#[test]
fn loads_library_only_into_context_that_uses_it() {
    let container = with_two_shares();
    for bytes in [0, MIB] {
        let mut process = container.start("dlsym");
        process.ok("init 1");
        let word = process.alloc(4);
        let stream = process.ok("stream")[0];
        process.ok(&format!("stall {stream} {word}"));
        process.ok("init 0");
        let before = container.machine.gpu(1).unwrap().used_bytes;
        let library = process.ok(&format!("library {bytes}"))[0];
        for kernel in KERNELS {
            let handle = process.ok(&format!("{kernel} {library}"))[0];
            process.ok(&format!("launchkernel {handle}"));
        }
        process.ok("sync");
        assert_eq!(container.machine.gpu(1).unwrap().used_bytes, before);
        process.ok(&format!("set {word}"));
        process.end();
        container.wait_for_ledger_bytes(0);
    }
}

/// Managed memory is charged before a GPU uses it.
#[test]
fn charges_globals_beside_unused_managed_memory() {
    let container = Container::with_memory(6 * GIB);
    let mut process = container.process();
    process.ok(&format!("managed {}", 4 * GIB));
    process.denied(&format!("module {} 0", 4 * GIB));
    let module = process.ok(&format!("module {BYTES} 0"))[0];
    assert_eq!(process.memory_info().0, 2 * GIB - BYTES);
    process.ok(&format!("unload {module}"));
    assert_eq!(process.memory_info().0, 2 * GIB);
}

#[test]
fn charges_heap_set_by_context_limit() {
    const HEAP: u32 = 2;
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.denied(&format!("setlimit {HEAP} {}", 4 * GIB));
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
    process.ok(&format!("setlimit {HEAP} {}", 256 * MIB));
    assert_eq!(process.memory_info().0, GIB - 256 * MIB);
    process.ok(&format!("setlimit {HEAP} {BYTES}"));
    assert_eq!(process.memory_info().0, GIB - BYTES);
    // A heap never shrinks.
    process.ok(&format!("setlimit {HEAP} {}", 256 * MIB));
    assert_eq!(process.memory_info().0, GIB - BYTES);
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + BYTES);
    process.denied(&format!("alloc {}", BYTES + 2 * MIB));
    process.ok("releaseprimary 0");
    process.ok("init 0");
    assert_eq!(process.memory_info().0, GIB);
}

/// A stack exists for each of the 2048 threads of each of 132 multiprocessors. The first KiB is part of the context.
#[test]
fn charges_stacks_set_by_context_limit() {
    const STACK: u32 = 0;
    const THREADS: u64 = 132 * 2048;
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.denied(&format!("setlimit {STACK} {}", 16 << 10));
    for kib in [3, 2, 3] {
        process.ok(&format!("setlimit {STACK} {}", kib << 10));
        let stacks = THREADS * ((kib - 1) << 10);
        assert_eq!(process.memory_info().0, GIB - stacks);
        assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + stacks);
    }
    process.ok(&format!("setlimit {STACK} 1024"));
    assert_eq!(process.memory_info().0, GIB);
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
    process.ok(&format!("setlimit {STACK} {}", 2 << 10));
    assert_eq!(process.memory_info().0, GIB - THREADS * (1 << 10));
    // The default is part of the context.
    let context = process.ok("context 0")[0];
    process.ok(&format!("setlimit {STACK} 1024"));
    assert_eq!(process.memory_info().0, GIB - THREADS * (1 << 10));
    process.ok(&format!("destroy {context}"));
}
