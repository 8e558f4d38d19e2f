//! Slices of other drivers and resources of device plugins.

use serde_json::{Value, json};

use super::{ApiServer, NODES, SLICES};

impl ApiServer {
    /// Deletes a slice.
    pub(crate) fn delete_slice(&self, name: &str) {
        self.remove(&format!("{SLICES}/{name}"));
    }

    /// Sets the allocatable resources of a node, as kubelet would.
    pub(crate) fn set_allocatable(&self, node: &str, allocatable: &Value) {
        let path = format!("{NODES}/{node}");
        let mut object = self.objects().by_path[&path].clone();
        object["status"] = json!({"allocatable": allocatable});
        self.store(&path, object);
    }
}
