//! Events and latency while pods wait that fit on no node.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::control_plane::ControlPlane;
use crate::measured::{extent, percentile, print, rate};
use crate::watched::Watched;
use drava_planning::objects::{self, Mode};

/// Time limit for the allocation of pods that fit.
const LIMIT: Duration = Duration::from_secs(600);
/// Time after which pods that fit are created even if not all others have their reasons: hundreds of costly selectors take
/// hours.
const EXPLANATION_LIMIT: Duration = Duration::from_secs(180);
/// Time between two pods that fit.
const INTERVAL: Duration = Duration::from_millis(200);
/// Pods that fit, at the same time.
const ALIVE: usize = 5;

/// Measures pods that ask for more memory than a GPU has, and then a sixth as many with costly selectors of their own.
pub(crate) async fn measure(plane: &ControlPlane, pods: usize, seconds: u64) -> Result<()> {
    plane.publish(Mode::Managed).await?;
    let too_large = |_: usize| objects::share("200Gi");
    print(&reject(plane, "too large", pods, too_large, seconds).await?)?;
    print(&reject(plane, "costly selector", pods.div_ceil(6), costly, seconds).await?)
}

/// A request whose selector takes nearly as many steps as the API server admits and matches no device.
fn costly(index: usize) -> Value {
    let list: Vec<String> = (1..=36).map(|number| number.to_string()).collect();
    let list = format!("[{}]", list.join(","));
    // It reads the identity of the GPU, so it is evaluated for each.
    let of_no_gpu = r#"device.attributes["gpu.drava.dev"].uuid == """#;
    let expression =
        format!("{list}.all(x, {list}.all(y, {list}.all(z, x + y + z > -{index}))) && {of_no_gpu}");
    let mut request = objects::share("1Gi");
    request["selectors"] = json!([{"cel": {"expression": expression}}]);
    request
}

async fn reject(
    plane: &ControlPlane,
    kind: &str,
    pods: usize,
    request: impl Fn(usize) -> Value,
    seconds: u64,
) -> Result<Value> {
    let controller = plane.start_controller()?;
    plane.wait_until_ready(Mode::Managed, true).await?;
    let names: Vec<String> = (0..pods)
        .map(|index| format!("rejected-{index:05}"))
        .collect();
    let claims: Result<Vec<_>> = names
        .iter()
        .enumerate()
        .map(|(index, name)| objects::claim(name, &request(index)))
        .collect();
    let watched = Watched::start(&plane.client);
    let decided = controller.decisions()?;
    let started = Instant::now();
    plane.create_claims(claims?).await?;
    plane.create_pods(&names, true).await?;
    let created = started.elapsed();
    // The row says how many pods have their reasons.
    let _ = watched
        .until("each pod has its reason", EXPLANATION_LIMIT, |times| {
            times.explained.len() >= pods
        })
        .await;
    let count = watched.times().explained.len();
    let explained = extent(std::iter::once(&started).chain(watched.times().explained.values()));
    let reasons = {
        let times = watched.times();
        let of = |(name, seen): (&String, &Instant)| {
            let explained = times.explained.get(name)?;
            Some(explained.saturating_duration_since(*seen))
        };
        let mut reasons: Vec<Duration> = times.seen.iter().filter_map(of).collect();
        reasons.sort();
        reasons
    };
    let first_events = watched.times().events.len();
    let before = controller.usage()?;
    let churn_started = Instant::now();
    let mut latencies = churn(plane, &watched, Duration::from_secs(seconds)).await?;
    let churned = churn_started.elapsed();
    let used = controller.usage()?;
    let decisions = controller.decisions()?;
    latencies.sort();
    let events = watched.times().events.len();
    drop((controller, watched));
    plane.delete(&names).await?;
    Ok(json!({
        "measure": "rejection", "reason": kind, "nodes": plane.nodes(), "pods": pods,
        "createdSeconds": created.as_secs_f64(), "explained": count, "explainedSeconds": explained.as_secs_f64(),
        "reasonP50Ms": percentile(&reasons, 50), "reasonP99Ms": percentile(&reasons, 99),
        "reasonMaxMs": percentile(&reasons, 100),
        "firstEventsPerSecond": rate(first_events, explained),
        "churnSeconds": churned.as_secs_f64(), "placed": latencies.len(),
        "eventsPerSecond": rate(events - first_events, churned),
        "p50Ms": percentile(&latencies, 50), "p99Ms": percentile(&latencies, 99),
        "maxMs": percentile(&latencies, 100),
        "decisionsP99Ms": decisions.percentile_ms(&decided, 99),
        "decisionsMaxMs": decisions.percentile_ms(&decided, 100),
        "controllerCpuSeconds": used.cpu_seconds - before.cpu_seconds, "controllerMib": used.resident_mib,
    }))
}

/// Creates and deletes pods that fit, and returns the time from the creation of each to its allocation.
async fn churn(plane: &ControlPlane, watched: &Watched, time: Duration) -> Result<Vec<Duration>> {
    let started = Instant::now();
    let mut alive: Vec<String> = Vec::new();
    let mut created: Vec<(String, Instant)> = Vec::new();
    while started.elapsed() < time {
        let name = format!("fits-{:05}", created.len());
        let claim = objects::claim(&name, &plane.shape().request())?;
        plane.create_claims(vec![claim]).await?;
        plane.create_pods(std::slice::from_ref(&name), true).await?;
        created.push((name.clone(), Instant::now()));
        alive.push(name);
        tokio::time::sleep(INTERVAL).await;
        if alive.len() > ALIVE {
            let oldest = alive.remove(0);
            placed(watched, std::slice::from_ref(&oldest)).await?;
            plane.delete(&[oldest]).await?;
        }
    }
    placed(watched, &alive).await?;
    plane.delete(&alive).await?;
    let times = watched.times();
    created
        .into_iter()
        .map(|(name, created)| {
            let allocated = times.allocated.get(&name).context("an allocated pod")?;
            Ok(allocated.saturating_duration_since(created))
        })
        .collect()
}

async fn placed(watched: &Watched, names: &[String]) -> Result<()> {
    watched
        .until("pods that fit are allocated", LIMIT, |times| {
            names.iter().all(|name| times.allocated.contains_key(name))
        })
        .await
}
