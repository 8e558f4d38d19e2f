//! Stop of the driver: its last writes, and calls that do not return.

use std::fs;
use std::os::unix::fs::OpenOptionsExt as _;

use drava_dra_driver::driver::Config;
use drava_vgpu_abi::page;
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};

use crate::api_server::{ApiServer, eventually, poll};
use crate::cluster::{TestCluster, free_address, get};
use crate::driver_process::DriverProcess;
use crate::fixture::NODE;
use crate::namespace::in_mount_namespace;
use crate::node::{TestNode, lacks_device_files, page_of, record_of};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_includes_the_last_writes_of_the_agent() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let listen = free_address();
    let config = Config {
        listen,
        ..cluster.config()
    };
    let running = cluster.start_with(config, cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    cluster.prepare_shares(&plugin, &[1]).await;
    poll("the agent follows the share", async || {
        let metrics = get(listen, "/metrics").await;
        let is_followed = metrics.contains("\ndrava_share_memory_used_bytes{");
        is_followed.then_some(()).ok_or(metrics)
    })
    .await;
    let path = page_of(&cluster.node, 1);
    let limits = || page::decode(&fs::read(&path).unwrap()).unwrap().spec.limits;
    // What only a running agent may grant.
    let mut bytes = fs::read(&path).unwrap();
    let granted = drava_vgpu_abi::Limits {
        driver_surplus_bytes: 1 << 20,
        ..limits()
    };
    for write in page::update(&bytes, &granted).unwrap() {
        let start = usize::try_from(write.offset()).unwrap();
        bytes[start..start + write.bytes().len()].copy_from_slice(write.bytes());
    }
    fs::write(&path, &bytes).unwrap();
    assert_eq!(limits(), granted);
    running.stop().await;
    assert_eq!(limits().driver_surplus_bytes, 0);
}

/// A call of NVML, or of a file system that hangs, does not end with the driver.
#[test]
fn process_ends_while_a_call_does_not_return() {
    in_mount_namespace("stop::process_ends_while_a_call_does_not_return", || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(stop_during_a_call());
    });
}

async fn stop_during_a_call() {
    let node = TestNode::new();
    fs::create_dir_all(node.layout().claims()).unwrap();
    let record = record_of(&node, 1);
    mknodat(CWD, &record, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let api = ApiServer::start(NODE).await;
    let mut driver = DriverProcess::start(&node, &api, &[]);
    // Fails without a reader, which then waits for content.
    let mut writer = fs::OpenOptions::new();
    let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
    writer.write(true).custom_flags(nonblocking);
    let _writer = eventually("a reader of the record", || writer.open(&record).ok()).await;
    assert!(driver.terminate().await.success(), "{}", driver.log());
}
