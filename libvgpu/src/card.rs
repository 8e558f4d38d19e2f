//! A card as the process may use it: all the shares with its UUID together.

use core::sync::atomic::Ordering;

use drava_vgpu_abi::DeviceUuid;
use drava_vgpu_abi::ledger::LimitExceeded;

use crate::cuda::{CUDA_SUCCESS, CUcontext, CUdevice, CUresult, CUuuid};
use crate::driver::{Library, Original};
use crate::environment::Attached;
use crate::imports::Imports;
use crate::process::Process;
use crate::share::{Headroom, Share};
use crate::shares::{LimitsSource, MAX_SHARES};
use crate::sys;

/// What applies to a card.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    /// Nothing: calls go through as they are.
    Unlimited,
    /// It is limited by these shares.
    Limited(Card),
    /// Its limits cannot be known, so nothing may be taken from it.
    Denied,
}

/// A limited card.
#[derive(Clone, Copy)]
pub(crate) struct Card {
    process: &'static Process,
    /// Index of its first share. No more is carried along, so that a card is passed in registers.
    first_share: u8,
}

/// How much of a card there is for this process.
#[derive(Clone, Copy)]
pub(crate) struct Amount {
    pub(crate) limit_bytes: u64,
    pub(crate) used_bytes: u64,
}

impl Amount {
    pub(crate) fn free_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes)
    }
}

impl Card {
    /// The card of that UUID, if a share of it is known.
    pub(crate) fn of(process: &'static Process, uuid: DeviceUuid) -> Option<Self> {
        let first = process.shares().position(|share| share.uuid() == uuid)?;
        Some(Self {
            process,
            first_share: u8::try_from(first).ok()?,
        })
    }

    /// The card that [`Card::index`] named.
    pub(crate) fn at(process: &'static Process, index: u8) -> Option<Self> {
        process.shares().nth(usize::from(index))?;
        Some(Self {
            process,
            first_share: index,
        })
    }

    /// The process whose view of the card this is.
    pub(crate) fn process(self) -> &'static Process {
        self.process
    }

    /// A small number for the card.
    pub(crate) fn index(self) -> u8 {
        self.first_share
    }

    pub(crate) fn shares(self) -> impl Iterator<Item = &'static Share> {
        let mut others = self.process.shares().skip(usize::from(self.first_share));
        let first = others.next();
        let is_same = move |share: &&Share| first.is_some_and(|first| first.uuid() == share.uuid());
        first.into_iter().chain(others.filter(is_same))
    }

    /// Whether its memory is limited. Shares are summed, so one that is not limited frees all.
    pub(crate) fn is_memory_limited(self) -> bool {
        self.shares().all(Share::is_memory_limited)
    }

    /// Whether its GPU time is metered. Shares are summed, so one that is not frees all.
    pub(crate) fn is_metered(self) -> bool {
        self.shares().all(Share::is_metered)
    }

    /// Limit and use.
    pub(crate) fn amount(self) -> Amount {
        let _guard = self.process.guard();
        let mut amount = Amount {
            limit_bytes: 0,
            used_bytes: 0,
        };
        self.reclaim();
        for share in self.shares() {
            amount.limit_bytes = amount.limit_bytes.saturating_add(share.limit_bytes());
            amount.used_bytes = amount.used_bytes.saturating_add(share.used_bytes());
        }
        amount
    }

    /// Whether plain allocations beyond the limit become managed memory.
    pub(crate) fn spills(self) -> bool {
        self.shares().any(Share::spills)
    }

    /// What the driver takes for itself in a context.
    pub(crate) fn driver_reserve_bytes(self) -> u64 {
        self.shares()
            .map(Share::driver_reserve_bytes)
            .max()
            .unwrap_or(0)
    }

    /// Takes `bytes`, from one share if one has them, else from several.
    pub(crate) fn reserve(self, bytes: u64) -> Result<(), LimitExceeded> {
        if !self.certainly_lacks(bytes)
            && (self.try_reserve(bytes) || self.reserve_after_reclaim(bytes))
        {
            Ok(())
        } else {
            Err(LimitExceeded)
        }
    }

    /// Notes that something was refused for lack of memory.
    pub(crate) fn count_denied(self) {
        if let Some(share) = self.shares().next() {
            share.count_denied();
        }
    }

    /// Whether so much is not there, even with what dead processes left. What live_processes ones return counts at once.
    #[inline]
    pub(crate) fn certainly_lacks(self, bytes: u64) -> bool {
        let headroom = self.headroom();
        headroom.bytes < bytes && sys::now_ns() < headroom.valid_until_ns
    }

    /// Whether there seems to be so much, of which nothing is taken yet.
    pub(crate) fn may_have(self, bytes: u64) -> bool {
        self.headroom().bytes >= bytes
    }

    #[inline]
    fn headroom(self) -> Headroom {
        let none = Headroom {
            bytes: 0,
            valid_until_ns: u64::MAX,
        };
        self.shares()
            .map(Share::headroom)
            .fold(none, Headroom::with)
    }

    /// Takes back what dead processes left before it tries again.
    #[cold]
    fn reserve_after_reclaim(self, bytes: u64) -> bool {
        let _guard = self.process.guard();
        self.reclaim();
        self.shares().any(|share| share.reserve_or_rebuild(bytes)) || self.reserve_parts(bytes)
    }

    /// Takes back what dead processes held, and charges this one for what it has opened of theirs. The caller holds
    /// the process's guard.
    fn reclaim(self) {
        for share in self.shares() {
            share.reclaim();
        }
        if let Some(imports) = self.imports() {
            let missing = imports.missing_bytes(self.exported_bytes());
            if missing != 0 {
                self.charge(missing);
                imports.add_charged(missing);
                self.publish(imports);
            }
        }
    }

    fn imports(self) -> Option<&'static Imports> {
        self.process.imports.get(usize::from(self.first_share))
    }

    fn exported_bytes(self) -> u64 {
        self.shares()
            .map(Share::exported_bytes)
            .fold(0, u64::saturating_add)
    }

    /// Notes that other processes may open so much of what this one holds.
    pub(crate) fn export(self, bytes: u64) {
        if let Some(share) = self.shares().next() {
            share.add_exported_bytes(bytes);
        }
    }

    /// Takes back what [`Card::export`] noted.
    pub(crate) fn end_export(self, bytes: u64) {
        if let Some(share) = self.shares().next() {
            share.subtract_exported_bytes(bytes);
        }
    }

    /// Opens memory of another process, and pays for it if it is not of the own share.
    pub(crate) fn import(self, bytes: u64) -> Result<(), LimitExceeded> {
        let Some(imports) = self.imports() else {
            return Err(LimitExceeded);
        };
        let missing = {
            let _guard = self.process.guard();
            imports.open(bytes);
            // Before the look at what is available: see `Region::reclaim_slot`.
            self.publish(imports);
            let missing = imports.missing_bytes(self.exported_bytes());
            // Or a look for dead processes on the way would find it missing too.
            imports.add_charged(missing);
            missing
        };
        if missing == 0 {
            return Ok(());
        }
        let outcome = self.reserve(missing);
        let _guard = self.process.guard();
        if outcome.is_err() {
            imports.undo_open(bytes, missing);
        }
        self.publish(imports);
        outcome
    }

    /// Lets others know what this process has open. The caller holds the process's guard.
    fn publish(self, imports: &Imports) {
        if let Some(share) = self.shares().next() {
            share.set_opened_bytes(imports.uncharged_bytes());
        }
    }

    /// Closes memory of another process.
    pub(crate) fn end_import(self, bytes: u64) {
        let Some(imports) = self.imports() else {
            return;
        };
        let surplus = {
            let _guard = self.process.guard();
            let surplus = imports.close(bytes);
            self.publish(imports);
            surplus
        };
        self.release(surplus);
    }

    /// Takes `bytes` if they are there without further ado.
    pub(crate) fn try_reserve(self, bytes: u64) -> bool {
        self.shares().any(|share| share.reserve(bytes))
    }

    fn reserve_parts(self, bytes: u64) -> bool {
        let mut parts = [0u64; MAX_SHARES];
        let mut missing = bytes;
        for (share, part) in self.shares().zip(&mut parts) {
            *part = share.reserve_up_to(missing);
            missing = missing.saturating_sub(*part);
        }
        if missing == 0 {
            return true;
        }
        for (share, part) in self.shares().zip(parts) {
            share.release(part);
        }
        false
    }

    /// Takes `bytes` that the driver has given already.
    pub(crate) fn charge(self, bytes: u64) {
        if !self.try_reserve(bytes)
            && let Some(share) = self.shares().next()
        {
            share.charge(bytes);
        }
    }

    /// Returns `bytes`, to whichever shares this process took them from.
    pub(crate) fn release(self, bytes: u64) {
        let mut left = bytes;
        for share in self.shares() {
            if left == 0 {
                return;
            }
            left = left.saturating_sub(share.release(left));
        }
    }

    /// Notes that so much of what this process holds is for the driver's own use.
    pub(crate) fn add_driver_bytes(self, bytes: u64) {
        if let Some(share) = self.shares().next() {
            share.add_driver_bytes(bytes);
        }
    }

    /// Takes back what [`Card::add_driver_bytes`] noted.
    pub(crate) fn subtract_driver_bytes(self, bytes: u64) {
        if let Some(share) = self.shares().next() {
            share.subtract_driver_bytes(bytes);
        }
    }

    /// Makes `from` bytes that were reserved into `to`, what the driver really took.
    pub(crate) fn correct(self, from: u64, to: u64) {
        if to > from {
            self.charge(to.saturating_sub(from));
        } else {
            self.release(from.saturating_sub(to));
        }
    }
}

/// What applies to the card of that UUID.
pub(crate) fn target_of(
    process: &'static Process,
    uuid: DeviceUuid,
    ordinal: Option<u32>,
) -> Target {
    if let Some(card) = Card::of(process, uuid) {
        return Target::Limited(card);
    }
    match process.source() {
        LimitsSource::None | LimitsSource::Pages => Target::Unlimited,
        LimitsSource::UnreadablePages | LimitsSource::InvalidEnvironment => Target::Denied,
        LimitsSource::Environment => {
            let _guard = process.guard();
            // Another thread may have been faster.
            if let Some(card) = Card::of(process, uuid) {
                return Target::Limited(card);
            }
            match process.environment.attach(&process.shares, uuid, ordinal) {
                Attached::Share => Card::of(process, uuid).map_or(Target::Denied, Target::Limited),
                Attached::NoLimit => Target::Unlimited,
                Attached::Failed => Target::Denied,
            }
        }
    }
}

static GET_CURRENT: Original = Original::new(Library::Cuda, c"cuCtxGetCurrent");
static GET_DEVICE: Original = Original::new(Library::Cuda, c"cuCtxGetDevice");
static GET_UUID_V2: Original = Original::new(Library::Cuda, c"cuDeviceGetUuid_v2");
static GET_UUID: Original = Original::new(Library::Cuda, c"cuDeviceGetUuid");

type GetCurrent = unsafe extern "C" fn(*mut CUcontext) -> CUresult;
type GetDevice = unsafe extern "C" fn(*mut CUdevice) -> CUresult;
type GetUuid = unsafe extern "C" fn(*mut CUuuid, CUdevice) -> CUresult;

/// The context that calls of this thread act in.
pub(crate) fn current_context() -> Option<u64> {
    let get = GET_CURRENT.address()?;
    // SAFETY: the signature of `cuCtxGetCurrent`.
    let get = unsafe { core::mem::transmute::<core::ptr::NonNull<_>, GetCurrent>(get) };
    let mut context = core::ptr::null_mut();
    // SAFETY: writes one context.
    let result = unsafe { get(&raw mut context) };
    (result == CUDA_SUCCESS && !context.is_null()).then(|| context.expose_provenance() as u64)
}

/// The device of that context.
pub(crate) fn current_device() -> Option<CUdevice> {
    let get = GET_DEVICE.address()?;
    // SAFETY: the signature of `cuCtxGetDevice`.
    let get = unsafe { core::mem::transmute::<core::ptr::NonNull<_>, GetDevice>(get) };
    let mut device = 0;
    // SAFETY: writes one device.
    let result = unsafe { get(&raw mut device) };
    (result == CUDA_SUCCESS).then_some(device)
}

/// UUID of a CUDA device; of a MIG partition its own, which no share has.
pub(crate) fn uuid_of(device: CUdevice) -> Option<DeviceUuid> {
    let get = GET_UUID_V2.address().or_else(|| GET_UUID.address())?;
    // SAFETY: the signature of `cuDeviceGetUuid` and its second version.
    let get = unsafe { core::mem::transmute::<core::ptr::NonNull<_>, GetUuid>(get) };
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: writes one UUID.
    let result = unsafe { get(&raw mut uuid, device) };
    (result == CUDA_SUCCESS).then_some(DeviceUuid(uuid.bytes))
}

const UNLIMITED: u32 = 1;
const DENIED: u32 = 2;
const FIRST_CARD: u32 = 3;

/// What applies to a CUDA device's memory.
pub(crate) fn target_of_device(device: CUdevice) -> Target {
    let Some(process) = Process::get() else {
        return Target::Denied;
    };
    let known = usize::try_from(device)
        .ok()
        .and_then(|ordinal| process.devices.get(ordinal))
        .map(|device| &device.target);
    if let Some(known) = known {
        match known.load(Ordering::Acquire) {
            0 => {}
            UNLIMITED => return Target::Unlimited,
            DENIED => return Target::Denied,
            found => {
                let index = u8::try_from(found.saturating_sub(FIRST_CARD)).unwrap_or(u8::MAX);
                return Card::at(process, index).map_or(Target::Denied, Target::Limited);
            }
        }
    }
    // An invalid device is the driver's business to report.
    let Some(uuid) = uuid_of(device) else {
        return Target::Unlimited;
    };
    let target = match target_of(process, uuid, u32::try_from(device).ok()) {
        Target::Limited(card) if !card.is_memory_limited() => Target::Unlimited,
        target => target,
    };
    if let Some(known) = known {
        let code = match target {
            Target::Unlimited => UNLIMITED,
            Target::Denied => DENIED,
            Target::Limited(card) => FIRST_CARD.saturating_add(u32::from(card.index())),
        };
        known.store(code, Ordering::Release);
    }
    target
}

/// What applies to the memory of the card that calls of this thread act on.
pub(crate) fn target_of_current_context() -> Target {
    // Without a context the driver refuses by itself.
    current_device().map_or(Target::Unlimited, target_of_device)
}
