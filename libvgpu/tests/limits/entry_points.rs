//! Ways to look up the driver's functions, and the functions that they return.

use std::process::Command;

use drava_vgpu_abi::{ComputePolicy, Cores, Limits};

use crate::interposer;
use crate::test_process::{Container, GIB, GPUS};

#[test]
fn limits_every_way_to_the_driver() {
    let container = Container::with_memory(GIB);
    for route in ["dlsym", "procaddress", "next"] {
        let mut process = container.start(route);
        process.init(0);
        assert_eq!(process.memory_info(), (GIB, GIB), "{route}");
        process.denied(&format!("alloc {}", GIB + 1));
        let place = process.alloc(GIB);
        process.ok(&format!("free {place}"));
        process.end();
    }
}

#[test]
fn returns_hook_of_requested_abi_version() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let mut ask = |query: &str| process.request(&format!("procaddress {query}"));
    assert_eq!(ask("cuMemAlloc 12080 0"), "0 libvgpu.so cuMemAlloc_v2");
    assert_eq!(ask("cuMemAlloc 3020 0"), "0 libvgpu.so cuMemAlloc_v2");
    assert_eq!(ask("cuMemAlloc 2000 0"), "0 libvgpu.so cuMemAlloc");
    assert_eq!(
        ask("cuGetProcAddress 12080 0"),
        "0 libvgpu.so cuGetProcAddress_v2"
    );
    assert_eq!(
        ask("cuGetProcAddress 11030 0"),
        "0 libvgpu.so cuGetProcAddress"
    );
    assert!(ask("cuDeviceGetName 12080 0").contains("libcuda"));
    assert_ne!(ask("cuNoSuchFunction 12080 0").split(' ').next(), Some("0"));
}

#[test]
fn returns_driver_function_when_not_hooked() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    assert!(
        process
            .request("lookup cuDeviceGetName")
            .contains("libcuda")
    );
    assert_eq!(process.request("lookup cuNoSuchFunction"), "0 none");
    assert_eq!(process.request("lookup cuMemAlloc_v2"), "0 libvgpu.so");
}

#[test]
fn returns_driver_functions_without_limits() {
    let container = Container::new();
    let mut process = container.process();
    for name in [
        "cuMemAlloc_v2",
        "cuMemGetInfo_v2",
        "cuGetProcAddress_v2",
        "cuInit",
    ] {
        assert!(
            process
                .request(&format!("lookup {name}"))
                .contains("libcuda"),
            "{name}"
        );
    }
    assert!(
        process
            .request("procaddress cuMemAlloc 12080 0")
            .contains("libcuda")
    );
    let (_, total) = process.memory_info();
    assert!(total > 70 * GIB);
}

/// Hooks that only meter GPU time.
fn compute_hooks() -> Vec<String> {
    let functions = include_str!("../../src/driver_api/functions.rs");
    let lines = functions.lines().map(str::trim_start);
    let hooks = lines.filter_map(|line| line.strip_prefix("Compute Cuda "));
    hooks
        .filter_map(|hook| Some(hook.split_once('(')?.0.to_owned()))
        .collect()
}

/// In a spatial share, and in any share whose time is not metered, a launch does not pass through libvgpu, unless it has to show that
/// a suspended share is wanted back.
#[test]
fn returns_driver_function_for_launches_that_are_not_metered() {
    let hooks = compute_hooks();
    assert!(hooks.len() > 80, "{}", hooks.len());
    let container = Container::with_memory(GIB);
    let mut spatial = container.process();
    let container = Container::new();
    let limits = Limits {
        cores: Cores::new(50).unwrap(),
        compute_policy: ComputePolicy::Fixed,
        ..Limits::memory(GIB)
    };
    container.add_share("share", GPUS[0], &limits);
    let mut metered = container.process();
    let container = Container::new();
    let limits = Limits {
        can_suspend: true,
        ..Limits::memory(GIB)
    };
    container.add_share("share", GPUS[0], &limits);
    let mut suspendable = container.process();
    let ours = "0 libvgpu.so";
    for name in &hooks {
        let lookup = format!("lookup {name}");
        assert_eq!(metered.request(&lookup), ours, "{name}");
        assert_eq!(suspendable.request(&lookup), ours, "{name}");
        let found = spatial.request(&lookup);
        assert!(found.contains("libcuda"), "{name}: {found}");
        // By name and version, as the CUDA runtime asks; functions for per-thread streams have a flag instead of a suffix.
        let (base, flag) = match name.strip_suffix("_ptsz").or(name.strip_suffix("_ptds")) {
            Some(base) => (base, 2),
            None => (name.as_str(), 1),
        };
        let base = base.trim_end_matches("_v2");
        let asked = format!("procaddress {base} 13020 {flag}");
        let found = spatial.request(&asked);
        assert!(!found.contains("libvgpu"), "{name}: {found}");
    }
    let launch = "procaddress cuLaunchKernel 12080 0";
    assert_eq!(metered.request(launch), "0 libvgpu.so cuLaunchKernel");
    assert!(spatial.request(launch).contains("libcuda"));
    // Its memory is limited as ever.
    assert_eq!(spatial.request("lookup cuMemAlloc_v2"), ours);
    spatial.denied(&format!("alloc {}", GIB + 1));
}

#[test]
fn does_not_limit_gpus_without_share() {
    let container = Container::new();
    container.add_share("share", GPUS[1], &Limits::memory(GIB));
    let mut process = container.process();
    process.alloc(2 * GIB);
    let mut process = container.start("dlsym");
    process.init(1);
    process.denied(&format!("alloc {}", 2 * GIB));
}

#[test]
fn does_not_affect_programs_without_cuda() {
    for (program, arguments) in [
        ("/bin/true", &[][..]),
        ("/bin/sh", &["-c", "exit 0"]),
        (
            "python3",
            &[
                "-c",
                "import ctypes, ssl, subprocess; subprocess.check_call(['true'])",
            ],
        ),
    ] {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("LD_PRELOAD", interposer::library());
        match command.output() {
            Ok(output) => {
                assert!(output.status.success(), "{program}: {output:?}");
                assert!(output.stderr.is_empty(), "{program}: {output:?}");
            }
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{program}"),
        }
    }
}

#[test]
fn finds_no_driver_in_global_scope_where_none_is_loaded() {
    let container = Container::with_memory(GIB);
    let mut command = container.command("python3");
    command.args([
        "-c",
        "import ctypes\nlibrary = ctypes.CDLL(None)\ntry:\n library.cuInit\nexcept AttributeError:\n print('none')",
    ]);
    if let Ok(output) = command.output() {
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "none");
    }
}
