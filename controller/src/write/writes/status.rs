//! Writes of the status of a quota, a policy or the GpuControllerLeader.
//!
//! A status is derived from the cluster, so a lost or late write is harmless: it is guarded by UID and resource version, and
//! repeated as long as the status differs.

use std::fmt::Debug;

use drava_api::error::describe;
use kube::Api;
use kube::api::Patch;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::Writer;
use super::request::parameters;
use crate::action::status::{Reported, StatusOutcome, StatusUpdate};

impl Writer {
    /// Writes a status.
    pub async fn write_status<K>(&self, update: StatusUpdate<K>) -> StatusOutcome<K>
    where
        K: Reported + Clone + Debug + DeserializeOwned,
    {
        let written = match self.try_write_status::<K>(&update).await {
            Ok(written) => Some(Box::new(written)),
            // Changed or deleted; the watch delivers the newest version.
            Err(Some(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => None,
            Err(error) => {
                let error =
                    error.map_or_else(|| "request timed out".to_owned(), |error| describe(&error));
                let (kind, name) = (K::kind(&()), &update.name);
                tracing::warn!(error, %kind, name, "cannot write a status");
                None
            }
        };
        StatusOutcome {
            name: update.name,
            written,
        }
    }

    /// Returns no error for a time-out, and when this replica has lost the lease.
    async fn try_write_status<K>(&self, update: &StatusUpdate<K>) -> Result<K, Option<kube::Error>>
    where
        K: Reported + Clone + Debug + DeserializeOwned,
    {
        if !self.requests.may_send() {
            return Err(None);
        }
        let objects: Api<K> = Api::all(self.requests.client());
        let patch = json!({
            "metadata": {"uid": update.uid, "resourceVersion": update.resource_version},
            "status": K::patch(&update.status),
        });
        let (parameters, patch) = (parameters(), Patch::Merge(&patch));
        let request = objects.patch_status(&update.name, &parameters, &patch);
        match tokio::time::timeout(self.timing.request_timeout, request).await {
            Ok(response) => response.map_err(Some),
            Err(_) => Err(None),
        }
    }
}
