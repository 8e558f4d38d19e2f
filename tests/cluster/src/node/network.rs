//! The networks of the nodes.
//!
//! The node with the control plane carries its own address and that of the service `kubernetes` on its loopback device,
//! and routes between the other nodes. Each of these has one device, `eth0`, whose peer in the first node has the node's
//! name. Pods reach all addresses through the bridge of the CNI plugin on their node. No kube-proxy is needed, because the
//! API server listens on the service's port.

use std::fs::{self, File};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::thread;

use anyhow::{Context as _, Result, anyhow};
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketType, socket};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::netlink::{Destination, LOOPBACK, Request};
use crate::config::{NodeIndex, POD_PREFIX_LENGTH, SERVICE_IP};

/// Device of a node without the control plane.
const UPLINK: &str = "eth0";

/// Sets up the network of the node with the control plane.
pub(super) fn carry_service(node: NodeIndex) -> Result<()> {
    enable_loopback()?;
    for address in [node.address(), SERVICE_IP] {
        Request::add_address(LOOPBACK, address)
            .send()
            .with_context(|| format!("give the node the address {address}"))?;
    }
    enable_forwarding()
}

/// Sets up the network of another node, with `router` in the network namespace `namespace` as its router.
pub(super) fn attach(node: NodeIndex, router: NodeIndex, namespace: &OwnedFd) -> Result<()> {
    enable_loopback()?;
    let own = File::open("/proc/thread-self/ns/net").context("open the network namespace")?;
    // A namespace belongs to a thread, and this one ends in the router's.
    thread::scope(|scope| {
        scope
            .spawn(|| connect_router(node, router, namespace.as_fd(), own.as_fd()))
            .join()
            .map_err(|_| anyhow!("the thread in the router's network namespace panicked"))?
    })
    .with_context(|| format!("connect the node to {}", router.name()))?;
    let device = device(UPLINK)?;
    Request::add_address(device, node.address()).send()?;
    Request::enable(device).send()?;
    let source = node.address();
    let neighbor = Destination::Network(router.address(), 32);
    Request::add_route(neighbor, None, device, source)
        .send()
        .context("add the route to the router")?;
    Request::add_route(Destination::Default, Some(router.address()), device, source)
        .send()
        .context("add the default route")?;
    enable_forwarding()
}

/// Moves this thread to the router's network namespace, and creates the pair of devices and the routes to the node.
fn connect_router(
    node: NodeIndex,
    router: NodeIndex,
    namespace: BorrowedFd<'_>,
    nodes_namespace: BorrowedFd<'_>,
) -> Result<()> {
    move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))
        .context("enter the router's network namespace")?;
    Request::add_veth(&node.name(), UPLINK, nodes_namespace)
        .send()
        .context("create the pair of devices")?;
    let device = device(&node.name())?;
    Request::enable(device).send()?;
    let source = router.address();
    let neighbor = Destination::Network(node.address(), 32);
    Request::add_route(neighbor, None, device, source)
        .send()
        .context("add the route to the node")?;
    let pods = Destination::Network(node.pod_network(), POD_PREFIX_LENGTH);
    Request::add_route(pods, Some(node.address()), device, source)
        .send()
        .context("add the route to the node's pods")
}

fn enable_loopback() -> Result<()> {
    Request::enable(LOOPBACK)
        .send()
        .context("enable the loopback device")
}

/// Lets the node forward packets between its pods and other nodes.
fn enable_forwarding() -> Result<()> {
    fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("enable IP forwarding")
}

/// Returns the index of a device of this thread's network namespace.
fn device(name: &str) -> Result<u32> {
    let socket = socket(AddressFamily::INET, SocketType::DGRAM, None).context("open a socket")?;
    name_to_index(&socket, name).with_context(|| format!("find the network device {name}"))
}
