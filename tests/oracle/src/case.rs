//! A case: a cluster and the unallocated claims of one pod.

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A case with parsed objects.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Case {
    /// Nodes.
    pub nodes: Vec<Node>,
    /// Slices of all nodes.
    pub slices: Vec<ResourceSlice>,
    /// Device classes.
    pub classes: Vec<DeviceClass>,
    /// Claims with devices.
    pub allocated: Vec<ResourceClaim>,
    /// Claims of the pod.
    pub claims: Vec<ResourceClaim>,
}

impl Case {
    /// Parses a case.
    ///
    /// # Errors
    /// When an object is malformed.
    pub fn parse(json: &Value) -> Result<Self> {
        serde_json::from_value(json.clone()).with_context(|| format!("parse case {json}"))
    }

    /// Returns whether there are claims, and each has requests.
    #[must_use]
    pub fn has_requests(&self) -> bool {
        let has_requests = |claim: &ResourceClaim| {
            claim
                .spec
                .as_ref()
                .and_then(|spec| spec.devices.as_ref()?.requests.as_ref())
                .is_some_and(|requests| !requests.is_empty())
        };
        !self.claims.is_empty() && self.claims.iter().all(has_requests)
    }

    /// Names of the nodes.
    pub fn node_names(&self) -> impl Iterator<Item = &str> {
        self.nodes
            .iter()
            .filter_map(|node| node.metadata.name.as_deref())
    }
}
