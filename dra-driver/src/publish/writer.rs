//! Writes the ResourceSlices of the node.
//!
//! The writer watches the slices and restores them after changes by other clients: kubelet deletes all slices of its
//! node when kubelet starts and when the driver was unavailable.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::event::EventReason;
use drava_api::listed::Listed;
use drava_api::names;
use drava_api::node_profile::NodeSettings;
use drava_connection::Limits;
use drava_nvml::GpuUuid;
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::ListParams;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::change::{SyncError, apply, dry_run, is_foreign_change};
use super::diff::{self, Owner};
use super::retained::{self, PublishedGpus, Retained};
use super::{Features, Pool, TaintPolicy};
use crate::gpu_health::HealthByGpu;
use crate::gpus::capacity::UnavailableReason;
use crate::gpus::inventory::{NodeInventory, State};
use crate::kubelet::claims::cached_list;
use crate::kubelet::plugin::health::{Devices, Health};
use crate::node::options::Scheduling;
use crate::report::conditions::{Condition, Conditions};
use crate::report::{Reporter, Subject};

mod change;

/// Delay after a watch event, to coalesce further events.
const COALESCE: Duration = Duration::from_secs(1);

/// Maximum delay after errors and after repeated changes by other clients.
const MAX_DELAY: Duration = Duration::from_secs(30);

/// Time without a write after which the delay is reset.
const RESET_AFTER: Duration = Duration::from_secs(60);

/// Effect of managed mode without taints.
const NOTHING_PUBLISHED: &str = "no device is published, because kube-scheduler would allocate the devices of the controller too";

/// Longest time until the driver notices that the API server stores fields again that it dropped.
const PROBE: Duration = Duration::from_secs(300);

/// Publishes the GPUs of one node.
pub struct Publisher {
    /// Client of the API server.
    pub client: Client,
    /// Name of the node.
    pub node: String,
    /// What decides the taints.
    pub taints: TaintPolicy,
    /// State of the node's GPUs.
    pub gpus: watch::Receiver<State>,
    /// Health of the node's GPUs.
    pub health: watch::Receiver<Arc<HealthByGpu>>,
    /// Health of the published devices, for kubelet.
    pub devices: watch::Sender<Devices>,
    /// Conditions; the writer sets `published`.
    pub conditions: Conditions,
    /// Queue of events.
    pub reporter: Reporter,
    /// Time between tainting and withdrawal of retained devices, see [`retained::GRACE`].
    pub retained_grace: Duration,
    /// What is published, for the status of node profiles and for prepare.
    pub published: watch::Sender<Published>,
}

/// What the slices of the node show.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Published {
    /// Settings that the slices follow, except for the retained devices; `None` before the first write.
    pub settings: Option<NodeSettings>,
    /// Devices that are published as before.
    pub retained: BTreeMap<GpuUuid, Retained>,
    /// GPUs that need a reset to be published as the node profile says: name of the whole GPU, and the commands.
    pub resets: BTreeMap<String, String>,
}

/// State of the publisher between two synchronizations.
#[derive(Default)]
struct Memory {
    /// Published devices; `None` until the slices of an earlier instance were read.
    published: Option<PublishedGpus>,
    /// Whether this publisher has synchronized the slices.
    is_published: bool,
    /// Features of the API server; `None` until the first write.
    features: Option<Features>,
    /// GPUs with a reported reason, by UUID.
    reported: BTreeMap<String, UnavailableReason>,
    /// Version of each slice that this publisher wrote, by name. Watch events of these versions are ignored.
    own: BTreeMap<String, String>,
}

impl Memory {
    /// Returns whether the API server dropped fields.
    fn has_dropped(&self) -> bool {
        self.features
            .is_some_and(|features| features != Features::ALL)
    }
}

impl Publisher {
    /// Publishes until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let slices: Api<ResourceSlice> = Api::all(self.client.clone());
        let selector = self.selector();
        let events = watcher(
            slices.clone(),
            Limits::LONG_WATCHES.watch().fields(&selector),
        )
        .default_backoff();
        let mut events = std::pin::pin!(events.map_err(|error| describe(&error)).fuse());
        let (mut gpus, mut health) = (self.gpus.clone(), self.health.clone());
        gpus.mark_changed();
        let mut memory = Memory::default();
        let mut delay = COALESCE;
        let mut wrote: Option<Instant> = None;
        // Time of the next synchronization; `None` when none is scheduled.
        let mut due: Option<Instant> = None;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                changed = gpus.changed() => match changed {
                    Ok(()) => due = Some(Instant::now()),
                    Err(_) => return,
                },
                changed = health.changed() => match changed {
                    Ok(()) => due = Some(Instant::now()),
                    Err(_) => return,
                },
                Some(event) = events.next() => match event {
                    Ok(event) if is_foreign_change(&event, &memory.own) => {
                        if wrote.is_none_or(|wrote| wrote.elapsed() > RESET_AFTER) {
                            delay = COALESCE;
                        }
                        due = earlier(due, Some(Instant::now() + delay));
                    }
                    Ok(_) => {}
                    Err(error) => tracing::warn!(%error, "watch of ResourceSlices interrupted"),
                },
                () = at(due) => {
                    let state = gpus.borrow_and_update().clone();
                    health.mark_unchanged();
                    let synced = tokio::select! {
                        () = stop.cancelled() => return,
                        synced = self.sync(&slices, &state, &mut memory) => synced,
                    };
                    let published = memory.published.as_ref();
                    due = published.and_then(|published| published.next_check(Instant::now(), self.retained_grace));
                    let probe = memory.has_dropped().then(|| Instant::now() + PROBE);
                    due = earlier(due, probe);
                    match synced {
                        Ok(0) => {}
                        Ok(_) => {
                            // Grows while another client keeps changing the slices.
                            delay = (delay * 2).min(MAX_DELAY);
                            wrote = Some(Instant::now());
                        }
                        Err(error) => {
                            self.conditions.set(Condition::Published, Err(describe(&error)));
                            delay = (delay * 2).min(MAX_DELAY);
                            due = Some(Instant::now() + delay);
                        }
                    }
                }
            }
        }
    }

    fn selector(&self) -> String {
        format!("spec.driver={},spec.nodeName={}", names::DRIVER, self.node)
    }

    /// Synchronizes the slices once. Returns the number of writes.
    async fn sync(
        &self,
        slices: &Api<ResourceSlice>,
        state: &State,
        memory: &mut Memory,
    ) -> Result<usize, SyncError> {
        let node = match state {
            State::Known(node) if node.inventory.settings.is_some() => node,
            // Devices that the node profile excludes must not appear, not even at start.
            State::Known(_) | State::Pending => return Ok(0),
            State::Unknown(reason) => {
                // Published devices stay, because claims hold them; their health is unknown.
                self.devices.send_modify(|devices| {
                    for (_, _, health) in devices {
                        *health = Health::Unknown(reason.clone());
                    }
                });
                return Ok(0);
            }
        };
        let retained = self.retained(slices, &node.inventory, memory).await?;
        let health = Arc::clone(&self.health.borrow());
        let desired = |features| {
            let inventory = &node.inventory;
            super::desired(
                &self.node,
                inventory,
                &retained,
                &health,
                self.taints,
                features,
            )
        };
        if memory.is_published {
            // Kubelet must not wait for the API server.
            let features = memory.features.unwrap_or(Features::ALL);
            self.devices.send_replace(devices(&desired(features)));
        }
        let owner = self.owner().await?;
        let mut writes = 0;
        // The API server may store the dropped fields again.
        let mut features = Features::ALL;
        loop {
            let pool = desired(features);
            let existing = self.existing(slices).await?;
            let changes = diff::changes(&existing, &pool, &owner);
            let mut kept = features;
            // Another client could allocate devices twice that have lost their counters or taints, however short the time.
            for change in &changes {
                kept = kept.and(dry_run(slices, change).await?);
            }
            if kept == features {
                for change in &changes {
                    kept = kept.and(apply(slices, change, &mut memory.own).await?);
                    writes += 1;
                }
            }
            let before = memory.features.replace(kept);
            if kept == features {
                self.report_unavailable(&pool, memory);
                if let Some(published) = &mut memory.published {
                    published.set_published(&pool, &retained, Instant::now());
                }
                memory.is_published = true;
                self.devices.send_replace(devices(&pool));
                self.set_published(Published {
                    settings: node.inventory.settings.clone(),
                    resets: resets(&pool, &node.inventory),
                    retained,
                });
                let excluded =
                    || format!("feature gate DRADeviceTaints is off; {NOTHING_PUBLISHED}");
                let is_excluded = self.taints.excludes_all(features);
                let state = is_excluded.then(excluded).map_or(Ok(()), Err);
                self.conditions.set(Condition::Published, state);
                return Ok(writes);
            }
            if before != Some(kept) {
                self.report_dropped(kept);
            }
            features = kept;
        }
    }

    /// Returns the retained devices, without those that can be withdrawn.
    async fn retained(
        &self,
        slices: &Api<ResourceSlice>,
        inventory: &NodeInventory,
        memory: &mut Memory,
    ) -> Result<BTreeMap<GpuUuid, Retained>, SyncError> {
        let pool = names::pool(&self.node);
        let published = match &mut memory.published {
            Some(published) => published,
            unknown @ None => {
                let existing = self.existing(slices).await?;
                unknown.insert(PublishedGpus::from_slices(&existing, &pool))
            }
        };
        let mut retained = published.retained(inventory);
        let now = Instant::now();
        let is_grace_over =
            |retained: &Retained| published.is_grace_over(retained, now, self.retained_grace);
        if retained.values().any(is_grace_over) {
            let allocated = self.allocated(&pool).await?;
            retained.retain(|uuid, retained| {
                let mut devices = retained.gpu.devices.iter();
                let is_held = devices.any(|device| allocated.contains(&device.name));
                let stays = is_held || !is_grace_over(retained);
                if !stays {
                    let reasons = &retained.reasons;
                    tracing::info!(gpu.uuid = %uuid, ?reasons, "withdrawing or changing unallocated devices");
                }
                stays
            });
        }
        Ok(retained)
    }

    fn set_published(&self, published: Published) {
        self.published.send_if_modified(|present| {
            let is_changed = *present != published;
            *present = published;
            is_changed
        });
    }

    /// Returns the names of the allocated devices of the pool. The devices in question are tainted for longer than the answer
    /// can be old.
    async fn allocated(&self, pool: &str) -> Result<BTreeSet<String>, SyncError> {
        let claims: Api<Listed<ResourceClaim>> = Api::all(self.client.clone());
        let list = claims.list(&cached_list()).await;
        let list = list.map_err(|source| SyncError::Api {
            operation: "list",
            object: "ResourceClaims".to_owned(),
            source,
        })?;
        let (claims, unreadable) = Listed::split(list.items);
        let mut allocated = retained::allocated(&claims, pool);
        let held = unreadable.into_iter().flat_map(|claim| claim.devices);
        let held = held.filter(|held| held.driver == names::DRIVER && held.pool == pool);
        allocated.extend(held.map(|held| held.device));
        Ok(allocated)
    }

    /// Returns the slices of this driver and node.
    async fn existing(&self, slices: &Api<ResourceSlice>) -> Result<Vec<ResourceSlice>, SyncError> {
        let wanted = ListParams::default().fields(&self.selector());
        let list = slices.list(&wanted).await;
        list.map(|list| list.items)
            .map_err(|source| SyncError::Api {
                operation: "list",
                object: "ResourceSlices".to_owned(),
                source,
            })
    }

    async fn owner(&self) -> Result<Owner, SyncError> {
        let nodes: Api<Listed<NodeObject>> = Api::all(self.client.clone());
        let error = |source| SyncError::Api {
            operation: "get",
            object: format!("Node {}", self.node),
            source,
        };
        let node = nodes.get_opt(&self.node).await.map_err(error)?;
        let uid = node
            .and_then(|node| node.uid())
            .ok_or_else(|| SyncError::NoNode(self.node.clone()))?;
        Ok(Owner {
            node: self.node.clone(),
            uid,
        })
    }

    fn report_dropped(&self, kept: Features) {
        let Features {
            counters,
            sharing,
            taints,
        } = kept;
        let gates = [
            (
                counters,
                "DRAPartitionableDevices",
                "only whole GPUs are published",
            ),
            (
                sharing,
                "DRAConsumableCapacity",
                "only whole GPUs are published",
            ),
            (
                taints,
                "DRADeviceTaints",
                match self.taints.scheduling {
                    Scheduling::Managed => NOTHING_PUBLISHED,
                    Scheduling::Native => "unhealthy devices have no taint",
                },
            ),
        ];
        for (_, gate, effect) in gates.iter().filter(|(kept, ..)| !kept) {
            let note = format!(
                "the API server drops ResourceSlice fields: feature gate {gate} is off (default on since Kubernetes 1.36); \
                 {effect}"
            );
            self.reporter
                .event(Subject::Node, EventReason::FieldsDropped, note);
        }
    }

    fn report_unavailable(&self, pool: &Pool, memory: &mut Memory) {
        for (gpu, reason) in &pool.unavailable {
            if memory.reported.insert(gpu.clone(), *reason) != Some(*reason) {
                self.reporter.event(
                    Subject::Node,
                    EventReason::GpuUnavailable,
                    format!("GPU {gpu}: {}", reason.of_gpu(gpu)),
                );
            }
        }
        memory
            .reported
            .retain(|gpu, _| pool.unavailable.contains_key(gpu));
    }
}

/// Returns the GPUs that need a reset, with the commands.
fn resets(pool: &Pool, inventory: &NodeInventory) -> BTreeMap<String, String> {
    let resets = pool
        .unavailable
        .iter()
        .filter(|(_, reason)| reason.is_reset());
    resets
        .filter_map(|(uuid, reason)| {
            let number = inventory.number(inventory.gpu(uuid)?);
            Some((names::gpu_device(number), reason.of_gpu(uuid)))
        })
        .collect()
}

/// Returns the earlier of two times.
fn earlier(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}

async fn at(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// Returns the health of all devices of a pool.
fn devices(pool: &Pool) -> Devices {
    let health = |name: &String| {
        let reason = pool.unhealthy.get(name).cloned();
        reason.map_or(Health::Healthy, Health::Unhealthy)
    };
    pool.devices()
        .map(|device| {
            let name = &device.name;
            (pool.name.clone(), name.clone(), health(name))
        })
        .collect()
}
