//! rtnetlink(7) messages: devices, addresses and routes of a network namespace, without an `ip` program.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use anyhow::{Context as _, Result, bail};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, recv, sendto, socket};

/// Index of `lo`, the first device of every network namespace.
pub(super) const LOOPBACK: u32 = 1;

// linux/rtnetlink.h, linux/netlink.h, linux/if.h, linux/if_addr.h, linux/if_link.h, linux/veth.h
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
const IFF_UP: u32 = 0x1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PREFSRC: u16 = 7;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_LINK: u8 = 253;
const RTN_UNICAST: u8 = 1;
const AF_INET: u8 = 2;
/// Length of `struct ifinfomsg`.
const LINK_HEADER: usize = 16;

/// A request to the kernel.
pub(super) struct Request {
    kind: u16,
    flags: u16,
    body: Vec<u8>,
}

/// Destination of a route.
#[derive(Clone, Copy)]
pub(super) enum Destination {
    /// A network with its prefix length.
    Network(Ipv4Addr, u8),
    /// All addresses without another route.
    Default,
}

impl Request {
    /// Enables the device `index`: `struct ifinfomsg` with the flag `IFF_UP`.
    pub(super) fn enable(index: u32) -> Self {
        let mut body = vec![0; 4]; // family, padding, type
        body.extend(index.to_ne_bytes());
        body.extend(IFF_UP.to_ne_bytes()); // flags
        body.extend(IFF_UP.to_ne_bytes()); // mask of the changed flags
        Self {
            kind: RTM_NEWLINK,
            flags: 0,
            body,
        }
    }

    /// Adds an address of a single host to the device `index`: `struct ifaddrmsg`.
    pub(super) fn add_address(index: u32, address: Ipv4Addr) -> Self {
        let mut body = vec![AF_INET, 32, 0, 0]; // family, prefix length, flags, scope
        body.extend(index.to_ne_bytes());
        for kind in [IFA_LOCAL, IFA_ADDRESS] {
            attribute(&mut body, kind, &address.octets());
        }
        Self {
            kind: RTM_NEWADDR,
            flags: NLM_F_CREATE | NLM_F_REPLACE,
            body,
        }
    }

    /// Creates the veth device `name`, whose peer is the device `peer` in another network namespace (veth(4)).
    pub(super) fn add_veth(name: &str, peer: &str, namespace: BorrowedFd<'_>) -> Self {
        let mut peer_link = vec![0; LINK_HEADER];
        attribute(&mut peer_link, IFLA_IFNAME, &terminated(peer));
        attribute(
            &mut peer_link,
            IFLA_NET_NS_FD,
            &namespace.as_raw_fd().to_ne_bytes(),
        );
        let mut data = vec![];
        attribute(&mut data, VETH_INFO_PEER, &peer_link);
        let mut info = vec![];
        attribute(&mut info, IFLA_INFO_KIND, b"veth");
        attribute(&mut info, IFLA_INFO_DATA, &data);
        let mut body = vec![0; LINK_HEADER];
        attribute(&mut body, IFLA_IFNAME, &terminated(name));
        attribute(&mut body, IFLA_LINKINFO, &info);
        Self {
            kind: RTM_NEWLINK,
            flags: NLM_F_CREATE,
            body,
        }
    }

    /// Adds a route through the device `index`: `struct rtmsg`. `source` is the address of packets that this host
    /// sends.
    pub(super) fn add_route(
        destination: Destination,
        gateway: Option<Ipv4Addr>,
        index: u32,
        source: Ipv4Addr,
    ) -> Self {
        let prefix_length = match destination {
            Destination::Network(_, length) => length,
            Destination::Default => 0,
        };
        let scope = match gateway {
            Some(_) => RT_SCOPE_UNIVERSE,
            None => RT_SCOPE_LINK,
        };
        let mut body = vec![AF_INET, prefix_length, 0, 0]; // … prefix length of the source, type of service
        body.extend([RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST]);
        body.extend([0; 4]); // flags
        if let Destination::Network(network, _) = destination {
            attribute(&mut body, RTA_DST, &network.octets());
        }
        if let Some(gateway) = gateway {
            attribute(&mut body, RTA_GATEWAY, &gateway.octets());
        }
        attribute(&mut body, RTA_OIF, &index.to_ne_bytes());
        attribute(&mut body, RTA_PREFSRC, &source.octets());
        Self {
            kind: RTM_NEWROUTE,
            flags: NLM_F_CREATE | NLM_F_REPLACE,
            body,
        }
    }

    /// Sends the request to this thread's network namespace.
    pub(super) fn send(&self) -> Result<()> {
        let socket = socket(AddressFamily::NETLINK, SocketType::RAW, None)
            .context("open a netlink socket")?;
        sendto(
            &socket,
            &self.encode(),
            SendFlags::empty(),
            &SocketAddrNetlink::new(0, 0),
        )
        .context("send a netlink message")?;
        let mut answer = [0; 4096];
        let (length, _) = recv(&socket, &mut answer[..], RecvFlags::empty())
            .context("receive a netlink message")?;
        acknowledged(answer.get(..length).unwrap_or_default())
    }

    /// Puts `struct nlmsghdr` before the body.
    fn encode(&self) -> Vec<u8> {
        let length = u32::try_from(16 + self.body.len()).unwrap_or(u32::MAX);
        let mut message = length.to_ne_bytes().to_vec();
        message.extend(self.kind.to_ne_bytes());
        message.extend((self.flags | NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
        message.extend([0; 8]); // sequence number, port
        message.extend(&self.body);
        message
    }
}

/// Appends `struct rtattr` with its value, padded to four bytes.
fn attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    body.extend(length.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

fn terminated(name: &str) -> Vec<u8> {
    name.bytes().chain([0]).collect()
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
        let up = Request::enable(1).encode();
        assert_eq!(up.len(), 32);
        assert_eq!(up[..8], [32, 0, 0, 0, 16, 0, 5, 0]);
        assert_eq!(up[20..32], [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]);
        let address = Request::add_address(1, Ipv4Addr::new(10, 95, 0, 1)).encode();
        assert_eq!(address.len(), 40);
        assert_eq!(address[24..32], [8, 0, 2, 0, 10, 95, 0, 1]);
    }

    #[test]
    fn pads_attributes_to_four_bytes() {
        let mut body = vec![];
        attribute(&mut body, IFLA_IFNAME, &terminated("eth0"));
        assert_eq!(body, [9, 0, 3, 0, b'e', b't', b'h', b'0', 0, 0, 0, 0]);
    }

    #[test]
    fn routes_without_gateway_are_link_local() {
        let own = Ipv4Addr::new(10, 95, 0, 2);
        let router = Ipv4Addr::new(10, 95, 0, 1);
        let link = Request::add_route(Destination::Network(router, 32), None, 2, own).encode();
        assert_eq!(link[16..28], [2, 32, 0, 0, 254, 4, 253, 1, 0, 0, 0, 0]);
        assert_eq!(link[28..36], [8, 0, 1, 0, 10, 95, 0, 1]);
        let default = Request::add_route(Destination::Default, Some(router), 2, own).encode();
        assert_eq!(default[16..28], [2, 0, 0, 0, 254, 4, 0, 1, 0, 0, 0, 0]);
        assert_eq!(default[28..36], [8, 0, 5, 0, 10, 95, 0, 1]);
    }

    #[test]
    fn returns_error_number_of_rejected_request() {
        let refused = Request {
            kind: NLMSG_ERROR,
            flags: 0,
            body: (-1_i32).to_ne_bytes().to_vec(),
        };
        let mut answer = refused.encode();
        assert_eq!(
            acknowledged(&answer).unwrap_err().downcast_ref(),
            Some(&Errno::PERM)
        );
        answer[16..20].copy_from_slice(&0_i32.to_ne_bytes());
        acknowledged(&answer).unwrap();
        assert!(acknowledged(&answer[..10]).is_err());
    }
}
