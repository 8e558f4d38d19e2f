//! Kubelet's plugin sockets.
//!
//! The DRA socket serves prepare, unprepare and health. The registration socket points kubelet to the DRA socket, so it
//! is created second, and only when [`takeover`] allows it. A deleted socket is recreated; the sockets of this instance
//! are removed on a clean stop, and those of killed instances at the next start.

pub mod health;
pub mod registration;
pub mod service;
pub mod socket;
pub mod takeover;

use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::Instrument as _;

use crate::kubelet::proto::dra_v1::dra_plugin_server::DraPluginServer;
use crate::kubelet::proto::health_v1::dra_resource_health_server::DraResourceHealthServer;
use crate::kubelet::proto::health_v1alpha1::dra_resource_health_server::DraResourceHealthServer as DraResourceHealthServerV1alpha1;
use crate::kubelet::proto::registration::registration_server::RegistrationServer;
use crate::report::conditions::{Condition, Conditions};
use health::HealthService;
use registration::RegistrationService;
use service::{Claims, DraService};
use socket::Sockets;
use takeover::InstanceRole;

/// Services of the DRA socket. Kubelet uses the first version of a service that it supports; 1.36 supports only
/// `v1alpha1` of the health service.
pub const SERVICES: [&str; 3] = [
    "v1.DRAPlugin",
    "v1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth",
];

/// Configuration of the plugin.
pub struct Plugin<C> {
    /// Paths of the sockets.
    pub sockets: Sockets,
    /// Prepares and unprepares claims.
    pub claims: Arc<C>,
    /// Health of the published devices.
    pub health: watch::Receiver<health::Devices>,
    /// Conditions; the plugin sets `registered`.
    pub conditions: Conditions,
    /// Role of this instance.
    pub role: watch::Receiver<InstanceRole>,
}

/// Serves until `stop`. Errors are retried.
pub async fn serve<C: Claims>(plugin: Plugin<C>, stop: CancellationToken) {
    let Plugin {
        sockets,
        claims,
        health,
        conditions,
        role,
    } = plugin;
    let (dra_bound, mut dra_is_bound) = watch::channel(false);
    let dra = DraService::new(claims);
    let health = HealthService::new(health, stop.clone());
    let dra_server = || {
        Server::builder()
            .add_service(DraPluginServer::new(dra.clone()))
            .add_service(DraResourceHealthServer::new(health.clone()))
            .add_service(DraResourceHealthServerV1alpha1::new(health.clone()))
    };
    let registration = RegistrationService::new(sockets.dra.clone(), conditions.clone());
    let registration_server =
        || Server::builder().add_service(RegistrationServer::new(registration.clone()));
    let on_dra_bound = || {
        dra_bound.send_replace(true);
    };
    let on_error = |reason: String| conditions.set(Condition::Registered, Err(reason));
    let first = socket::serve(&sockets.dra, dra_server, &on_dra_bound, &on_error, &stop)
        .instrument(tracing::info_span!("socket", path = %sockets.dra.display()));
    let second = async {
        // Fails only when the sender is dropped, which lives in this function.
        let _ = dra_is_bound.wait_for(|bound| *bound).await;
        tokio::select! {
            () = stop.cancelled() => return,
            () = takeover::may_register(&conditions, role) => {}
        }
        let waiting = || {
            conditions.set(
                Condition::Registered,
                Err("kubelet has not registered the driver yet".into()),
            )
        };
        socket::serve(
            &sockets.registration,
            registration_server,
            &waiting,
            &on_error,
            &stop,
        )
        .await;
    }
    .instrument(tracing::info_span!("socket", path = %sockets.registration.display()));
    let serving = async {
        tokio::join!(first, second, socket::sweep(&sockets));
    };
    let stopping = async {
        stop.cancelled().await;
        // Immediately, so that kubelet uses another instance; calls in progress complete.
        socket::remove(&sockets);
    };
    let drained = async {
        stop.cancelled().await;
        tokio::time::sleep(socket::DRAIN).await;
    };
    tokio::select! {
        ((), ()) = async { tokio::join!(serving, stopping) } => {}
        () = drained => {}
    }
}
