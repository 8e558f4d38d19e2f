//! A node with a simulated machine and the agent in a process of its own.

use anyhow::{Context as _, Result};
use drava_api::config::Enforcement;
use drava_vgpu_abi::{ComputePolicy, Cores, Limits, Priority};
use gpu_node::{AgentProcess, Node, simulated};
use gpu_tenants::{Tenant, TestBed, library};

/// A node.
pub(crate) struct BenchNode {
    pub(crate) test_bed: TestBed,
    pub(crate) node: Node,
    _directory: tempfile::TempDir,
}

impl BenchNode {
    /// Creates a node with the default machine.
    pub(crate) fn new() -> Result<Self> {
        Self::on(TestBed::new(library::shipped()?)?)
    }

    /// Creates a node with this machine.
    pub(crate) fn on(test_bed: TestBed) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        Ok(Self {
            test_bed,
            node: Node::create(directory.path())?,
            _directory: directory,
        })
    }

    /// Prepares a claim with one share of a GPU.
    pub(crate) fn prepare(&self, gpu: usize, claim: u32, limits: &Limits) -> Result<()> {
        let uuid = simulated::uuid(&self.test_bed, gpu)?;
        let shares = [(uuid.as_str(), claim)];
        self.node
            .prepare(claim, &shares, limits, Enforcement::Report)
    }

    /// Starts a process of a claim on a GPU.
    pub(crate) fn tenant(&self, gpu: usize, claim: u32) -> Result<Tenant> {
        simulated::start_tenant(&self.node, &self.test_bed, gpu, claim)
    }

    /// Starts the agent.
    pub(crate) fn agent(&self) -> Result<AgentProcess> {
        AgentProcess::start(&self.node, self.test_bed.machine().root(), &[])
    }
}

/// Returns the limits of a share with 1 GiB.
pub(crate) fn limits(policy: ComputePolicy, percent: u32, priority: i32) -> Result<Limits> {
    Ok(Limits {
        cores: Cores::new(percent).context("a share has at most 100%")?,
        compute_policy: policy,
        priority: Priority::new(priority).context("a priority out of range")?,
        ..Limits::memory(1 << 30)
    })
}
