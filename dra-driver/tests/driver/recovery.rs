//! Recovery of a new driver instance from the files on the node.

use std::fs;
use std::time::{Duration, Instant};

use drava_dra_driver::driver::Config;

use crate::api_server::{CLAIMS, eventually};
use crate::cluster::{TestCluster, inode, kubelet_claim, prepare_error};
use crate::fixture::Allocated::{Share, Whole};
use crate::fixture::{GPU_UUIDS, claim, claim_ref};
use crate::node::{base_of, lacks_device_files, page_of};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restores_running_claims_after_kill_and_reboot() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    cluster.api.put_claim(&found);
    let devices = plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let complete = cluster.node.claim_state();
    let page = complete
        .0
        .iter()
        .find(|name| name.ends_with("/page"))
        .unwrap()
        .clone();
    let page = cluster.node.root.path().join(page);
    let before = inode(&page);

    running.kill().await;
    let (running, plugin) = cluster.start_ready().await;
    assert_eq!(
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap(),
        devices
    );
    assert_eq!(
        (cluster.node.claim_state(), inode(&page)),
        (complete.clone(), before)
    );

    // A reboot empties the run directories; the driver restores them without a call of kubelet.
    running.kill().await;
    cluster.node.tmpfs.reboot();
    fs::remove_file(cluster.spec_file(1)).unwrap();
    let (_running, plugin) = cluster.start_ready().await;
    eventually("restored files", || {
        (cluster.node.claim_state() == complete).then_some(())
    })
    .await;
    assert_eq!(inode(&page), before);
    assert_eq!(
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap(),
        devices
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removes_orphans_at_start() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    for number in [1, 2] {
        let found = claim(number, &[Share(0, "8Gi", "0")]);
        cluster.api.put_claim(&found);
        plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
    }
    running.kill().await;
    // Claim 1 is force-deleted, claim 3 has only a spec, and one file belongs to another vendor.
    cluster.api.delete_claim(&claim(1, &[]));
    fs::copy(cluster.spec_file(1), cluster.spec_file(3)).unwrap();
    fs::write(cluster.node.paths.cdi_dir.join("other-vendor.json"), "{}").unwrap();
    let (_running, _plugin) = cluster.start_ready().await;
    eventually("removal of claim 1", || {
        (!cluster.spec_file(1).exists() && !cluster.record_file(1).exists()).then_some(())
    })
    .await;
    eventually("removal of claim 3", || {
        (!cluster.spec_file(3).exists()).then_some(())
    })
    .await;
    assert!(cluster.spec_file(2).exists() && cluster.record_file(2).exists());
    assert!(
        cluster
            .node
            .paths
            .cdi_dir
            .join("other-vendor.json")
            .exists()
    );
    assert_eq!(cluster.node.tmpfs.mounted().len(), 1);
    eventually("event", || {
        cluster
            .api
            .events()
            .into_iter()
            .find(|(reason, _)| reason == "OrphanRemoved")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_gpu_blocks_one_thread_only() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    for (number, gpu) in [(1, 1), (2, 0)] {
        cluster.api.put_claim(&claim(number, &[Whole(gpu)]));
        plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
    }
    running.stop().await;
    // Both claims are deleted by force while one of the GPUs hangs.
    cluster.gpus.hang(Some(GPU_UUIDS[1]));
    for number in [1, 2] {
        cluster.api.delete_claim(&claim(number, &[]));
    }
    let (_running, plugin) = cluster.start_ready().await;
    eventually("removal of the claim of the other GPU", || {
        (!cluster.record_file(2).exists()).then_some(())
    })
    .await;
    eventually("event", || {
        let mut events = cluster.api.events().into_iter();
        events.find(|(reason, note)| reason == "ClaimMissing" && note.contains(GPU_UUIDS[1]))
    })
    .await;
    let reads = cluster.api.reads("claim-1");
    eventually("more reconciliations", || {
        (cluster.api.reads("claim-1") >= reads + 3).then_some(())
    })
    .await;
    assert_eq!(cluster.gpus.hanging_lists(), 1);
    assert!(cluster.record_file(1).exists());
    cluster.prepare_shares(&plugin, &[3]).await;
    cluster.gpus.hang(None);
    eventually("removal of the claim of the GPU", || {
        (!cluster.record_file(1).exists()).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_reads_of_claims_hold_up_no_others() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    for number in 1..=12 {
        let found = claim(number, &[Share(number % 2, "1Gi", "0")]);
        cluster.api.put_claim(&found);
        plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
    }
    running.stop().await;
    cluster
        .api
        .stall_reads((1..12).map(|number| format!("claim-{number}")));
    cluster.api.delete_claim(&claim(12, &[]));
    let (_running, _plugin) = cluster.start_ready().await;
    eventually("removal of claim 12", || {
        (!cluster.record_file(12).exists()).then_some(())
    })
    .await;
    assert!(cluster.record_file(1).exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeps_devices_of_deleted_claim_in_grace_period() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let patient = Config {
        orphan_grace: Duration::from_secs(3600),
        ..cluster.config()
    };
    let (running, plugin) = cluster.start_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "50Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    running.stop().await;
    cluster.api.delete_claim(&claim(1, &[]));
    fs::remove_file(cluster.spec_file(1)).unwrap();
    let running = cluster.start_with(patient, cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    // Its pod may still run, so the GPU is not free.
    cluster.api.put_claim(&claim(2, &[Share(0, "50Gi", "0")]));
    let error = prepare_error(&plugin, 2).await;
    assert!(
        error.contains("is prepared for other claims: default/claim-1"),
        "{error}"
    );
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    plugin.prepare_one(&kubelet_claim(2)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rebuilds_damaged_record_from_api_server() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "50Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let valid = fs::read(cluster.record_file(1)).unwrap();
    running.kill().await;
    fs::write(cluster.record_file(1), &valid[..valid.len() - 9]).unwrap();
    let (_running, plugin) = cluster.start_ready().await;
    eventually("a rebuilt record", || {
        (fs::read(cluster.record_file(1)).ok()? == valid).then_some(())
    })
    .await;
    let event = eventually("event", || {
        cluster
            .api
            .events()
            .into_iter()
            .find(|(reason, _)| reason == "ClaimStateRepaired")
    });
    assert!(event.await.1.contains("truncated"));
    cluster.api.put_claim(&claim(2, &[Share(0, "50Gi", "0")]));
    let error = prepare_error(&plugin, 2).await;
    assert!(
        error.contains("is prepared for other claims: default/claim-1"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeps_deleted_claim_until_its_containers_end() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "50Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let prepared = cluster.node.claim_state();
    running.kill().await;
    cluster.api.delete_claim(&claim(1, &[]));
    let container = cluster.node.start_container(10, 1);
    let (_running, plugin) = cluster.start_ready().await;
    let event = eventually("event", || {
        let events = cluster.api.events();
        events
            .into_iter()
            .find(|(reason, _)| reason == "ClaimMissing")
    });
    let (_, note) = event.await;
    assert!(
        note.contains("claim default/claim-1") && note.contains("a container mounts its share"),
        "{note}"
    );
    assert_eq!(cluster.node.claim_state(), prepared);
    cluster.api.put_claim(&claim(2, &[Share(0, "50Gi", "0")]));
    let error = prepare_error(&plugin, 2).await;
    assert!(
        error.contains("is prepared for other claims: default/claim-1"),
        "{error}"
    );
    fs::remove_dir_all(container).unwrap();
    eventually("removal of claim 1", || {
        (!cluster.record_file(1).exists()).then_some(())
    })
    .await;
    plugin.prepare_one(&kubelet_claim(2)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rebuilds_lost_record_without_touching_limits() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "50Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let record = fs::read(cluster.record_file(1)).unwrap();
    let (page, prepared) = (page_of(&cluster.node, 1), cluster.node.claim_state());
    let before = inode(&page);
    running.kill().await;
    fs::remove_file(cluster.record_file(1)).unwrap();
    cluster.node.start_container(10, 1);
    let (_running, plugin) = cluster.start_ready().await;
    eventually("a rebuilt record", || {
        (fs::read(cluster.record_file(1)).ok()? == record).then_some(())
    })
    .await;
    assert_eq!(
        (cluster.node.claim_state(), inode(&page)),
        (prepared, before)
    );
    cluster.api.put_claim(&claim(2, &[Share(0, "50Gi", "0")]));
    assert!(plugin.prepare_one(&kubelet_claim(2)).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeps_running_claim_without_record_and_api_claim() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    cluster.api.put_claim(&claim(1, &[Share(0, "50Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    running.kill().await;
    fs::remove_file(cluster.record_file(1)).unwrap();
    cluster.api.delete_claim(&claim(1, &[]));
    cluster.node.start_container(10, 1);
    let left = cluster.node.claim_state();
    let (_running, plugin) = cluster.start_ready().await;
    eventually("event", || {
        let events = cluster.api.events();
        events
            .into_iter()
            .find(|(reason, _)| reason == "ClaimMissing")
    })
    .await;
    assert_eq!(cluster.node.claim_state(), left);
    cluster.api.put_claim(&claim(2, &[Share(0, "50Gi", "0")]));
    let error = prepare_error(&plugin, 2).await;
    assert!(error.contains("is damaged or lost"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restores_deleted_state_of_running_claims() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    cluster.prepare_shares(&plugin, &[1, 2, 3]).await;
    eventually("the start", || {
        (cluster.api.reads("claim-3") > 1).then_some(())
    })
    .await;
    let complete = cluster.node.claim_state();
    // Alone, since the repair of a claim restores its base, too.
    let base = base_of(&cluster.node, "share-compat");
    fs::remove_file(&base).unwrap();
    let started = Instant::now();
    eventually("restored base", || base.exists().then_some(())).await;
    assert!(started.elapsed() < Duration::from_secs(60));
    fs::remove_file(cluster.spec_file(1)).unwrap();
    fs::remove_file(cluster.record_file(2)).unwrap();
    fs::remove_dir_all(page_of(&cluster.node, 3).parent().unwrap()).unwrap();
    let started = Instant::now();
    eventually("restored files", || {
        (cluster.node.claim_state() == complete).then_some(())
    })
    .await;
    assert!(started.elapsed() < Duration::from_secs(60));
    for repair in [
        "recreated the missing CDI spec that claims share",
        "recreated the missing CDI spec",
        "rebuilt the lost claim record",
        "recreated the missing limits page",
    ] {
        eventually(repair, || {
            let events = cluster.api.events().into_iter();
            let mut repairs = events.filter(|(reason, _)| reason == "ClaimStateRepaired");
            repairs.find(|(_, note)| note.contains(repair))
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_deleted_state_that_cannot_be_restored() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    cluster.prepare_shares(&plugin, &[1]).await;
    // Without GPUs the spec cannot be built.
    cluster.gpus.fail();
    fs::remove_file(cluster.spec_file(1)).unwrap();
    let (_, note) = eventually("event", || {
        let mut events = cluster.api.events().into_iter();
        events.find(|(reason, _)| reason == "ClaimStateMissing")
    })
    .await;
    assert!(
        note.starts_with("claim default/claim-1 ")
            && note.contains(
                ": the CDI spec is missing on the node, and cannot be recreated: cannot use the GPUs of this node: ",
            )
            && note.contains("the number of GPUs"),
        "{note}"
    );
    cluster.gpus.restore();
    eventually("restored spec", || {
        cluster.spec_file(1).exists().then_some(())
    })
    .await;
}

/// No record names the namespace of its claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn companion_of_a_claim_that_was_never_prepared_is_released() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let mut companion = serde_json::to_value(claim(2, &[Share(0, "1Gi", "0")])).unwrap();
    let metadata = &mut companion["metadata"];
    metadata["labels"] =
        serde_json::json!({"gpu.drava.dev/companion-of": claim_ref(1).uid.as_str()});
    metadata["deletionTimestamp"] = serde_json::json!("2026-01-01T00:00:00Z");
    cluster.api.put_claim_json(&companion);
    let (_running, _plugin) = cluster.start_ready().await;
    eventually("its release", || {
        let condition = cluster.api.condition("claim-2", "Granted")?;
        (condition["reason"] == "Released").then_some(())
    })
    .await;
}

/// A time that the API server stores and typed decoding refuses.
const LAST_TIME: &str = "9999-12-31T23:59:59Z";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_claims_of_the_node_by_name() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (running, plugin) = cluster.start_ready().await;
    cluster.prepare_shares(&plugin, &[1, 2]).await;
    running.kill().await;
    let before = cluster.api.reads("claim-2");
    let (_running, _plugin) = cluster.start_ready().await;
    eventually("comparison with the API server", || {
        (cluster.api.reads("claim-2") > before).then_some(())
    })
    .await;
    // Companions of no prepared claim are looked for now and then.
    let sweep = "labelSelector=gpu.drava.dev%2Fcompanion-of";
    let queries = || cluster.api.list_queries(CLAIMS);
    eventually("lists at the start", || {
        (!queries().is_empty()).then_some(())
    })
    .await;
    assert!(
        queries().iter().all(|query| query.contains(sweep)),
        "{:?}",
        queries()
    );
    // A record without a name needs a list, which the API server answers from memory.
    fs::remove_file(cluster.record_file(1)).unwrap();
    eventually("rebuilt record", || {
        cluster.record_file(1).exists().then_some(())
    })
    .await;
    let queries = queries();
    assert!(
        queries.iter().any(|query| !query.contains(sweep))
            && queries
                .iter()
                .all(|query| query.contains("resourceVersion=0")),
        "{queries:?}"
    );
    // Each event of a claim would be handed to each watch of all namespaces, of which each node has one.
    let watched = cluster.api.watched();
    let of_claims = || {
        watched
            .iter()
            .filter(|path| path.ends_with("/resourceclaims"))
    };
    assert!(of_claims().count() > 0, "{watched:?}");
    assert!(
        of_claims().all(|path| path.ends_with("/namespaces/default/resourceclaims")),
        "{watched:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn works_beside_objects_with_extreme_times() {
    if lacks_device_files() {
        return;
    }
    let cluster = TestCluster::new().await;
    let (_running, plugin) = cluster.start_ready().await;
    cluster.prepare_shares(&plugin, &[1]).await;
    for name in ["claim-1", "claim-7"] {
        let mut odd = serde_json::to_value(claim(7, &[Share(1, "8Gi", "0")])).unwrap();
        if name == "claim-1" {
            odd = cluster.api.claim(name);
        }
        odd["metadata"]["managedFields"] = serde_json::json!([
            {"manager": "kubectl", "operation": "Update", "time": LAST_TIME}
        ]);
        cluster.api.put_claim_json(&odd);
    }
    // By a list and by name.
    fs::remove_file(cluster.record_file(1)).unwrap();
    eventually("rebuilt record", || {
        cluster.record_file(1).exists().then_some(())
    })
    .await;
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    plugin.prepare_one(&kubelet_claim(7)).await.unwrap();
}
