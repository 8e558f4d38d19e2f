//! Forwards connections from the host's loopback port to the API server in the node.
//!
//! The listener belongs to the host's network namespace, where it was created; the connections to the API server
//! belong to the node's. So the host needs no device, address, route or firewall rule to reach the cluster.

use std::io::{self, copy};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::thread;

/// Address of the API server in the node.
const API_SERVER: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 443);

/// Forwards connections accepted by `listener` until this process ends.
pub(super) fn start(listener: TcpListener) -> io::Result<()> {
    thread::Builder::new()
        .name("forward".into())
        .spawn(move || accept(&listener))
        .map(drop)
}

fn accept(listener: &TcpListener) {
    for client in listener.incoming() {
        // A failed connection is closed by the drop; its client retries.
        if let Err(error) = client.and_then(forward) {
            eprintln!("drava-node: forward a connection to the API server: {error}");
        }
    }
}

fn forward(client: TcpStream) -> io::Result<()> {
    // Without an API server the client sees a connection reset, as it would without this forwarder.
    let Ok(server) = TcpStream::connect(API_SERVER) else {
        return Ok(());
    };
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (client_reader, server_reader) = (client.try_clone()?, server.try_clone()?);
    thread::Builder::new()
        .name("forward-request".into())
        .spawn(move || pump(client_reader, server))?;
    thread::Builder::new()
        .name("forward-answer".into())
        .spawn(move || pump(server_reader, client))?;
    Ok(())
}

/// Copies one direction until its end and closes the other side for writing.
fn pump(mut from: TcpStream, mut to: TcpStream) {
    if copy(&mut from, &mut to).is_err() {
        // The peer has failed: the other side must not wait for it.
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }
    let _ = to.shutdown(Shutdown::Write);
}
