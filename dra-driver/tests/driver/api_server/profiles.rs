//! Node profiles and the labels of nodes.

use serde_json::{Value, json};

use super::{ApiServer, NODES, PROFILES};

impl ApiServer {
    /// Installs the resource definition of node profiles.
    pub(crate) fn install_profiles(&self) {
        self.objects().has_profiles = true;
    }

    /// Stores a profile, as an administrator does, and installs the resource definition.
    pub(crate) fn put_profile(&self, name: &str, spec: &Value) {
        self.install_profiles();
        let path = format!("{PROFILES}/{name}");
        let present = self.objects().by_path.get(&path).cloned();
        let generation = present.as_ref().map_or(0, |present| {
            present["metadata"]["generation"].as_i64().unwrap()
        });
        let mut profile = present.unwrap_or_else(|| {
            json!({"apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuNodeProfile", "metadata": {"name": name}})
        });
        profile["metadata"]["generation"] = json!(generation + 1);
        profile["spec"] = spec.clone();
        self.store(&path, profile);
    }

    /// Deletes a profile.
    pub(crate) fn delete_profile(&self, name: &str) {
        self.remove(&format!("{PROFILES}/{name}")).unwrap();
    }

    /// Sets the status of a profile, as node drivers do.
    pub(crate) fn put_profile_status(&self, name: &str, status: &Value) {
        let path = format!("{PROFILES}/{name}");
        let mut profile = self.objects().by_path[&path].clone();
        profile["status"] = status.clone();
        self.store(&path, profile);
    }

    /// Returns the status of a profile.
    pub(crate) fn profile_status(&self, name: &str) -> Value {
        let path = format!("{PROFILES}/{name}");
        self.objects().by_path[&path]["status"].clone()
    }

    /// Sets the labels of the node.
    pub(crate) fn label_node(&self, node: &str, labels: &Value) {
        let path = format!("{NODES}/{node}");
        let mut object = self.objects().by_path[&path].clone();
        object["metadata"]["labels"] = labels.clone();
        self.store(&path, object);
    }

    /// Sets the annotations of the node.
    pub(crate) fn annotate_node(&self, node: &str, annotations: &Value) {
        let path = format!("{NODES}/{node}");
        let mut object = self.objects().by_path[&path].clone();
        object["metadata"]["annotations"] = annotations.clone();
        self.store(&path, object);
    }
}
