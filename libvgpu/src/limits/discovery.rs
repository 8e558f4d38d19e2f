//! Finds the shares of this container: one directory each under `/run/drava`.
//!
//! A share with an unreadable page is not skipped: it may limit any GPU, so every GPU without a readable share is
//! denied. So is every GPU if the node driver delivered this library, and the program cannot see any share: a sandbox
//! or a mount hides the directory, or a program removed its content.

use core::ffi::CStr;

use drava_vgpu_abi::paths;

use crate::driver_api::driver;
use crate::limits::shares::{LimitsSource, Shares};
use crate::system::log;
use crate::system::path::{EntryBuffer, PathBuffer, names};
use crate::system::sys::{self, Fd};

/// Attaches all shares of the container, from the standard directory or else from `other`. Returns `None` if there
/// are none; then the environment applies.
pub(crate) fn find_shares(
    shares: &Shares,
    other: impl FnOnce() -> Option<&'static CStr>,
) -> Option<LimitsSource> {
    let standard = PathBuffer::new(format_args!("{}", paths::RUN_DIR))?;
    let found = find_shares_in(shares, standard.as_c_str());
    if found.is_none() && driver::is_delivered() {
        log::line(format_args!(
            "the limits of the share are hidden from this process: {} has none, because of a mount on /run, a sandbox \
             or a removed directory; denying GPU memory",
            paths::RUN_DIR
        ));
        return Some(LimitsSource::UnreadablePages);
    }
    found.or_else(|| find_shares_in(shares, other()?))
}

fn find_shares_in(shares: &Shares, run_directory: &CStr) -> Option<LimitsSource> {
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
            match attach(shares, directory, run_directory, name) {
                Attached::Share if source.is_none() => source = Some(LimitsSource::Pages),
                Attached::Share | Attached::NoShare => {}
                Attached::Broken => source = Some(LimitsSource::UnreadablePages),
            }
        }
    }
    sys::close(directory);
    source
}

/// An unreadable directory does not mean "no shares".
fn unreadable(run_directory: &CStr) -> LimitsSource {
    log::line(format_args!(
        "cannot read {}; denying GPU memory",
        run_directory.to_str().unwrap_or("?")
    ));
    LimitsSource::UnreadablePages
}

enum Attached {
    Share,
    NoShare,
    Broken,
}

fn attach(shares: &Shares, directory: Fd, run_directory: &CStr, name: &str) -> Attached {
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
        Err(sys::OpenFailed) => {
            log::line(format_args!(
                "share {run_directory}/{name}: cannot open its directory; denying GPU memory"
            ));
            return Attached::Broken;
        }
    }
    let page = sys::open(Some(directory), page_path.as_c_str(), libc::O_RDONLY, 0);
    let share = shares.next();
    let (Some(page), Some(share)) = (page, share) else {
        log::line(format_args!(
            "limits page of share {run_directory}/{name}: cannot open the file; denying GPU memory"
        ));
        return Attached::Broken;
    };
    let attached = share.attach_page(page);
    sys::close(page);
    if attached.is_none() {
        log::line(format_args!(
            "limits page of share {run_directory}/{name}: cannot read the content; denying GPU memory"
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
    shares.publish();
    Attached::Share
}
