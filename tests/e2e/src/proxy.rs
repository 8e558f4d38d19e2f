//! A proxy before the API server that forgets connections: they stay open and deliver nothing, as when a load balancer or a
//! router between controller and API server is replaced.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use anyhow::{Context, Result, anyhow};
use drava_cluster::Node;

use crate::TestCluster;

/// Address of the API server on the node with the control plane.
const API_SERVER: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 443);

/// Both sides of a connection.
struct Connection {
    sockets: [TcpStream; 2],
    is_forgotten: Arc<AtomicBool>,
}

#[derive(Default)]
struct State {
    connections: Vec<Connection>,
    /// Whether new connections are forgotten at once.
    forgets_new: bool,
    has_ended: bool,
}

/// See the [module](self). Ends with the value.
pub struct Proxy {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Proxy {
    /// Starts the proxy on the node with the control plane.
    ///
    /// # Errors
    /// When it cannot listen there.
    pub fn start(cluster: &TestCluster) -> Result<Self> {
        let node = cluster.kubernetes().control_plane();
        let state = Arc::<Mutex<State>>::default();
        let (sender, receiver) = mpsc::channel();
        let shared = Arc::clone(&state);
        // A network belongs to a thread and to those that it starts.
        thread::spawn(move || match listen(&node) {
            Ok((listener, address)) => {
                let _ = sender.send(Ok(address));
                accept(&listener, &shared);
            }
            Err(error) => drop(sender.send(Err(error))),
        });
        let address = receiver.recv().map_err(|_| anyhow!("the proxy ended"))??;
        Ok(Self { address, state })
    }

    /// Address of the proxy in the network of the cluster.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Forgets all connections of this moment, and returns their number.
    #[must_use]
    pub fn forget(&self) -> usize {
        let state = lock(&self.state);
        let open = state.connections.iter();
        let forgotten = open.filter(|one| !one.is_forgotten.swap(true, Ordering::SeqCst));
        forgotten.count()
    }

    /// Sets whether new connections are forgotten at once.
    pub fn forget_new(&self, forgets_new: bool) {
        lock(&self.state).forgets_new = forgets_new;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.has_ended = true;
        for connection in state.connections.drain(..) {
            for socket in connection.sockets {
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn listen(node: &Node) -> Result<(TcpListener, SocketAddr)> {
    node.enter_network()?;
    let listener =
        TcpListener::bind((node.address(), 0)).context("listen in the network of the node")?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Forwards connections until the first one after the end of the proxy; the thread of a proxy without one ends with the test.
fn accept(listener: &TcpListener, state: &Arc<Mutex<State>>) {
    for client in listener.incoming() {
        if lock(state).has_ended {
            return;
        }
        if let Err(error) = client.and_then(|client| forward(client, state)) {
            eprintln!("proxy: {error}");
        }
    }
}

fn forward(client: TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    // Without an API server the client sees the end of its connection.
    let Ok(server) = TcpStream::connect(API_SERVER) else {
        return Ok(());
    };
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let mut state = lock(state);
    let is_forgotten = Arc::new(AtomicBool::new(state.forgets_new));
    let pairs = [
        (client.try_clone()?, server.try_clone()?),
        (server.try_clone()?, client.try_clone()?),
    ];
    for (from, to) in pairs {
        let is_forgotten = Arc::clone(&is_forgotten);
        thread::spawn(move || pump(from, to, &is_forgotten));
    }
    state.connections.push(Connection {
        sockets: [client, server],
        is_forgotten,
    });
    Ok(())
}

/// Copies one direction until its end. Of a forgotten connection neither data nor the end arrive.
fn pump(mut from: TcpStream, mut to: TcpStream, is_forgotten: &AtomicBool) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let length = match from.read(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Ok(length) => length,
            Err(_) => 0,
        };
        let data = buffer.get(..length).unwrap_or_default();
        if is_forgotten.load(Ordering::SeqCst) {
            if data.is_empty() {
                return;
            }
        } else if data.is_empty() || to.write_all(data).is_err() {
            let _ = to.shutdown(Shutdown::Both);
            return;
        }
    }
}
