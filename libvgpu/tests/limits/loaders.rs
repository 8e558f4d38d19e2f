//! Dynamic loading: other preloaded libraries, deep binding, separate namespaces, static programs and musl.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::interposer;
use crate::robustness::{by_route, is_root, skipped};
use crate::test_process::{Container, GIB, MIB};

#[test]
fn limits_driver_in_separate_namespace() {
    let container = Container::with_memory(GIB);
    let mut process = by_route(&container, "dlmopen");
    process.alloc(GIB);
    process.denied("alloc 1");
    assert_eq!(process.memory_info(), (0, GIB));
}

/// Opens two libcudas, the first of them `arguments[1]`, initializes it if told so, and uses the second, `arguments[2]`.
const TWO_DRIVERS: &str = r#"
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <stdio.h>
    #include <string.h>
    #define CALL(name, ...) ((int (*)())dlsym(driver, name))(__VA_ARGS__)
    static void use(void *driver) {
        void *context, *function;
        unsigned long long pointer;
        int status, initialized = CALL("cuInit", 0u);
        printf("init %d ", initialized);
        if (initialized) {
            printf("lookup %d\n", CALL("cuGetProcAddress_v2", "cuInit", &function, 12000, 0ull, &status));
            return;
        }
        CALL("cuDevicePrimaryCtxRetain", &context, 0);
        CALL("cuCtxSetCurrent", context);
        printf("alloc %d ", CALL("cuMemAlloc_v2", &pointer, (2ul << 30)));
        printf("alloc %d\n", CALL("cuMemAlloc_v2", &pointer, (1ul << 29)));
    }
    int main(int count, char **arguments) {
        void *first = dlopen(arguments[1], RTLD_NOW);
        int version, (*get_version)(int *) = (int (*)(int *))dlsym(first, "cuDriverGetVersion");
        if (get_version(&version)) return 1;
        if (!strcmp(arguments[3], "both")) use(first);
        void *second = dlopen(arguments[2], RTLD_NOW);
        if (count != 4 || second == first) return 2;
        use(second);
        return 0;
    }"#;

/// As Julia does it with the libcuda of its own packages: the hooks use one libcuda, and another one is refused. One that cannot
/// be initialized is not the one, such as a libcuda of CUDA's compatibility package on a GPU that does not support it.
#[test]
fn limits_one_libcuda_and_refuses_second() {
    let container = Container::with_memory(GIB);
    let directory = tempfile::tempdir().unwrap();
    let (source, program) = (directory.path().join("two.c"), directory.path().join("two"));
    fs::write(&source, TWO_DRIVERS).unwrap();
    let built = Command::new("cc")
        .args(["-std=gnu11", "-o"])
        .args([&program, &source])
        .arg("-ldl")
        .status();
    assert!(built.unwrap().success());
    // The simulated driver finds its machine by its own directory.
    let libraries = container.machine.lib_dir();
    let second = libraries.join("libcuda.so.999.0");
    fs::copy(libraries.join("libcuda.so.1"), &second).unwrap();
    let refusal = format!(
        "libvgpu: cannot limit {}: the program uses another libcuda already; denying its use; load one libcuda only (in \
         Julia with JULIA_CUDA_USE_COMPAT=false)\n",
        second.display()
    );
    // Without a machine.
    let broken = directory.path().join("libcuda.so.888.0");
    fs::copy(libraries.join("libcuda.so.1"), &broken).unwrap();
    let (first, limited) = (Path::new("libcuda.so.1"), "init 0 alloc 2 alloc 0\n");
    for (first, used, shown, errors) in [
        (first, "second", limited.to_owned(), String::new()),
        (
            first,
            "both",
            format!("{limited}init 800 lookup 800\n"),
            refusal,
        ),
        (
            &broken,
            "both",
            format!("init 100 lookup 0\n{limited}"),
            String::new(),
        ),
    ] {
        let mut command = container.command(&program);
        let output = command.arg(first).arg(&second).arg(used).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), errors, "{used}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), shown, "{used}");
        assert!(output.status.success(), "{used}");
    }
}

/// Statically linked programs have no dynamic loader, so nothing can be preloaded.
#[test]
fn does_not_affect_static_program() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("static");
    let source = directory.path().join("static.c");
    fs::write(&source, "int main(void) { return 7; }").unwrap();
    let built = Command::new("cc")
        .args(["-static", "-o"])
        .args([&program, &source])
        .status()
        .unwrap();
    if !built.success() {
        skipped("there is no static C library to link with (Debian: apt install libc6-dev)");
        return;
    }
    let output = Command::new(&program)
        .env("LD_PRELOAD", interposer::library())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7));
    assert!(output.stderr.is_empty(), "{output:?}");
}

/// musl's dynamic loader, which is its C library: the system's, or that of Debian's package, fetched on the first call.
/// `None` without either; the calling test is skipped then.
fn musl() -> Option<PathBuf> {
    let architecture = std::env::consts::ARCH;
    let of_system = PathBuf::from(format!("/lib/ld-musl-{architecture}.so.1"));
    if of_system.exists() {
        return Some(of_system);
    }
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("musl");
    let fetched = directory.join(format!("lib/{architecture}-linux-musl/libc.so"));
    if !fetched.exists() {
        fs::create_dir_all(&directory).unwrap();
        let script = "apt-get -qq download musl && dpkg-deb -x musl_*.deb .";
        let outcome = Command::new("sh")
            .args(["-c", script])
            .current_dir(&directory)
            .output()
            .unwrap();
        if !fetched.exists() {
            let error = String::from_utf8_lossy(&outcome.stderr);
            let error = error.lines().next().unwrap_or_default();
            skipped(&format!(
                "there is no {} and no Debian package of it: {error}",
                of_system.display()
            ));
            return None;
        }
    }
    Some(fetched)
}

/// As in an Alpine image: musl's loader does not read `/etc/ld.so.preload`. With `LD_PRELOAD` it reports the missing
/// symbols and does not start the program (see `libvgpu/README.md`).
#[test]
fn runs_musl_program_with_preload_file_but_not_variable() {
    let Some(musl) = musl() else { return };
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("program");
    let source = directory.path().join("program.c");
    let code = "void _exit(int); void _start(void) { _exit(7); }";
    fs::write(&source, code).unwrap();
    let built = Command::new("cc")
        .args(["-nostdlib", "-nostartfiles", "-fno-builtin", "-o"])
        .args([&program, &source, &musl])
        .arg(format!("-Wl,--dynamic-linker={}", musl.display()))
        .status()
        .unwrap();
    assert!(built.success());
    let output = Command::new(&program)
        .env("LD_PRELOAD", interposer::library())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(127), "{output:?}");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("dlvsym: symbol not found"), "{error}");
    if !is_root() {
        return;
    }
    let script = format!(
        "set -e
        mount --make-rprivate /
        mount -t tmpfs none /mnt
        cp -a /etc/. /mnt/
        echo {} > /mnt/ld.so.preload
        mount --bind /mnt /etc
        exec {}",
        interposer::library().display(),
        program.display(),
    );
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", &script])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
}

/// Another preloaded library with its own `dlsym`, which calls the next one.
const OTHER_PRELOADED: &str = r#"
    #define _GNU_SOURCE
    #include <dlfcn.h>
    void *dlsym(void *handle, const char *name) {
        static void *(*next)(void *, const char *);
        if (!next) next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
        if (!next) next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
        return next(handle, name);
    }
"#;

pub(crate) fn build_library(
    directory: &Path,
    name: &str,
    source: &str,
    arguments: &[&str],
) -> PathBuf {
    let file = directory.join(name).with_extension("c");
    let library = directory.join(name).with_extension("so");
    fs::write(&file, source).unwrap();
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &file])
        .args(arguments)
        .arg("-ldl")
        .status()
        .unwrap();
    assert!(built.success(), "cc could not build {name}");
    library
}

#[test]
fn limits_with_other_preloaded_libraries() {
    let directory = tempfile::tempdir().unwrap();
    let other = build_library(directory.path(), "other", OTHER_PRELOADED, &[]);
    let own = interposer::library().display().to_string();
    let preloads = [
        format!("{own}:{}", other.display()),
        format!("{own}:/nonexistent/libother.so"),
        format!("/nonexistent/libother.so {own}"),
    ];
    for preload in preloads {
        let container = Container::with_memory(GIB);
        let mut process = container.start_with("dlsym", |command| {
            command.env("LD_PRELOAD", &preload);
        });
        process.init(0);
        process.alloc(GIB);
        process.denied("alloc 1");
        assert!(process.end().success(), "{preload}");
    }
}

/// `RTLD_DEEPBIND` resolves a library's symbols in its own dependencies before preloaded libraries, so its calls bypass
/// libvgpu (see `docs/security.md`). The program keeps running, and its other calls are limited.
#[test]
fn does_not_count_calls_of_deeply_bound_library() {
    let container = Container::with_memory(GIB);
    let directory = tempfile::tempdir().unwrap();
    let libraries = container.machine.lib_dir().display().to_string();
    let source = include_str!("plugin.c");
    let arguments = [&format!("-L{libraries}"), "-l:libcuda.so.1"];
    let plugin = build_library(directory.path(), "plugin", source, &arguments);
    let mut process = container.start_with("dlsym", |command| {
        command.arg(&plugin);
    });
    process.init(0);
    process.alloc(GIB);
    process.denied("alloc 1");
    process.ok(&format!("plugin {}", 4 * MIB));
    process.denied("alloc 1");
    assert!(process.end().success());
}
