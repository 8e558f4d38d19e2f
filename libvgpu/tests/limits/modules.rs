//! Memory that libcuda allocates for modules, and for the heap and the stacks of a context.

use crate::test_process::{CONTEXT_BYTES, Container, GIB, MIB};

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

/// Many small modules are as large as one large module.
#[test]
fn charges_small_globals_of_many_modules() {
    const EACH: u64 = 4 * MIB;
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    for _ in 0..100 {
        process.ok(&format!("module {EACH} 0"));
    }
    let (free, _) = process.memory_info();
    let uncharged = free - (GIB - 100 * EACH);
    assert!(uncharged < 16 * MIB, "{uncharged} bytes are not charged");
}

#[test]
fn charges_globals_of_library_used_in_context() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    for uses in ["kernel", "librarymodule", "libraryglobal"] {
        let library = process.ok(&format!("library {BYTES}"))[0];
        assert_eq!(process.memory_info().0, GIB, "a library is in no context");
        process.ok(&format!("{uses} {library}"));
        // The simulated driver allocates the variable of `libraryglobal` in a block of its own.
        let charged = GIB - process.memory_info().0;
        assert!(
            (BYTES..=BYTES + 2 * MIB).contains(&charged),
            "{uses}: {charged}"
        );
        process.ok(&format!("{uses} {library}"));
        assert_eq!(GIB - process.memory_info().0, charged, "{uses} twice");
        process.ok(&format!("unloadlibrary {library}"));
        assert_eq!(process.memory_info().0, GIB, "{uses}");
        let library = process.ok(&format!("library {}", 4 * GIB))[0];
        process.denied(&format!("{uses} {library}"));
        process.denied("alloc 1");
        process.ok(&format!("unloadlibrary {library}"));
        assert_eq!(process.memory_info().0, GIB, "{uses}");
        assert_eq!(container.ledger_bytes(), CONTEXT_BYTES, "{uses}");
    }
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

/// A stack exists for each of the 2048 threads of each of 132 multiprocessors.
#[test]
fn charges_stacks_set_by_context_limit() {
    const STACK: u32 = 0;
    const THREADS: u64 = 132 * 2048;
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.denied(&format!("setlimit {STACK} {}", 16 << 10));
    process.ok(&format!("setlimit {STACK} {}", 2 << 10));
    assert_eq!(process.memory_info().0, GIB - THREADS * (2 << 10));
    assert_eq!(
        container.ledger_bytes(),
        CONTEXT_BYTES + THREADS * (2 << 10)
    );
    // The default is part of the context.
    let context = process.ok("context 0")[0];
    process.ok(&format!("setlimit {STACK} 1024"));
    assert_eq!(process.memory_info().0, GIB - THREADS * (2 << 10));
    process.ok(&format!("destroy {context}"));
}
