//! Answers to kubelet and writes to the API server for claims.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use drava_dra_driver::driver::Config;
use serde_json::json;

use crate::api_server::eventually;
use crate::cluster::{TestCluster, kubelet_claim, prepare_error};
use crate::fixture::Allocated::{Share, Whole};
use crate::fixture::{GPU_UUIDS, POOL, claim, claim_ref, claim_with, config, share_id};
use crate::node::lacks_device_files;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prepares_idempotently_and_unprepares_completely() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    assert_eq!(
        plugin.info.supported_versions,
        [
            "v1.DRAPlugin",
            "v1.DRAResourceHealth",
            "v1alpha1.DRAResourceHealth"
        ]
    );
    cluster
        .api
        .put_claim(&claim(1, &[Share(0, "8Gi", "30"), Whole(1)]));
    let devices = plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let uid = claim_ref(1).uid;
    let [share, whole] = devices.as_slice() else {
        panic!("{devices:?}")
    };
    assert_eq!(
        (share.request_names.as_slice(), share.pool_name.as_str()),
        (["gpu".to_owned()].as_slice(), POOL)
    );
    assert_eq!(share.share_id, Some(share_id(1, 0)));
    assert_eq!(
        share.cdi_device_ids,
        [
            "gpu.drava.dev/base=share-compat".to_owned(),
            format!(
                "gpu.drava.dev/claim={uid}-gpu-gpu-0-vgpu-{}",
                share_id(1, 0)
            )
        ]
    );
    assert_eq!(
        (whole.device_name.as_str(), &whole.share_id),
        ("gpu-1", &None)
    );
    assert_eq!(
        whole.cdi_device_ids,
        [
            "gpu.drava.dev/base=whole-compat".to_owned(),
            format!("gpu.drava.dev/claim={uid}-gpu1-gpu-1")
        ]
    );
    let spec = fs::read(cluster.spec_file(1)).unwrap();
    assert_eq!(
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap(),
        devices
    );
    assert_eq!(fs::read(cluster.spec_file(1)).unwrap(), spec);

    for _ in 0..2 {
        plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    }
    assert_eq!(cluster.node.claim_state(), (Vec::new(), Default::default()));
    assert!(
        fs::read_dir(cluster.node.layout().locks())
            .unwrap()
            .all(|lock| {
                !lock
                    .unwrap()
                    .file_name()
                    .to_string_lossy()
                    .starts_with("claim-")
            })
    );

    running.stop().await;
    assert_eq!(
        cluster.kubelet.registry().unwrap(),
        Vec::<PathBuf>::new(),
        "sockets remain after a clean stop"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_errors_per_claim_with_field_and_action() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "30")]));
    cluster.api.put_claim(&claim_with(
        2,
        &[Share(0, "8Gi", "0")],
        &config("FromClaim", &json!({"color": "red"})),
    ));
    cluster.api.put_claim(&claim(3, &[Share(0, "8Gi", "101")]));
    cluster.api.put_claim(&claim(4, &[Share(5, "8Gi", "0")]));
    let claims = [1, 2, 3, 4, 5].map(kubelet_claim);
    let outcomes = plugin.prepare(&claims).await.unwrap();
    assert!(outcomes[&claims[0].uid].is_ok());
    for (number, text) in [
        (2, "request gpu: config field color: unknown field `color`"),
        (
            3,
            "consumedCapacity.cores of device gpu-0-vgpu is 101, expected an integer from 0 to 100",
        ),
        (4, "device gpu-5-vgpu is not on this node"),
        (5, "not found in the API server"),
    ] {
        let error = outcomes[&kubelet_claim(number).uid].as_ref().unwrap_err();
        assert!(
            error.contains(text) && error.contains(&format!("default/claim-{number}")),
            "{error}"
        );
    }
    let mut hostile = kubelet_claim(6);
    hostile.uid = "../../etc/passwd".to_owned();
    assert!(
        plugin
            .prepare_one(&hostile)
            .await
            .unwrap_err()
            .to_string()
            .contains("invalid claim UID")
    );
    assert!(plugin.unprepare_one(&hostile).await.is_err());

    cluster.api.set_down(true);
    let error = prepare_error(&plugin, 7).await;
    assert!(
        error.contains("cannot get the claim from the API server"),
        "{error}"
    );
    // Unprepare works without the API server.
    plugin.unprepare_one(&claims[0]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_overcommit_by_concurrent_claims() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    let claims = [1, 2].map(kubelet_claim);
    for number in [1, 2] {
        cluster
            .api
            .put_claim(&claim(number, &[Share(0, "50Gi", "0")]));
    }
    let (first, second) = tokio::join!(
        plugin.prepare_one(&claims[0]),
        plugin.prepare_one(&claims[1])
    );
    let rejected: Vec<_> = [first, second]
        .into_iter()
        .filter_map(Result::err)
        .collect();
    assert_eq!(rejected.len(), 1);
    let error = rejected[0].to_string();
    assert!(
        error.contains("51200 MiB of 80480 MiB is prepared for other claims"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_for_gpu_of_terminating_claim() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let patient = Config {
        release_wait: Duration::from_secs(3600),
        ..cluster.config()
    };
    let running = cluster.start_with(patient, cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    let claims = [1, 2].map(kubelet_claim);
    // After a forced pod deletion, the claim can be deleted, recreated under the same name or deallocated before kubelet
    // has stopped the containers.
    let terminations: [fn(&TestCluster); 3] = [
        |cluster| cluster.api.delete_claim(&claim(1, &[])),
        |cluster| {
            let mut other = claim(1, &[Whole(1)]);
            other.metadata.uid = Some("another-uid".to_owned());
            cluster.api.put_claim(&other);
        },
        |cluster| {
            let mut deallocated = claim(1, &[]);
            deallocated.status = None;
            cluster.api.put_claim(&deallocated);
        },
    ];
    for terminate in terminations {
        for number in [1, 2] {
            cluster.api.put_claim(&claim(number, &[Whole(0)]));
        }
        plugin.prepare_one(&claims[0]).await.unwrap();
        // Claim 1 is still allocated: prepare fails without waiting.
        let error = prepare_error(&plugin, 2).await;
        assert!(error.contains("uses the GPU as a whole GPU"), "{error}");

        terminate(&cluster);
        let reads = || cluster.api.reads("claim-2");
        let before = reads();
        let (prepared, unprepared) = tokio::join!(plugin.prepare_one(&claims[1]), async {
            // Each attempt reads the claim. A second attempt follows a conflict that was not returned to kubelet.
            eventually("a second attempt", || (reads() >= before + 2).then_some(())).await;
            plugin.unprepare_one(&claims[0]).await
        });
        unprepared.unwrap();
        prepared.unwrap();
        plugin.unprepare_one(&claims[1]).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_status_devices_once() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "30")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let devices = eventually("status.devices", || {
        let claim = cluster.api.claim("claim-1");
        claim["status"]["devices"].as_array().cloned()
    });
    let device = devices.await.remove(0);
    assert_eq!(device["data"]["uuid"], GPU_UUIDS[0]);
    assert_eq!(device["data"]["memoryBytes"], json!(8u64 << 30));
    assert_eq!(device["shareID"], json!(share_id(1, 0)));
    let condition = |kind: &str| {
        let conditions = device["conditions"].as_array().unwrap();
        conditions
            .iter()
            .find(|condition| condition["type"] == kind)
            .cloned()
            .unwrap()
    };
    assert_eq!(condition("Prepared")["status"], "True");
    assert_eq!(condition("Enforced")["status"], "True");
    assert!(
        condition("Enforced")["message"]
            .as_str()
            .unwrap()
            .contains("8192 MiB")
    );
    let status_writes = || {
        cluster
            .api
            .writes()
            .iter()
            .filter(|write| write.contains("/status"))
            .count()
    };
    assert_eq!(status_writes(), 1);
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    cluster.api.put_claim(&claim(2, &[Share(0, "8Gi", "30")]));
    plugin.prepare_one(&kubelet_claim(2)).await.unwrap();
    eventually("the status of claim 2", || {
        (status_writes() == 2).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_failed_writes_of_status() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
    cluster.api.fail_statuses(2);
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    eventually("status.devices", || {
        cluster.api.condition("claim-1", "Prepared")
    })
    .await;
    let writes = || {
        let writes = cluster.api.writes().into_iter();
        writes
            .filter(|write| write.ends_with("claim-1/status"))
            .count()
    };
    assert_eq!(writes(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_hmm_where_enforcement_is_required() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    let share = [Share(0, "8Gi", "0")];
    let required = config("FromClass", &json!({"enforcement": "required"}));
    cluster.api.put_claim(&claim(1, &share));
    cluster.api.put_claim(&claim_with(2, &share, &required));
    for (number, reason) in [(1, "Interposed"), (2, "HeterogeneousMemory")] {
        plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
        let name = format!("claim-{number}");
        let condition = eventually("condition", || cluster.api.condition(&name, "Enforced")).await;
        assert_eq!(condition["reason"], reason);
        let message = condition["message"].as_str().unwrap();
        assert_eq!(
            number == 2,
            message.contains("uvm_disable_hmm=1"),
            "{message}"
        );
    }
}
