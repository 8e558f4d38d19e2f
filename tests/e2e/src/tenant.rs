//! A user with the role of the example `tenant-access` in one namespace.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::{Namespace, TestCluster};

impl TestCluster {
    /// Writes the kubeconfig of a service account of the namespace with the role of the example.
    ///
    /// # Errors
    /// When an object cannot be created.
    pub fn kubeconfig_of_tenant(&self, tenant: &Namespace<'_>) -> Result<PathBuf> {
        tenant.example("tenant-access")?;
        tenant.kubectl(&["create", "serviceaccount", "user"])?;
        let account = format!("--serviceaccount={}:user", tenant.name());
        tenant.kubectl(&["create", "rolebinding", "user", "--role=gpu-user", &account])?;
        let token = tenant.kubectl(&["create", "token", "user"])?;
        let text = self.kubectl(["config", "view", "--raw", "--flatten", "-o", "json"])?;
        let mut config: Value = serde_json::from_str(&text)?;
        for user in config["users"].as_array_mut().context("users")? {
            user["user"] = json!({"token": token.trim()});
        }
        let file = self.kubernetes().state().join("tenant.kubeconfig");
        fs::write(&file, config.to_string())?;
        Ok(file)
    }
}
