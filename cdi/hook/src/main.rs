//! `drava-cdi-hook`: makes a container's dynamic loader find the driver's libraries, and libvgpu first.
//!
//! An OCI `createContainer` hook: the runtime runs it as root, in the container's mount namespace, after its mounts
//! and before its first process, with the container's state on stdin. The image is hostile: every path in it is
//! resolved inside the container's root by the kernel (`openat2` with `RESOLVE_IN_ROOT`, Linux 5.6), nothing of the
//! image is run, and every read is bounded. It reads no environment, starts no process and opens no socket.
//!
//! It fails closed. A non-zero status makes the runtime refuse the container, and the one line on stderr reaches the
//! pod's events. Run again on the same container, it changes nothing.
//!
//! Subcommands (`drava_cdi::HookProgram` is the caller's side):
//! - `preload --library PATH`: PATH comes first in `/etc/ld.so.preload`, what the image has there follows.
//! - `shim --library PATH --stub PATH…`: each stub is a shared library that needs the library first. If something else
//!   has the place of one, because another device of the container brought the driver's own, `preload` is done.
//! - `ldcache --library PATH…`: `/etc/ld.so.cache` has each library under its file name.
//! - `symlinks --link TARGET::PATH…`: PATH is a symbolic link to TARGET.
//! - `mark --file PATH`: PATH is a file. It tells the driver that the runtime has applied the edits: one with CDI
//!   switched off starts the container without them and says nothing.
//!
//! An image with musl has another loader, which ignores `ld.so.preload` and `ld.so.cache`. The driver's libraries need
//! glibc, so a musl program can use the GPU no more with this hook than without.

#![forbid(unsafe_code)]

mod arguments;
mod container;
mod ldcache;
mod mark;
mod preload;
mod root;
mod shim;
mod symlinks;

use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::ExitCode;

use arguments::Action;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody is left to tell when stderr is closed.
            let _ = writeln!(io::stderr(), "{}", one_line(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let action = arguments::parse(std::env::args_os().skip(1))?;
    let root = container::root(io::stdin().lock())?;
    match action {
        Action::Preload { library } => preload::apply(&root, &library)?,
        Action::Shim { library, stubs } => shim::apply(&root, &library, &stubs)?,
        Action::LdCache { libraries } => ldcache::apply(&root, &libraries)?,
        Action::Mark { file } => mark::apply(&root, &file)?,
        Action::Symlinks { links } => symlinks::apply(&root, &links)?,
    }
    Ok(())
}

/// An error with its causes. Paths may hold anything, a line end too.
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
    fn an_error_is_one_line_with_its_causes() {
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
