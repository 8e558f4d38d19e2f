//! A node whose GPUs are a simulated machine.

use anyhow::{Context as _, Result};
use drava_api::config::Enforcement;
use drava_vgpu_abi::{ComputePolicy, Cores, Limits};
use gpu_tenants::{Tenant, TestBed, library};

use crate::Node;

/// Returns the UUID of a GPU.
///
/// # Errors
/// If the machine has no such GPU.
pub fn uuid(test_bed: &TestBed, gpu: usize) -> Result<String> {
    Ok(test_bed.machine().gpu(gpu)?.uuid.to_string())
}

/// Starts a process in the container of a claim, with a context on a GPU.
///
/// # Errors
/// If the process cannot be started.
pub fn start_tenant(node: &Node, test_bed: &TestBed, gpu: usize, claim: u32) -> Result<Tenant> {
    let library = library::shipped()?;
    let tenant = test_bed.tenant_with(None, "dlsym", |command| {
        command
            .env("CUDA_VISIBLE_DEVICES", gpu.to_string())
            .env("LD_PRELOAD", library)
            .env("DRAVA_RUN_DIR", node.container(claim));
    })?;
    node.add_process(tenant.pid(), claim)?;
    Ok(tenant)
}

/// Prepares claims with equal parts of each GPU, numbered from 0 in the order of the GPUs.
///
/// # Errors
/// If a file cannot be written.
pub fn prepare_equal_claims(node: &Node, test_bed: &TestBed, per_gpu: u32) -> Result<()> {
    let machine = test_bed.machine().status()?;
    let limits = Limits {
        cores: Cores::new(100 / per_gpu).context("at most 100 claims of a GPU")?,
        compute_policy: ComputePolicy::Balance,
        ..Limits::memory(1 << 30)
    };
    for (index, gpu) in (0..).zip(&machine.gpus) {
        let uuid = gpu.uuid.to_string();
        for claim in index * per_gpu..(index + 1) * per_gpu {
            node.prepare(claim, &[(&uuid, claim)], &limits, Enforcement::Report)?;
        }
    }
    Ok(())
}
