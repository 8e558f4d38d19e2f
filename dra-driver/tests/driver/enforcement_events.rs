//! Events and conditions for findings of the node agent.

use std::fs::OpenOptions;

use drava_api::metric::driver as table;
use drava_dra_driver::driver::Config;
use drava_nvml::{Process, ProcessKind, ProcessMemory};
use serde_json::json;

use crate::api_server::{eventually, poll};
use crate::cluster::{TestCluster, free_address, get, kubelet_claim};
use crate::fixture::Allocated::{Share, Whole};
use crate::fixture::{GPU_UUIDS, claim, claim_ref, share_id};
use crate::metrics::samples;
use crate::node::lacks_device_files;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_damaged_region_until_repaired() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    cluster.prepare_shares(&plugin, &[1, 2]).await;
    let region_of = |number: u32| {
        let mut file = OpenOptions::new();
        file.write(true)
            .open(cluster.usage_dir(number).join("region"))
            .unwrap()
    };
    let region = region_of(1);
    let size = region.metadata().unwrap().len();
    region.set_len(100).unwrap();

    let reported = |claim: &str| -> Vec<String> {
        let events = cluster.api.events();
        events
            .into_iter()
            .filter(|(reason, note)| reason == "UsageRegionDamaged" && note.contains(claim))
            .map(|(_, note)| note)
            .collect()
    };
    let note = eventually("an event of claim 1", || reported("claim-1").pop()).await;
    assert!(
        note.contains("default/claim-1") && note.contains("100 bytes"),
        "{note}"
    );
    assert!(note.contains("restart the pod"), "{note}");
    let enforced = |claim: &str| cluster.api.condition(claim, "Enforced");
    let damaged = || enforced("claim-1").filter(|condition| condition["status"] == "False");
    assert_eq!(
        eventually("a condition of claim 1", damaged).await["reason"],
        "UsageRegionDamaged"
    );

    region.set_len(size).unwrap();
    let cleared = || enforced("claim-1").filter(|condition| condition["status"] == "True");
    eventually("a cleared condition", cleared).await;
    assert_eq!(enforced("claim-2").unwrap()["status"], "True");

    // Events are published in order: a second event of claim 1 would precede the event of claim 2.
    region_of(2).set_len(100).unwrap();
    eventually("an event of claim 2", || reported("claim-2").pop()).await;
    assert_eq!(reported("claim-1").len(), 1);
}

/// A privileged container has all GPUs of its node. The pod of the first claim also has the second one, so that its use of that
/// GPU is right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_use_of_gpu_of_other_pod() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let config = Config {
        listen: free_address(),
        ..cluster.config()
    };
    let address = config.listen;
    let running = cluster.start_with(config, cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    for (number, allocated, pod) in [
        (1, Share(0, "8Gi", "30"), "owner"),
        (2, Whole(1), "owner"),
        (3, Share(0, "8Gi", "30"), "stranger"),
    ] {
        let mut claim = claim(number, &[allocated]);
        let consumer = json!({"resource": "pods", "name": pod, "uid": pod});
        let consumer = serde_json::from_value(consumer).unwrap();
        claim.status.as_mut().unwrap().reserved_for = Some(vec![consumer]);
        cluster.api.put_claim(&claim);
        plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
    }
    let listed = [(7001, 1), (7003, 3)].map(|(pid, number)| {
        cluster.node.start_process(pid, number);
        Process {
            pid,
            memory: ProcessMemory::Used { bytes: 1 << 30 },
            gpu_instance: None,
            compute_instance: None,
            kind: ProcessKind::Compute,
        }
    });
    cluster.gpus.set_processes(GPU_UUIDS[1], listed.to_vec());

    let events = || -> Vec<(String, String)> {
        let events = cluster.api.events_with_kind().into_iter();
        events
            .filter(|(reason, ..)| reason == "OtherGpuUsed")
            .map(|(_, note, kind)| (kind, note))
            .collect()
    };
    let found = eventually("events of claim and pod", || {
        Some(events()).filter(|found| found.len() == 2)
    })
    .await;
    let mut kinds: Vec<&str> = found.iter().map(|(kind, _)| kind.as_str()).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["Pod", "ResourceClaim"]);
    let note = &found[0].1;
    let gpu = GPU_UUIDS[1];
    let expected = format!(
        "claim {} (device gpu-0-vgpu): process 7003 (train) uses GPU {gpu}, which the claim does not have; no limit is \
         enforced there; a privileged container and a volume of /dev have all GPUs of the node: run the pod without them, or \
         request the GPU in a claim",
        claim_ref(3)
    );
    assert_eq!(*note, expected);
    let used = || {
        let condition = cluster.api.condition("claim-3", "Enforced");
        condition.filter(|condition| condition["status"] == "False")
    };
    assert_eq!(
        eventually("a condition", used).await["reason"],
        "OtherGpuUsed"
    );
    let labels = ["default", "claim-3", &share_id(3, 0), "OtherGpuUsed"].map(str::to_owned);
    poll("the metric", async || {
        let text = get(address, "/metrics").await;
        let found = samples(&text, &table::SHARE_VIOLATION_INFO);
        if found.keys().eq([&labels.to_vec()]) {
            Ok(())
        } else {
            Err(format!("{found:?}"))
        }
    })
    .await;
    // The process of the owner was confirmed at the same time as that of the stranger.
    assert_eq!(
        cluster.api.condition("claim-1", "Enforced").unwrap()["status"],
        "True"
    );

    cluster.gpus.set_processes(gpu, Vec::new());
    let cleared = || {
        let condition = cluster.api.condition("claim-3", "Enforced");
        condition.filter(|condition| condition["status"] == "True")
    };
    eventually("a cleared condition", cleared).await;
}
