//! The node's network: a loopback device with the node's address and the address of the service `kubernetes`.
//!
//! Pods reach both through the bridge of the CNI plugin. No kube-proxy is needed, because the API server listens on
//! the service's port. Uses rtnetlink(7), so that no `ip` program is needed.

use std::net::Ipv4Addr;

use anyhow::{Context as _, Result, bail};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, recv, sendto, socket};

use crate::config::{NODE_IP, SERVICE_IP};

/// Index of `lo`, the first device of every network namespace.
const LOOPBACK: u32 = 1;

// linux/rtnetlink.h, linux/netlink.h, linux/if.h, linux/if_addr.h
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
const IFF_UP: u32 = 0x1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const AF_INET: u8 = 2;

/// Enables the loopback device and adds the node's addresses.
pub(super) fn configure() -> Result<()> {
    send_request(&link_up(LOOPBACK)).context("enable the loopback device")?;
    for address in [NODE_IP, SERVICE_IP] {
        let parsed: Ipv4Addr = address
            .parse()
            .with_context(|| format!("read the address {address}"))?;
        send_request(&add_address(LOOPBACK, parsed))
            .with_context(|| format!("give the node the address {address}"))?;
    }
    Ok(())
}

/// `RTM_NEWLINK` with `struct ifinfomsg`: set the flag `IFF_UP`.
fn link_up(index: u32) -> Vec<u8> {
    let mut body = vec![0; 4]; // family, padding, type
    body.extend(index.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes()); // flags
    body.extend(IFF_UP.to_ne_bytes()); // which flags to change
    message(RTM_NEWLINK, 0, &body)
}

/// `RTM_NEWADDR` with `struct ifaddrmsg`: the address of a single host.
fn add_address(index: u32, address: Ipv4Addr) -> Vec<u8> {
    let mut body = vec![AF_INET, 32, 0, 0]; // family, prefix length, flags, scope
    body.extend(index.to_ne_bytes());
    for kind in [IFA_LOCAL, IFA_ADDRESS] {
        body.extend(8_u16.to_ne_bytes()); // length of the attribute with its header
        body.extend(kind.to_ne_bytes());
        body.extend(address.octets());
    }
    message(RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, &body)
}

/// Puts `struct nlmsghdr` before `body`.
fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(16 + body.len()).unwrap_or(u32::MAX);
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend((flags | NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
    message.extend([0; 8]); // sequence number, port
    message.extend(body);
    message
}

fn send_request(request: &[u8]) -> Result<()> {
    let socket =
        socket(AddressFamily::NETLINK, SocketType::RAW, None).context("open a netlink socket")?;
    sendto(
        &socket,
        request,
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )
    .context("send a netlink message")?;
    let mut answer = [0; 4096];
    let (length, _) =
        recv(&socket, &mut answer[..], RecvFlags::empty()).context("receive a netlink message")?;
    acknowledged(answer.get(..length).unwrap_or_default())
}

/// Parses an `NLMSG_ERROR` message, whose error number is 0 for success.
fn acknowledged(answer: &[u8]) -> Result<()> {
    let (Some(kind), Some(error)) = (answer.get(4..6), answer.get(16..20)) else {
        bail!("the kernel's answer is truncated")
    };
    if kind != NLMSG_ERROR.to_ne_bytes() {
        bail!("unexpected message type of the kernel: {kind:?}");
    }
    match i32::from_ne_bytes(error.try_into()?) {
        0 => Ok(()),
        error => Err(Errno::from_raw_os_error(-error).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodes_messages_in_kernel_layout() {
        let up = link_up(1);
        assert_eq!(up.len(), 32);
        assert_eq!(up[..8], [32, 0, 0, 0, 16, 0, 5, 0]);
        assert_eq!(up[20..32], [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]);
        let address = add_address(1, Ipv4Addr::new(10, 95, 0, 1));
        assert_eq!(address.len(), 40);
        assert_eq!(address[24..32], [8, 0, 2, 0, 10, 95, 0, 1]);
    }

    #[test]
    fn returns_error_number_of_rejected_request() {
        let mut answer = message(NLMSG_ERROR, 0, &(-1_i32).to_ne_bytes());
        assert_eq!(
            acknowledged(&answer).unwrap_err().downcast_ref(),
            Some(&Errno::PERM)
        );
        answer[16..20].copy_from_slice(&0_i32.to_ne_bytes());
        acknowledged(&answer).unwrap();
        assert!(acknowledged(&answer[..10]).is_err());
    }
}
