//! Durable writes of the shipped program.

use std::path::Path;

use drava_fake_kubelet::FakeKubelet;
use simulator_machine::description::H200X8;
use simulator_machine::testing::Machine;

use crate::api_server::ApiServer;
use crate::cluster::kubelet_claim;
use crate::driver_process::DriverProcess;
use crate::fixture::Allocated::Share;
use crate::fixture::{NODE, claim};
use crate::namespace::in_mount_namespace;
use crate::node::{TestNode, lacks_device_files};

#[test]
fn prepare_makes_one_durable_write() {
    if lacks_device_files() {
        return;
    }
    in_mount_namespace("durability::prepare_makes_one_durable_write", || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(count_writes());
    });
}

async fn count_writes() {
    let machine = Machine::start(H200X8).unwrap();
    let mut node = TestNode::new();
    node.paths.driver_root_mount = machine.root().to_owned();
    let kubelet = FakeKubelet::start(&node.paths.kubelet_dir).unwrap();
    let api = ApiServer::start(NODE).await;
    api.put_claim(&claim(1, &[Share(0, "1Gi", "0"), Share(1, "1Gi", "0")]));
    let log = [("RUST_LOG", "drava_dra_driver::node::files=trace")];
    let driver = DriverProcess::start(&node, &api, &log);
    let plugin = kubelet.register("gpu.drava.dev").await.unwrap();
    driver.await_ready().await;
    // The artifacts are installed when the driver starts.
    let started = driver.log().len();
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    // The content of the record, and its name in the directory; a repeated call finds both.
    let records = node.layout().claims();
    let written = synced(&driver.log()[started..]);
    assert_eq!(written.len(), 2, "{written:?}");
    assert_eq!(Path::new(&written[0]).parent(), Some(records.as_path()));
    assert_eq!(Path::new(&written[1]), records);
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    assert_eq!(synced(&driver.log()[started..]), written);
}

/// Returns the paths of the durable writes in a log.
fn synced(log: &str) -> Vec<String> {
    let lines = log.lines().filter(|line| line.contains("synced to disk"));
    let path = |line: &str| line.split_once("path=").unwrap().1.to_owned();
    lines.map(path).collect()
}
