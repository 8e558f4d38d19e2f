//! SIGTERM and SIGINT as a readable descriptor.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

/// Blocks both signals in the calling thread and returns a descriptor that becomes readable when
/// one is pending.
pub(super) fn descriptor() -> io::Result<OwnedFd> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `set` is writable memory for a signal set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: `sigemptyset` initialized it.
    let mut set = unsafe { set.assume_init() };
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: `set` is initialized and the signal number valid.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    // SAFETY: `set` is initialized; the old mask is not requested.
    let masked = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) };
    if masked != 0 {
        return Err(io::Error::from_raw_os_error(masked));
    }
    // SAFETY: `set` is initialized; -1 requests a new descriptor.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor without other owners.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
