//! Shared memory between one process and the daemon. Work is submitted and completion observed
//! without system calls, like user-mode submission on hardware.
//!
//! The daemon creates a channel for each CUDA client. The client appends [`Command`]s to the ring
//! and writes to the doorbell when the daemon sleeps. The daemon writes stream progress and event
//! times, and wakes waiters on the adjacent futexes.
//!
//! All words are atomics. Client data is untrusted: the daemon decodes each command and bounds
//! every index; malformed data disconnects that client only.

use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::thread::futex;

use crate::protocol::{Action, Command, ContextId, Direction, Nanos, Work};

/// Most streams of one process.
pub const STREAMS: u32 = 1 << 14;
/// Most events of one process.
pub const EVENTS: u32 = 1 << 16;
/// Capacity of the ring, commands.
const RING: u32 = 1 << 12;
/// Words of one command.
const WORDS: usize = 7;

#[repr(C)]
struct Layout {
    /// Commands appended, modulo 2³². Written by the client.
    submitted: Lone,
    /// Commands consumed. Written by the daemon.
    taken: Lone,
    /// 1 while the daemon may sleep.
    asleep: Lone,
    /// Host functions announced; a futex.
    host_calls: Lone,
    /// 1 while the client is locked; a futex. Written by the daemon.
    locked: Lone,
    /// `CUresult` of all calls from now on; 0 is none. Written by the daemon.
    failure: Lone,
    streams: [StreamCell; STREAMS as usize],
    events: [EventCell; EVENTS as usize],
    ring: [[AtomicU64; WORDS]; RING as usize],
}

/// A number in a cache line of its own: every client call reads `locked` and must not contend with
/// the daemon's writes.
#[repr(C, align(64))]
struct Lone(AtomicU32);

impl Deref for Lone {
    type Target = AtomicU32;

    fn deref(&self) -> &AtomicU32 {
        &self.0
    }
}

#[repr(C)]
struct StreamCell {
    /// The last completed ticket.
    completed: AtomicU64,
    /// The last ticket whose host function may run.
    host_ready: AtomicU64,
    /// Incremented with `completed`; a futex.
    changes: AtomicU32,
    /// Number of waiters on `changes`.
    waiters: AtomicU32,
}

#[repr(C)]
struct EventCell {
    /// The last completed recording.
    recording: AtomicU64,
    /// Time of the last completed recording.
    at: AtomicU64,
}

impl Command {
    fn encode(self) -> [u64; WORDS] {
        let (kind, first, second) = match self.action {
            Action::Submit(Work::Kernel {
                nanos,
                multiprocessors,
            }) => (0, nanos, u64::from(multiprocessors)),
            Action::Submit(Work::Copy {
                nanos,
                direction: Direction::ToGpu,
            }) => (1, nanos, 0),
            Action::Submit(Work::Copy {
                nanos,
                direction: Direction::ToHost,
            }) => (2, nanos, 0),
            Action::Submit(Work::Wait { stream, ticket }) => (3, u64::from(stream), ticket),
            Action::Submit(Work::Record { event, recording }) => (4, u64::from(event), recording),
            Action::Submit(Work::Host) => (5, 0, 0),
            Action::HostDone => (6, 0, 0),
        };
        [
            kind,
            self.at,
            self.context.0,
            u64::from(self.stream),
            self.ticket,
            first,
            second,
        ]
    }

    fn decode([kind, at, context, stream, ticket, first, second]: [u64; WORDS]) -> Option<Self> {
        let stream = stream_index(stream)?;
        let action = match kind {
            0 => Action::Submit(Work::Kernel {
                nanos: first,
                multiprocessors: u32::try_from(second).ok()?,
            }),
            1 => Action::Submit(Work::Copy {
                nanos: first,
                direction: Direction::ToGpu,
            }),
            2 => Action::Submit(Work::Copy {
                nanos: first,
                direction: Direction::ToHost,
            }),
            3 => Action::Submit(Work::Wait {
                stream: stream_index(first)?,
                ticket: second,
            }),
            4 => {
                let event = u32::try_from(first).ok().filter(|event| *event < EVENTS)?;
                Action::Submit(Work::Record {
                    event,
                    recording: second,
                })
            }
            5 => Action::Submit(Work::Host),
            6 => Action::HostDone,
            _ => return None,
        };
        Some(Self {
            at,
            context: ContextId(context),
            stream,
            ticket,
            action,
        })
    }
}

fn stream_index(word: u64) -> Option<u32> {
    u32::try_from(word).ok().filter(|stream| *stream < STREAMS)
}

/// A mapped channel, on either side.
#[derive(Debug)]
pub struct Channel {
    layout: &'static Layout,
    doorbell: OwnedFd,
    memory: OwnedFd,
}

impl std::fmt::Debug for Layout {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Layout").finish_non_exhaustive()
    }
}

impl Channel {
    /// Creates a channel.
    ///
    /// # Errors
    /// If memory or descriptors are exhausted.
    pub fn new() -> Result<Self, Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = memfd_create("simulated-gpu-channel", flags)?;
        ftruncate(&memory, size_of::<Layout>() as u64)?;
        // A client that truncated the file would kill the daemon with SIGBUS.
        fcntl_add_seals(
            &memory,
            SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
        )?;
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Self::open(memory, doorbell)
    }

    /// Opens the other side of a channel from [`Self::descriptors`].
    ///
    /// # Errors
    /// If the memory cannot be mapped.
    pub fn open(memory: OwnedFd, doorbell: OwnedFd) -> Result<Self, Errno> {
        if rustix::fs::fstat(&memory)?.st_size.unsigned_abs() < size_of::<Layout>() as u64 {
            return Err(Errno::INVAL);
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED the kernel chooses unused addresses.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                size_of::<Layout>(),
                access,
                MapFlags::SHARED,
                &memory,
                0,
            )
        }?;
        // SAFETY: page-aligned, as large as the layout, never truncated, all atomics for which any
        // bytes are valid; only `drop` unmaps it, when no borrow exists.
        let layout = unsafe { base.cast::<Layout>().as_ref() }.ok_or(Errno::FAULT)?;
        Ok(Self {
            layout,
            doorbell,
            memory,
        })
    }

    /// Memory and doorbell for the other side.
    #[must_use]
    pub fn descriptors(&self) -> [&OwnedFd; 2] {
        [&self.memory, &self.doorbell]
    }

    /// Client: appends a command; blocks while the ring is full. Callers serialize.
    pub fn submit(&self, command: Command) {
        let layout = self.layout;
        let submitted = layout.submitted.load(Ordering::Relaxed);
        while submitted.wrapping_sub(layout.taken.load(Ordering::Acquire)) >= RING {
            self.ring_doorbell();
            std::thread::sleep(Duration::from_micros(50));
        }
        let index = (submitted % RING) as usize;
        let slot = layout.ring.get(index).into_iter().flatten();
        for (word, value) in slot.zip(command.encode()) {
            word.store(value, Ordering::Relaxed);
        }
        layout
            .submitted
            .store(submitted.wrapping_add(1), Ordering::Release);
        // Either this sees `asleep`, or the daemon sees the command before it sleeps.
        fence(Ordering::SeqCst);
        if layout.asleep.load(Ordering::Relaxed) != 0 {
            self.ring_doorbell();
        }
    }

    fn ring_doorbell(&self) {
        // Full implies that the doorbell rings already.
        let _ = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
    }

    /// The last ticket that a stream completed.
    #[must_use]
    pub fn completed(&self, stream: u32) -> u64 {
        self.stream(stream)
            .map_or(u64::MAX, |cell| cell.completed.load(Ordering::Acquire))
    }

    /// Client: waits until a stream has completed a ticket; false on timeout.
    #[must_use]
    pub fn wait(&self, stream: u32, ticket: u64, timeout: Duration) -> bool {
        let Some(cell) = self.stream(stream) else {
            return true;
        };
        if cell.completed.load(Ordering::Acquire) >= ticket {
            return true;
        }
        cell.waiters.fetch_add(1, Ordering::SeqCst);
        let seen = cell.changes.load(Ordering::SeqCst);
        if cell.completed.load(Ordering::SeqCst) < ticket {
            wait_on(&cell.changes, seen, timeout);
        }
        cell.waiters.fetch_sub(1, Ordering::SeqCst);
        cell.completed.load(Ordering::Acquire) >= ticket
    }

    /// The last completed recording of an event and its time.
    #[must_use]
    pub fn event(&self, event: u32) -> (u64, Nanos) {
        let cell = self.layout.events.get(event as usize);
        cell.map_or((0, 0), |cell| {
            let recording = cell.recording.load(Ordering::Acquire);
            (recording, cell.at.load(Ordering::Acquire))
        })
    }

    /// Client: number of host functions announced.
    #[must_use]
    pub fn host_calls(&self) -> u32 {
        self.layout.host_calls.load(Ordering::Acquire)
    }

    /// Client: waits until more than `seen` host functions are announced.
    pub fn wait_host_calls(&self, seen: u32, timeout: Duration) {
        wait_on(&self.layout.host_calls, seen, timeout);
    }

    /// Client: last ticket of a stream whose host function may run.
    #[must_use]
    pub fn host_ready(&self, stream: u32) -> u64 {
        self.stream(stream)
            .map_or(0, |cell| cell.host_ready.load(Ordering::Acquire))
    }

    /// Daemon: takes the next command.
    ///
    /// # Errors
    /// If the ring holds malformed data.
    pub fn take(&self) -> Result<Option<Command>, NotACommand> {
        let layout = self.layout;
        let taken = layout.taken.load(Ordering::Relaxed);
        match layout.submitted.load(Ordering::Acquire).wrapping_sub(taken) {
            0 => return Ok(None),
            waiting if waiting > RING => return Err(NotACommand),
            _ => {}
        }
        let slot = layout
            .ring
            .get((taken % RING) as usize)
            .ok_or(NotACommand)?;
        let words = slot.each_ref().map(|word| word.load(Ordering::Relaxed));
        layout.taken.store(taken.wrapping_add(1), Ordering::Release);
        Command::decode(words).map(Some).ok_or(NotACommand)
    }

    /// Daemon: sets whether it is about to sleep. Returns true if commands are pending.
    #[must_use]
    pub fn set_asleep(&self, asleep: bool) -> bool {
        let layout = self.layout;
        layout.asleep.store(u32::from(asleep), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        layout.submitted.load(Ordering::Relaxed) != layout.taken.load(Ordering::Relaxed)
    }

    /// Daemon: clears the doorbell.
    pub fn answer_doorbell(&self) {
        let _ = rustix::io::read(&self.doorbell, &mut [0u8; 8]);
    }

    /// Daemon: publishes the completed ticket of a stream.
    pub fn complete(&self, stream: u32, ticket: u64) {
        if let Some(cell) = self.stream(stream) {
            cell.completed.store(ticket, Ordering::SeqCst);
            cell.changes.fetch_add(1, Ordering::SeqCst);
            if cell.waiters.load(Ordering::SeqCst) != 0 {
                wake(&cell.changes);
            }
        }
    }

    /// Daemon: publishes the time of an event.
    pub fn record(&self, event: u32, recording: u64, at: Nanos) {
        if let Some(cell) = self.layout.events.get(event as usize) {
            cell.at.store(at, Ordering::Release);
            cell.recording.store(recording, Ordering::Release);
        }
    }

    /// Daemon: locks or unlocks the client's calls.
    pub fn set_locked(&self, locked: bool) {
        self.layout
            .locked
            .store(u32::from(locked), Ordering::Release);
        wake(&self.layout.locked);
    }

    /// Client: returns whether its calls are locked.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.layout.locked.load(Ordering::Acquire) != 0
    }

    /// Client: waits until unlocked or timeout.
    pub fn wait_while_locked(&self, timeout: Duration) {
        wait_on(&self.layout.locked, 1, timeout);
    }

    /// Daemon: makes the client's calls fail from now on. The first failure stays.
    pub fn fail(&self, error: u32) {
        let failure = &self.layout.failure;
        let _ = failure.compare_exchange(0, error, Ordering::Release, Ordering::Relaxed);
    }

    /// Client: `CUresult` with which its calls fail.
    #[must_use]
    pub fn failure(&self) -> Option<u32> {
        match self.layout.failure.load(Ordering::Acquire) {
            0 => None,
            error => Some(error),
        }
    }

    /// Daemon: announces a host function.
    pub fn call_host(&self, stream: u32, ticket: u64) {
        if let Some(cell) = self.stream(stream) {
            cell.host_ready.store(ticket, Ordering::Release);
            self.layout.host_calls.fetch_add(1, Ordering::Release);
            wake(&self.layout.host_calls);
        }
    }

    fn stream(&self, stream: u32) -> Option<&StreamCell> {
        self.layout.streams.get(stream as usize)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let base = std::ptr::from_ref(self.layout).cast_mut().cast();
        // SAFETY: the mapping of this value, whose only reference ends here.
        let _ = unsafe { rustix::mm::munmap(base, size_of::<Layout>()) };
    }
}

impl AsFd for Channel {
    /// The doorbell.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.doorbell.as_fd()
    }
}

/// The ring holds malformed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client's ring does not hold a command")]
pub struct NotACommand;

fn wait_on(word: &AtomicU32, seen: u32, timeout: Duration) {
    let timeout = futex::Timespec::try_from(timeout).ok();
    // Woken, changed, interrupted or timed out: the caller checks again in any case.
    let _ = futex::wait(word, futex::Flags::empty(), seen, timeout.as_ref());
}

fn wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), u32::MAX >> 1);
}

#[cfg(test)]
mod tests;
