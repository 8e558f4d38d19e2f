//! System calls, by number.
//!
//! Not through libc's wrappers: some of them (`fstat`, `fcntl`) got new symbol versions after glibc 2.17, and the
//! program may interpose any of them. Failures return `None` and leave the program's `errno` unchanged; no function
//! touches memory that it was not given.

use core::ffi::{CStr, c_int, c_long, c_void};
use core::mem::{MaybeUninit, size_of};
use core::ptr::{self, NonNull};

/// A file descriptor that stays open until the process ends.
///
/// There is no `Drop`: the descriptor of a usage region carries the lock that marks the process as alive.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fd(pub(crate) c_int);

/// Result of `fstat`.
#[derive(Clone, Copy)]
pub(crate) struct FileStatus {
    pub(crate) size: u64,
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) owner: u32,
    pub(crate) links: u64,
}

/// Returns the result if it is not an error.
fn positive(result: c_long) -> Option<usize> {
    usize::try_from(result).ok()
}

/// `openat`, always with `O_CLOEXEC`. `directory` is `None` for absolute paths.
pub(crate) fn open(directory: Option<Fd>, path: &CStr, flags: c_int, mode: u32) -> Option<Fd> {
    try_open(directory, path, flags, mode).ok()
}

/// As [`open`], with the error number.
fn try_open(directory: Option<Fd>, path: &CStr, flags: c_int, mode: u32) -> Result<Fd, c_int> {
    let _errno = SavedErrno::new();
    let directory = directory.map_or(libc::AT_FDCWD, |fd| fd.0);
    // SAFETY: openat reads a NUL-terminated path.
    let result = unsafe {
        libc::syscall(
            libc::SYS_openat,
            directory,
            path.as_ptr(),
            flags | libc::O_CLOEXEC,
            mode,
        )
    };
    let fd = c_int::try_from(result).ok().filter(|&fd| fd >= 0);
    fd.map(Fd).ok_or_else(errno)
}

/// Opens a directory; `Ok(None)` if it is missing, `Err` if it exists, or may exist, and cannot be opened.
pub(crate) fn open_directory(directory: Option<Fd>, path: &CStr) -> Result<Option<Fd>, OpenFailed> {
    match try_open(directory, path, libc::O_RDONLY | libc::O_DIRECTORY, 0) {
        Ok(fd) => Ok(Some(fd)),
        Err(libc::ENOENT | libc::ENOTDIR) => Ok(None),
        Err(_) => Err(OpenFailed),
    }
}

/// Error: the directory exists, or may exist, and cannot be opened.
pub(crate) struct OpenFailed;

/// Moves the descriptor above the numbers of the standard streams, which the program may have closed.
pub(crate) fn above_standard_streams(fd: Fd) -> Option<Fd> {
    let _errno = SavedErrno::new();
    const LOWEST: c_int = libc::STDERR_FILENO + 1;
    if fd.0 >= LOWEST {
        return Some(fd);
    }
    // SAFETY: fcntl takes numbers.
    let result = unsafe { libc::syscall(libc::SYS_fcntl, fd.0, libc::F_DUPFD_CLOEXEC, LOWEST) };
    close(fd);
    c_int::try_from(result).ok().filter(|&fd| fd >= 0).map(Fd)
}

pub(crate) fn close(fd: Fd) {
    let _errno = SavedErrno::new();
    // SAFETY: close takes a number; every caller owns the descriptor.
    unsafe { libc::syscall(libc::SYS_close, fd.0) };
}

pub(crate) fn unlink(path: &CStr) {
    let _errno = SavedErrno::new();
    // SAFETY: unlinkat reads a NUL-terminated path.
    unsafe { libc::syscall(libc::SYS_unlinkat, libc::AT_FDCWD, path.as_ptr(), 0) };
}

/// Sets the timestamps of a file to the present, if possible; inotify reports that.
pub(crate) fn touch(path: &CStr) {
    let _errno = SavedErrno::new();
    let now = ptr::null::<libc::timespec>();
    // SAFETY: utimensat reads a NUL-terminated path; without times it uses the current time.
    unsafe { libc::syscall(libc::SYS_utimensat, libc::AT_FDCWD, path.as_ptr(), now, 0) };
}

/// Calls `read` once and returns the number of bytes.
pub(crate) fn read(fd: Fd, buffer: &mut [u8]) -> Option<usize> {
    let _errno = SavedErrno::new();
    // SAFETY: the kernel writes at most `buffer.len()` bytes to the buffer.
    positive(unsafe { libc::syscall(libc::SYS_read, fd.0, buffer.as_mut_ptr(), buffer.len()) })
}

/// Calls `getdents64` once and returns the number of bytes, 0 at the end, `None` on failure.
pub(crate) fn directory_entries(fd: Fd, buffer: &mut [u8]) -> Option<usize> {
    let _errno = SavedErrno::new();
    // SAFETY: the kernel writes at most `buffer.len()` bytes to the buffer.
    positive(unsafe {
        libc::syscall(
            libc::SYS_getdents64,
            fd.0,
            buffer.as_mut_ptr(),
            buffer.len(),
        )
    })
}

/// Writes to standard error, if possible.
pub(crate) fn write_stderr(text: &[u8]) {
    let _errno = SavedErrno::new();
    // SAFETY: the kernel reads `text.len()` bytes of the text.
    unsafe {
        libc::syscall(
            libc::SYS_write,
            libc::STDERR_FILENO,
            text.as_ptr(),
            text.len(),
        )
    };
}

pub(crate) fn status(fd: Fd) -> Option<FileStatus> {
    let _errno = SavedErrno::new();
    let mut status = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: fstat writes one `struct stat`.
    let result = unsafe { libc::syscall(libc::SYS_fstat, fd.0, status.as_mut_ptr()) };
    positive(result)?;
    // SAFETY: zeroed, and filled by the kernel.
    let status = unsafe { status.assume_init() };
    #[allow(
        clippy::useless_conversion,
        reason = "the link count has 32 bits on aarch64"
    )]
    Some(FileStatus {
        size: u64::try_from(status.st_size).ok()?,
        device: status.st_dev,
        inode: status.st_ino,
        owner: status.st_uid,
        links: status.st_nlink.into(),
    })
}

/// Extends the file to at least `size` bytes and allocates them: writing to its mapping cannot fail later.
pub(crate) fn allocate(fd: Fd, size: usize) -> bool {
    let _errno = SavedErrno::new();
    // SAFETY: fallocate takes numbers.
    positive(unsafe { libc::syscall(libc::SYS_fallocate, fd.0, 0, 0usize, size) }).is_some()
}

/// Sets the mode of the file, whatever the umask was when it was created.
pub(crate) fn set_mode(fd: Fd, mode: u32) {
    let _errno = SavedErrno::new();
    // SAFETY: fchmod takes numbers.
    unsafe { libc::syscall(libc::SYS_fchmod, fd.0, mode) };
}

/// Maps `size` bytes of a file, shared.
pub(crate) fn map_file(fd: Fd, size: usize, writable: bool) -> Option<NonNull<c_void>> {
    let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
    map(size, protection, libc::MAP_SHARED, fd.0)
}

/// Maps `size` zero bytes.
pub(crate) fn map_zeroes(size: usize) -> Option<NonNull<c_void>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    map(size, protection, flags, -1)
}

fn map(size: usize, protection: c_int, flags: c_int, fd: c_int) -> Option<NonNull<c_void>> {
    let _errno = SavedErrno::new();
    // SAFETY: a mapping at an address of the kernel's choice overlaps nothing.
    let address = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            ptr::null_mut::<c_void>(),
            size,
            protection,
            flags,
            fd,
            0usize,
        )
    };
    let address = usize::try_from(address).ok()?;
    NonNull::new(ptr::with_exposed_provenance_mut(address))
}

pub(crate) fn unmap(address: NonNull<c_void>, size: usize) {
    let _errno = SavedErrno::new();
    // SAFETY: callers pass a mapping of `map` and hold no reference into it.
    unsafe { libc::syscall(libc::SYS_munmap, address.as_ptr(), size) };
}

/// Makes the kernel fill the mapping with zeroes in forked children.
pub(crate) fn wipe_on_fork(address: NonNull<c_void>, size: usize) -> bool {
    let _errno = SavedErrno::new();
    // SAFETY: the advice only affects forked children.
    let result = unsafe {
        libc::syscall(
            libc::SYS_madvise,
            address.as_ptr(),
            size,
            libc::MADV_WIPEONFORK,
        )
    };
    positive(result).is_some()
}

/// Takes an exclusive open-file-description lock on `length` bytes, if no other process has it.
pub(crate) fn lock(fd: Fd, offset: usize, length: usize) -> bool {
    set_lock(fd, libc::F_WRLCK, offset, length)
}

/// Releases a lock.
pub(crate) fn unlock(fd: Fd, offset: usize, length: usize) {
    set_lock(fd, libc::F_UNLCK, offset, length);
}

fn set_lock(fd: Fd, kind: c_int, offset: usize, length: usize) -> bool {
    let _errno = SavedErrno::new();
    let Some(range) = lock_range(kind, offset, length) else {
        return false;
    };
    // SAFETY: fcntl reads one `struct flock`.
    let result =
        unsafe { libc::syscall(libc::SYS_fcntl, fd.0, libc::F_OFD_SETLK, &raw const range) };
    positive(result).is_some()
}

/// Returns whether another process has a lock on any of the bytes.
pub(crate) fn is_locked(fd: Fd, offset: usize, length: usize) -> bool {
    let _errno = SavedErrno::new();
    let Some(mut range) = lock_range(libc::F_WRLCK, offset, length) else {
        return true;
    };
    // SAFETY: fcntl reads and writes one `struct flock`.
    let result = unsafe { libc::syscall(libc::SYS_fcntl, fd.0, libc::F_OFD_GETLK, &raw mut range) };
    positive(result).is_none() || c_int::from(range.l_type) != libc::F_UNLCK
}

fn lock_range(kind: c_int, offset: usize, length: usize) -> Option<libc::flock> {
    let mut range = MaybeUninit::<libc::flock>::zeroed();
    // SAFETY: all zeroes is a valid `struct flock`.
    let range = unsafe { range.assume_init_mut() };
    range.l_type = libc::c_short::try_from(kind).ok()?;
    range.l_whence = libc::c_short::try_from(libc::SEEK_SET).ok()?;
    range.l_start = libc::off_t::try_from(offset).ok()?;
    range.l_len = libc::off_t::try_from(length).ok()?;
    Some(*range)
}

/// Returns nanoseconds of `CLOCK_MONOTONIC`, read without a system call; 0 if the clock is missing.
pub(crate) fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one `struct timespec`.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    if result != 0 {
        return 0;
    }
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns microseconds of `CLOCK_MONOTONIC`.
pub(crate) fn now_us() -> u64 {
    now_ns() / 1_000
}

/// Returns microseconds since the epoch, the timestamps of NVML's samples; 0 if the clock is missing.
pub(crate) fn epoch_us() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one `struct timespec`.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut time) };
    if result != 0 {
        return 0;
    }
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000)
        .saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0) / 1000)
}

/// Returns whether the process exists in this PID namespace.
pub(crate) fn process_exists(pid: u32) -> bool {
    let _errno = SavedErrno::new();
    // SAFETY: takes numbers; signal 0 is not sent.
    if unsafe { libc::syscall(libc::SYS_kill, pid, 0) } == 0 {
        return true;
    }
    errno() == libc::EPERM
}

/// Returns the error number of this thread's last failed system call.
fn errno() -> c_int {
    // SAFETY: always valid for this thread.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { errno.read() }
}

/// Sleeps; a signal ends the sleep early.
pub(crate) fn sleep_us(us: u64) {
    let _errno = SavedErrno::new();
    let length = libc::timespec {
        tv_sec: libc::time_t::try_from(us / 1_000_000).unwrap_or(0),
        tv_nsec: c_long::try_from((us % 1_000_000).saturating_mul(1000)).unwrap_or(0),
    };
    let rest = ptr::null_mut::<libc::timespec>();
    // SAFETY: nanosleep reads one `struct timespec`; the remainder may be null.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const length, rest) };
}

/// Lets another thread run.
pub(crate) fn yield_now() {
    let _errno = SavedErrno::new();
    // SAFETY: no arguments.
    unsafe { libc::syscall(libc::SYS_sched_yield) };
}

pub(crate) fn process_id() -> u32 {
    // SAFETY: no arguments.
    u32::try_from(unsafe { libc::syscall(libc::SYS_getpid) }).unwrap_or(0)
}

pub(crate) fn thread_id() -> u32 {
    // SAFETY: no arguments.
    u32::try_from(unsafe { libc::syscall(libc::SYS_gettid) }).unwrap_or(0)
}

pub(crate) fn process_group() -> u32 {
    let _errno = SavedErrno::new();
    // SAFETY: takes a number.
    u32::try_from(unsafe { libc::syscall(libc::SYS_getpgid, 0) }).unwrap_or(0)
}

pub(crate) fn user_id() -> u32 {
    // SAFETY: no arguments.
    u32::try_from(unsafe { libc::syscall(libc::SYS_geteuid) }).unwrap_or(0)
}

/// Restores `errno` when dropped, so that a hook leaves the `errno` of the original function.
pub(crate) struct SavedErrno(c_int);

impl SavedErrno {
    pub(crate) fn new() -> Self {
        Self(errno())
    }
}

impl Drop for SavedErrno {
    fn drop(&mut self) {
        // SAFETY: always valid for this thread.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: as above.
        unsafe { errno.write(self.0) };
    }
}

const _: () = assert!(size_of::<c_long>() == size_of::<usize>());
