//! Finds the shares of this container: one directory each under `/run/drava`.
//!
//! A share whose page cannot be read is not skipped: nobody knows which card it limits, so every card that has
//! no readable share is refused.

use core::ffi::CStr;
use core::fmt::{self, Write};

use drava_vgpu_abi::paths;

use crate::environment;
use crate::log;
use crate::process::{Process, Source};
use crate::sys::{self, Fd};

const PATH_CAPACITY: usize = 512;

/// A path put together on the stack.
#[derive(Clone, Copy)]
pub(crate) struct PathBuffer {
    bytes: [u8; PATH_CAPACITY],
    len: usize,
}

impl PathBuffer {
    /// `None` if it does not fit.
    pub(crate) fn new(arguments: fmt::Arguments<'_>) -> Option<Self> {
        let mut path = Self {
            bytes: [0; PATH_CAPACITY],
            len: 0,
        };
        path.write_fmt(arguments).ok()?;
        Some(path)
    }

    pub(crate) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }
}

impl Write for PathBuffer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.len.saturating_add(text.len());
        // One byte is left for the NUL.
        match self.bytes.get_mut(self.len..end) {
            Some(place) if end < PATH_CAPACITY => {
                // Not `copy_from_slice`, which would panic if the lengths differed.
                for (place, byte) in place.iter_mut().zip(text.bytes()) {
                    *place = byte;
                }
            }
            _ => return Err(fmt::Error),
        }
        self.len = end;
        Ok(())
    }
}

/// Attaches all shares. `None` if there are none, so that the environment counts.
pub(crate) fn find_shares(process: &Process) -> Option<Source> {
    let standard = PathBuffer::new(format_args!("{}", paths::RUN_DIR))?;
    find_shares_in(process, standard.as_c_str())
        .or_else(|| find_shares_in(process, environment::run_directory()?))
}

fn find_shares_in(process: &Process, run_directory: &CStr) -> Option<Source> {
    let Ok(directory) = sys::open_directory(None, run_directory) else {
        return Some(unreadable(run_directory));
    };
    let directory = directory?;
    let mut source = None;
    let mut buffer = EntryBuffer::new();
    loop {
        let length = match sys::directory_entries(directory, &mut buffer.0) {
            Some(0) => break,
            Some(length) => length,
            None => {
                source = Some(unreadable(run_directory));
                break;
            }
        };
        for name in names(buffer.0.get(..length).unwrap_or_default()) {
            match attach(process, directory, run_directory, name) {
                Attached::Share if source.is_none() => source = Some(Source::Pages),
                Attached::Share | Attached::NoShare => {}
                Attached::Broken => source = Some(Source::BrokenPages),
            }
        }
    }
    sys::close(directory);
    source
}

/// Shares that cannot be looked for are not "no shares".
fn unreadable(run_directory: &CStr) -> Source {
    log::line(format_args!(
        "{} cannot be read: GPU memory is refused",
        run_directory.to_str().unwrap_or("?")
    ));
    Source::BrokenPages
}

enum Attached {
    Share,
    NoShare,
    Broken,
}

fn attach(process: &Process, directory: Fd, run_directory: &CStr, name: &str) -> Attached {
    let run_directory = run_directory.to_str().unwrap_or("?");
    let page_path = PathBuffer::new(format_args!(
        "{name}/{}/{}",
        paths::LIMITS_DIR,
        paths::PAGE_FILE
    ));
    let limits_path = PathBuffer::new(format_args!("{name}/{}", paths::LIMITS_DIR));
    let (Some(page_path), Some(limits_path)) = (page_path, limits_path) else {
        return Attached::NoShare;
    };
    match sys::open_directory(Some(directory), limits_path.as_c_str()) {
        Ok(Some(limits)) => sys::close(limits),
        Ok(None) => return Attached::NoShare,
        Err(sys::Unknown) => {
            log::line(format_args!(
                "share {run_directory}/{name} cannot be opened: GPU memory is refused"
            ));
            return Attached::Broken;
        }
    }
    let page = sys::open(Some(directory), page_path.as_c_str(), libc::O_RDONLY, 0);
    let share = process.next_share();
    let (Some(page), Some(share)) = (page, share) else {
        log::line(format_args!(
            "limits page of share {run_directory}/{name} cannot be opened: GPU memory is refused"
        ));
        return Attached::Broken;
    };
    let full_path = PathBuffer::new(format_args!(
        "{run_directory}/{name}/{}/{}",
        paths::LIMITS_DIR,
        paths::PAGE_FILE
    ));
    let attached = full_path.and_then(|path| share.attach_page(page, path));
    sys::close(page);
    if attached.is_none() {
        log::line(format_args!(
            "limits page of share {run_directory}/{name} cannot be read: GPU memory is refused"
        ));
        return Attached::Broken;
    }
    let region_path = PathBuffer::new(format_args!(
        "{run_directory}/{name}/{}/{}",
        paths::USAGE_DIR,
        paths::REGION_FILE
    ));
    if let Some(path) = region_path
        && let Err(error) = share.attach_region(path, false)
    {
        share.report_unusable(path.as_c_str(), error);
    }
    process.publish_share();
    Attached::Share
}

/// Aligned as `getdents64` wants its buffer.
#[repr(align(8))]
pub(crate) struct EntryBuffer(pub(crate) [u8; 2048]);

impl EntryBuffer {
    pub(crate) fn new() -> Self {
        Self([0; 2048])
    }
}

/// Where the length and the name are in a `struct linux_dirent64`.
const RECORD_LENGTH_OFFSET: usize = 16;
const NAME_OFFSET: usize = 19;

/// The names in a buffer of directory entries, hidden ones left out.
pub(crate) fn names(mut entries: &[u8]) -> impl Iterator<Item = &str> {
    core::iter::from_fn(move || {
        loop {
            let length = *entries.get(RECORD_LENGTH_OFFSET..)?.first_chunk::<2>()?;
            let length = usize::from(u16::from_ne_bytes(length));
            let entry = entries.get(..length).filter(|entry| !entry.is_empty())?;
            entries = entries.get(length..)?;
            let name = CStr::from_bytes_until_nul(entry.get(NAME_OFFSET..)?).ok()?;
            match name.to_str() {
                Ok(name) if !name.starts_with('.') => return Some(name),
                _ => {}
            }
        }
    })
}
