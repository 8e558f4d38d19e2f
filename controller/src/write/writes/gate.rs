//! Removal of a pod's allocation gate.
//!
//! The patch names the gate and the pod's UID, and nothing else: repeating it, or executing it late, changes nothing. The
//! admission policy `drava-controller-gate` rejects any other change of a pod by this controller.

use drava_api::error::describe;
use drava_api::listed::Listed;
use drava_api::names;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kube::Api;
use kube::api::Patch;
use serde_json::json;

use super::Writer;
use super::request::parameters;
use crate::action::{AllocationFailure, GateRemovalOutcome};

impl Writer {
    /// Removes the allocation gate of a pod; a gate that is already removed is a success.
    pub async fn remove_gate(&self, pod: ObjectReference) -> GateRemovalOutcome {
        let pod_uid = pod.uid.clone().unwrap_or_default();
        let failure = self.try_remove_gate(&pod).await.err();
        if let Some(failure) = &failure {
            tracing::warn!(
                error = failure.message,
                pod = pod.name,
                namespace = pod.namespace,
                "cannot remove the scheduling gate"
            );
        }
        GateRemovalOutcome { pod_uid, failure }
    }

    async fn try_remove_gate(&self, pod: &ObjectReference) -> Result<(), AllocationFailure> {
        let failed = |cause: String, is_reportable| AllocationFailure {
            message: format!(
                "cannot remove the scheduling gate {}: {cause}",
                names::ALLOCATION_GATE
            ),
            is_reportable,
        };
        if !self.requests.may_send() {
            return Err(failed("this replica has lost the lease".to_owned(), false));
        }
        let namespace = pod.namespace.as_deref().unwrap_or_default();
        let name = pod.name.as_deref().unwrap_or_default();
        let pods: Api<Listed<Pod>> = Api::namespaced(self.requests.client(), namespace);
        let patch = json!({
            "metadata": {"uid": pod.uid},
            "spec": {"schedulingGates": [{"$patch": "delete", "name": names::ALLOCATION_GATE}]},
        });
        let (parameters, patch) = (parameters(), Patch::Strategic(&patch));
        let request = pods.patch_metadata(name, &parameters, &patch);
        match tokio::time::timeout(self.timing.request_timeout, request).await {
            Ok(Ok(_)) => Ok(()),
            // Deleted, or replaced by a pod of the same name.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Ok(()),
            Ok(Err(kube::Error::Api(status))) => {
                let is_rejected = matches!(status.code, 400..=428 | 430..=499);
                Err(failed(status.message.clone(), is_rejected))
            }
            Ok(Err(error)) => Err(failed(describe(&error), false)),
            Err(_) => Err(failed("request timed out".to_owned(), false)),
        }
    }
}
