//! MIG through the C functions: creation, queries, errors, destruction.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_uint};
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::ptr::{null, null_mut};

use anyhow::{Context, ensure};
use nvml_wrapper_sys::bindings::{
    NvmlLib, nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlDevice_t,
    nvmlDeviceAttributes_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t,
    nvmlMemory_t, nvmlProcessInfo_t, nvmlReturn_t,
};
use simulator_machine::client::Connection;
use simulator_machine::control::Command;
use simulator_machine::description::{A30X2, H100X2, MIB};
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::{
    ClientKind, ContextId, GpuIndex, InstanceId, MigRequest, Reply, Request,
};
use simulator_machine::root::DriverRoot;
use simulator_machine::testing::{Machine, python, skips_without_root};

const SUCCESS: nvmlReturn_t = 0;
const INVALID_ARGUMENT: nvmlReturn_t = 2;
const NOT_SUPPORTED: nvmlReturn_t = 3;
const NOT_FOUND: nvmlReturn_t = 6;
const IN_USE: nvmlReturn_t = 19;
const INSUFFICIENT_RESOURCES: nvmlReturn_t = 23;

/// NVML on a machine of its own, initialized.
struct Mig {
    machine: Machine,
    nvml: NvmlLib,
}

/// Calls a function of the library; pointer arguments refer to live variables.
macro_rules! call {
    ($mig:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: pointers are to live variables or null, as the function allows.
        unsafe { $mig.nvml.$name($($argument),*) }
    }};
}

mod mode;

impl Mig {
    fn start(yaml: &str) -> anyhow::Result<Self> {
        let machine = Machine::start(yaml)?;
        // SAFETY: the library does nothing when loaded.
        let nvml = unsafe { NvmlLib::new(machine.lib_dir().join("libnvidia-ml.so.1")) }?;
        let mig = Self { machine, nvml };
        ensure!(call!(mig, nvmlInit_v2()) == SUCCESS);
        Ok(mig)
    }

    /// GPU 0.
    fn gpu(&self) -> anyhow::Result<nvmlDevice_t> {
        let mut gpu = null_mut();
        ensure!(call!(self, nvmlDeviceGetHandleByIndex_v2(0, &raw mut gpu)) == SUCCESS);
        Ok(gpu)
    }

    /// GPU 0 in MIG mode.
    fn partitioned(yaml: &str) -> anyhow::Result<(Self, nvmlDevice_t)> {
        let mig = Self::start(yaml)?;
        let gpu = mig.gpu()?;
        ensure!(mig.set_mode(gpu, 1) == (SUCCESS, SUCCESS));
        Ok((mig, gpu))
    }

    fn set_mode(&self, gpu: nvmlDevice_t, mode: c_uint) -> (nvmlReturn_t, nvmlReturn_t) {
        let mut activation = SUCCESS;
        let result = call!(self, nvmlDeviceSetMigMode(gpu, mode, &raw mut activation));
        (result, activation)
    }

    fn mode(&self, gpu: nvmlDevice_t) -> (c_uint, c_uint) {
        let (mut current, mut pending) = (9, 9);
        let result = call!(
            self,
            nvmlDeviceGetMigMode(gpu, &raw mut current, &raw mut pending)
        );
        assert_eq!(result, SUCCESS);
        (current, pending)
    }

    fn create(
        &self,
        gpu: nvmlDevice_t,
        profile: c_uint,
    ) -> Result<nvmlGpuInstance_t, nvmlReturn_t> {
        let mut instance = null_mut();
        match call!(
            self,
            nvmlDeviceCreateGpuInstance(gpu, profile, &raw mut instance)
        ) {
            SUCCESS => Ok(instance),
            error => Err(error),
        }
    }

    fn fill(
        &self,
        gpu_instance: nvmlGpuInstance_t,
        profile: c_uint,
    ) -> Result<nvmlComputeInstance_t, nvmlReturn_t> {
        let mut instance = null_mut();
        let result = call!(
            self,
            nvmlGpuInstanceCreateComputeInstance(gpu_instance, profile, &raw mut instance)
        );
        match result {
            SUCCESS => Ok(instance),
            error => Err(error),
        }
    }

    fn device(&self, gpu: nvmlDevice_t, index: c_uint) -> Result<nvmlDevice_t, nvmlReturn_t> {
        let mut device = null_mut();
        let result = call!(
            self,
            nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, &raw mut device)
        );
        match result {
            SUCCESS => Ok(device),
            error => Err(error),
        }
    }

    fn name(&self, device: nvmlDevice_t) -> String {
        let mut text = [0; 96];
        assert_eq!(
            call!(self, nvmlDeviceGetName(device, text.as_mut_ptr(), 96)),
            SUCCESS
        );
        // SAFETY: the library terminates what it writes.
        let name = unsafe { CStr::from_ptr(text.as_ptr()) };
        name.to_string_lossy().into_owned()
    }

    fn uuid(&self, device: nvmlDevice_t) -> String {
        let mut text = [0; 96];
        assert_eq!(
            call!(self, nvmlDeviceGetUUID(device, text.as_mut_ptr(), 96)),
            SUCCESS
        );
        // SAFETY: the library terminates what it writes.
        let uuid = unsafe { CStr::from_ptr(text.as_ptr()) };
        uuid.to_string_lossy().into_owned()
    }

    fn processes(&self, device: nvmlDevice_t) -> Vec<(u32, u32, u32)> {
        let mut infos = [nvmlProcessInfo_t {
            pid: 0,
            usedGpuMemory: 0,
            gpuInstanceId: 0,
            computeInstanceId: 0,
        }; 8];
        let mut count = 8;
        let result = call!(
            self,
            nvmlDeviceGetComputeRunningProcesses_v3(device, &raw mut count, infos.as_mut_ptr())
        );
        assert_eq!(result, SUCCESS);
        let shown = infos.iter().take(count as usize);
        shown
            .map(|info| (info.pid, info.gpuInstanceId, info.computeInstanceId))
            .collect()
    }

    /// This process, computing in an instance of GPU 0.
    fn compute(&self, instance: InstanceId) -> anyhow::Result<(Connection, ContextId)> {
        let root = DriverRoot::new(self.machine.root());
        let (mut cuda, _welcome) = Connection::open(&root, ClientKind::Cuda)?;
        let gpu = GpuIndex(0);
        let Reply::ContextCreated { context } = cuda.request(&Request::CreateContext { gpu })?
        else {
            anyhow::bail!("unexpected reply to CreateContext")
        };
        let request = MigRequest::Enter { context, instance };
        cuda.request(&Request::Mig { gpu, request })?;
        Ok((cuda, context))
    }
}

#[test]
fn capability_files_follow_live_instances() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let (mig, gpu) = Mig::partitioned(A30X2)?;
    let root = mig.machine.root().to_owned();
    let capabilities = root.join("proc/driver/nvidia/capabilities");
    let minors = std::fs::read_to_string(root.join("proc/driver/nvidia-caps/mig-minors"))?;
    let present = |capability: &str| -> anyhow::Result<bool> {
        let minor = minors.lines().find_map(|line| {
            line.strip_prefix(capability)
                .and_then(|rest| rest.strip_prefix(' '))
        });
        let minor = minor.with_context(|| format!("mig-minors has no {capability}"))?;
        let file = match capability.split_once('/') {
            Some((gpu_instance, instance)) => {
                capabilities.join(gpu_instance).join("mig").join(instance)
            }
            None => capabilities.join("mig").join(capability),
        };
        let node = root.join(format!("dev/nvidia-caps/nvidia-cap{minor}"));
        let text = std::fs::read_to_string(file).ok();
        let of_machine = !capability.contains('/');
        ensure!(
            node.exists() == of_machine,
            "programs create the nodes of instances"
        );
        Ok(text.is_some_and(|text| text.starts_with(&format!("DeviceFileMinor: {minor}\n"))))
    };
    // The halves of an A30 are the GPU instances 1 and 2.
    let instances = ["gpu0/gi2/access", "gpu0/gi2/ci0/access"];
    let check = |wanted: [bool; 2]| -> anyhow::Result<()> {
        for (capability, wanted) in instances.iter().zip(wanted) {
            ensure!(present(capability)? == wanted, "{capability}");
        }
        ensure!(present("config")? && present("monitor")?);
        Ok(())
    };
    check([false, false])?;
    let first = mig.create(gpu, 5).unwrap();
    let second = mig.create(gpu, 5).unwrap();
    let ids = [first, second].map(|instance| gpu_instance_id(&mig, instance));
    ensure!(ids == [1, 2], "{ids:?}");
    check([true, false])?;
    let compute = mig.fill(second, 1).unwrap();
    check([true, true])?;
    assert_eq!(call!(mig, nvmlComputeInstanceDestroy(compute)), SUCCESS);
    check([true, false])?;
    assert_eq!(call!(mig, nvmlGpuInstanceDestroy(second)), SUCCESS);
    check([false, false])?;
    ensure!(present("gpu0/gi1/access")?);
    Ok(())
}

fn gpu_instance_id(mig: &Mig, instance: nvmlGpuInstance_t) -> c_uint {
    // SAFETY: zero is a value of every field.
    let mut info: nvmlGpuInstanceInfo_t = unsafe { std::mem::zeroed() };
    assert_eq!(
        call!(mig, nvmlGpuInstanceGetInfo(instance, &raw mut info)),
        SUCCESS
    );
    info.id
}

#[test]
fn creates_lists_and_destroys_instances() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let (mig, gpu) = Mig::partitioned(H100X2)?;
    assert_eq!(mig.mode(gpu), (1, 1));
    assert_eq!(mig.device(gpu, 0), Err(NOT_FOUND));
    let gpu_instance = mig.create(gpu, 9).unwrap();
    // A GPU instance alone is not a device.
    assert_eq!(mig.device(gpu, 0), Err(NOT_FOUND));
    let compute = mig.fill(gpu_instance, 2).unwrap();
    let device = mig.device(gpu, 0).unwrap();
    assert_eq!(mig.name(device), "NVIDIA H100 80GB HBM3 MIG 3g.40gb");
    let uuid = mig.uuid(device);
    assert!(uuid.starts_with("MIG-") && uuid.len() == 40, "{uuid}");

    // SAFETY: zero is a value of every field.
    let mut info: nvmlComputeInstanceInfo_t = unsafe { std::mem::zeroed() };
    assert_eq!(
        call!(mig, nvmlComputeInstanceGetInfo(compute, &raw mut info)),
        SUCCESS
    );
    assert_eq!((info.device, info.gpuInstance), (device, gpu_instance));

    let text = std::ffi::CString::new(uuid)?;
    let (mut same, mut parent) = (null_mut(), null_mut());
    assert_eq!(
        call!(mig, nvmlDeviceGetHandleByUUID(text.as_ptr(), &raw mut same)),
        SUCCESS
    );
    assert_eq!(same, device);
    assert_eq!(
        call!(
            mig,
            nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device, &raw mut parent)
        ),
        SUCCESS
    );
    assert_eq!(parent, gpu);
    let (mut is_mig, mut is_mig_gpu) = (9, 9);
    assert_eq!(
        call!(mig, nvmlDeviceIsMigDeviceHandle(device, &raw mut is_mig)),
        SUCCESS
    );
    assert_eq!(
        call!(mig, nvmlDeviceIsMigDeviceHandle(gpu, &raw mut is_mig_gpu)),
        SUCCESS
    );
    assert_eq!((is_mig, is_mig_gpu), (1, 0));

    let mut memory = nvmlMemory_t {
        total: 0,
        free: 0,
        used: 0,
    };
    assert_eq!(
        call!(mig, nvmlDeviceGetMemoryInfo(device, &raw mut memory)),
        SUCCESS
    );
    assert_eq!((memory.total, memory.used), (40448 * MIB, 0));
    // SAFETY: plain numbers, for which all zeroes is a value.
    let mut attributes: nvmlDeviceAttributes_t = unsafe { std::mem::zeroed() };
    assert_eq!(
        call!(mig, nvmlDeviceGetAttributes_v2(device, &raw mut attributes)),
        SUCCESS
    );
    assert_eq!(
        (
            attributes.multiprocessorCount,
            attributes.gpuInstanceSliceCount,
            attributes.computeInstanceSliceCount,
            attributes.memorySizeMB
        ),
        (60, 3, 3, 40448)
    );

    assert_eq!(call!(mig, nvmlGpuInstanceDestroy(gpu_instance)), IN_USE);
    assert_eq!(mig.set_mode(gpu, 0).0, IN_USE);
    assert_eq!(call!(mig, nvmlComputeInstanceDestroy(compute)), SUCCESS);
    assert_eq!(mig.device(gpu, 0), Err(NOT_FOUND));
    let mut memory_of_gone = nvmlMemory_t {
        total: 0,
        free: 0,
        used: 0,
    };
    assert_eq!(
        call!(
            mig,
            nvmlDeviceGetMemoryInfo(device, &raw mut memory_of_gone)
        ),
        INVALID_ARGUMENT
    );
    assert_eq!(
        call!(mig, nvmlComputeInstanceDestroy(compute)),
        INVALID_ARGUMENT
    );
    assert_eq!(call!(mig, nvmlGpuInstanceDestroy(gpu_instance)), SUCCESS);
    assert_eq!(mig.set_mode(gpu, 0), (SUCCESS, SUCCESS));
    Ok(())
}

#[test]
fn rejects_instances_on_a_full_gpu_and_used_placements() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let (mig, gpu) = Mig::partitioned(H100X2)?;
    let place = |start, size| {
        let placement = nvmlGpuInstancePlacement_t { start, size };
        let mut instance = null_mut();
        call!(
            mig,
            nvmlDeviceCreateGpuInstanceWithPlacement(
                gpu,
                9,
                &raw const placement,
                &raw mut instance
            )
        )
    };
    assert_eq!(place(1, 4), INVALID_ARGUMENT);
    assert_eq!(place(0, 3), INVALID_ARGUMENT);
    assert_eq!(place(4, 4), SUCCESS);
    assert_eq!(place(4, 4), INSUFFICIENT_RESOURCES);
    let remaining = |profile| {
        let mut count = 99;
        let result = call!(
            mig,
            nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, profile, &raw mut count)
        );
        (result, count)
    };
    assert_eq!(remaining(9), (SUCCESS, 1));
    assert_eq!(remaining(19), (SUCCESS, 4));
    assert_eq!(remaining(0), (SUCCESS, 0));
    assert_eq!(remaining(77).0, NOT_SUPPORTED);
    let ids: BTreeSet<nvmlGpuInstance_t> = (0..4).map(|_| mig.create(gpu, 19).unwrap()).collect();
    assert_eq!(ids.len(), 4);
    assert_eq!(mig.create(gpu, 19), Err(INSUFFICIENT_RESOURCES));
    let mut listed = [null_mut(); 7];
    let mut count = 7;
    let result = call!(
        mig,
        nvmlDeviceGetGpuInstances(gpu, 19, listed.as_mut_ptr(), &raw mut count)
    );
    assert_eq!((result, count), (SUCCESS, 4));
    let listed: BTreeSet<_> = listed.into_iter().take(4).collect();
    assert_eq!(listed, ids);
    Ok(())
}

#[test]
fn keeps_instances_in_use_and_lists_their_processes() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let (mig, gpu) = Mig::partitioned(H100X2)?;
    let devices: Vec<_> = (0..2)
        .map(|index| {
            let gpu_instance = mig.create(gpu, 19).unwrap();
            let compute = mig.fill(gpu_instance, 0).unwrap();
            (compute, mig.device(gpu, index).unwrap())
        })
        .collect();
    let [(busy, device), (idle, other)] = devices[..] else {
        anyhow::bail!("expected two MIG devices")
    };
    // The first 1g instance is placed last, at slice 6.
    let (mut cuda, context) = mig.compute(InstanceId {
        gpu_instance: 13,
        compute: 0,
    })?;
    let here = (std::process::id(), 13, 0);
    assert_eq!(mig.processes(gpu), [here]);
    assert_eq!(mig.processes(device), [here]);
    assert_eq!(mig.processes(other), []);
    assert_eq!(call!(mig, nvmlComputeInstanceDestroy(busy)), IN_USE);
    assert_eq!(call!(mig, nvmlComputeInstanceDestroy(idle)), SUCCESS);

    // Reports the memory of its instance.
    let take = |bytes| Request::Allocate { context, bytes };
    assert!(cuda.request(&take(9984 * MIB)).is_err());
    let instances = mig.machine.gpu(0)?.mig.gpu_instances;
    let context_bytes: u64 = instances.iter().map(|instance| instance.used_bytes).sum();
    cuda.request(&take(9984 * MIB - context_bytes))?;
    let mut memory = nvmlMemory_t {
        total: 0,
        free: 0,
        used: 0,
    };
    assert_eq!(
        call!(mig, nvmlDeviceGetMemoryInfo(device, &raw mut memory)),
        SUCCESS
    );
    assert_eq!((memory.free, memory.used), (0, 9984 * MIB));
    cuda.request(&Request::DestroyContext { context })?;
    assert_eq!(call!(mig, nvmlComputeInstanceDestroy(busy)), SUCCESS);
    Ok(())
}

#[test]
fn refuses_instances_on_demand() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let (mig, gpu) = Mig::partitioned(H100X2)?;
    let faults = Faults {
        refuses_instances: true,
        ..Faults::default()
    };
    let gpu_index = GpuIndex(0);
    let fail = |faults| Command::Break {
        gpu: gpu_index,
        faults,
    };
    mig.machine.control(&fail(faults))?;
    assert_eq!(mig.create(gpu, 19), Err(INSUFFICIENT_RESOURCES));
    mig.machine.control(&fail(Faults::default()))?;
    mig.create(gpu, 19).unwrap();
    Ok(())
}
