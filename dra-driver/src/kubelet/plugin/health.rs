//! Health stream: the complete list of devices, at the start, after each change, and every [`REPEAT`].

use std::pin::Pin;
use std::time::Duration;

use futures::Stream;
use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::kubelet::proto::health_v1::dra_resource_health_server::DraResourceHealth;
use crate::kubelet::proto::health_v1::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest,
    NodeWatchResourcesResponse,
};
use crate::kubelet::proto::health_v1alpha1::dra_resource_health_server::DraResourceHealth as DraResourceHealthV1alpha1;

/// Time between two messages. Kubelet sets the health of a device to unknown after 30 s without a message.
const REPEAT: Duration = Duration::from_secs(10);

/// Health of one published device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// The device can be used.
    Healthy,
    /// The device cannot be used, for this reason.
    Unhealthy(String),
    /// The health is unknown, for this reason.
    Unknown(String),
}

/// Health of all published devices as (pool, device, health).
pub type Devices = Vec<(String, String, Health)>;

/// The health services of both versions.
#[derive(Debug, Clone)]
pub struct HealthService {
    devices: watch::Receiver<Devices>,
    stop: CancellationToken,
    repeat: Duration,
}

/// Response stream.
type Messages = Pin<Box<dyn Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send>>;

impl HealthService {
    /// Returns a service that streams `devices` until `stop`.
    #[must_use]
    pub fn new(devices: watch::Receiver<Devices>, stop: CancellationToken) -> Self {
        Self {
            devices,
            stop,
            repeat: REPEAT,
        }
    }

    fn messages(&self) -> Messages {
        let (mut devices, stop, repeat) = (self.devices.clone(), self.stop.clone(), self.repeat);
        devices.mark_changed();
        Box::pin(futures::stream::unfold(
            (devices, stop),
            move |(mut devices, stop)| async move {
                tokio::select! {
                    () = stop.cancelled() => return None,
                    changed = devices.changed() => changed.ok()?,
                    () = tokio::time::sleep(repeat) => {}
                }
                let message = message(&devices.borrow_and_update(), Timestamp::now().as_second());
                Some((Ok(message), (devices, stop)))
            },
        ))
    }
}

fn message(devices: &Devices, now: i64) -> NodeWatchResourcesResponse {
    let devices = devices.iter().map(|(pool, device, health)| {
        let (status, text) = match health {
            Health::Healthy => (HealthStatus::Healthy, ""),
            Health::Unhealthy(reason) => (HealthStatus::Unhealthy, reason.as_str()),
            Health::Unknown(reason) => (HealthStatus::Unknown, reason.as_str()),
        };
        DeviceHealth {
            device: Some(DeviceIdentifier {
                pool_name: pool.clone(),
                device_name: device.clone(),
            }),
            health: status.into(),
            last_updated_time: now,
            health_check_timeout_seconds: 0,
            message: text.chars().take(1024).collect(),
        }
    });
    NodeWatchResourcesResponse {
        devices: devices.collect(),
    }
}

#[tonic::async_trait]
impl DraResourceHealth for HealthService {
    type NodeWatchResourcesStream = Messages;

    async fn node_watch_resources(
        &self,
        _request: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Messages>, Status> {
        Ok(Response::new(self.messages()))
    }
}

#[tonic::async_trait]
impl DraResourceHealthV1alpha1 for HealthService {
    type NodeWatchResourcesStream = Messages;

    async fn node_watch_resources(
        &self,
        _request: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Messages>, Status> {
        Ok(Response::new(self.messages()))
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;

    use super::*;

    #[tokio::test]
    async fn repeats_the_whole_list_without_a_change() {
        let device = |name: &str| ("pool".to_owned(), name.to_owned(), Health::Healthy);
        let (_sender, devices) = watch::channel(vec![device("gpu-0"), device("gpu-1")]);
        let service = HealthService {
            repeat: Duration::from_millis(1),
            ..HealthService::new(devices, CancellationToken::new())
        };
        let messages: Vec<_> = service.messages().take(3).collect().await;
        for message in messages {
            assert_eq!(message.unwrap().devices.len(), 2);
        }
        // Kubelet sets the health to unknown after 30 s without a message.
        assert!(REPEAT * 3 <= Duration::from_secs(30));
    }
}
