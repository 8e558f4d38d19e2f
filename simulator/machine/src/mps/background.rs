//! Process in the background.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use rustix::process::setsid;
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

/// A process after [`fork`].
pub(super) enum Forked {
    /// The parent; whether the child is ready.
    Parent(bool),
    /// The child.
    Child(Readiness),
}

/// Lets the parent end.
#[derive(Debug)]
pub(super) struct Readiness(OwnedFd);

impl Readiness {
    /// Reports that the process is ready.
    pub(super) fn report(self) {
        // The parent may be gone.
        let _ = File::from(self.0).write_all(b"1");
    }
}

/// Forks. The parent waits until the child is ready or ends; the child has a session of its own. The process must have no other
/// thread.
pub(super) fn fork() -> io::Result<Forked> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // SAFETY: the caller has no other thread, so the child may go on like the parent.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(reader);
            setsid()?;
            Ok(Forked::Child(Readiness(writer)))
        }
        _ => {
            drop(writer);
            let mut report = Vec::new();
            File::from(reader).read_to_end(&mut report)?;
            Ok(Forked::Parent(!report.is_empty()))
        }
    }
}

/// Replaces the standard streams by a file, as a `chroot` may have no `/dev/null`.
pub(super) fn detach(to: &File) -> io::Result<()> {
    dup2_stdin(to)?;
    dup2_stdout(to)?;
    Ok(dup2_stderr(to)?)
}
