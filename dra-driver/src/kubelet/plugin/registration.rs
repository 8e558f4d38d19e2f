//! Registration service: kubelet reads the plugin info and reports the outcome of the registration.

use std::path::PathBuf;

use drava_api::names;
use tonic::{Request, Response, Status};

use super::SERVICES;
use crate::kubelet::proto::registration::registration_server::Registration;
use crate::kubelet::proto::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use crate::report::conditions::{Condition, Conditions};

/// Registration service for kubelet's plugin watcher.
#[derive(Debug, Clone)]
pub struct RegistrationService {
    endpoint: PathBuf,
    conditions: Conditions,
}

impl RegistrationService {
    /// Returns a service that registers the DRA socket at `endpoint`.
    #[must_use]
    pub fn new(endpoint: PathBuf, conditions: Conditions) -> Self {
        Self {
            endpoint,
            conditions,
        }
    }
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(
        &self,
        _request: Request<InfoRequest>,
    ) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: names::DRIVER.to_owned(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: SERVICES.iter().map(|&service| service.to_owned()).collect(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus {
            plugin_registered,
            error,
        } = request.into_inner();
        if plugin_registered {
            tracing::info!("kubelet registered the driver");
            self.conditions.set(Condition::Registered, Ok(()));
        } else {
            // Kubelet retries.
            tracing::error!(%error, "kubelet rejected the driver");
            self.conditions.set(
                Condition::Registered,
                Err(format!("kubelet rejected the driver: {error}")),
            );
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
