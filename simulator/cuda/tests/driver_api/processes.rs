//! Several processes on one GPU, and process death.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};

use anyhow::Context as _;
use simulator_machine::control::Command;
use simulator_machine::description::{A100_40X8, A100_80X8, H200X8, MIB, RTX_4090, T4};
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::GpuIndex;
use simulator_machine::testing::{Machine, poll};

use crate::api::{Api, NOT_INITIALIZED, OUT_OF_MEMORY, call};
use crate::sharing;

const CONTEXT: u64 = 104 * MIB;
/// Role of a child process.
const ROLE: &str = "DRAVA_TEST_ROLE";

/// Argument of the role.
const ARGUMENT: &str = "DRAVA_TEST_ARGUMENT";

/// Starts this test program in a role and waits until it is ready.
fn start(machine: &Machine, role: &str) -> Child {
    start_with(machine, role, "", None)
}

/// Like [`start`], with an argument and an inherited descriptor.
pub(crate) fn start_with(
    machine: &Machine,
    role: &str,
    argument: &str,
    inherited: Option<RawFd>,
) -> Child {
    let mut command = machine.command(std::env::current_exe().unwrap());
    command
        .args(["processes::child_process", "--exact", "--nocapture"])
        .env(ROLE, role)
        .env(ARGUMENT, argument)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    if let Some(descriptor) = inherited {
        let keep = move || match unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        };
        unsafe { command.pre_exec(keep) };
    }
    let mut child = command.spawn().unwrap();
    let stdout = BufReader::new(child.stdout.as_mut().unwrap());
    // Lines of the test runner come first.
    assert!(
        stdout.lines().any(|line| line.unwrap() == "ready"),
        "role {role} ended before it was ready"
    );
    child
}

/// Reports that this process is ready.
fn ready() {
    let mut stdout = std::io::stdout();
    stdout.write_all(b"\nready\n").unwrap();
    stdout.flush().unwrap();
}

/// Last output of a child that outlives its parent.
const LIVES: &str = "child is alive";

/// Host memory behind the GPU memory files that this process has open.
fn gpu_memory_on_host() -> u64 {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        let is_gpu = std::fs::read_link(&path).is_ok_and(|file| {
            file.to_string_lossy()
                .starts_with("/memfd:simulated-gpu-memory")
        });
        if let Some(file) = std::fs::metadata(&path).ok().filter(|_| is_gpu) {
            files.insert(file.ino(), file.blocks() * 512);
        }
    }
    assert!(!files.is_empty());
    files.values().sum()
}

fn until_stdin_closes() {
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// Not a test by itself: the child process. Returns immediately without a role.
#[test]
fn child_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let argument = std::env::var(ARGUMENT).unwrap();
    let api = Api::open_path(std::path::Path::new("libcuda.so.1"));
    api.enter(0);
    match role.as_str() {
        "import" => {
            let descriptor: RawFd = argument.parse().unwrap();
            let imported = sharing::import(&api, descriptor);
            assert_eq!(unsafe { libc::close(descriptor) }, 0);
            let (address, _) = sharing::map(&api, imported, sharing::BYTES);
            assert_eq!(sharing::read(&api, address), sharing::PATTERN);
            ready();
            until_stdin_closes();
        }
        "pool" => {
            let (descriptor, data) = argument.split_once(' ').unwrap();
            let address = sharing::import_pointer(&api, descriptor.parse().unwrap(), data);
            assert_eq!(sharing::read(&api, address), sharing::PATTERN);
            ready();
            until_stdin_closes();
        }
        "open" => {
            let address = sharing::open(&api, &argument).unwrap();
            assert_eq!(sharing::read(&api, address), sharing::PATTERN);
            ready();
            until_stdin_closes();
        }
        "hold" => {
            api.allocate(1000 * MIB).unwrap();
            ready();
            until_stdin_closes();
        }
        "fork" => {
            api.allocate(1000 * MIB).unwrap();
            if unsafe { libc::fork() } == 0 {
                assert_eq!(api.allocate(1), Err(NOT_INITIALIZED));
                assert_eq!(call!(api, "cuInit", 0u32), NOT_INITIALIZED);
                ready();
                until_stdin_closes();
                unsafe { libc::_exit(0) };
            }
            // Exits while the child lives, without notifying the driver.
            unsafe { libc::_exit(0) };
        }
        "fork and close" => {
            api.allocate(1000 * MIB).unwrap();
            if unsafe { libc::fork() } == 0 {
                assert_eq!(unsafe { libc::close_range(3, u32::MAX, 0) }, 0);
                ready();
                until_stdin_closes();
                println!("{LIVES}");
                unsafe { libc::_exit(0) };
            }
            unsafe { libc::_exit(0) };
        }
        "touch" => {
            let before = gpu_memory_on_host();
            let address = api.allocate(64 * MIB).unwrap();
            api.write(address, &vec![7; 64 << 20]);
            assert!(gpu_memory_on_host() >= before + 64 * MIB);
            api.free(address);
            poll(|| Ok((gpu_memory_on_host() <= before).then_some(())))
                .context("freed memory is still allocated on the host")
                .unwrap();
            ready();
            until_stdin_closes();
        }
        "spin" => {
            let spin = api.function(c"spin");
            api.spin(spin, std::ptr::null_mut(), 40, 3_600_000_000_000);
            ready();
            api.synchronize();
        }
        role => panic!("unknown role {role}"),
    }
}

#[test]
fn frees_memory_of_a_killed_process() {
    let machine = Machine::start(T4).unwrap();
    let mut children: Vec<Child> = (0..3).map(|_| start(&machine, "hold")).collect();
    let gpu = machine.gpu(0).unwrap();
    assert_eq!(gpu.used_bytes, 3 * (CONTEXT + 1000 * MIB));
    let pids: Vec<u32> = gpu.processes.iter().map(|process| process.pid).collect();
    assert!(children.iter().all(|child| pids.contains(&child.id())));
    let api = Api::start(&machine);
    assert_eq!(api.allocate(12_000 * MIB), Err(OUT_OF_MEMORY));
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    machine
        .wait_for_gpu(0, |gpu| gpu.used_bytes == CONTEXT)
        .unwrap();
    api.allocate(12_000 * MIB).unwrap();
}

#[test]
fn keeps_parent_memory_while_a_forked_child_lives() {
    let machine = Machine::start(T4).unwrap();
    let mut parent = start(&machine, "fork");
    // `wait` would close stdin, and the child exits when stdin closes.
    let stdin = parent.stdin.take();
    parent.wait().unwrap();
    let gpu = machine.gpu(0).unwrap();
    assert_eq!(gpu.used_bytes, CONTEXT + 1000 * MIB);
    assert_eq!(gpu.processes[0].pid, parent.id());
    drop(stdin);
    machine.wait_for_gpu(0, |gpu| gpu.used_bytes == 0).unwrap();
}

/// Memory lives while the device files are open, not while a child lives.
#[test]
fn frees_memory_when_a_forked_child_closes_devices() {
    let machine = Machine::start(T4).unwrap();
    let mut parent = start(&machine, "fork and close");
    let (stdin, stdout) = (parent.stdin.take(), parent.stdout.take());
    parent.wait().unwrap();
    machine
        .wait_for_gpu(0, |gpu| gpu.used_bytes == 0 && gpu.processes.is_empty())
        .unwrap();
    drop(stdin);
    let mut rest = String::new();
    stdout.unwrap().read_to_string(&mut rest).unwrap();
    assert!(rest.contains(LIVES), "child output: {rest:?}");
}

/// A program may use more memory than the host has, one allocation after the other.
#[test]
fn returns_freed_memory_to_the_host() {
    let machine = Machine::start(T4).unwrap();
    let mut child = start(&machine, "touch");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn stops_the_kernel_of_a_killed_process() {
    let machine = Machine::start(T4).unwrap();
    let mut child = start(&machine, "spin");
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    api.spin(spin, std::ptr::null_mut(), 40, 10_000_000);
    api.synchronize();
    child.kill().unwrap();
    child.wait().unwrap();
    machine
        .wait_for_gpu(0, |gpu| gpu.processes.len() == 1)
        .unwrap();
    let busy = machine.gpu(0).unwrap().busy_nanos;
    api.spin(spin, std::ptr::null_mut(), 40, 10_000_000);
    api.synchronize();
    assert_eq!(machine.gpu(0).unwrap().busy_nanos, busy + 10_000_000);
}

#[test]
fn shares_gpu_time_between_two_processes() {
    let machine = Machine::start(T4).unwrap();
    let mut children = [start(&machine, "spin"), start(&machine, "spin")];
    let gpu = machine
        .wait_for_gpu(0, |gpu| gpu.busy_nanos > 500_000_000)
        .unwrap();
    let busy: Vec<u64> = gpu
        .processes
        .iter()
        .map(|process| process.busy_nanos)
        .collect();
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    // One of them had the GPU alone while the other started.
    let shared = busy.iter().min().unwrap();
    assert!(*shared > 50_000_000, "{busy:?}");
}

#[test]
fn disconnects_only_the_client_that_sends_noise() {
    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
    };

    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let address =
        SocketAddrUnix::new(machine.root().join("run/nvidia-persistenced/socket")).unwrap();
    for noise in [&[0xffu8; 4000][..], &[0, 9, 9, 9], &[1]] {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        connect(&socket, &address).unwrap();
        rustix::io::write(&socket, noise).unwrap();
        let mut reply = [0; 100];
        // Rejected or disconnected, never blocked.
        let _ = rustix::io::read(&socket, &mut reply);
    }
    api.allocate(MIB).unwrap();
}

/// As without the fabric manager.
#[test]
fn needs_registration_with_fabric() {
    let machine = Machine::start(H200X8).unwrap();
    let registered = |fabric_state| {
        let faults = Faults {
            fabric_state,
            ..Faults::default()
        };
        let gpu = GpuIndex(0);
        machine.control(&Command::Break { gpu, faults }).unwrap();
        call!(
            Api::open_path(&machine.lib_dir().join("libcuda.so.1")),
            "cuInit",
            0u32
        )
    };
    // In progress.
    assert_eq!(registered(Some(2)), 802);
    assert_eq!(registered(None), 0);
}

/// NVML reports no fabric of GPUs before Hopper.
#[test]
fn needs_fabric_manager_before_hopper() {
    for yaml in [A100_40X8, A100_80X8] {
        let machine = Machine::start(yaml).unwrap();
        let is_ready = || {
            let output = machine.program("cuda-probe")?.arg("info").output()?;
            let text = String::from_utf8_lossy(&output.stderr);
            let not_ready = text.contains("CUDA_ERROR_SYSTEM_NOT_READY");
            anyhow::ensure!(output.status.success() != not_ready, "{output:?}");
            Ok(!not_ready)
        };
        assert!(!is_ready().unwrap());
        let manager = machine.start_fabric_manager().unwrap();
        assert!(is_ready().unwrap());
        drop(manager);
        poll(|| Ok((!is_ready()?).then_some(()))).unwrap();
    }
}

/// As an image's library in `/usr/local/cuda/compat`.
#[test]
fn newer_library_works_on_gpus_of_data_centers_only() {
    for (yaml, expected) in [(RTX_4090, 804), (T4, 0)] {
        let machine = Machine::start(yaml).unwrap();
        let directory = machine.root().join("usr/local/cuda/compat");
        std::fs::create_dir_all(&directory).unwrap();
        let library = directory.join("libcuda.so.999.1");
        std::fs::copy(machine.lib_dir().join("libcuda.so.1"), &library).unwrap();
        let api = Api::open_path(&library);
        assert_eq!(call!(api, "cuInit", 0u32), expected);
    }
}
