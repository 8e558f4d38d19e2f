//! CPU time and reading system calls of the agent.

use std::time::Duration;

use anyhow::Result;
use gpu_node::{eventually, simulated};
use gpu_tenants::{Tenant, TestBed, library};
use serde_json::json;
use simulator_machine::description::H200X8;

use crate::node::BenchNode;
use crate::report;

const GPUS: u32 = 8;

/// Time after which the agent is in steady state.
const SETTLE: Duration = Duration::from_secs(10);

/// Measures 64 claims of each GPU without processes, and 8 with a process each.
pub(crate) fn measure(length: Duration) -> Result<()> {
    cost(64, false, length)?;
    cost(8, true, length)
}

fn cost(claims_per_gpu: u32, is_busy: bool, length: Duration) -> Result<()> {
    let node = BenchNode::on(TestBed::with_machine(library::shipped()?, H200X8)?)?;
    simulated::prepare_equal_claims(&node.node, &node.test_bed, claims_per_gpu)?;
    let claims = GPUS * claims_per_gpu;
    let mut busy: Vec<Tenant> = Vec::new();
    for claim in (0..claims).filter(|_| is_busy) {
        let mut tenant = node.tenant((claim / claims_per_gpu) as usize, claim)?;
        tenant.ok("start kernel ns=20000000 depth=2")?;
        busy.push(tenant);
    }
    let agent = node.agent()?;
    eventually("a rate for the last claim", || {
        node.node.limits(claims - 1).ok()?.rate_us_per_s
    })?;
    std::thread::sleep(SETTLE);
    let before = agent.used()?;
    std::thread::sleep(length);
    let (percent, reads) = agent.used()?.since(before);
    report(&json!({
        "figure": "agent", "gpus": GPUS, "claims": claims, "busy": busy.len(),
        "percentOfACore": percent, "readsPerSecond": reads,
    }));
    Ok(())
}
