//! The metrics of drava's pods.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};

use crate::{TestCluster, wait};

/// Port of the node driver's exporter.
pub const DRIVER_PORT: u16 = 9394;

impl TestCluster {
    /// Returns the metrics of a pod of this component.
    ///
    /// # Errors
    /// When there is none, or when it does not answer.
    pub fn metrics(&self, component: &str, port: u16) -> Result<String> {
        let selector = format!("app.kubernetes.io/component={component}");
        let pods = self.get(&["pods", "-n", "drava-system", "-l", &selector])?;
        let pods = pods["items"].as_array().context("pods")?;
        let running = pods
            .iter()
            .find(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        let name = running.and_then(|pod| pod["metadata"]["name"].as_str());
        let name = name.with_context(|| format!("no pod of {component}"))?;
        let path = format!("/api/v1/namespaces/drava-system/pods/{name}:{port}/proxy/metrics");
        self.kubectl(["get", "--raw", &path])
    }

    /// Waits until the node driver has read each GPU, for whose events it registers before. A test before may have
    /// restarted it, or released NVML.
    ///
    /// # Errors
    /// When a GPU is not read in time.
    pub fn gpus_are_watched(&self) -> Result<()> {
        let start = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        wait("a reading of each GPU", || {
            let text = self.metrics("driver", DRIVER_PORT)?;
            let lines = text.lines();
            let read = lines.filter(|line| line.starts_with("drava_gpu_sample_timestamp_seconds{"));
            let times: Option<Vec<f64>> = read
                .map(|line| line.rsplit(' ').next()?.parse().ok())
                .collect();
            let times = times.context("a time of a reading")?;
            let is_new = !times.is_empty() && times.iter().all(|time| *time > start);
            Ok(is_new.then_some(()))
        })
    }
}
