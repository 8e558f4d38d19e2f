//! Binary properties of `libvgpu.so`: exported names, needed libraries, symbol versions, no constructor.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use drava_vgpu_abi::paths;

#[path = "limits/interposer.rs"]
#[expect(dead_code, reason = "only the shipped files are checked")]
mod interposer;

fn tool(program: &str, arguments: &[&str]) -> String {
    tool_on(interposer::library(), program, arguments)
}

fn tool_on(file: &Path, program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .arg(file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{program}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Symbol names; with versions for undefined symbols.
fn dynamic_symbols(kind: &str) -> BTreeSet<String> {
    tool("nm", &["--dynamic", "--format=posix", kind])
        .lines()
        .map(|line| line.split(' ').next().unwrap().to_owned())
        .collect()
}

/// The hooked names, read from the source.
fn hooked_names() -> BTreeSet<String> {
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/driver_api/functions.rs");
    std::fs::read_to_string(table)
        .unwrap()
        .lines()
        .filter_map(|line| {
            let mut words = line.strip_prefix("    ")?.split(' ');
            let _purpose = words.next()?;
            words
                .next()
                .filter(|word| matches!(*word, "Cuda" | "Nvml"))?;
            Some(words.next()?.split('(').next()?.to_owned())
        })
        .collect()
}

#[test]
fn exports_only_hooked_names() {
    let mut expected = hooked_names();
    assert!(expected.len() > 40, "{expected:?}");
    expected.insert("dlsym".into());
    assert_eq!(dynamic_symbols("--defined-only"), expected);
}

#[test]
fn needs_only_the_c_library() {
    let needed: BTreeSet<String> = tool("readelf", &["--dynamic", "--wide"])
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .map(|line| line.split(['[', ']']).nth(1).unwrap().to_owned())
        .collect();
    assert_eq!(needed, ["libc.so.6", "libdl.so.2"].map(String::from).into());
}

/// The values of the dynamic entries with a tag.
fn dynamic_entries(dynamic: &str, tag: &str) -> Vec<String> {
    dynamic
        .lines()
        .filter(|line| line.contains(tag))
        .map(|line| line.split(['[', ']']).nth(1).unwrap().to_owned())
        .collect()
}

#[test]
fn writes_stubs_of_only_names_and_dependencies() {
    let directory = tempfile::tempdir().unwrap();
    for (stub, soname) in [
        (paths::CUDA_STUB, "libcuda.so.1"),
        (paths::NVML_STUB, "libnvidia-ml.so.1"),
    ] {
        let file = directory.path().join(soname);
        interposer::write_stub(stub, &file);
        let dynamic = tool_on(&file, "readelf", &["--dynamic", "--wide"]);
        assert_eq!(dynamic_entries(&dynamic, "(SONAME)"), [soname]);
        let driver_path = format!("/usr/local/lib/drava/driver/{soname}");
        let needed = ["/usr/local/lib/drava/libvgpu.so", &driver_path];
        assert_eq!(dynamic_entries(&dynamic, "(NEEDED)"), needed);
        // NVIDIA's library has the same SONAME and stays loaded, so the stub must stay loaded too.
        assert!(dynamic.contains("NODELETE"), "{dynamic}");
        // No code, and no executable stack.
        let segments = tool_on(&file, "readelf", &["--segments", "--wide"]);
        assert!(segments.contains("GNU_STACK"), "{segments}");
        assert!(
            !segments.contains(" E ") && !segments.contains("RWE"),
            "{segments}"
        );
        // `readelf` reports no problem.
        let all = Command::new("readelf").arg("--all").arg(&file).output();
        let problems = String::from_utf8(all.unwrap().stderr).unwrap();
        assert_eq!(problems, "");
        // The names for `ld` are in no bucket of the hash table that the loader searches.
        let histogram = tool_on(&file, "readelf", &["--histogram", "--wide"]);
        assert!(histogram.contains("total of 1 bucket"), "{histogram}");
        assert!(histogram.contains("0  1          (100.0%)"), "{histogram}");
    }
}

/// `GLIBC_2.17` as (2, 17).
fn version(symbol: &str) -> Option<(u32, u32)> {
    let (_, version) = symbol.split_once("@GLIBC_")?;
    let mut parts = version.trim_start_matches('@').split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[test]
fn requires_at_most_glibc_2_17() {
    let undefined = dynamic_symbols("--undefined-only");
    assert!(undefined.iter().any(|symbol| version(symbol).is_some()));
    for symbol in undefined {
        assert!(
            version(&symbol).is_none_or(|version| version <= (2, 17)),
            "{symbol}"
        );
    }
}

#[test]
fn runs_no_code_when_loaded() {
    // Only the linker's own `frame_dummy` and `register_tm_clones` may run.
    let dynamic = tool("readelf", &["--dynamic", "--wide"]);
    let size = |tag: &str| {
        dynamic
            .lines()
            .find(|line| line.contains(tag))
            .and_then(|line| line.split_ascii_whitespace().rev().nth(1))
            .map_or(0, |size| size.parse::<u64>().unwrap())
    };
    assert!(size("(INIT_ARRAYSZ)") <= 8, "{dynamic}");
    assert!(size("(FINI_ARRAYSZ)") <= 8, "{dynamic}");
    assert!(!tool("nm", &["--dynamic"]).contains("pthread_create"));
}

#[test]
fn contains_no_unwinding() {
    let symbols = tool("nm", &["--dynamic"]);
    assert!(!symbols.contains("_Unwind"), "{symbols}");
    assert!(!symbols.contains("malloc"), "{symbols}");
}

/// The complete list of imported C functions: none ends the program, handles signals, starts threads, allocates or
/// writes to streams. An addition needs a review.
#[test]
fn imports_only_allowed_c_functions() {
    let allowed = [
        "__errno_location",
        "bcmp",
        "clock_gettime",
        "dlvsym",
        "memcmp",
        "memcpy",
        "memmove",
        "memset",
        "secure_getenv",
        "strlen",
        "syscall",
        // Weak symbols of the linker.
        "_ITM_deregisterTMCloneTable",
        "_ITM_registerTMCloneTable",
        "__cxa_finalize",
        "__gmon_start__",
    ];
    for symbol in dynamic_symbols("--undefined-only") {
        let name = symbol.split('@').next().unwrap();
        assert!(allowed.contains(&name), "{symbol}");
    }
}

/// The library contains neither a call that panics nor the panic machinery.
#[test]
fn contains_no_panic_path() {
    let symbols = tool("nm", &[]);
    assert!(symbols.lines().count() > 300, "{symbols}");
    let panics: Vec<&str> = symbols
        .lines()
        .filter(|line| line.contains("panic") || line.contains("unwrap_failed"))
        .collect();
    assert!(panics.is_empty(), "{panics:?}");
}
