//! Processes of the multi-process service, and the compute mode.

use std::ffi::{c_uint, c_void};
use std::process::{Child, Command, Stdio};

use anyhow::ensure;
use libloading::Library;
use simulator_machine::description::T4;
use simulator_machine::testing::{Machine, skips_without_root};

const INVALID_ARGUMENT: c_uint = 2;
const EXCLUSIVE_PROCESS: c_uint = 3;

/// `nvmlProcessInfo_t`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used_bytes: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

struct Nvml {
    library: Library,
    device: *mut c_void,
}

impl Nvml {
    fn open(machine: &Machine) -> anyhow::Result<Self> {
        // SAFETY: the library under test.
        let library = unsafe { Library::new(machine.lib_dir().join("libnvidia-ml.so.1")) }?;
        let mut device = std::ptr::null_mut();
        // SAFETY: the signature of nvml.h.
        let init = unsafe { library.get::<unsafe extern "C" fn() -> c_uint>(b"nvmlInit_v2") }?;
        // SAFETY: as above.
        ensure!(unsafe { init() } == 0);
        type ByIndex = unsafe extern "C" fn(c_uint, *mut *mut c_void) -> c_uint;
        // SAFETY: the signature of nvml.h.
        let by_index = unsafe { library.get::<ByIndex>(b"nvmlDeviceGetHandleByIndex_v2") }?;
        // SAFETY: writes one handle.
        ensure!(unsafe { by_index(0, &raw mut device) } == 0);
        Ok(Self { library, device })
    }

    /// PIDs of a list of processes.
    fn pids(&self, function: &[u8]) -> anyhow::Result<Vec<u32>> {
        type List = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut ProcessInfo) -> c_uint;
        // SAFETY: the signature of nvml.h.
        let list = unsafe { self.library.get::<List>(function) }?;
        let mut infos = [ProcessInfo::default(); 8];
        let mut count = 8;
        // SAFETY: writes at most as many entries as the count says.
        let code = unsafe { list(self.device, &raw mut count, infos.as_mut_ptr()) };
        ensure!(code == 0, "{code}");
        let infos = infos.iter().take(usize::try_from(count)?);
        Ok(infos.map(|info| info.pid).collect())
    }

    fn set_compute_mode(&self, mode: c_uint) -> anyhow::Result<c_uint> {
        type Set = unsafe extern "C" fn(*mut c_void, c_uint) -> c_uint;
        // SAFETY: the signature of nvml.h.
        let set = unsafe { self.library.get::<Set>(b"nvmlDeviceSetComputeMode") }?;
        // SAFETY: no pointers but the handle.
        Ok(unsafe { set(self.device, mode) })
    }

    fn compute_mode(&self) -> anyhow::Result<c_uint> {
        type Get = unsafe extern "C" fn(*mut c_void, *mut c_uint) -> c_uint;
        // SAFETY: the signature of nvml.h.
        let get = unsafe { self.library.get::<Get>(b"nvmlDeviceGetComputeMode") }?;
        let mut mode = 9;
        // SAFETY: writes one number.
        ensure!(unsafe { get(self.device, &raw mut mode) } == 0);
        Ok(mode)
    }
}

/// A process with memory that is killed when the test ends.
struct Holder(Child);

impl Holder {
    fn start(command: &mut Command) -> anyhow::Result<Self> {
        let command = command.args(["alloc", "--mib", "10", "--hold", "600"]);
        Ok(Self(command.stdout(Stdio::null()).spawn()?))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn lists_clients_apart_and_with_their_server() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let daemon = machine.start_mps(&[])?;
    let client = Holder::start(daemon.serve(&mut machine.program("cuda-probe")?))?;
    let mut outside = machine.program("cuda-probe")?;
    outside.env("CUDA_MPS_PIPE_DIRECTORY", machine.root().join("none"));
    let outside = Holder::start(&mut outside)?;
    machine.wait_for_gpu(0, |gpu| gpu.processes.len() == 3)?;
    let nvml = Nvml::open(&machine)?;
    let mut all = vec![daemon.server()?, client.0.id(), outside.0.id()];
    all.sort_unstable();
    assert_eq!(nvml.pids(b"nvmlDeviceGetComputeRunningProcesses_v3")?, all);
    let clients = nvml.pids(b"nvmlDeviceGetMPSComputeRunningProcesses_v3")?;
    assert_eq!(clients, [client.0.id()]);
    Ok(())
}

#[test]
fn exclusive_mode_leaves_a_gpu_to_a_server_and_its_clients() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let machine = Machine::start(T4)?;
    let nvml = Nvml::open(&machine)?;
    assert_eq!(nvml.compute_mode()?, 0);
    assert_eq!(nvml.set_compute_mode(7)?, INVALID_ARGUMENT);
    assert_eq!(nvml.set_compute_mode(EXCLUSIVE_PROCESS)?, 0);
    assert_eq!(nvml.compute_mode()?, EXCLUSIVE_PROCESS);
    let daemon = machine.start_mps(&[])?;
    let first = Holder::start(daemon.serve(&mut machine.program("cuda-probe")?))?;
    let second = Holder::start(daemon.serve(&mut machine.program("cuda-probe")?))?;
    let all = |gpu: &simulator_machine::kernel::GpuStatus| gpu.processes.len() == 3;
    machine.wait_for_gpu(0, all)?;
    let mut outside = machine.program("cuda-probe")?;
    outside.env("CUDA_MPS_PIPE_DIRECTORY", machine.root().join("none"));
    let outside = outside.args(["alloc", "--mib", "1"]).output()?;
    assert_eq!(outside.status.code(), Some(2), "{outside:?}");
    let message = String::from_utf8(outside.stderr)?;
    assert!(
        message.contains("CUDA_ERROR_DEVICE_UNAVAILABLE"),
        "{message}"
    );
    drop((first, second));
    Ok(())
}
