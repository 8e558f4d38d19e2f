//! `/metrics` and `/debug/state` of a running driver.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use drava_api::metric::{self, driver as table};
use drava_dra_driver::driver::Config;
use serde_json::json;

use crate::api_server::poll;
use crate::cluster::{TestCluster, free_address, get, kubelet_claim};
use crate::fixture::Allocated::{Share, Whole};
use crate::fixture::{claim, share_id};
use crate::metrics::{samples, values};
use crate::node::lacks_device_files;

/// Scrapes until the text is as wanted, up to 60 s.
async fn scrape(address: SocketAddr, what: &str, is_wanted: impl Fn(&str) -> bool) -> String {
    poll(what, async || {
        let answer = get(address, "/metrics").await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(metric::CONTENT_TYPE), "{head}");
        let body = body.to_owned();
        if is_wanted(&body) {
            Ok(body)
        } else {
            Err(body)
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serves_claims_pods_and_operations() {
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
    let mut shared = claim(1, &[Share(0, "8Gi", "30"), Whole(1)]);
    let consumers = ["a", "b"].map(|pod| {
        serde_json::from_value(json!({"resource": "pods", "name": pod, "uid": pod})).unwrap()
    });
    shared.status.as_mut().unwrap().reserved_for = Some(consumers.to_vec());
    cluster.api.put_claim(&shared);
    cluster.api.put_pod(&json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "a", "namespace": "default", "uid": "a"},
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "claim-1"}],
            "containers": [
                {"name": "app", "resources": {"claims": [{"name": "gpu", "request": "gpu"}]}},
                {"name": "sidecar"},
            ],
        },
    }));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    plugin.prepare_one(&kubelet_claim(2)).await.unwrap_err();
    let is_complete = |text: &str| {
        samples(text, &table::CLAIM_POD_INFO).len() == 2
            && samples(text, &table::GPU_INFO).len() == 2
            && samples(text, &table::SHARE_MEMORY_LIMIT_BYTES).len() == 1
    };
    let text = scrape(address, "the metrics of the claim", is_complete).await;
    let devices = samples(&text, &table::CLAIM_DEVICE_INFO).into_keys();
    let access: Vec<(String, String)> = devices
        .map(|labels| (labels[4].clone(), labels[6].clone()))
        .collect();
    let expected = [("gpu-0-vgpu", "share"), ("gpu-1", "whole")];
    assert_eq!(
        access,
        expected.map(|(device, access)| (device.to_owned(), access.to_owned()))
    );
    assert_eq!(
        values(&text, &table::SHARE_MEMORY_LIMIT_BYTES),
        [8589934592.0]
    );
    let containers = samples(&text, &table::CONTAINER_DEVICE_INFO).into_keys();
    let containers: Vec<String> = containers.map(|labels| labels[1..4].join(" ")).collect();
    assert_eq!(containers, ["a app claim-1"]);
    let calls = samples(&text, &table::CLAIM_OPERATION_SECONDS);
    assert_eq!(calls[&vec!["prepare".to_owned()]], 2.0);
    let errors = samples(&text, &table::CLAIM_OPERATION_ERRORS);
    assert_eq!(errors[&vec!["prepare".to_owned()]], 1.0);
    assert_eq!(values(&text, &table::CONDITION), [1.0; 8]);

    let state = get(address, "/debug/state").await;
    assert!(
        state.contains("application/json") && state.contains("\"claim-1\""),
        "{state}"
    );

    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    let is_gone = |text: &str| !text.contains(&share_id(1, 0)) && !text.contains("drava_claim_pod");
    scrape(address, "the end of the claim's series", is_gone).await;
    running.stop().await;
}

/// A day of a node that starts a pod every five minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn series_do_not_grow_with_pods_of_a_day() {
    const PODS: u32 = 288;
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
    let series = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
    let mut counts = BTreeSet::new();
    for number in 1..=PODS {
        let found = claim(number, &[Share(number % 2, "8Gi", "30")]);
        cluster.api.put_claim(&found);
        plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
        if number % 96 == 0 {
            let share = share_id(number, 0);
            let has_share = |text: &str| text.contains(&share);
            scrape(address, "the series of the share", has_share).await;
        }
        plugin.unprepare_one(&kubelet_claim(number)).await.unwrap();
        cluster.api.delete_claim(&found);
        if number % 96 == 0 {
            let has_none =
                |text: &str| !text.contains("claim=\"claim-") && !text.contains("share=\"5a5a");
            counts.insert(series(
                &scrape(address, "no series of claims", has_none).await,
            ));
        }
    }
    assert_eq!(counts.len(), 1, "the number of series changed: {counts:?}");
    running.stop().await;
}
