//! User of the other side of a socket.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;

/// Returns the user of the process that connected. Its PID may be 0: it can be in another PID namespace.
pub(super) fn user_of(socket: &OwnedFd) -> Result<u32, Errno> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: a buffer of the given length.
    let code = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    match code {
        0 => Ok(credentials.uid),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
    }
}
