//! `drava-cdi-hook`: makes a container's dynamic loader find the NVIDIA driver's libraries, and libvgpu first.
//!
//! An OCI `createContainer` hook: the runtime runs it as root, in the container's mount namespace, after its mounts
//! and before its first process, with the container's state on stdin. The image is untrusted: the kernel resolves
//! every path of the image inside the container's root (`openat2` with `RESOLVE_IN_ROOT`, Linux 5.6), the hook runs no
//! program of the image, and every read is bounded. The hook reads no environment, starts no process and, except `limit`,
//! opens no socket.
//!
//! The hook fails closed. A non-zero status makes the runtime reject the container, and the one line on stderr appears
//! in the pod's events. A second run on the same container changes nothing.
//!
//! Subcommands (`drava_cdi::HookProgram` writes the command lines). One process runs several, separated by the argument
//! `then`, in their order up to the first error:
//! - `preload --library PATH [--stub PATH]…`: inserts PATH at the start of `/etc/ld.so.preload`, before the image's entries,
//!   and of `/etc/ld-nix.so.preload` in an image with programs of Nix; nothing if each stub is a shared library that needs
//!   PATH first, which the delivery `shim` mounts.
//! - `ldcache --library PATH…`: adds each library to `/etc/ld.so.cache` under its file name, and the libraries of the
//!   image's `/etc/ld.so.conf` if the image's cache is older.
//! - `compat --driver-version VERSION [--cuda-version VERSION]`: adds the CUDA compatibility libraries of the image to
//!   `/etc/ld.so.cache` if they are of a newer release than the driver and the image requires a newer CUDA version.
//! - `params`: mounts a copy of `/proc/driver/nvidia/params` with `ModifyDeviceFiles: 0` over the file.
//! - `symlinks --link TARGET::PATH…`: creates the symbolic link PATH to TARGET.
//! - `mark --files PATH`: empties the file in each directory that is mounted at a path of this form, such as
//!   `/run/drava/*/usage/pending`, which shows the node driver that the runtime has applied the edits. A runtime with CDI
//!   disabled starts the container without them and reports nothing. A container without such a mount is rejected: it
//!   would have no limits.
//! - `limit --socket PATH --claim UID --share ID`: has the node driver at PATH limit the GPU memory of the container's cgroup. Runs
//!   at the stage `createRuntime`, alone.
//!
//! crun before 1.26 makes the root read-only before it runs hooks; the hook then makes it writable for its own writes.
//!
//! musl's loader ignores `ld.so.preload` and `ld.so.cache`. The NVIDIA libraries need glibc, so a musl program cannot
//! use the GPU with or without this hook.

#![forbid(unsafe_code)]

mod arguments;
mod compat;
mod container;
mod ldcache;
mod ldconf;
mod limit;
mod mark;
mod params;
mod preload;
mod root;
mod symlinks;

use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::ExitCode;

use arguments::Action;
use container::Container;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without stderr, the error cannot be reported.
            let _ = writeln!(io::stderr(), "{}", one_line(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let actions = arguments::parse(std::env::args_os().skip(1))?;
    let container = container::read(io::stdin().lock())?;
    actions
        .into_iter()
        .try_for_each(|action| apply(action, &container))
}

fn apply(action: Action, container: &Container) -> Result<(), Box<dyn Error>> {
    let root = &container.root;
    match action {
        Action::Preload { library, stubs } => preload::apply(root, &library, &stubs)?,
        Action::LdCache { libraries } => ldcache::apply(root, &libraries)?,
        Action::Compat(driver) => compat::apply(container, &driver)?,
        Action::Limit(share) => limit::apply(container, &share)?,
        Action::Params => params::apply(container)?,
        Action::Mark { files } => mark::apply(container, &files)?,
        Action::Symlinks { links } => symlinks::apply(root, &links)?,
    }
    Ok(())
}

/// Formats an error and its causes in one line. Paths can contain any character, including a line end.
fn one_line(error: &dyn Error) -> String {
    let mut line = format!("drava-cdi-hook: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        // Writing to a string cannot fail.
        let _ = write!(line, ": {error}");
        cause = error.source();
    }
    line.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_error_and_causes_in_one_line() {
        #[derive(Debug)]
        struct Outer(io::Error);
        impl std::fmt::Display for Outer {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("cannot read /a\nb")
            }
        }
        impl Error for Outer {
            fn source(&self) -> Option<&(dyn Error + 'static)> {
                Some(&self.0)
            }
        }
        let line = one_line(&Outer(io::Error::other("broken")));
        assert_eq!(line, "drava-cdi-hook: cannot read /a\u{fffd}b: broken");
    }
}
