//! Cost of the agent, and the file of measurements of `cargo xtask bench memory` (`DRAVA_FIGURES`).

use std::fs;
use std::time::Duration;

use gpu_node::simulated::prepare_equal_claims;
use gpu_tenants::{TestBed, library};
use serde_json::Value;
use simulator_machine::description::H200X8;

use crate::node::{TestNode, eventually};

/// Prints a measurement and appends it to the file of `DRAVA_FIGURES`, if set.
pub(crate) fn report(measurement: &Value) {
    use std::io::Write as _;
    println!("{measurement}");
    if let Some(file) = std::env::var_os("DRAVA_FIGURES") {
        let file = fs::File::options().append(true).create(true).open(file);
        writeln!(file.unwrap(), "{measurement}").unwrap();
    }
}

#[test]
fn reads_idle_claims_less_than_once_per_second() {
    const CLAIMS_PER_GPU: u32 = 64;
    let node = TestNode::on(TestBed::with_machine(library::shipped().unwrap(), H200X8).unwrap());
    prepare_equal_claims(&node.node, &node.test_bed, CLAIMS_PER_GPU).unwrap();
    let claims = 8 * CLAIMS_PER_GPU;
    let agent = node.agent_process();
    eventually("a rate for the last claim", || {
        node.page(claims - 1).rate_us_per_s
    });
    // In steady state.
    std::thread::sleep(Duration::from_secs(3));
    let before = agent.used().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let (_, reads) = agent.used().unwrap().since(before);
    assert!(reads < f64::from(claims), "{reads} reads per second");
}
