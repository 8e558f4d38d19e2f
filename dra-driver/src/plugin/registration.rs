//! The registration socket: kubelet asks what there is and says whether it took it.

use std::path::PathBuf;

use drava_api::names;
use tonic::{Request, Response, Status};

use super::SERVICES;
use crate::conditions::{Condition, Conditions};
use crate::proto::registration::registration_server::Registration;
use crate::proto::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};

/// Answers kubelet's plugin watcher.
#[derive(Debug, Clone)]
pub struct RegistrationService {
    endpoint: PathBuf,
    conditions: Conditions,
}

impl RegistrationService {
    /// Registers the DRA socket at `endpoint`.
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
            tracing::info!("kubelet has registered the driver");
            self.conditions.set(Condition::Registered, Ok(()));
        } else {
            // Kubelet goes on trying by itself; what keeps it from taking us is for a person to change.
            tracing::error!(%error, "kubelet refuses the driver");
            self.conditions.set(
                Condition::Registered,
                Err(format!("kubelet refuses the driver: {error}")),
            );
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
