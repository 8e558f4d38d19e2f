//! Writes of the status of a policy, as those of quotas: derived, guarded, and repeated as long as the status differs.

use drava_api::error::describe;
use drava_api::policy::GpuPolicy;
use kube::Api;
use kube::api::Patch;
use serde_json::json;

use super::Writer;
use super::request::parameters;
use crate::action::{PolicyStatusOutcome, PolicyStatusUpdate};

impl Writer {
    /// Writes the status of a policy.
    pub async fn write_policy_status(&self, update: PolicyStatusUpdate) -> PolicyStatusOutcome {
        let policy = self.try_write_policy_status(&update).await;
        if let Err(error) = &policy {
            tracing::warn!(
                error,
                policy = update.name,
                "cannot write the status of a policy"
            );
        }
        PolicyStatusOutcome {
            name: update.name,
            policy: policy.ok().map(Box::new),
        }
    }

    async fn try_write_policy_status(
        &self,
        update: &PolicyStatusUpdate,
    ) -> Result<GpuPolicy, String> {
        if !self.requests.may_send() {
            return Err("this replica stops or has lost the lease".to_owned());
        }
        let policies: Api<GpuPolicy> = Api::all(self.requests.client());
        let patch = json!({
            "metadata": {"uid": update.uid, "resourceVersion": update.resource_version},
            "status": update.status,
        });
        let (parameters, patch) = (parameters(), Patch::Merge(&patch));
        let request = policies.patch_status(&update.name, &parameters, &patch);
        match tokio::time::timeout(self.timing.request_timeout, request).await {
            Ok(response) => response.map_err(|error| describe(&error)),
            Err(_) => Err("request timed out".to_owned()),
        }
    }
}
