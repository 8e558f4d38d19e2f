//! Files and descriptors of the daemon: lock, sockets, GPU memory.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::event::epoll;
use rustix::fs::{FlockOperation, MemfdFlags, flock, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};

use super::{ServeError, system};
use crate::root::DriverRoot;

/// Size of a GPU's memory file: sparse, larger than any run can use.
const MEMORY_FILE_BYTES: u64 = 1 << 60;

pub(super) fn watch(epoll: &OwnedFd, fd: &impl AsFd, token: u64) -> Result<(), ServeError> {
    epoll::add(
        epoll,
        fd,
        epoll::EventData::new_u64(token),
        epoll::EventFlags::IN,
    )
    .map_err(system("watch a descriptor"))
}

pub(super) fn memory_file() -> Result<OwnedFd, ServeError> {
    let file = memfd_create("simulated-gpu-memory", MemfdFlags::CLOEXEC)
        .map_err(system("create the memory file of a GPU"))?;
    ftruncate(&file, MEMORY_FILE_BYTES).map_err(system("resize the memory file of a GPU"))?;
    Ok(file)
}

/// Locks the root for this process; the kernel releases the lock at exit.
pub(super) fn lock(root: &DriverRoot) -> Result<OwnedFd, ServeError> {
    let path = root.lock_file();
    let file_error = |action, path: &Path, source| ServeError::File {
        action,
        path: path.to_owned(),
        source,
    };
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(|source| file_error("create", parent, source))?;
    }
    let file = fs::File::create(&path).map_err(|source| file_error("create", &path, source))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file.into()),
        Err(Errno::WOULDBLOCK) => Err(ServeError::AlreadyServed {
            root: root.path().to_owned(),
        }),
        Err(errno) => Err(file_error("lock", &path, errno.into())),
    }
}

/// Creates a listening socket. With the lock held, an existing file is a leftover. The socket
/// appears under its name once it accepts connections.
pub(crate) fn listener(path: &Path) -> Result<OwnedFd, ServeError> {
    let error = |action: &'static str| {
        move |source: Errno| ServeError::File {
            action,
            path: path.to_owned(),
            source: source.into(),
        }
    };
    let temporary = path.with_extension("new");
    let _ = fs::remove_file(&temporary);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(error("create socket"))?;
    let address = SocketAddrUnix::new(&temporary).map_err(error("name socket"))?;
    bind(&socket, &address).map_err(error("bind socket"))?;
    listen(&socket, 1024).map_err(error("listen on socket"))?;
    let renamed = open_to_all(&temporary).and_then(|()| fs::rename(&temporary, path));
    renamed.map_err(|source| ServeError::File {
        action: "publish socket",
        path: path.to_owned(),
        source,
    })?;
    Ok(socket)
}

/// Accessible to every user, like the driver's device files.
fn open_to_all(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))
}
