//! The node agent with two shares of the first GPU.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, anyhow};
use serde::Deserialize;
use tempfile::TempDir;

use super::setup::{Running, Setup, Share};

/// Last line of `gpu-node`.
#[derive(Debug, Deserialize)]
struct Found {
    findings: Vec<String>,
}

/// First line of `gpu-node`.
#[derive(Debug, Deserialize)]
struct Prepared {
    shares: Vec<PreparedShare>,
}

#[derive(Debug, Deserialize)]
struct PreparedShare {
    container: PathBuf,
    region: PathBuf,
}

/// What a suspension or a resume took.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Moved {
    pub(super) seconds: f64,
    /// The calls that copy memory.
    pub(super) copying_seconds: f64,
    pub(super) bytes: u64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Followed {
    Moved(Moved),
    Failed(String),
}

/// The node agent with two shares.
pub(super) struct Node {
    program: Running,
    pub(super) shares: [Share; 2],
    _directory: TempDir,
}

/// Memory of two shares, bytes.
pub(super) struct Memory {
    /// Guarantee of each.
    pub(super) share_bytes: u64,
    /// What the first may use of what the second does not use.
    pub(super) limit_bytes: u64,
    /// What both can get together.
    pub(super) allocatable_bytes: u64,
}

impl Memory {
    /// Returns shares that use what they are guaranteed.
    pub(super) const fn plain(share_bytes: u64) -> Self {
        Self {
            share_bytes,
            limit_bytes: share_bytes,
            allocatable_bytes: 0,
        }
    }
}

impl Node {
    /// Starts the agent with two shares of the first GPU, of these percentages of its time.
    pub(super) fn start(setup: &Setup, cores: [u32; 2], memory_bytes: u64) -> Result<Self> {
        Self::with_memory(setup, cores, &Memory::plain(memory_bytes))
    }

    /// The same with memory that is lent.
    pub(super) fn with_memory(
        setup: &Setup,
        [left, right]: [u32; 2],
        memory: &Memory,
    ) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let mut command = Command::new(&setup.node);
        command
            .arg("--directory")
            .arg(directory.path())
            .arg("--driver-root")
            .arg(setup.driver_root())
            .args(["--gpu", &setup.gpu()?.gpu()?])
            .args(["--memory-bytes", &memory.share_bytes.to_string()])
            .args(["--cores", &format!("{left},{right}")]);
        if memory.limit_bytes > memory.share_bytes {
            command
                .args(["--limit-bytes", &memory.limit_bytes.to_string()])
                .args(["--allocatable-bytes", &memory.allocatable_bytes.to_string()]);
        }
        let mut program = Running::start(command)?;
        let prepared: Prepared = program.json()?;
        let shares = prepared.shares.into_iter();
        let shares = shares.map(|share| Share::of_node(share.container, share.region));
        Ok(Self {
            program,
            shares: two(shares.collect())?,
            _directory: directory,
        })
    }

    /// Reports the process of each share to the agent.
    pub(super) fn add_tenants(&mut self, pids: &[u32]) -> Result<()> {
        let mut tenants = (1..).zip(pids);
        tenants.try_for_each(|(number, pid)| self.program.send(&format!("{number} {pid}")))
    }

    /// Adds memory to a share, as a companion does.
    pub(super) fn grow(&mut self, share: u32, bytes: u64) -> Result<()> {
        self.program.send(&format!("grow {share} {bytes}"))
    }

    /// Suspends a share, by its number from 1.
    pub(super) fn suspend(&mut self, share: u32) -> Result<Moved> {
        self.program.send(&format!("{share} suspend"))?;
        self.moved()
    }

    /// Resumes a share.
    pub(super) fn resume(&mut self, share: u32) -> Result<Moved> {
        self.program.send(&format!("{share} resume"))?;
        self.moved()
    }

    fn moved(&mut self) -> Result<Moved> {
        match self.program.json()? {
            Followed::Moved(moved) => Ok(moved),
            Followed::Failed(why) => Err(anyhow!("{why}")),
        }
    }

    /// Reports a process of a share to the agent.
    pub(super) fn add_tenant(&mut self, share: u32, pid: u32) -> Result<()> {
        self.program.send(&format!("{share} {pid}"))
    }

    /// Ends the agent, and returns what it found.
    pub(super) fn end(self) -> Result<Vec<String>> {
        let found: Found = serde_json::from_str(&self.program.end()?)?;
        Ok(found.findings)
    }

    /// GPU time in the account of each share, µs.
    pub(super) fn accounts(&self) -> Result<Vec<u64>> {
        let accounts = self.shares.iter();
        accounts.map(|share| Ok(share.account()?.1)).collect()
    }
}

pub(super) fn two<T>(values: Vec<T>) -> Result<[T; 2]> {
    let count = values.len();
    values
        .try_into()
        .map_err(|_| anyhow!("{count} tenants instead of two"))
}
