//! The condition `Idle` of claims, with the whole driver.

use std::fs;
use std::time::Duration;

use drava_dra_driver::driver::{Config, IdleTimes};
use drava_fake_kubelet::Plugin;
use drava_nvml::{Process, ProcessKind, ProcessMemory};
use serde_json::Value;

use crate::api_server::eventually;
use crate::cluster::{Running, TestCluster};
use crate::fixture::GPU_UUIDS;

/// PIDs of the programs of both claims.
const PIDS: [u32; 2] = [101, 102];

/// Starts a driver that reports idle shares soon.
async fn start(cluster: &TestCluster) -> (Running, Plugin) {
    let config = Config {
        idle: IdleTimes {
            after_us: 200_000,
            retry: Duration::from_millis(100),
        },
        ..cluster.config()
    };
    let running = cluster.start_with(config, cluster.source());
    let plugin = cluster.kubelet.register("gpu.drava.dev").await.unwrap();
    running.await_ready().await;
    (running, plugin)
}

/// Sets the programs on the GPU. Nothing is known of their GPU time.
fn run_programs(cluster: &TestCluster, pids: &[u32]) {
    let listed = pids.iter().map(|&pid| Process {
        pid,
        memory: ProcessMemory::Used { bytes: 0 },
        gpu_instance: None,
        compute_instance: None,
        kind: ProcessKind::Compute,
    });
    cluster.gpus.set_processes(GPU_UUIDS[0], listed.collect());
}

fn idle(cluster: &TestCluster, claim: &str) -> Option<Value> {
    cluster.api.condition(claim, "Idle")
}

async fn await_idle(cluster: &TestCluster, reason: &str) -> Value {
    eventually(reason, || {
        idle(cluster, "claim-1").filter(|condition| condition["reason"] == reason)
    })
    .await
}

/// Returns how many writes of the status of `claim-1` were tried.
fn writes(cluster: &TestCluster) -> usize {
    let writes = cluster.api.writes().into_iter();
    let of_claim = |write: &String| {
        write.starts_with("PATCH ") && write.ends_with("/resourceclaims/claim-1/status")
    };
    writes.filter(of_claim).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_idle_share_and_takes_that_back_after_restart() {
    let cluster = TestCluster::new().await;
    run_programs(&cluster, &PIDS);
    let (running, plugin) = start(&cluster).await;
    cluster.prepare_shares(&plugin, &[1, 2]).await;
    let directories: Vec<_> = PIDS
        .into_iter()
        .zip(1..)
        .map(|(pid, number)| cluster.node.start_process(pid, number))
        .collect();
    for claim in ["claim-1", "claim-2"] {
        let prepared = || cluster.api.condition(claim, "Prepared");
        eventually("the claim's status", prepared).await;
    }
    assert_eq!(idle(&cluster, "claim-1"), None);

    // The API server does not accept the first write.
    let before = writes(&cluster);
    cluster.api.fail_statuses_of("drava-idle", 1);
    run_programs(&cluster, &PIDS[1..]);
    let first = await_idle(&cluster, "NoGpuTime").await;
    assert_eq!(first["status"], "True");
    assert_eq!(writes(&cluster), before + 2, "one write is repeated");
    // The rest of the status is still there.
    let prepared = cluster.api.condition("claim-1", "Prepared").unwrap();
    assert_eq!(prepared["status"], "True");

    // Another driver does not know what an earlier one has measured.
    running.kill().await;
    run_programs(&cluster, &PIDS);
    let (running, _plugin) = start(&cluster).await;
    let back = await_idle(&cluster, "UsesGpu").await;
    assert_eq!(back["status"], "False");
    run_programs(&cluster, &PIDS[1..]);
    let second = await_idle(&cluster, "NoGpuTime").await;
    let since = |condition: &Value| condition["lastTransitionTime"].as_str().unwrap().to_owned();
    assert!(since(&second) >= since(&back), "{second} {back}");

    // Of the other one nothing was ever written.
    assert_eq!(idle(&cluster, "claim-2"), None);
    running.stop().await;
    for directory in directories {
        fs::remove_dir_all(directory).unwrap();
    }
}
