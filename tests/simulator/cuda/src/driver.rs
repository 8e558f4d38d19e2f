//! The state of the driver in this process: the connection, the devices and every handle.
//!
//! A forked child shares the parent's connection, which keeps the parent's memory alive, but
//! cannot use it: its calls answer `CUDA_ERROR_NOT_INITIALIZED`, as on hardware.
//!
//! Lock order: [`Driver::state`] before [`Driver::request`]'s connection. No lock is held while a
//! caller waits for the card.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use simulator_machine::channel::Channel;
use simulator_machine::client::{ClientError, Connection};
use simulator_machine::description::{CardDescription, CardModel, MachineDescription};
use simulator_machine::protocol::{ClientKind, Reply, Request};
use simulator_machine::root::DriverRoot;

use crate::abi::Answer;
use crate::array::Arrays;
use crate::capture::Captures;
use crate::context::{Context, Primary};
use crate::enumerate::{self, Device};
use crate::error::CudaError;
use crate::event::Events;
use crate::external::Externals;
use crate::graph::Graphs;
use crate::green::Greens;
use crate::host::HostFunctions;
use crate::ipc::Opened;
use crate::library::Libraries;
use crate::memory::AddressSpace;
use crate::module::Modules;
use crate::multicast::Multicast;
use crate::pool::Pools;
use crate::stream::{Point, Streams};
use crate::types::{CUcontext, CUdevice};
use crate::virtual_memory::{Handle, VirtualMemory};

/// The driver of the process that called `cuInit`; never freed, since other threads may use it.
static CURRENT: AtomicPtr<Driver> = AtomicPtr::new(std::ptr::null_mut());

/// The driver of one process.
#[derive(Debug)]
pub(crate) struct Driver {
    /// 1 in the process that initialised it, 0 in forked children.
    is_own: &'static AtomicU32,
    machine: MachineDescription,
    /// In CUDA's order; an ordinal is an index here.
    devices: Vec<Device>,
    connection: Mutex<Connection>,
    channel: Channel,
    state: Mutex<State>,
}

/// Everything that handles and addresses stand for.
#[derive(Debug)]
pub(crate) struct State {
    next_handle: usize,
    pub(crate) contexts: BTreeMap<CUcontext, Context>,
    /// One per device.
    pub(crate) primaries: Vec<Primary>,
    pub(crate) addresses: AddressSpace,
    pub(crate) streams: Streams,
    pub(crate) events: Events,
    pub(crate) modules: Modules,
    pub(crate) libraries: Libraries,
    pub(crate) arrays: Arrays,
    pub(crate) pools: Pools,
    pub(crate) virtual_memory: VirtualMemory,
    pub(crate) opened: Opened,
    pub(crate) captures: Captures,
    pub(crate) graphs: Graphs,
    pub(crate) host_functions: HostFunctions,
    pub(crate) greens: Greens,
    pub(crate) multicasts: BTreeMap<Handle, Multicast>,
    pub(crate) externals: Externals,
}

impl State {
    /// A handle that was never used. Multiples of 16, as allocated objects would have.
    pub(crate) fn handle(&mut self) -> usize {
        self.next_handle += 16;
        self.next_handle
    }
}

/// Where handles start: nothing is ever mapped so high.
const FIRST_HANDLE: usize = 0x0100_6375_6461_0000;

/// `cuInit`.
pub(crate) fn initialize() -> Answer {
    static INITIALIZING: Mutex<()> = Mutex::new(());
    let _guard = INITIALIZING.lock().unwrap_or_else(PoisonError::into_inner);
    if !CURRENT.load(Ordering::Acquire).is_null() {
        return driver().map(drop);
    }
    let driver: &'static mut Driver = Box::leak(Box::new(Driver::connect()?));
    CURRENT.store(driver, Ordering::Release);
    Ok(())
}

/// A word that is 1 here and 0 in forked children: the kernel empties its page for them. Every call looks at it,
/// so it must not take a system call.
fn own_mark() -> Answer<&'static AtomicU32> {
    const LENGTH: usize = 4096;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let anywhere = std::ptr::null_mut();
    // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing uses.
    let page = unsafe { mmap_anonymous(anywhere, LENGTH, access, MapFlags::PRIVATE) }?;
    // SAFETY: nobody knows the page yet.
    unsafe { madvise(page, LENGTH, Advice::LinuxWipeOnFork) }?;
    // SAFETY: a page of zeroes that is never unmapped, aligned to a page.
    let mark = unsafe { page.cast::<AtomicU32>().as_ref() }.ok_or(CudaError::OutOfMemory)?;
    mark.store(1, Ordering::Relaxed);
    Ok(mark)
}

/// The initialised driver, once the process may use it: not while it is locked for a checkpoint.
pub(crate) fn driver() -> Answer<&'static Driver> {
    /// How often a waiting call looks whether the driver is still there.
    const PATIENCE: Duration = Duration::from_millis(200);
    let driver = driver_at_once()?;
    while driver.channel.is_locked() {
        driver.channel.wait_while_locked(PATIENCE);
        driver.require_alive()?;
    }
    Ok(driver)
}

/// The initialised driver, locked or not.
pub(crate) fn driver_at_once() -> Answer<&'static Driver> {
    let current = CURRENT.load(Ordering::Acquire);
    // SAFETY: null, or a leaked box that nobody has a mutable reference to.
    let driver = unsafe { current.as_ref() }.ok_or(CudaError::NotInitialized)?;
    if driver.is_own.load(Ordering::Relaxed) == 1 {
        Ok(driver)
    } else {
        Err(CudaError::NotInitialized)
    }
}

impl Driver {
    fn connect() -> Answer<Self> {
        let root = DriverRoot::of_library(own_path().as_deref());
        if !root.path().join("dev/nvidiactl").exists() {
            return Err(CudaError::NoDevice);
        }
        let (mut connection, mut welcome) = Connection::open(&root, ClientKind::Cuda)?;
        let doorbell = welcome.fds.pop().ok_or(CudaError::Unknown)?;
        let memory = welcome.fds.pop().ok_or(CudaError::Unknown)?;
        let channel = Channel::open(memory, doorbell)?;
        let machine = welcome.machine;
        let devices = enumerate::devices(&mut connection, &root, &machine, welcome.fds);
        if devices.is_empty() {
            return Err(CudaError::NoDevice);
        }
        let state = State {
            next_handle: FIRST_HANDLE,
            contexts: BTreeMap::new(),
            primaries: devices.iter().map(|_| Primary::default()).collect(),
            addresses: AddressSpace::default(),
            streams: Streams::default(),
            events: Events::default(),
            modules: Modules::default(),
            libraries: Libraries::default(),
            arrays: Arrays::default(),
            pools: Pools::default(),
            virtual_memory: VirtualMemory::default(),
            opened: Opened::default(),
            captures: Captures::default(),
            graphs: Graphs::default(),
            host_functions: HostFunctions::default(),
            greens: Greens::default(),
            multicasts: BTreeMap::new(),
            externals: Externals::default(),
        };
        Ok(Self {
            is_own: own_mark()?,
            machine,
            devices,
            connection: Mutex::new(connection),
            channel,
            state: Mutex::new(state),
        })
    }

    pub(crate) fn machine(&self) -> &MachineDescription {
        &self.machine
    }

    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The device with an ordinal.
    pub(crate) fn device(&self, ordinal: CUdevice) -> Answer<&Device> {
        let device = usize::try_from(ordinal)
            .ok()
            .and_then(|index| self.devices.get(index));
        device.ok_or(CudaError::InvalidDevice)
    }

    /// A device's entry in the machine file.
    pub(crate) fn described(&self, device: &Device) -> Answer<&CardDescription> {
        let index = usize::try_from(device.card.0).map_err(|_| CudaError::InvalidDevice)?;
        self.machine
            .cards
            .get(index)
            .ok_or(CudaError::InvalidDevice)
    }

    /// A device's model.
    pub(crate) fn model(&self, ordinal: CUdevice) -> Answer<&CardModel> {
        let device = self.device(ordinal)?;
        match &device.instance {
            Some(instance) => Ok(&instance.model),
            None => Ok(self.machine.model(self.described(device)?)),
        }
    }

    /// The state, locked.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where work is submitted and its completion seen.
    pub(crate) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Whether a stream has come to a point.
    pub(crate) fn is_reached(&self, point: Point) -> bool {
        self.channel.completed(point.cell) >= point.ticket
    }

    /// Refuses when the daemon is gone, so that nobody waits for it forever.
    pub(crate) fn require_alive(&self) -> Answer {
        match self.connection().is_closed() {
            true => Err(CudaError::Unknown),
            false => Ok(()),
        }
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the daemon.
    pub(crate) fn request(&self, request: &Request) -> Answer<Reply> {
        Ok(self.connection().request(request)?)
    }

    /// As [`Self::request`], with the daemon's own reason for a refusal.
    pub(crate) fn try_request(&self, request: &Request) -> Result<Reply, ClientError> {
        self.connection().request(request)
    }

    /// Asks the daemon for something that comes with descriptors.
    pub(crate) fn request_with_fds(&self, request: &Request) -> Answer<(Reply, Vec<OwnedFd>)> {
        Ok(self.connection().request_with_fds(request)?)
    }

    /// Asks the daemon about a descriptor.
    pub(crate) fn request_about(&self, request: &Request, fd: BorrowedFd<'_>) -> Answer<Reply> {
        Ok(self.connection().request_about(request, fd)?)
    }
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
