//! Writes of the status of a quota.
//!
//! A status is derived from the cluster, so a lost or late write is harmless: it is guarded by UID and resource version, and
//! repeated as long as the status differs.

use drava_api::error::describe;
use drava_api::quota::{GpuQuota, GpuQuotaStatus, QuotaResource};
use kube::Api;
use kube::api::Patch;
use serde_json::{Value, json};

use super::Writer;
use super::request::parameters;
use crate::action::{QuotaStatusOutcome, QuotaStatusUpdate};

impl Writer {
    /// Writes the status of a quota.
    pub async fn write_quota_status(&self, update: QuotaStatusUpdate) -> QuotaStatusOutcome {
        let quota = match self.try_write_quota_status(&update).await {
            Ok(quota) => Some(Box::new(quota)),
            // Changed or deleted; the watch delivers the newest version.
            Err(Some(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => None,
            Err(error) => {
                let error =
                    error.map_or_else(|| "request timed out".to_owned(), |error| describe(&error));
                tracing::warn!(
                    error,
                    quota = update.name,
                    "cannot write the status of a quota"
                );
                None
            }
        };
        QuotaStatusOutcome {
            name: update.name,
            quota,
        }
    }

    /// Returns no error for a time-out, and when this replica has lost the lease.
    async fn try_write_quota_status(
        &self,
        update: &QuotaStatusUpdate,
    ) -> Result<GpuQuota, Option<kube::Error>> {
        if !self.requests.may_send() {
            return Err(None);
        }
        let quotas: Api<GpuQuota> = Api::all(self.requests.client());
        let patch = json!({
            "metadata": {"uid": update.uid, "resourceVersion": update.resource_version},
            "status": merge_patch(&update.status),
        });
        let (parameters, patch) = (parameters(), Patch::Merge(&patch));
        let request = quotas.patch_status(&update.name, &parameters, &patch);
        match tokio::time::timeout(self.timing.request_timeout, request).await {
            Ok(response) => response.map_err(Some),
            Err(_) => Err(None),
        }
    }
}

/// Returns the merge patch that results in this status: absent amounts are removed.
fn merge_patch(status: &GpuQuotaStatus) -> Value {
    let mut patch = json!(status);
    for amounts in ["used", "borrowed", "free"] {
        if let Some(amounts) = patch.get_mut(amounts).and_then(Value::as_object_mut) {
            for resource in QuotaResource::ALL {
                amounts.entry(resource.as_str()).or_insert(Value::Null);
            }
        }
    }
    patch
}
