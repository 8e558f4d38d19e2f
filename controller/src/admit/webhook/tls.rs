//! TLS connections of the webhook server. The certificate is replaced without interruption: new connections use the new one.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Maximum number of connections: any pod of the cluster can connect, and must not use up the process's file descriptors.
const MAX_CONNECTIONS: usize = 256;
/// Time-out of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a failed accept, for example without file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// Listener for TLS connections.
pub(super) struct TlsListener {
    address: SocketAddr,
    connections: mpsc::Receiver<(Connection, SocketAddr)>,
}

impl TlsListener {
    /// Accepts connections while the listener exists. Connections without a certificate to serve are closed.
    pub(super) fn start(
        listener: TcpListener,
        certificate: watch::Receiver<Option<Arc<ServerConfig>>>,
    ) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        let (sender, connections) = mpsc::channel(1);
        tokio::spawn(accept(listener, certificate, sender));
        Ok(Self {
            address,
            connections,
        })
    }
}

impl axum::serve::Listener for TlsListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        match self.connections.recv().await {
            Some(connection) => connection,
            // The accepting task ends with the process only.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        Ok(self.address)
    }
}

async fn accept(
    listener: TcpListener,
    certificate: watch::Receiver<Option<Arc<ServerConfig>>>,
    connections: mpsc::Sender<(Connection, SocketAddr)>,
) {
    let limit = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while !connections.is_closed() {
        let Ok(permit) = Arc::clone(&limit).acquire_owned().await else {
            return;
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = connections.closed() => return,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection of the webhook");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let Some(config) = certificate.borrow().clone() else {
            continue;
        };
        let connections = connections.clone();
        tokio::spawn(async move {
            let handshake = TlsAcceptor::from(config).accept(stream);
            match tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await {
                Ok(Ok(stream)) => {
                    let connection = Connection {
                        stream,
                        _permit: permit,
                    };
                    // The server has ended.
                    let _ = connections.send((connection, peer)).await;
                }
                Ok(Err(error)) => tracing::debug!(%peer, %error, "TLS handshake failed"),
                Err(_) => tracing::debug!(%peer, "TLS handshake timed out"),
            }
        });
    }
}

/// A TLS connection that counts towards [`MAX_CONNECTIONS`].
pub(super) struct Connection {
    stream: TlsStream<TcpStream>,
    _permit: OwnedSemaphorePermit,
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, buffer)
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
