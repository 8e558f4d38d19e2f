//! Creation of objects in a namespace.

use anyhow::{Context as _, Result, ensure};
use drava_cluster::process;
use serde_json::Value;

use crate::{Namespace, TestCluster, answer, connected};

/// An object of the cluster, such as a DeviceClass, that is deleted with the value.
pub struct ClusterObject<'c> {
    cluster: &'c TestCluster,
    kind: &'static str,
    name: &'static str,
}

impl Drop for ClusterObject<'_> {
    fn drop(&mut self) {
        let delete = ["delete", self.kind, self.name, "--ignore-not-found"];
        if let Err(error) = self.cluster.kubectl(delete) {
            eprintln!("cannot delete {} {}: {error:#}", self.kind, self.name);
        }
    }
}

impl TestCluster {
    /// Returns a value that deletes the object of the cluster with this name when it is dropped.
    #[must_use]
    pub const fn deletes(&self, kind: &'static str, name: &'static str) -> ClusterObject<'_> {
        ClusterObject {
            cluster: self,
            kind,
            name,
        }
    }
}

impl Namespace<'_> {
    /// Creates objects from YAML.
    ///
    /// # Errors
    /// When the API server rejects an object, with its message.
    pub fn apply(&self, yaml: &str) -> Result<()> {
        self.apply_with_warnings(yaml).map(drop)
    }

    /// Creates objects from YAML, and returns the warnings of the API server.
    ///
    /// # Errors
    /// When the API server rejects an object, with its message.
    pub fn apply_with_warnings(&self, yaml: &str) -> Result<String> {
        let (_, output) = connected(|| {
            let mut command = self.cluster.kubernetes.kubectl();
            command
                .args(["-n", &self.name, "apply", "-f", "-"])
                .stdin(process::input(yaml.as_bytes())?);
            Ok(command)
        })?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{text}");
        Ok(text)
    }

    /// Creates an object whose name the API server may generate, and returns it as `kind/name`.
    ///
    /// # Errors
    /// When the API server rejects the object, with its message.
    pub fn create(&self, yaml: &str) -> Result<String> {
        let created = answer(|| {
            let mut command = self.cluster.kubernetes.kubectl();
            command
                .args(["-n", &self.name, "create", "-o", "name", "-f", "-"])
                .stdin(process::input(yaml.as_bytes())?);
            Ok(command)
        });
        Ok(created?.trim().to_owned())
    }

    /// Returns the object that the API server would create from YAML.
    ///
    /// # Errors
    /// When the API server rejects the object, with its message.
    pub fn dry_run(&self, yaml: &str) -> Result<Value> {
        let create = ["create", "--dry-run=server", "-o", "json", "-f", "-"];
        let created = answer(|| {
            let mut command = self.cluster.kubernetes.kubectl();
            command
                .args(["-n", &self.name])
                .args(create)
                .stdin(process::input(yaml.as_bytes())?);
            Ok(command)
        });
        Ok(serde_json::from_str(&created?)?)
    }

    /// Creates the objects of one of `deploy/examples`.
    ///
    /// # Errors
    /// When the file is missing or rejected.
    pub fn example(&self, name: &str) -> Result<()> {
        self.example_file(name, name)
    }

    /// Creates the objects of one file of an example.
    ///
    /// # Errors
    /// When the file is missing or rejected.
    pub fn example_file(&self, name: &str, file: &str) -> Result<()> {
        let path = format!(
            "{}/../../deploy/examples/{name}/{file}.yaml",
            env!("CARGO_MANIFEST_DIR")
        );
        let yaml = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        self.apply(&yaml)
    }
}
