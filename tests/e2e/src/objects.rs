//! Creation of objects in a namespace.

use anyhow::{Context as _, Result, ensure};
use drava_cluster::process::{self, Limit};
use serde_json::Value;

use crate::{Namespace, stdout};

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
        let mut command = self.cluster.kubernetes.kubectl();
        command
            .args(["-n", &self.name, "apply", "-f", "-"])
            .stdin(process::input(yaml.as_bytes())?);
        let output = process::output(&mut command, Limit::REQUEST)?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{text}");
        Ok(text)
    }

    /// Creates an object whose name the API server may generate, and returns it as `kind/name`.
    ///
    /// # Errors
    /// When the API server rejects the object, with its message.
    pub fn create(&self, yaml: &str) -> Result<String> {
        let mut command = self.cluster.kubernetes.kubectl();
        command
            .args(["-n", &self.name, "create", "-o", "name", "-f", "-"])
            .stdin(process::input(yaml.as_bytes())?);
        Ok(stdout(command)?.trim().to_owned())
    }

    /// Returns the object that the API server would create from YAML.
    ///
    /// # Errors
    /// When the API server rejects the object, with its message.
    pub fn dry_run(&self, yaml: &str) -> Result<Value> {
        let mut command = self.cluster.kubernetes.kubectl();
        let create = ["create", "--dry-run=server", "-o", "json", "-f", "-"];
        command
            .args(["-n", &self.name])
            .args(create)
            .stdin(process::input(yaml.as_bytes())?);
        Ok(serde_json::from_str(&stdout(command)?)?)
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
