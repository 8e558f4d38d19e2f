//! Messages with file descriptors over a `SOCK_SEQPACKET` socket.
//!
//! One message is one packet, so no side sees half a message. The receiver bounds the size; a
//! malformed message is an error, never a panic.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest message.
pub const MAX_MESSAGE_BYTES: usize = 128 << 10;
/// Most file descriptors of one message: the memory of 64 GPUs, and two.
const MAX_FDS: usize = 66;

/// Error of sending or receiving a message.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The socket failed.
    #[error("socket: {0}")]
    Socket(#[from] Errno),
    /// The other side closed the connection.
    #[error("the connection is closed")]
    Closed,
    /// The packet is not a message.
    #[error("malformed message")]
    Malformed,
}

/// Sends one message.
///
/// # Errors
/// When the message is too long or the socket fails.
pub fn send(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    fds: &[BorrowedFd<'_>],
) -> Result<(), WireError> {
    let bytes = postcard::to_stdvec(message).map_err(|_| WireError::Malformed)?;
    if bytes.len() > MAX_MESSAGE_BYTES || fds.len() > MAX_FDS {
        return Err(WireError::Malformed);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(WireError::Malformed);
    }
    loop {
        let iov = [IoSlice::new(&bytes)];
        match sendmsg(socket, &iov, &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(WireError::Closed),
            Err(errno) => return Err(errno.into()),
            Ok(_) => return Ok(()),
        }
    }
}

/// Receives one message; blocks unless the socket is non-blocking.
///
/// # Errors
/// If the other side is gone, the socket fails, or the packet is malformed.
pub fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
) -> Result<(T, Vec<OwnedFd>), WireError> {
    buffer.resize(MAX_MESSAGE_BYTES, 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut iov = [IoSliceMut::new(buffer)];
        match recvmsg(socket, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Err(WireError::Closed),
            Err(errno) => return Err(errno.into()),
            Ok(received) => break received,
        }
    };
    let fds = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if received.bytes == 0 {
        return Err(WireError::Closed);
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(WireError::Malformed);
    }
    let packet = buffer.get(..received.bytes).ok_or(WireError::Malformed)?;
    let message = postcard::from_bytes(packet).map_err(|_| WireError::Malformed)?;
    Ok((message, fds))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::protocol::{GpuIndex, Request};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap()
    }

    #[test]
    fn delivers_messages_with_descriptors() {
        let (left, right) = pair();
        let message = Request::GpuState { gpu: GpuIndex(3) };
        send(left.as_fd(), &message, &[left.as_fd(), right.as_fd()]).unwrap();
        let (received, fds) = receive::<Request>(right.as_fd(), &mut Vec::new()).unwrap();
        assert_eq!(received, message);
        assert_eq!(fds.len(), 2);
    }

    #[test]
    fn distinguishes_noise_from_a_closed_peer() {
        let (left, right) = pair();
        rustix::io::write(&left, &[0xff; 40]).unwrap();
        let noise = receive::<Request>(right.as_fd(), &mut Vec::new());
        assert!(matches!(noise, Err(WireError::Malformed)));
        drop(left);
        let closed = receive::<Request>(right.as_fd(), &mut Vec::new());
        assert!(matches!(closed, Err(WireError::Closed)));
    }
}
