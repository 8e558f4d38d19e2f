//! Traces in the CSV format of openb, plain or compressed by gzip.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use flate2::read::MultiGzDecoder;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// A node of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct TraceNode {
    /// Name.
    #[serde(rename = "sn")]
    pub name: String,
    /// CPUs in thousandths.
    pub cpu_milli: u64,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Number of GPUs.
    #[serde(rename = "gpu")]
    pub gpus: u64,
    /// Model of the GPUs.
    pub model: String,
}

/// A pod of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct TracePod {
    /// Name.
    pub name: String,
    /// CPUs in thousandths.
    pub cpu_milli: u64,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Number of GPUs.
    #[serde(rename = "num_gpu")]
    pub gpus: u64,
    /// Part of each GPU in thousandths; 1,000 is a whole GPU.
    pub gpu_milli: u64,
    /// Allowed models, joined by `|`; empty for any.
    #[serde(default)]
    pub gpu_spec: String,
}

impl TracePod {
    /// Returns the requested GPUs, in thousandths of a GPU.
    #[must_use]
    pub const fn requested_milli(&self) -> u64 {
        self.gpus * self.gpu_milli
    }

    /// Returns the allowed models; none means any.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.gpu_spec.split('|').filter(|model| !model.is_empty())
    }
}

/// Reads the nodes of a trace.
///
/// # Errors
/// When the file cannot be read or has another format.
pub fn read_nodes(path: &Path) -> Result<Vec<TraceNode>> {
    read(path)
}

/// Reads the pods of a trace, sorted by name.
///
/// # Errors
/// When the file cannot be read or has another format.
pub fn read_pods(path: &Path) -> Result<Vec<TracePod>> {
    let mut pods: Vec<TracePod> = read(path)?;
    pods.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(pods)
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    let is_compressed = path.extension().is_some_and(|extension| extension == "gz");
    let rows: Box<dyn Read> = match is_compressed {
        true => Box::new(MultiGzDecoder::new(file)),
        false => Box::new(file),
    };
    let mut reader = csv::Reader::from_reader(rows);
    let rows = reader.deserialize().collect::<Result<_, _>>();
    rows.with_context(|| format!("read {}", path.display()))
}
