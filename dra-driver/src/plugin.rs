//! The sockets that kubelet talks to.
//!
//! The DRA socket serves prepare, unprepare and health; the registration socket tells kubelet about it, so it appears
//! second, and [when it is this instance's turn](takeover). A socket that disappears is made again; own sockets are removed on a clean stop.

pub mod health;
pub mod registration;
pub mod service;
pub mod socket;
pub mod takeover;

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::Instrument as _;

use crate::conditions::{Condition, Conditions};
use crate::proto::dra_v1::dra_plugin_server::DraPluginServer;
use crate::proto::health_v1::dra_resource_health_server::DraResourceHealthServer;
use crate::proto::health_v1alpha1::dra_resource_health_server::DraResourceHealthServer as DraResourceHealthServerV1alpha1;
use crate::proto::registration::registration_server::RegistrationServer;
use health::HealthService;
use registration::RegistrationService;
use service::{Claims, DraService};
use socket::{PathTooLong, Sockets};
use takeover::InstanceRole;

/// Services of the DRA socket, the preferred version of each first: kubelet takes the first that it knows.
pub const SERVICES: [&str; 3] = [
    "v1.DRAPlugin",
    "v1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth",
];

/// What the sockets serve.
pub struct Plugin<C> {
    /// kubelet's root directory.
    pub kubelet_dir: PathBuf,
    /// UID of this pod, where two instances may serve side by side.
    pub pod_uid: Option<String>,
    /// Who prepares.
    pub claims: Arc<C>,
    /// Health of the published devices.
    pub health: watch::Receiver<health::Devices>,
    /// Where it is told whether kubelet has registered the driver.
    pub conditions: Conditions,
    /// Whether another instance serves the node.
    pub role: watch::Receiver<InstanceRole>,
}

/// Serves until `stop`.
///
/// # Errors
/// When kubelet's directory is too deep for socket paths; everything else is retried.
pub async fn serve<C: Claims>(
    plugin: Plugin<C>,
    stop: CancellationToken,
) -> Result<(), PathTooLong> {
    let Plugin {
        kubelet_dir,
        pod_uid,
        claims,
        health,
        conditions,
        role,
    } = plugin;
    let sockets = Sockets::new(&kubelet_dir, pod_uid.as_deref())?;
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
    let on_trouble = |reason: String| conditions.set(Condition::Registered, Err(reason));
    let first = socket::serve(&sockets.dra, dra_server, &on_dra_bound, &on_trouble, &stop)
        .instrument(tracing::info_span!("socket", path = %sockets.dra.display()));
    let second = async {
        // It fails only with its sender, which lives in this function.
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
            &on_trouble,
            &stop,
        )
        .await;
    }
    .instrument(tracing::info_span!("socket", path = %sockets.registration.display()));
    let serving = async {
        tokio::join!(first, second);
    };
    let stopping = async {
        stop.cancelled().await;
        // At once, so that kubelet looks for another instance; calls in progress are finished.
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
    Ok(())
}
