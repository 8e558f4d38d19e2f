//! Two processes of the node driver on the records of one node: the present build, and one that stands for a later build with
//! a newer record version.

use std::fs;
use std::path::PathBuf;

use drava_fake_kubelet::{FakeKubelet, Plugin};
use simulator_machine::description::H200X8;
use simulator_machine::testing::Machine;

use crate::api_server::{ApiServer, eventually};
use crate::cluster::{kubelet_claim, prepare_error};
use crate::driver_process::DriverProcess;
use crate::fixture::Allocated::Share;
use crate::fixture::{NODE, claim};
use crate::namespace::in_mount_namespace;
use crate::node::{TestNode, lacks_device_files, page_of, record_of, spec_of};

const VERSION: &str = "DRAVA_TEST_RECORD_VERSION";

/// Returns record and CDI spec of a claim, whose limits page must exist; the node agent changes the page.
fn files(node: &TestNode, number: u32) -> [String; 2] {
    assert!(page_of(node, number).exists());
    [record_of, spec_of].map(|path| fs::read_to_string(path(node, number)).unwrap())
}

/// Returns whether the record of a claim has the version.
fn has_version(node: &TestNode, number: u32, version: u32) -> bool {
    let record = fs::read_to_string(record_of(node, number)).unwrap();
    record.contains(&format!("{{\"version\":{version},"))
}

/// Registers the instance with this pod UID. The fake kubelet connects to the first in alphabetical order.
async fn register(kubelet: &FakeKubelet, pod_uid: &str) -> Plugin {
    let is_of_pod = |path: &PathBuf| path.to_string_lossy().contains(pod_uid);
    eventually("the socket of the instance", || {
        kubelet
            .registry()
            .unwrap()
            .iter()
            .any(is_of_pod)
            .then_some(())
    })
    .await;
    let plugin = kubelet.register("gpu.drava.dev").await.unwrap();
    let endpoint = &plugin.info.endpoint;
    assert!(endpoint.contains(&format!("dra-{pod_uid}")), "{endpoint}");
    plugin
}

#[test]
fn processes_leave_newer_records_alone() {
    if lacks_device_files() {
        return;
    }
    in_mount_namespace(
        "record_versions::processes_leave_newer_records_alone",
        || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(run_two_versions());
        },
    );
}

async fn run_two_versions() {
    let machine = Machine::start(H200X8).unwrap();
    let mut node = TestNode::new();
    node.paths.driver_root_mount = machine.root().to_owned();
    let kubelet = FakeKubelet::start(&node.paths.kubelet_dir).unwrap();
    let api = ApiServer::start(NODE).await;
    for (number, gpu) in [(1, 0), (2, 1), (3, 2), (4, 3), (5, 1)] {
        api.put_claim(&claim(number, &[Share(gpu, "1Gi", "0")]));
    }
    let start = |pod_uid, version| {
        let variables = [("POD_UID", pod_uid), (VERSION, version)];
        DriverProcess::start(&node, &api, &variables)
    };
    let present = start("present", "1");
    let of_present = register(&kubelet, "present").await;
    present.await_ready().await;
    of_present.prepare_one(&kubelet_claim(1)).await.unwrap();
    let first = files(&node, 1);

    // The later build uses the record of the present one, and leaves it as it is.
    let later = start("later", "2");
    let of_later = register(&kubelet, "later").await;
    later.await_ready().await;
    of_later.prepare_one(&kubelet_claim(1)).await.unwrap();
    assert_eq!(files(&node, 1), first);
    of_later.prepare_one(&kubelet_claim(2)).await.unwrap();
    let second = files(&node, 2);
    assert!(has_version(&node, 1, 1) && has_version(&node, 2, 2));

    // The present build changes nothing of the later one's claim, and prepares no claim on its GPU.
    let reason = "format version 2, this build reads version 1";
    for number in [2, 5] {
        let error = prepare_error(&of_present, number).await;
        assert!(error.contains(reason), "{error}");
    }
    let unprepared = of_present.unprepare_one(&kubelet_claim(2)).await;
    let error = unprepared.unwrap_err().to_string();
    assert!(error.contains(reason), "{error}");
    of_present.prepare_one(&kubelet_claim(3)).await.unwrap();
    assert!(has_version(&node, 3, 1));
    assert_eq!((files(&node, 1), files(&node, 2)), (first, second.clone()));
    let readiness = present.await_readiness(reason).await;
    assert!(readiness.contains("downgrade"), "{readiness}");

    // After a downgrade the later process serves until it ends.
    drop(present);
    later.await_active().await;
    let downgraded = start("downgraded", "1");
    downgraded
        .await_readiness("another instance serves this node until this instance can: records: ")
        .await;
    register(&kubelet, "later").await;
    drop(later);
    let of_downgraded = register(&kubelet, "downgraded").await;
    downgraded.await_readiness(reason).await;
    of_downgraded.prepare_one(&kubelet_claim(4)).await.unwrap();
    let unprepared = of_downgraded.unprepare_one(&kubelet_claim(2)).await;
    unprepared.unwrap_err();
    assert_eq!(files(&node, 2), second);

    // The later build removes all.
    drop(downgraded);
    let upgraded = start("again", "2");
    let of_upgraded = register(&kubelet, "again").await;
    upgraded.await_ready().await;
    for number in 1..=4 {
        let claim = kubelet_claim(number);
        of_upgraded.unprepare_one(&claim).await.unwrap();
    }
    let left = fs::read_dir(node.layout().claims()).unwrap();
    assert_eq!(left.count(), 0);
}
