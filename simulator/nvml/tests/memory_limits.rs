//! Memory limits of cgroups, over a directory that stands for cgroup v2.

use std::ffi::{CString, c_char, c_uint, c_void};
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use libloading::Library;
use simulator_machine::client::{ClientError, Connection};
use simulator_machine::description::{B200X8, H100X2};
use simulator_machine::protocol::{ClientKind, GpuIndex, Refusal, Reply, Request};
use simulator_machine::root::DriverRoot;
use simulator_machine::testing::{Machine, skips_without_root};

const NOT_SUPPORTED: c_uint = 3;
const NOT_FOUND: c_uint = 6;
const INVALID_ARGUMENT: c_uint = 2;
const GIB: u64 = 1 << 30;
/// `NVML_DEVICE_MEMORY_LIMIT_MAX`.
const NO_LIMIT: u64 = u64::MAX;

/// `nvmlGetMemoryLimits_v1_t`, whose first fields are `nvmlSetMemoryLimits_v1_t`.
#[repr(C)]
struct Limits {
    name_space: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
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

    fn call(&self, function: &[u8], limits: &mut Limits) -> anyhow::Result<c_uint> {
        type Call = unsafe extern "C" fn(*mut c_void, *mut Limits) -> c_uint;
        // SAFETY: the signature of nvml.h.
        let call = unsafe { self.library.get::<Call>(function) }?;
        // SAFETY: reads and writes one struct.
        Ok(unsafe { call(self.device, limits) })
    }

    fn set(&self, cgroup: &Path, soft: u64, hard: u64) -> anyhow::Result<c_uint> {
        let name = CString::new(cgroup.as_os_str().as_encoded_bytes())?;
        let (name_space, used) = (name.as_ptr(), 0);
        let mut limits = Limits {
            name_space,
            soft,
            hard,
            used,
        };
        self.call(b"nvmlDeviceSetMemoryLimits_v1", &mut limits)
    }

    /// Soft and hard limit and use.
    fn get(&self, cgroup: &Path) -> anyhow::Result<Result<[u64; 3], c_uint>> {
        let name = CString::new(cgroup.as_os_str().as_encoded_bytes())?;
        let mut limits = Limits {
            name_space: name.as_ptr(),
            soft: 9,
            hard: 9,
            used: 9,
        };
        let code = self.call(b"nvmlDeviceGetMemoryLimits_v1", &mut limits)?;
        Ok(match code {
            0 => Ok([limits.soft, limits.hard, limits.used]),
            code => Err(code),
        })
    }
}

/// A machine whose driver counts memory by the cgroups below the directory, and the directory of a container.
fn machine(root: &Path, backend: &str) -> anyhow::Result<(Machine, std::path::PathBuf)> {
    let limits = format!(
        "memoryLimits: {{backend: {backend}, cgroupRoot: {:?}}}",
        root.display().to_string()
    );
    let machine = Machine::start(&B200X8.replace("memoryLimits: {backend: dmem}", &limits))?;
    let leaf = root.join("kubepods/pod/leaf");
    fs::create_dir_all(&leaf)?;
    Ok((machine, leaf))
}

fn enable_dmem(root: &Path) -> anyhow::Result<()> {
    for ancestor in ["", "kubepods", "kubepods/pod"] {
        fs::write(root.join(ancestor).join("cgroup.subtree_control"), "+dmem")?;
    }
    Ok(())
}

#[test]
fn library_before_615_has_no_function_of_memory_limits() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let nvml = Nvml::open(&machine)?;
    let set = nvml.set(Path::new("/sys/fs/cgroup/a"), 0, GIB);
    assert!(set.is_err(), "{set:?}");
    assert!(nvml.get(Path::new("/sys/fs/cgroup/a")).is_err());
    Ok(())
}

#[test]
fn sets_and_removes_limits_of_a_cgroup() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let root = tempfile::tempdir()?;
    let (machine, leaf) = machine(root.path(), "dmem")?;
    let nvml = Nvml::open(&machine)?;
    // An ancestor does not enable the controller.
    assert_eq!(nvml.set(&leaf, 0, GIB)?, NOT_SUPPORTED);
    enable_dmem(root.path())?;
    assert_eq!(nvml.get(&leaf)?, Ok([0, NO_LIMIT, 0]));
    assert_eq!(nvml.set(&leaf, 0, GIB)?, 0);
    assert_eq!(nvml.get(&leaf)?, Ok([0, GIB, 0]));
    assert_eq!(nvml.set(&leaf, 2, 1)?, INVALID_ARGUMENT);
    assert_eq!(nvml.set(&leaf.join("gone"), 0, GIB)?, NOT_FOUND);
    assert_eq!(nvml.set(Path::new("kubepods"), 0, GIB)?, INVALID_ARGUMENT);
    assert_eq!(nvml.set(&leaf, 0, NO_LIMIT)?, 0);
    assert_eq!(nvml.get(&leaf)?, Ok([0, NO_LIMIT, 0]));
    // A limit ends with its cgroup.
    assert_eq!(nvml.set(&leaf, 0, GIB)?, 0);
    fs::remove_dir(&leaf)?;
    assert_eq!(nvml.get(&leaf)?, Err(NOT_FOUND));
    assert_eq!(machine.gpu(0)?.memory_limits, []);
    Ok(())
}

#[test]
fn driver_without_backend_supports_no_limit() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let root = tempfile::tempdir()?;
    let (machine, leaf) = machine(root.path(), "none")?;
    let nvml = Nvml::open(&machine)?;
    assert_eq!(nvml.set(&leaf, 0, GIB)?, NOT_SUPPORTED);
    Ok(())
}

/// A program that speaks to the driver without libcuda, as a static one does.
fn allocates(machine: &Machine, bytes: u64) -> anyhow::Result<bool> {
    let root = DriverRoot::new(machine.root());
    let (mut connection, _welcome) = Connection::open(&root, ClientKind::Cuda)?;
    let gpu = GpuIndex(0);
    match connection.request(&Request::CreateMemory { gpu, bytes }) {
        Ok(Reply::Allocated { .. }) => Ok(true),
        Err(ClientError::Refused(Refusal::OutOfMemory)) => Ok(false),
        other => anyhow::bail!("{other:?}"),
    }
}

#[test]
fn program_without_libcuda_gets_no_memory_beyond_the_limit() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    for backend in ["dmem", "misc"] {
        let root = tempfile::tempdir()?;
        let (machine, leaf) = machine(root.path(), backend)?;
        enable_dmem(root.path())?;
        let nvml = Nvml::open(&machine)?;
        fs::write(leaf.join("cgroup.procs"), std::process::id().to_string())?;
        assert!(allocates(&machine, 2 * GIB)?);
        assert_eq!(nvml.set(&leaf, 0, GIB)?, 0);
        assert!(!allocates(&machine, 2 * GIB)?);
        assert!(allocates(&machine, GIB)?);
    }
    Ok(())
}

#[test]
fn cuda_and_nvml_show_the_limit_of_the_own_cgroup() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let root = tempfile::tempdir()?;
    let (machine, leaf) = machine(root.path(), "dmem")?;
    enable_dmem(root.path())?;
    let nvml = Nvml::open(&machine)?;
    assert_eq!(nvml.set(&leaf, 0, 3 * GIB)?, 0);
    /// `nvmlMemory_t`.
    #[repr(C)]
    struct Memory {
        total: u64,
        free: u64,
        used: u64,
    }
    type MemoryInfo = unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_uint;
    let totals = || -> anyhow::Result<[u64; 2]> {
        let mut probe = machine.program("cuda-probe")?;
        let output = probe.args(["alloc", "--mib", "1", "-o", "json"]).output()?;
        let read: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let by_cuda = read["before"]["totalBytes"].as_u64();
        let (total, free, used) = (0, 0, 0);
        let mut memory = Memory { total, free, used };
        // SAFETY: the signature of nvml.h.
        let info = unsafe { nvml.library.get::<MemoryInfo>(b"nvmlDeviceGetMemoryInfo") }?;
        // SAFETY: writes one struct.
        ensure!(unsafe { info(nvml.device, &raw mut memory) } == 0);
        ensure!(memory.free <= memory.total && memory.used <= memory.total);
        Ok([by_cuda.context("no total")?, memory.total])
    };
    let whole = totals()?;
    assert!(whole.iter().all(|total| *total > 100 * GIB), "{whole:?}");
    fs::write(leaf.join("cgroup.procs"), std::process::id().to_string())?;
    assert_eq!(totals()?, [3 * GIB; 2]);
    Ok(())
}
