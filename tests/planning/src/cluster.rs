//! The planner in a cluster of any size; the bench acts as API server, kube-scheduler and clock.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use drava_allocator::placement::Policies;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_api::listed::{Change, DeletedObject};
use drava_api::quota::GpuQuota;
use drava_controller::action::{
    Action, AllocationJob, AllocationOutcome, Eviction, EvictionOutcome,
};
use drava_controller::decide::planner::{DecisionTime, Planner, Settings};
use drava_packing::objects;
use drava_packing::trace::TraceNode;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::Instant;

/// GPUs of each node.
pub const GPUS_PER_NODE: u64 = 8;
/// More than the time for which the planner waits for the end of an evicted pod.
const ROUND: Duration = Duration::from_secs(31);

/// A pod to add, with one claim for whole GPUs.
#[derive(Debug, Clone)]
pub struct NewPod<'a> {
    /// Name of pod and claim.
    pub name: String,
    /// Namespace.
    pub namespace: &'a str,
    /// Priority.
    pub priority: i32,
    /// Number of GPUs.
    pub gpus: u64,
    /// Name and minimum of its gang.
    pub gang: Option<(&'a str, usize)>,
}

/// What the planner has decided.
#[derive(Debug, Default)]
pub struct Decided {
    /// Started allocations.
    pub jobs: Vec<AllocationJob>,
    /// Started evictions.
    pub evictions: Vec<Eviction>,
}

/// Time of a decision.
#[derive(Debug, Clone, Copy)]
pub struct Took {
    /// Time that passed.
    pub elapsed: Duration,
    /// Time of the processor, without that of other programs.
    pub processor: Duration,
}

/// Returns the time of the processor that this thread has used.
pub(crate) fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// See the [module](self).
pub struct BenchCluster {
    planner: Planner,
    start: Instant,
    now: Instant,
    version: u64,
    pods: BTreeMap<String, Pod>,
    claims: BTreeMap<String, ResourceClaim>,
    /// Evictions of this round.
    evictions: Vec<Eviction>,
}

fn object<T: DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).context("build an object")
}

fn applied<K>(object: K) -> Change<K> {
    Change::Applied(Box::new(object))
}

/// Returns the schedulers whose pods are planned.
pub(crate) fn schedulers() -> Vec<String> {
    vec!["default-scheduler".to_owned()]
}

/// Returns a planner that evicts pods, and releases nothing while it is measured.
pub(crate) fn planner(policies: Policies) -> Planner {
    let settings = Settings {
        policies,
        schedulers: schedulers(),
        release_after: Duration::from_secs(3600),
        preemption: true,
    };
    let mut shares = 0_u64;
    let share_ids = Box::new(move || {
        shares += 1;
        format!("share-{shares}")
    });
    Planner::new(settings, share_ids)
}

impl BenchCluster {
    /// Creates a cluster of nodes with [`GPUS_PER_NODE`] GPUs each.
    ///
    /// # Errors
    /// Never for valid numbers.
    pub fn new(nodes: usize) -> Result<Self> {
        let policies = Policies {
            node: NodePlacementPolicy::Binpack,
            gpu: GpuPlacementPolicy::Binpack,
        };
        let now = Instant::now();
        let mut cluster = Self {
            planner: planner(policies),
            start: now,
            now,
            version: 1,
            pods: BTreeMap::new(),
            claims: BTreeMap::new(),
            evictions: Vec::new(),
        };
        for class in objects::classes()? {
            cluster.planner.class(applied(class));
        }
        for index in 0..nodes {
            let node = TraceNode {
                name: format!("node-{index:04}"),
                cpu_milli: 128_000,
                memory_mib: 1 << 20,
                gpus: GPUS_PER_NODE,
                model: "H100".to_owned(),
            };
            cluster.planner.node(applied(objects::node(&node)?));
            for slice in objects::slices(&node)? {
                cluster.planner.slice(applied(slice));
            }
        }
        cluster.planner.set_synced();
        Ok(cluster)
    }

    /// Adds a quota of one namespace. The amounts are numbers of devices.
    ///
    /// # Errors
    /// Never for a valid name.
    pub fn add_quota(&mut self, namespace: &str, limit: u64, guarantee: u64) -> Result<()> {
        let quota: GpuQuota = object(json!({
            "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuQuota",
            "metadata": {"name": namespace, "uid": namespace, "resourceVersion": "1"},
            "spec": {
                "namespaces": [namespace], "limit": {"devices": limit}, "guarantee": {"devices": guarantee},
            },
        }))?;
        self.planner.quota(applied(quota));
        Ok(())
    }

    /// Adds a pod with its claim.
    ///
    /// # Errors
    /// Never for a valid name.
    pub fn add(&mut self, new: &NewPod<'_>) -> Result<()> {
        let NewPod {
            name, namespace, ..
        } = new;
        let claim: ResourceClaim = object(json!({
            "metadata": {"name": name, "namespace": namespace, "uid": name, "resourceVersion": "1"},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
                "deviceClassName": "gpu.drava.dev", "count": new.gpus,
            }}]}},
        }))?;
        let annotations = new.gang.map_or(json!({}), |(gang, min)| {
            json!({"gpu.drava.dev/gang": gang, "gpu.drava.dev/gang-min": min.to_string()})
        });
        let pod: Pod = object(json!({
            "metadata": {
                "name": name, "namespace": namespace, "uid": format!("pod-{name}"), "annotations": annotations,
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {
                "priority": new.priority,
                "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
                "containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}}}],
            },
            "status": {"phase": "Pending"},
        }))?;
        self.claims.insert(name.clone(), claim.clone());
        self.pods.insert(name.clone(), pod.clone());
        self.planner.claim(applied(claim), self.now);
        self.planner.pod(applied(pod));
        Ok(())
    }

    /// Deletes a pod with its claim.
    pub fn delete(&mut self, name: &str) {
        let (pod, claim) = (self.pods.remove(name), self.claims.remove(name));
        if let Some(pod) = pod {
            self.planner.pod(Change::Deleted(DeletedObject {
                namespace: pod.metadata.namespace.unwrap_or_default(),
                name: name.to_owned(),
                uid: pod.metadata.uid.unwrap_or_default(),
            }));
        }
        if let Some(claim) = claim {
            let deleted = DeletedObject {
                namespace: claim.metadata.namespace.unwrap_or_default(),
                name: name.to_owned(),
                uid: claim.metadata.uid.unwrap_or_default(),
            };
            self.planner.claim(Change::Deleted(deleted), self.now);
        }
    }

    /// Accepts the evictions of this round, and lets so much time pass that the planner stops waiting for the end of their pods.
    pub fn next_round(&mut self) {
        for eviction in std::mem::take(&mut self.evictions) {
            let outcome = EvictionOutcome {
                evicted: eviction.victims.clone(),
                eviction,
                failure: None,
            };
            self.planner.eviction_finished(outcome, self.now);
        }
        self.now += ROUND;
    }

    /// Returns what the planner decides now, and the time that it takes.
    pub fn decide(&mut self) -> Result<(Decided, Took)> {
        let time: jiff::Timestamp = "2026-01-01T00:00:00Z".parse()?;
        let passed = jiff::SignedDuration::try_from(self.now - self.start)?;
        let time = DecisionTime {
            instant: self.now,
            time: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(time.checked_add(passed)?),
            is_slice_over: |_| false,
        };
        let (started, used) = (std::time::Instant::now(), processor_time());
        let actions = self.planner.actions(&time);
        let took = Took {
            elapsed: started.elapsed(),
            processor: processor_time().saturating_sub(used),
        };
        let mut decided = Decided::default();
        for action in actions {
            match action {
                Action::Allocate(job) => decided.jobs.push(job),
                Action::Evict(eviction) => decided.evictions.push(eviction),
                Action::Release(_)
                | Action::RemoveGate(_)
                | Action::WriteSuspension(_)
                | Action::PublishEvent(_)
                | Action::WritePodCondition(_)
                | Action::WriteQuotaStatus(_)
                | Action::WritePolicyStatus(_)
                | Action::WriteLeaderStatus(_) => {}
            }
        }
        self.evictions.extend(decided.evictions.iter().cloned());
        Ok((decided, took))
    }

    /// Allocates and binds all pending pods.
    ///
    /// # Errors
    /// When a pod does not fit.
    pub fn settle(&mut self) -> Result<()> {
        loop {
            let (decided, _) = self.decide()?;
            ensure!(decided.evictions.is_empty(), "pods do not fit");
            if decided.jobs.is_empty() {
                return Ok(());
            }
            for job in &decided.jobs {
                self.finish(job)?;
            }
        }
    }

    fn finish(&mut self, job: &AllocationJob) -> Result<()> {
        let mut written = Vec::new();
        let mut bound = Vec::new();
        for pod in &job.pods {
            let name = pod.pod.name.clone().unwrap_or_default();
            for write in &pod.writes {
                let key = write.claim.metadata.name.clone().unwrap_or_default();
                let claim = self.claims.get_mut(&key).context("a known claim")?;
                self.version += 1;
                claim.metadata.resource_version = Some(self.version.to_string());
                let consumer = json!([{"resource": "pods", "name": name, "uid": pod.uid}]);
                let status = claim.status.get_or_insert_default();
                status.allocation = Some(write.allocation.clone());
                status.reserved_for = Some(object(consumer)?);
                written.push(claim.clone());
            }
            bound.push((name, pod.node.clone()));
        }
        let outcome = AllocationOutcome {
            pods: job.pods.iter().map(|pod| pod.uid.clone()).collect(),
            keys: written
                .iter()
                .map(|claim| drava_allocator::object::object_key(&claim.metadata))
                .collect(),
            claims: written.clone(),
            failure: None,
        };
        self.planner.allocation_finished(outcome, self.now);
        for claim in written {
            self.planner.claim(applied(claim), self.now);
        }
        for (name, node) in bound {
            let pod = self.pods.get_mut(&name).context("a known pod")?;
            pod.spec.get_or_insert_default().node_name = Some(node);
            pod.status = Some(object(json!({"phase": "Running"}))?);
            self.planner.pod(applied(pod.clone()));
        }
        Ok(())
    }
}
