//! Attaches a share to its limits and its usage region, before any other thread can see it.

use core::ffi::CStr;
use core::sync::atomic::Ordering;

use drava_vgpu_abi::{DeviceUuid, Limits, LimitsPage, REGION_SIZE, paths};

use super::mapping::{acquire_slot, check, map_page, view};
use super::{REGION_FLAGS, Share};
use crate::system::log;
use crate::system::path::PathBuffer;
use crate::system::sys::{self, Fd};

/// Reason why a share's files are unusable.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AttachError {
    Open,
    Owner,
    Size,
    Map,
    Content,
    Full,
    Removed,
}

impl AttachError {
    pub(crate) fn cause(self) -> &'static str {
        match self {
            Self::Open => "cannot open the file",
            Self::Owner => "file belongs to another user",
            Self::Size => "cannot allocate the file",
            Self::Map => "cannot map the file",
            Self::Content => "not a usage region of this version",
            Self::Full => "no free slot",
            Self::Removed => "removed repeatedly by other processes",
        }
    }
}

impl Share {
    /// Reads the limits from the page that is open as `fd`. The share is not published yet.
    pub(crate) fn attach_page(&self, fd: Fd) -> Option<LimitsPage> {
        let (mapping, page) = map_page(fd)?;
        self.set_identity(page.spec.device_uuid);
        self.set_limits(&page.spec.limits);
        self.seen_generation
            .store(page.generation, Ordering::Relaxed);
        self.page.store(mapping.as_ptr(), Ordering::Release);
        Some(page)
    }

    /// Sets limits from the environment. The share is not published yet.
    pub(crate) fn attach_limits(&self, uuid: DeviceUuid, limits: &Limits) {
        self.set_identity(uuid);
        self.set_limits(limits);
    }

    fn set_identity(&self, uuid: DeviceUuid) {
        // SAFETY: the share is not published yet, so only this thread accesses it.
        unsafe { self.uuid.get().write(uuid) };
    }

    /// Maps the region at `path` and takes a slot. The share is not published yet.
    pub(crate) fn attach_region(
        &self,
        path: PathBuffer,
        must_be_own: bool,
    ) -> Result<(), AttachError> {
        let mode = if must_be_own {
            0o600
        } else {
            paths::REGION_FILE_MODE
        };
        // Created only if it is missing: with `fs.protected_regular` the kernel rejects O_CREAT for another user's
        // file in a world-writable directory.
        let fd = sys::open(None, path.as_c_str(), REGION_FLAGS, 0)
            .or_else(|| sys::open(None, path.as_c_str(), REGION_FLAGS | libc::O_CREAT, mode))
            .and_then(sys::above_standard_streams)
            .ok_or(AttachError::Open)?;
        // SAFETY: the share is not published yet, so only this thread accesses it.
        unsafe { self.region_path.get().write(path) };
        let attached = self.attach_region_file(fd, must_be_own);
        if attached.is_err() {
            sys::close(fd);
        }
        attached
    }

    fn attach_region_file(&self, fd: Fd, must_be_own: bool) -> Result<(), AttachError> {
        let status = sys::status(fd).ok_or(AttachError::Open)?;
        let is_own = status.owner == sys::user_id();
        if must_be_own && !is_own {
            return Err(AttachError::Owner);
        }
        if is_own && !must_be_own {
            sys::set_mode(fd, paths::REGION_FILE_MODE);
        }
        // A sandbox may forbid `fallocate`; the node driver has allocated the file already.
        if !sys::allocate(fd, REGION_SIZE) && status.size < REGION_SIZE as u64 {
            return Err(AttachError::Size);
        }
        let mapping = sys::map_file(fd, REGION_SIZE, true).ok_or(AttachError::Map)?;
        let region = view(mapping);
        let slot = check(&region)
            .and_then(|()| acquire_slot(&region, fd))
            .and_then(|taken| match sys::status(fd) {
                Some(status) if status.links == 0 => Err(AttachError::Removed),
                _ => Ok(taken),
            });
        let (slot, generation) = match slot {
            Ok(taken) => taken,
            Err(error) => {
                sys::unmap(mapping, REGION_SIZE);
                return Err(error);
            }
        };
        let number = u32::try_from(slot.get()).map_err(|_| AttachError::Full)?;
        self.slot.store(number, Ordering::Relaxed);
        self.generation.store(generation, Ordering::Relaxed);
        self.region_device.store(status.device, Ordering::Relaxed);
        self.region_inode.store(status.inode, Ordering::Relaxed);
        self.region_fd.store(!fd.0, Ordering::Relaxed);
        self.region.store(mapping.as_ptr(), Ordering::Release);
        self.reclaim();
        Ok(())
    }

    /// Logs that the region is unusable, and the consequence.
    pub(crate) fn report_unusable(&self, path: &CStr, error: AttachError) {
        let action = if self.fails_open() {
            "not counting GPU memory"
        } else {
            "denying GPU memory"
        };
        let path = path.to_str().unwrap_or("?");
        log::line(format_args!(
            "usage region {path}: {}; {action}",
            error.cause()
        ));
    }
}
