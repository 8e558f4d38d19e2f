//! Groups of pods: those of a Job or Deployment, by label.

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::{Namespace, wait};

impl Namespace<'_> {
    /// Returns the names of the pods with this label that run and are not being deleted.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn running_pods(&self, label: (&str, &str)) -> Result<Vec<String>> {
        let is_running = |pod: &&Value| {
            pod["metadata"]["labels"][label.0] == label.1
                && pod["metadata"]["deletionTimestamp"].is_null()
                && pod["status"]["phase"] == "Running"
        };
        let pods = self.list("pods")?;
        let names = pods.iter().filter(is_running);
        Ok(names
            .filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned))
            .collect())
    }

    /// Waits until `count` pods with this label run, and returns their names.
    ///
    /// # Errors
    /// When they do not run in time.
    pub fn wait_for_pods(&self, label: (&str, &str), count: usize) -> Result<Vec<String>> {
        let (name, value) = label;
        wait(&format!("{count} pods with {name}={value} run"), || {
            let pods = self.running_pods(label)?;
            Ok((pods.len() == count).then_some(pods))
        })
    }

    /// Waits for an event with this text on a pod whose name begins with `prefix` and a hyphen.
    ///
    /// # Errors
    /// When there is none in time.
    pub fn wait_for_reason(&self, prefix: &str, text: &str) -> Result<()> {
        wait(&format!("event {text:?} on a pod of {prefix}"), || {
            let events = self.list("events")?;
            let found = events.iter().any(|event| {
                let object = event["involvedObject"]["name"].as_str().unwrap_or_default();
                let message = event["message"].as_str().unwrap_or_default();
                object.starts_with(&format!("{prefix}-")) && message.contains(text)
            });
            Ok(found.then_some(()))
        })
    }

    /// Checks that no pod with this label runs.
    ///
    /// # Errors
    /// When one does.
    pub fn has_no_running_pods(&self, label: (&str, &str)) -> Result<()> {
        let pods = self.running_pods(label)?;
        ensure!(pods.is_empty(), "pods with {label:?} run: {pods:?}");
        Ok(())
    }
}
