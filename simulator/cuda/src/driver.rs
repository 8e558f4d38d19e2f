//! Driver of this process: connection, devices, and the lock of the state.
//!
//! A forked child shares the parent's connection, which keeps the parent's memory alive. Its calls
//! return `CUDA_ERROR_NOT_INITIALIZED`, as on hardware.
//!
//! Lock order: [`Driver::state`] before the connection of [`Driver::request`]. No lock is held
//! while a caller waits for the GPU.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use simulator_machine::channel::Channel;
use simulator_machine::client::{ClientError, Connection};
use simulator_machine::description::{Brand, GpuDescription, GpuModel, MachineDescription};
use simulator_machine::protocol::{ClientKind, MpsRequest, Reply, Request};
use simulator_machine::root::DriverRoot;

use crate::State;
use crate::abi::CudaResult;
use crate::enumerate::{self, Device};
use crate::error::{CUresult, CudaError};
use crate::mps::{self, MpsShare};
use crate::types::{CUcontext, CUdevice};

/// Driver of the process that called `cuInit`. Never freed, since other threads may use it.
static CURRENT: AtomicPtr<Driver> = AtomicPtr::new(std::ptr::null_mut());

/// Interval of the check that the daemon is alive.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(crate) struct Driver {
    /// 1 in the process that called `cuInit`, 0 in forked children.
    owner_marker: &'static AtomicU32,
    machine: MachineDescription,
    /// In CUDA order: the ordinal is the index.
    devices: Vec<Device>,
    connection: Mutex<Connection>,
    channel: Channel,
    /// Set for a client of an MPS server.
    mps: Option<MpsShare>,
    state: Mutex<State>,
}

/// A point in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) cell: u32,
    pub(crate) ticket: u64,
}

/// `cuInit`.
pub(crate) fn initialize() -> CudaResult {
    static INITIALIZING: Mutex<()> = Mutex::new(());
    let _guard = INITIALIZING.lock().unwrap_or_else(PoisonError::into_inner);
    if !CURRENT.load(Ordering::Acquire).is_null() {
        return driver().map(drop);
    }
    let driver: &'static mut Driver = Box::leak(Box::new(Driver::connect()?));
    CURRENT.store(driver, Ordering::Release);
    Ok(())
}

/// Returns a word that is 1 in this process and 0 in forked children: the kernel wipes its page on
/// fork. Every call reads the word, so the check must not need a system call.
fn fork_marker() -> CudaResult<&'static AtomicU32> {
    const LENGTH: usize = 4096;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let anywhere = std::ptr::null_mut();
    // SAFETY: without MAP_FIXED the kernel chooses unused addresses.
    let page = unsafe { mmap_anonymous(anywhere, LENGTH, access, MapFlags::PRIVATE) }?;
    // SAFETY: no other reference to the page exists yet.
    unsafe { madvise(page, LENGTH, Advice::LinuxWipeOnFork) }?;
    // SAFETY: a page of zeroes that is never unmapped, aligned to a page.
    let mark = unsafe { page.cast::<AtomicU32>().as_ref() }.ok_or(CudaError::OutOfMemory)?;
    mark.store(1, Ordering::Relaxed);
    Ok(mark)
}

/// Returns the initialized driver. Blocks while the process is locked for a checkpoint.
pub(crate) fn driver() -> CudaResult<&'static Driver> {
    let driver = driver_even_if_locked()?;
    while driver.channel.is_locked() {
        driver.channel.wait_while_locked(LIVENESS_INTERVAL);
        driver.require_alive()?;
    }
    Ok(driver)
}

/// Returns the initialized driver, locked or not.
pub(crate) fn driver_even_if_locked() -> CudaResult<&'static Driver> {
    let current = CURRENT.load(Ordering::Acquire);
    // SAFETY: null, or a leaked box without mutable references.
    let driver = unsafe { current.as_ref() }.ok_or(CudaError::NotInitialized)?;
    if driver.owner_marker.load(Ordering::Relaxed) == 1 {
        Ok(driver)
    } else {
        Err(CudaError::NotInitialized)
    }
}

/// Errors if this process is an MPS client that has failed.
pub(crate) fn require_healthy() -> CudaResult {
    let current = CURRENT.load(Ordering::Acquire);
    // SAFETY: null, or a leaked box without mutable references.
    let driver = unsafe { current.as_ref() };
    driver.map_or(Ok(()), Driver::require_healthy)
}

/// Errors unless a GPU on an NVSwitch fabric is registered with it, which the fabric manager does; NVML reports it since Hopper.
fn require_fabric(
    connection: &mut Connection,
    machine: &MachineDescription,
    device: &Device,
) -> CudaResult {
    /// `NVML_GPU_FABRIC_STATE_COMPLETED`
    const COMPLETED: u8 = 3;
    let gpu = usize::try_from(device.gpu.0).ok();
    let gpu = gpu.and_then(|index| machine.gpus.get(index));
    if gpu.is_none_or(|gpu| gpu.fabric.is_none() && !machine.needs_unreported_fabric(gpu)) {
        return Ok(());
    }
    let request = Request::GpuState { gpu: device.gpu };
    match connection.request(&request) {
        Ok(Reply::GpuState(state)) if state.fabric_state.is_some_and(|at| at != COMPLETED) => {
            Err(CudaError::SystemNotReady)
        }
        // A GPU that does not answer fails when used.
        Ok(_) | Err(_) => Ok(()),
    }
}

impl Driver {
    fn connect() -> CudaResult<Self> {
        let path = own_path();
        let root = DriverRoot::of_library(path.as_deref());
        if !root.path().join("dev/nvidiactl").exists() {
            return Err(CudaError::NoDevice);
        }
        let (mut connection, mut welcome) = Connection::open(&root, ClientKind::Cuda)?;
        let doorbell = welcome.fds.pop().ok_or(CudaError::Unknown)?;
        let memory = welcome.fds.pop().ok_or(CudaError::Unknown)?;
        let channel = Channel::open(memory, doorbell)?;
        let machine = welcome.machine;
        let mps = mps::join(&mut connection)?;
        let devices =
            enumerate::devices(&mut connection, &root, &machine, welcome.fds, mps.as_ref());
        if devices.is_empty() {
            return Err(CudaError::NoDevice);
        }
        let is_consumer = |device: &Device| {
            let gpu = usize::try_from(device.gpu.0).ok();
            let gpu = gpu.and_then(|index| machine.gpus.get(index));
            gpu.is_some_and(|gpu| machine.model(gpu).brand == Brand::GeforceRtx)
        };
        let is_newer = path.is_some_and(|path| is_newer_release(&path, &machine.driver_version));
        if is_newer && devices.iter().any(is_consumer) {
            return Err(CudaError::CompatNotSupportedOnDevice);
        }
        for device in &devices {
            require_fabric(&mut connection, &machine, device)?;
        }
        let mut state = State::new(devices.len());
        state.tolerates_unsafe_calls = !machine.side_effects.unsafe_calls_invalidate_captures;
        Ok(Self {
            owner_marker: fork_marker()?,
            machine,
            devices,
            connection: Mutex::new(connection),
            channel,
            mps,
            state: Mutex::new(state),
        })
    }

    pub(crate) fn machine(&self) -> &MachineDescription {
        &self.machine
    }

    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    pub(crate) fn device(&self, ordinal: CUdevice) -> CudaResult<&Device> {
        let device = usize::try_from(ordinal)
            .ok()
            .and_then(|index| self.devices.get(index));
        device.ok_or(CudaError::InvalidDevice)
    }

    /// Entry of a device in the machine file.
    pub(crate) fn description(&self, device: &Device) -> CudaResult<&GpuDescription> {
        let index = usize::try_from(device.gpu.0).map_err(|_| CudaError::InvalidDevice)?;
        self.machine.gpus.get(index).ok_or(CudaError::InvalidDevice)
    }

    /// Model of a device as the program sees it.
    pub(crate) fn model(&self, ordinal: CUdevice) -> CudaResult<&GpuModel> {
        match &self.device(ordinal)?.limited {
            Some(limited) => Ok(limited),
            None => self.whole_model(ordinal),
        }
    }

    /// Model of a device without the limit of an MPS client.
    pub(crate) fn whole_model(&self, ordinal: CUdevice) -> CudaResult<&GpuModel> {
        let device = self.device(ordinal)?;
        match &device.instance {
            Some(instance) => Ok(&instance.model),
            None => Ok(self.machine.model(self.description(device)?)),
        }
    }

    /// Reports that a kernel has failed, which fails all MPS clients of its GPUs.
    pub(crate) fn report_fault(&self, error: CudaError) -> CudaResult {
        if self.mps.is_none() {
            return Ok(());
        }
        let error = CUresult::from(error);
        let fault = Request::Mps(MpsRequest::Fault { error });
        self.request(&fault).map(drop)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Channel for submissions and completions.
    pub(crate) fn channel(&self) -> &Channel {
        &self.channel
    }

    pub(crate) fn is_reached(&self, point: Point) -> bool {
        self.channel.completed(point.cell) >= point.ticket
    }

    /// Waits until points are reached. The caller must hold no lock.
    pub(crate) fn wait_for(&self, points: &[Point]) -> CudaResult {
        for point in points {
            while !self
                .channel
                .wait(point.cell, point.ticket, LIVENESS_INTERVAL)
            {
                self.require_alive()?;
            }
        }
        Ok(())
    }

    /// Waits for all work of a context, as a load of code into it does. The caller must hold no lock.
    pub(crate) fn wait_for_context(&self, context: CUcontext) -> CudaResult {
        if !self.machine.side_effects.loads_wait {
            return Ok(());
        }
        let points = self.state().points_of_context(self, context);
        self.wait_for(&points)
    }

    /// Errors if the daemon is gone or this MPS client has failed, so that no caller waits forever.
    pub(crate) fn require_alive(&self) -> CudaResult {
        self.require_healthy()?;
        match self.connection().is_closed() {
            true => Err(CudaError::Unknown),
            false => Ok(()),
        }
    }

    /// Errors if this process is an MPS client that has failed.
    pub(crate) fn require_healthy(&self) -> CudaResult {
        match self.channel.failure() {
            None => Ok(()),
            Some(code) => Err(CudaError::of_code(code).unwrap_or(CudaError::Unknown)),
        }
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request to the daemon.
    pub(crate) fn request(&self, request: &Request) -> CudaResult<Reply> {
        Ok(self.connection().request(request)?)
    }

    /// Like [`Self::request`], with the daemon's refusal as error.
    pub(crate) fn try_request(&self, request: &Request) -> Result<Reply, ClientError> {
        self.connection().request(request)
    }

    /// Sends a request whose reply carries file descriptors.
    pub(crate) fn request_with_fds(&self, request: &Request) -> CudaResult<(Reply, Vec<OwnedFd>)> {
        Ok(self.connection().request_with_fds(request)?)
    }

    /// Sends a request with a file descriptor.
    pub(crate) fn request_about(&self, request: &Request, fd: BorrowedFd<'_>) -> CudaResult<Reply> {
        Ok(self.connection().request_about(request, fd)?)
    }
}

/// Whether the library is one of a newer release branch than the kernel driver: a compatibility library.
fn is_newer_release(library: &Path, kernel_version: &str) -> bool {
    let file = std::fs::canonicalize(library).unwrap_or_else(|_| library.to_owned());
    let name = file.file_name().and_then(|name| name.to_str());
    let branch = |version: &str| version.split_once('.')?.0.parse::<u32>().ok();
    let of_library = name.and_then(|name| branch(name.strip_prefix("libcuda.so.")?));
    of_library > branch(kernel_version)
}

fn own_path() -> Option<PathBuf> {
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    let address: *const libc::c_void = (&raw const CURRENT).cast();
    // SAFETY: `info` is writable; any address may be asked about.
    if unsafe { libc::dladdr(address, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: `dladdr` succeeded and filled it.
    let info = unsafe { info.assume_init() };
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a terminated string that lives as long as the library is loaded.
    let path = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(path.to_str().ok()?))
}
