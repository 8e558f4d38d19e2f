//! When the API server reported allocations, bindings, conditions and events.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use drava_api::names;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::task::JoinHandle;

use drava_planning::objects::NAMESPACE;

/// Interval of checks.
const POLL: Duration = Duration::from_millis(20);

/// First time of each observation, by name of the object.
#[derive(Debug, Default)]
pub(crate) struct Times {
    /// Claims with an allocation.
    pub(crate) allocated: BTreeMap<String, Instant>,
    /// Pods.
    pub(crate) seen: BTreeMap<String, Instant>,
    /// Pods with a node.
    pub(crate) bound: BTreeMap<String, Instant>,
    /// Pods with the reason of the controller in a condition.
    pub(crate) explained: BTreeMap<String, Instant>,
    /// Writes of events by the controller.
    pub(crate) events: Vec<Instant>,
}

/// Watches that end when the value is dropped.
pub(crate) struct Watched {
    times: Arc<Mutex<Times>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Watched {
    /// Starts the watches.
    pub(crate) fn start(client: &Client) -> Self {
        let times = Arc::<Mutex<Times>>::default();
        let tasks = vec![
            watch(client, &times, |claim: &ResourceClaim, times| {
                let status = claim.status.as_ref();
                if status.is_some_and(|status| status.allocation.is_some()) {
                    first(&mut times.allocated, claim.name_any());
                }
            }),
            watch(client, &times, |pod: &Pod, times| {
                first(&mut times.seen, pod.name_any());
                if pod
                    .spec
                    .as_ref()
                    .is_some_and(|spec| spec.node_name.is_some())
                {
                    first(&mut times.bound, pod.name_any());
                }
                let conditions = pod
                    .status
                    .as_ref()
                    .and_then(|status| status.conditions.as_ref());
                let mut conditions = conditions.into_iter().flatten();
                if conditions.any(|condition| condition.type_ == names::ALLOCATED_CONDITION) {
                    first(&mut times.explained, pod.name_any());
                }
            }),
            watch(client, &times, |event: &Event, times| {
                let component = event.reporting_controller.as_deref().unwrap_or_default();
                if component.contains("drava") {
                    times.events.push(Instant::now());
                }
            }),
        ];
        Self { times, tasks }
    }

    /// Returns what was observed so far.
    pub(crate) fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a condition on the observations is true.
    pub(crate) async fn until(
        &self,
        what: &str,
        limit: Duration,
        mut is_reached: impl FnMut(&Times) -> bool,
    ) -> Result<()> {
        let started = Instant::now();
        while !is_reached(&self.times()) {
            if started.elapsed() > limit {
                bail!("not within {} s: {what}", limit.as_secs());
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }
}

fn first(times: &mut BTreeMap<String, Instant>, name: String) {
    times.entry(name).or_insert_with(Instant::now);
}

fn watch<K>(
    client: &Client,
    times: &Arc<Mutex<Times>>,
    observe: fn(&K, &mut Times),
) -> JoinHandle<()>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Send
        + 'static,
{
    let times = Arc::clone(times);
    let api = Api::<K>::namespaced(client.clone(), NAMESPACE);
    tokio::spawn(async move {
        let objects = watcher(api, watcher::Config::default())
            .default_backoff()
            .applied_objects();
        let mut objects = std::pin::pin!(objects);
        while let Some(seen) = objects.next().await {
            match seen {
                Ok(object) => observe(
                    &object,
                    &mut times.lock().unwrap_or_else(PoisonError::into_inner),
                ),
                Err(error) => eprintln!("a watch failed: {error}"),
            }
        }
    })
}
