//! State of the library in this process: initialization and connection.
//!
//! The initialization count survives a fork; the connection does not, since two processes on one
//! socket would read each other's replies. A child connects at its first call. The inherited
//! descriptor keeps the parent's resources alive, like an open device file.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::time::{ClockId, clock_gettime};
use simulator_machine::client::Connection;
use simulator_machine::description::{GpuDescription, GpuModel, MachineDescription};
use simulator_machine::protocol::{
    ClientKind, GpuIndex, GpuState, InstanceId, MigReply, MigRequest, MigState, Reply, Request,
    SampleState,
};
use simulator_machine::root::DriverRoot;

use crate::abi::NvmlResult;
use crate::error::NvmlError;

/// Number of `nvmlInit` calls without `nvmlShutdown`.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);
/// Library of the process that loaded or forked last. Never freed, since other threads may use it.
static CURRENT: AtomicPtr<Library> = AtomicPtr::new(std::ptr::null_mut());

/// A connection to the machine.
#[derive(Debug)]
pub(crate) struct Library {
    pid: u32,
    machine: MachineDescription,
    root: DriverRoot,
    /// GPUs whose device node this process can see, by index.
    visible: Vec<GpuIndex>,
    connection: Mutex<Connection>,
    /// Nanoseconds between the epoch and the start of the machine's clock.
    epoch: u64,
}

/// `nvmlInit`: connects at the first call.
pub(crate) fn initialize() -> NvmlResult {
    current_or_connect()?;
    INITIALIZED.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// `nvmlShutdown`: disconnects with the last call.
pub(crate) fn shut_down() -> NvmlResult {
    let decremented = INITIALIZED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
        count.checked_sub(1)
    });
    let count = decremented.map_err(|_| NvmlError::Uninitialized)?;
    if count == 1 {
        if let Some(library) = current() {
            library.connection().close();
        }
        CURRENT.store(std::ptr::null_mut(), Ordering::Release);
    }
    Ok(())
}

/// Errors before `nvmlInit`.
pub(crate) fn require_initialized() -> NvmlResult {
    match INITIALIZED.load(Ordering::Relaxed) {
        0 => Err(NvmlError::Uninitialized),
        _ => Ok(()),
    }
}

/// Returns the initialized library.
pub(crate) fn library() -> NvmlResult<&'static Library> {
    require_initialized()?;
    current_or_connect()
}

fn current_or_connect() -> NvmlResult<&'static Library> {
    static CONNECTING: Mutex<()> = Mutex::new(());
    if let Some(library) = current() {
        return Ok(library);
    }
    let _guard = CONNECTING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(library) = current() {
        return Ok(library);
    }
    let library: &'static mut Library = Box::leak(Box::new(Library::connect()?));
    CURRENT.store(library, Ordering::Release);
    current().ok_or(NvmlError::Unknown)
}

fn current() -> Option<&'static Library> {
    let current = CURRENT.load(Ordering::Acquire);
    // SAFETY: null, or a leaked box without mutable references.
    let library = unsafe { current.as_ref() }?;
    (library.pid == std::process::id()).then_some(library)
}

impl Library {
    fn connect() -> NvmlResult<Self> {
        let root = root();
        if !root.path().join("dev/nvidiactl").exists() {
            return Err(NvmlError::DriverNotLoaded);
        }
        let (connection, welcome) = Connection::open(&root, ClientKind::Nvml)?;
        let gpus = u32::try_from(welcome.machine.gpus.len()).unwrap_or(u32::MAX);
        Ok(Self {
            pid: std::process::id(),
            visible: (0..gpus)
                .map(GpuIndex)
                .filter(|gpu| root.sees(*gpu))
                .collect(),
            machine: welcome.machine,
            root,
            connection: Mutex::new(connection),
            epoch: nanoseconds(ClockId::Realtime).saturating_sub(nanoseconds(ClockId::Monotonic)),
        })
    }

    pub(crate) fn machine(&self) -> &MachineDescription {
        &self.machine
    }

    /// GPUs visible to this process; the NVML index is the position.
    pub(crate) fn visible(&self) -> &[GpuIndex] {
        &self.visible
    }

    /// Whether this process can see the device nodes of a MIG device.
    pub(crate) fn sees_instance(&self, gpu: GpuIndex, id: InstanceId) -> bool {
        self.root.sees_instance(gpu, id)
    }

    /// Entry of a GPU in the machine file.
    pub(crate) fn gpu(&self, gpu: GpuIndex) -> NvmlResult<&GpuDescription> {
        let index = usize::try_from(gpu.0).map_err(|_| NvmlError::InvalidArgument)?;
        self.machine
            .gpus
            .get(index)
            .ok_or(NvmlError::InvalidArgument)
    }

    pub(crate) fn model(&self, gpu: GpuIndex) -> NvmlResult<&GpuModel> {
        Ok(self.machine.model(self.gpu(gpu)?))
    }

    /// Current state of a GPU.
    pub(crate) fn state(&self, gpu: GpuIndex) -> NvmlResult<GpuState> {
        match self.request(&Request::GpuState { gpu })? {
            Reply::GpuState(state) => Ok(*state),
            _ => Err(NvmlError::Unknown),
        }
    }

    /// Current MIG state of a GPU.
    pub(crate) fn mig(&self, gpu: GpuIndex) -> NvmlResult<MigState> {
        match self.mig_request(gpu, MigRequest::State)? {
            Some(MigReply::State(state)) => Ok(state),
            _ => Err(NvmlError::Unknown),
        }
    }

    /// Sends a MIG request.
    pub(crate) fn mig_request(
        &self,
        gpu: GpuIndex,
        request: MigRequest,
    ) -> NvmlResult<Option<MigReply>> {
        match self.request(&Request::Mig { gpu, request })? {
            Reply::Mig(reply) => Ok(Some(reply)),
            Reply::Done => Ok(None),
            _ => Err(NvmlError::Unknown),
        }
    }

    /// Sampling periods of a GPU closed after a time, microseconds since the epoch.
    pub(crate) fn samples(&self, gpu: GpuIndex, since: u64) -> NvmlResult<Vec<SampleState>> {
        let monotonic = since.saturating_mul(1000).saturating_sub(self.epoch);
        let request = Request::Samples {
            gpu,
            since: monotonic,
        };
        let Reply::Samples(mut samples) = self.request(&request)? else {
            return Err(NvmlError::Unknown);
        };
        // Rounding to microseconds must not repeat a sample.
        samples.retain(|sample| self.microseconds(sample.end) > since);
        Ok(samples)
    }

    /// Converts machine time to microseconds since the epoch.
    pub(crate) fn microseconds(&self, monotonic: u64) -> u64 {
        monotonic.saturating_add(self.epoch) / 1000
    }

    /// Microseconds since the epoch, now.
    pub(crate) fn now(&self) -> u64 {
        self.microseconds(nanoseconds(ClockId::Monotonic))
    }

    /// Sends a request to the daemon.
    pub(crate) fn request(&self, request: &Request) -> NvmlResult<Reply> {
        Ok(self.connection().request(request)?)
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // A panic of another thread leaves no partial message: packets are atomic.
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    let (seconds, nanos) = (time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs());
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}

/// Driver root of this library.
pub(crate) fn root() -> DriverRoot {
    DriverRoot::of_library(own_path().as_deref())
}

fn own_path() -> Option<PathBuf> {
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    let address: *const libc::c_void = (&raw const INITIALIZED).cast();
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
