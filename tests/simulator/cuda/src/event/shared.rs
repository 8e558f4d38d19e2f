//! Events of several processes (`CU_EVENT_INTERPROCESS`).
//!
//! How often such an event was recorded, and which recording was reached, is in a page that all of
//! them map; see the daemon's `shared_events`.

use std::ffi::c_uint;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags, mmap};
use simulator_machine::protocol::{Reply, Request, SharedEventId};
use simulator_machine::server::shared_events::{AT, PAGE_LENGTH, REACHED, RECORDED, RECORDER};

use super::{DISABLE_TIMING, Event, INTERPROCESS};
use crate::abi::{Answer, Out, entry_points};
use crate::context::current_handle;
use crate::driver::{Driver, State, driver};
use crate::error::CudaError;
use crate::types::{CUevent, CUipcHandle};

/// Tells handles of events from anything else.
const MAGIC: u64 = 0x746e_6576_6375_6461;
/// How often a waiting thread looks.
const INTERVAL: Duration = Duration::from_micros(50);

/// The page of an event. It stays mapped: other threads may look at it.
#[derive(Clone, Debug)]
pub(super) struct SharedEvent {
    id: SharedEventId,
    /// What this process is called there.
    member: u64,
    words: &'static [AtomicU64; 4],
}

impl SharedEvent {
    fn map(id: SharedEventId, member: u64, page: &OwnedFd) -> Answer<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let anywhere = std::ptr::null_mut();
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing uses.
        let base = unsafe { mmap(anywhere, PAGE_LENGTH, access, MapFlags::SHARED, page, 0) }?;
        // SAFETY: a page that is never unmapped, aligned, and long enough; the file cannot shrink.
        let words = unsafe { base.cast::<[AtomicU64; 4]>().as_ref() };
        let words = words.ok_or(CudaError::OutOfMemory)?;
        Ok(Self { id, member, words })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        let [recorded, recorder, reached, at] = self.words;
        match index {
            RECORDED => recorded,
            RECORDER => recorder,
            REACHED => reached,
            AT => at,
            _ => recorded,
        }
    }

    /// The number of a new recording by this process.
    pub(super) fn next(&self) -> u64 {
        self.word(RECORDER).store(self.member, Ordering::SeqCst);
        self.word(RECORDED).fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The last recording by anyone; 0 when there was none.
    pub(super) fn last(&self) -> u64 {
        self.word(RECORDED).load(Ordering::SeqCst)
    }

    /// When a recording was reached.
    pub(super) fn reached(&self, recording: u64) -> Option<u64> {
        let reached = self.word(REACHED).load(Ordering::SeqCst) >= recording;
        reached.then(|| self.word(AT).load(Ordering::SeqCst))
    }

    /// Waits until a recording is reached. No lock may be held.
    pub(super) fn wait(&self, driver: &Driver, recording: u64) -> Answer {
        while self.reached(recording).is_none() {
            driver.require_alive()?;
            std::thread::sleep(INTERVAL);
        }
        Ok(())
    }

    /// What was recorded before the event was shared.
    fn begin(&self, recording: u64, reached: Option<u64>) {
        self.word(RECORDER).store(self.member, Ordering::SeqCst);
        self.word(RECORDED).store(recording, Ordering::SeqCst);
        if let Some(at) = reached {
            self.word(AT).store(at, Ordering::SeqCst);
            self.word(REACHED).store(recording, Ordering::SeqCst);
        }
    }
}

/// What the daemon answers to both requests.
fn request(driver: &Driver, request: &Request) -> Answer<SharedEvent> {
    let (reply, mut fds) = driver.request_with_fds(request)?;
    let Reply::EventShared { shared, member } = reply else {
        return Err(CudaError::Unknown);
    };
    let page = fds.pop().ok_or(CudaError::Unknown)?;
    SharedEvent::map(shared, member, &page)
}

impl State {
    fn share_event(&mut self, driver: &Driver, handle: CUevent) -> Answer<CUipcHandle> {
        let event = self.events.get(handle)?;
        if event.flags & INTERPROCESS == 0 {
            return Err(CudaError::InvalidValue);
        }
        let shared = match event.shared {
            Some(shared) => shared,
            None => {
                let shared = request(driver, &Request::ShareEvent { event: event.cell })?;
                // From here on the daemon writes what is reached; what was before is written here.
                let last = event.last.map_or(0, |last| last.recording);
                let (recording, at) = driver.channel().event(event.cell);
                shared.begin(last, (recording >= last).then_some(at));
                self.events.get_mut(handle)?.shared = Some(shared.clone());
                shared
            }
        };
        Ok(CUipcHandle::of([MAGIC, shared.id.0]))
    }

    fn open_event(&mut self, driver: &Driver, handle: CUipcHandle) -> Answer<CUevent> {
        let [magic, shared] = handle.words();
        if magic != MAGIC {
            return Err(CudaError::InvalidValue);
        }
        let context = current_handle()?;
        self.current()?;
        let cell = self.events.cell()?;
        let open = Request::OpenEvent {
            shared: SharedEventId(shared),
            event: cell,
        };
        let shared = match request(driver, &open) {
            Ok(shared) => shared,
            Err(_) => {
                self.events.free.push(cell);
                return Err(CudaError::InvalidValue);
            }
        };
        let opened = CUevent(self.handle());
        let event = Event {
            context,
            cell,
            flags: INTERPROCESS | DISABLE_TIMING,
            last: None,
            captured: None,
            shared: Some(shared),
        };
        self.events.created.insert(opened, event);
        Ok(opened)
    }
}

/// Refuses flags that do not go together.
pub(super) fn check_flags(flags: c_uint) -> Answer {
    match flags & INTERPROCESS == 0 || flags & DISABLE_TIMING != 0 {
        true => Ok(()),
        false => Err(CudaError::InvalidValue),
    }
}

entry_points! {
    "cuIpcGetEventHandle" 4010 fn cuIpcGetEventHandle(handle: Out<CUipcHandle>, event: CUevent) {
        let driver = driver()?;
        handle.set(driver.state().share_event(driver, event)?)
    }

    "cuIpcOpenEventHandle" 4010 fn cuIpcOpenEventHandle(event: Out<CUevent>, handle: CUipcHandle) {
        if event.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        event.set(driver.state().open_event(driver, handle)?)
    }
}
