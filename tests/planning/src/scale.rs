//! The planner with the objects of a large cluster: its memory, and the time of the processor for decisions, passes and
//! explanations. One process measures one [`Point`], because a process does not give back its memory.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use drava_allocator::object::object_key;
use drava_allocator::placement::Policies;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_api::listed::{Change, DeletedObject};
use drava_api::names;
use drava_api::quota::GpuQuota;
use drava_controller::action::{Action, AllocationOutcome, EvictionFailure, EvictionOutcome};
use drava_controller::decide::planner::{DecisionTime, Planner};
use drava_explanation::explain;
use drava_explanation::snapshot::Snapshot;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Map, Value, json};

use crate::cluster::{planner, processor_time, schedulers};
use crate::objects::{self, GPUS, Mode, NAMESPACE, Shape, object, share};

/// Most claims of a cluster.
const MAX_CLAIMS: usize = 100_000;
/// Decisions of each kind that are measured.
const DECISIONS: usize = 400;
/// Different requests of the pods that come in turn.
const REQUESTS: usize = 200;
/// Pods with required anti-affinity, three of each application.
const APART: usize = 3_000;
/// Pods that wait while all slices change.
const WAITING: usize = 10_000;
/// Time slice of the leader, for observations between two passes and for a pass.
const SLICE: Duration = Duration::from_millis(50);

/// What one process measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Point {
    /// Nodes with 16 devices; claims have shares. The policies are the default ones.
    Shares,
    /// The same with the policies `leastFragmentation`, whose scores are known only when devices are evaluated.
    LeastFragmentation,
    /// Nodes with 216 devices; claims have partitions.
    Partitions,
    /// Every GPU is allocated to a claim of its own; pods evict others.
    Full,
    /// The explanation of a pod in such a cluster.
    Explanation,
}

impl Point {
    const fn shape(self) -> Shape {
        match self {
            Self::Shares | Self::LeastFragmentation | Self::Full | Self::Explanation => {
                Shape::Shares
            }
            Self::Partitions => Shape::Partitions,
        }
    }

    const fn policies(self) -> Policies {
        match self {
            Self::LeastFragmentation => Policies {
                node: NodePlacementPolicy::LeastFragmentation,
                gpu: GpuPlacementPolicy::LeastFragmentation,
            },
            Self::Shares | Self::Partitions | Self::Full | Self::Explanation => Policies {
                node: NodePlacementPolicy::Binpack,
                gpu: GpuPlacementPolicy::Binpack,
            },
        }
    }

    /// Number of claims in a cluster of that many nodes.
    fn claims(self, nodes: usize) -> usize {
        match self {
            Self::Shares | Self::LeastFragmentation => MAX_CLAIMS.min(nodes * GPUS * 5),
            // Half of each GPU stays free for the partitions that pods ask for.
            Self::Partitions => MAX_CLAIMS.min(nodes * GPUS * 3),
            Self::Full | Self::Explanation => nodes * GPUS,
        }
    }

    /// Returns the request and the device of the claim of that number on its node.
    fn claimed(self, number: usize) -> (Value, Value) {
        let gpu = number % GPUS;
        match self {
            Self::Shares | Self::LeastFragmentation => {
                let consumed = json!({"memory": "4Gi", "cores": "5", "slots": "1"});
                let share_id = format!("00000000-0000-0000-0000-{number:012}");
                let device = json!({"device": format!("gpu-{gpu}-vgpu"), "shareID": share_id, "consumedCapacity": consumed});
                (share("4Gi"), device)
            }
            Self::Partitions => {
                let start = number / GPUS;
                let device = format!("gpu-{gpu}-mig-1g-10gb-{start}");
                (self.shape().request(), json!({"device": device}))
            }
            Self::Full | Self::Explanation => (whole(1), json!({"device": format!("gpu-{gpu}")})),
        }
    }
}

fn whole(count: u64) -> Value {
    json!({"deviceClassName": names::class::GPU, "count": count})
}

fn classes() -> Result<Vec<DeviceClass>> {
    let mut classes = objects::classes()?;
    let expression =
        r#"device.driver == "gpu.drava.dev" && device.attributes["gpu.drava.dev"].type == "gpu""#;
    classes.push(object(json!({
        "metadata": {"name": names::class::GPU},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }))?);
    Ok(classes)
}

/// Returns a pending pod with its claim.
fn pending(name: &str, request: &Value, priority: i32) -> Result<(Pod, ResourceClaim)> {
    let mut pod = objects::pod(name, false)?;
    pod.metadata.uid = Some(format!("pod-{name}"));
    pod.metadata.creation_timestamp = Some(object(json!("2026-01-02T00:00:00Z"))?);
    pod.spec.get_or_insert_default().priority = Some(priority);
    pod.status = Some(object(json!({"phase": "Pending"}))?);
    let mut claim = objects::claim(name, request)?;
    claim.metadata.uid = Some(format!("claim-{name}"));
    claim.metadata.resource_version = Some("1".to_owned());
    Ok((pod, claim))
}

/// Returns a pod that runs on the node with its claim for the device.
fn running(point: Point, index: usize, nodes: usize) -> Result<(Pod, ResourceClaim)> {
    let (node, number) = (objects::node_name(index % nodes), index / nodes);
    let (request, mut result) = point.claimed(number);
    let name = format!("running-{index:06}");
    let (mut pod, mut claim) = pending(&name, &request, 0)?;
    let created = jiff::Timestamp::from_second(1_767_225_600 + i64::try_from(index)?)?;
    pod.metadata.creation_timestamp = Some(Time(created));
    pod.spec.get_or_insert_default().node_name = Some(node.clone());
    pod.status = Some(object(json!({
        "phase": "Running",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    }))?);
    if let Value::Object(result) = &mut result {
        let more = [
            ("driver", json!(names::DRIVER)),
            ("pool", json!(format!("{node}/gpus"))),
            ("request", json!("gpu")),
            (
                "tolerations",
                json!([{"key": names::MANAGED_TAINT, "operator": "Exists"}]),
            ),
        ];
        result.extend(more.map(|(name, value)| (name.to_owned(), value)));
    }
    claim.metadata.finalizers = Some(vec!["resource.kubernetes.io/delete-protection".to_owned()]);
    claim.status = Some(object(json!({
        "allocation": {
            "allocationTimestamp": "2026-01-01T00:00:00Z",
            "devices": {"results": [result], "config": [{"source": "FromClass", "opaque": {
                "driver": names::RECORD_DRIVER,
                "parameters": {
                    "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "PlacementRecord",
                    "podUID": format!("pod-{name}"), "reason": format!("node {node}: only feasible node"),
                },
            }}]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
                {"key": "metadata.name", "operator": "In", "values": [node]},
            ]}]},
        },
        "reservedFor": [{"resource": "pods", "name": name, "uid": format!("pod-{name}")}],
    }))?);
    Ok((pod, claim))
}

/// The planner, and the clock.
struct Scale {
    planner: Planner,
    nodes: usize,
    point: Point,
    next: usize,
}

fn applied<K>(object: K) -> Change<K> {
    Change::Applied(Box::new(object))
}

/// A decision, or the passes until a pod is decided.
#[derive(Default)]
struct Decided {
    total: Duration,
    longest: Duration,
    placed: usize,
    victims: usize,
}

impl Scale {
    fn new(nodes: usize, point: Point) -> Result<Self> {
        let mut planner = planner(point.policies());
        for class in classes()? {
            planner.class(applied(class));
        }
        for index in 0..nodes {
            planner.node(applied(objects::node(index)?));
            for slice in objects::slices(index, point.shape(), Mode::Managed)? {
                planner.slice(applied(slice));
            }
        }
        Ok(Self {
            planner,
            nodes,
            point,
            next: 0,
        })
    }

    fn fill(&mut self) -> Result<()> {
        for index in 0..self.point.claims(self.nodes) {
            let (pod, claim) = running(self.point, index, self.nodes)?;
            self.planner
                .claim(applied(claim), tokio::time::Instant::now());
            self.planner.pod(applied(pod));
        }
        self.planner.set_synced();
        Ok(())
    }

    /// Lets the leader pass once. Returns what it decides.
    fn pass(&mut self, decided: &mut Decided) -> Result<()> {
        let time = DecisionTime {
            instant: tokio::time::Instant::now(),
            time: Time("2026-01-03T00:00:00Z".parse()?),
            is_slice_over: |started| started.elapsed() >= SLICE,
        };
        let started = processor_time();
        let actions = self.planner.actions(&time);
        let took = processor_time().saturating_sub(started);
        decided.total += took;
        decided.longest = decided.longest.max(took);
        for action in actions {
            match action {
                Action::Allocate(job) => {
                    decided.placed += job.pods.len();
                    let writes = job.pods.iter().flat_map(|pod| &pod.writes);
                    let outcome = AllocationOutcome {
                        pods: job.pods.iter().map(|pod| pod.uid.clone()).collect(),
                        keys: writes
                            .map(|write| object_key(&write.claim.metadata))
                            .collect(),
                        claims: Vec::new(),
                        failure: None,
                    };
                    let now = tokio::time::Instant::now();
                    self.planner.allocation_finished(outcome, now);
                }
                Action::Evict(eviction) => {
                    decided.victims += eviction.victims.len();
                    // The pods stay, and are not expected to end.
                    let victim = eviction.victims.first().cloned();
                    let failure = victim.map(|victim| EvictionFailure {
                        victim,
                        message: "bench".to_owned(),
                    });
                    let outcome = EvictionOutcome {
                        evicted: Vec::new(),
                        eviction,
                        failure,
                    };
                    self.planner
                        .eviction_finished(outcome, tokio::time::Instant::now());
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn add(&mut self, request: &Value, priority: i32) -> Result<String> {
        let name = format!("pending-{}", self.next);
        self.next += 1;
        let (pod, claim) = pending(&name, request, priority)?;
        self.planner
            .claim(applied(claim), tokio::time::Instant::now());
        self.planner.pod(applied(pod));
        Ok(name)
    }

    fn delete(&mut self, name: &str) {
        let deleted = |uid: String| DeletedObject {
            namespace: NAMESPACE.to_owned(),
            name: name.to_owned(),
            uid,
        };
        let pod = deleted(format!("pod-{name}"));
        self.planner.pod(Change::Deleted(pod));
        let claim = deleted(format!("claim-{name}"));
        let now = tokio::time::Instant::now();
        self.planner.claim(Change::Deleted(claim), now);
    }

    /// Returns the times of decisions for pods that come one after the other. Each is allocated, which changes its node, and gone
    /// before the next.
    fn decisions(&mut self, requests: usize) -> Result<Decisions> {
        let mut decisions = Decisions::default();
        for round in 0..requests + DECISIONS {
            let memory = format!("{}Mi", 4_096 + round % requests);
            let request = match self.point {
                Point::Shares | Point::LeastFragmentation => share(&memory),
                _ => self.point.shape().request(),
            };
            let name = self.add(&request, 0)?;
            let mut decided = Decided::default();
            while decided.placed == 0 {
                self.pass(&mut decided)?;
                ensure!(
                    decided.total < Duration::from_secs(600),
                    "the pod does not fit"
                );
            }
            let ms = decided.total.as_secs_f64() * 1e3;
            match round < requests {
                true => decisions.longest_first = decisions.longest_first.max(ms),
                false => decisions.later.push(ms),
            }
            self.delete(&name);
            self.pass(&mut Decided::default())?;
        }
        decisions.later.sort_by(f64::total_cmp);
        Ok(decisions)
    }

    /// Measures the eviction for a pod with that many GPUs. Returns the time of all passes and that of the longest.
    fn eviction(&mut self, gpus: u64) -> Result<Decided> {
        let name = self.add(&whole(gpus), 100)?;
        let mut decided = Decided::default();
        while decided.victims == 0 {
            self.pass(&mut decided)?;
            ensure!(decided.total < Duration::from_secs(600), "no victims");
        }
        ensure!(
            decided.victims == usize::try_from(gpus)?,
            "{} victims",
            decided.victims
        );
        self.delete(&name);
        self.pass(&mut Decided::default())?;
        Ok(decided)
    }
}

/// Times of decisions in milliseconds.
#[derive(Default)]
struct Decisions {
    /// The longest of the first decisions for a request, which may evaluate every node.
    longest_first: f64,
    /// Those of all later ones, the shortest first.
    later: Vec<f64>,
}

fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let index = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(index).copied().unwrap_or_default()
}

/// Returns the memory of this process in MiB.
fn resident_mib() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    let kib: f64 = kib.context("no VmRSS")?.parse()?;
    Ok(kib / 1024.0)
}

/// Measures a point, and returns its figures by name.
///
/// # Errors
/// When the planner does not decide as expected.
pub fn run(point: Point, nodes: usize) -> Result<Map<String, Value>> {
    let claims = point.claims(nodes);
    let mut row = Map::new();
    row.insert("nodes".to_owned(), json!(nodes));
    row.insert("claims".to_owned(), json!(claims));
    if point == Point::Explanation {
        let ms = explanation(nodes)?;
        row.insert("explanationMs".to_owned(), json!(ms));
        return Ok(row);
    }
    let before = resident_mib()?;
    let mut scale = Scale::new(nodes, point)?;
    let with_nodes = resident_mib()?;
    scale.fill()?;
    let with_claims = resident_mib()?;
    row.insert("nodesMib".to_owned(), json!(with_nodes - before));
    row.insert("claimsMib".to_owned(), json!(with_claims - with_nodes));
    let mut insert = |name: &str, value: f64| row.insert(name.to_owned(), json!(value));
    if point == Point::Full {
        scale.pass(&mut Decided::default())?;
        for (gpus, name) in [(1, "oneGpu"), (8, "eightGpus")] {
            // The first search of a kind evaluates every node.
            let first = scale.eviction(gpus)?;
            insert(&format!("{name}FirstMs"), first.total.as_secs_f64() * 1e3);
            let decided = scale.eviction(gpus)?;
            insert(&format!("{name}Ms"), decided.total.as_secs_f64() * 1e3);
            let longest = decided.longest.as_secs_f64() * 1e3;
            insert(&format!("{name}LongestPassMs"), longest);
        }
        insert("residentMib", resident_mib()?);
        return Ok(row);
    }
    let plain = scale.decisions(1)?;
    insert("plainFirstMs", plain.longest_first);
    insert("plainP50Ms", percentile(&plain.later, 50));
    insert("plainP99Ms", percentile(&plain.later, 99));
    if point != Point::Partitions {
        let quota: GpuQuota = object(json!({
            "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuQuota",
            "metadata": {"name": "bench", "uid": "bench", "resourceVersion": "1"},
            "spec": {"namespaces": [NAMESPACE], "limit": {"memory": "1000Ti"}},
        }))?;
        scale.planner.quota(applied(quota));
        insert("quotaP99Ms", percentile(&scale.decisions(1)?.later, 99));
        scale.planner.quota(Change::Deleted(DeletedObject {
            namespace: String::new(),
            name: "bench".to_owned(),
            uid: "bench".to_owned(),
        }));
        let requests = scale.decisions(REQUESTS)?;
        insert("requestsFirstMs", requests.longest_first);
        insert("requestsP99Ms", percentile(&requests.later, 99));
        for index in 0..APART {
            scale.planner.pod(applied(apart(index, nodes)?));
        }
        insert(
            "antiAffinityP99Ms",
            percentile(&scale.decisions(1)?.later, 99),
        );
        insert("residentMib", resident_mib()?);
        let (batch, pass) = all_slices_change(&mut scale)?;
        insert("longestBatchMs", batch.as_secs_f64() * 1e3);
        insert("longestPassMs", pass.as_secs_f64() * 1e3);
    } else {
        insert("residentMib", resident_mib()?);
    }
    Ok(row)
}

/// Returns a running pod of an application whose pods keep to different nodes.
fn apart(index: usize, nodes: usize) -> Result<Pod> {
    let app = json!({"app": format!("apart-{}", index / 3)});
    object(json!({
        "metadata": {"name": format!("apart-{index}"), "namespace": NAMESPACE, "uid": format!("apart-{index}"), "labels": app},
        "spec": {
            "nodeName": objects::node_name(index % nodes),
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": app}},
            ]}},
            "containers": [{"name": "main"}],
        },
        "status": {"phase": "Running"},
    }))
}

/// Lets the slices of all nodes change while pods wait. Returns the longest time for the observations between two passes, and
/// for a pass.
fn all_slices_change(scale: &mut Scale) -> Result<(Duration, Duration)> {
    for _ in 0..WAITING {
        scale.add(&whole(8), 0)?;
    }
    for _ in 0..20 {
        scale.pass(&mut Decided::default())?;
    }
    let mut changed: Vec<ResourceSlice> = Vec::new();
    for index in 0..scale.nodes {
        for mut slice in objects::slices(index, scale.point.shape(), Mode::Managed)? {
            for device in slice.spec.devices.iter_mut().flatten() {
                let attributes = device.attributes.get_or_insert_default();
                let version = object(json!({"version": "580.95.5"}))?;
                attributes.insert("driverVersion".to_owned(), version);
            }
            slice.metadata.resource_version = Some("2".to_owned());
            changed.push(slice);
        }
    }
    let mut longest_batch = Duration::ZERO;
    let mut passes = Decided::default();
    let mut changed = changed.into_iter().peekable();
    while changed.peek().is_some() {
        let started = processor_time();
        for slice in changed.by_ref() {
            scale.planner.slice(applied(slice));
            // As the leader does.
            if processor_time().saturating_sub(started) >= SLICE {
                break;
            }
        }
        longest_batch = longest_batch.max(processor_time().saturating_sub(started));
        scale.pass(&mut passes)?;
    }
    Ok((longest_batch, passes.longest))
}

/// Returns the time of the explanation of a pod that does not fit, in milliseconds. The snapshot is taken before.
fn explanation(nodes: usize) -> Result<f64> {
    let all: Vec<Node> = (0..nodes).map(objects::node).collect::<Result<_>>()?;
    let slices = (0..nodes).map(|node| objects::slices(node, Shape::Shares, Mode::Managed));
    let slices: Vec<Vec<ResourceSlice>> = slices.collect::<Result<_>>()?;
    let slices = slices.concat();
    let point = Point::Explanation;
    let running = (0..point.claims(nodes)).map(|index| running(point, index, nodes));
    let running: Vec<(Pod, ResourceClaim)> = running.collect::<Result<_>>()?;
    let (mut pods, mut claims): (Vec<_>, Vec<_>) = running.into_iter().unzip();
    let (pod, claim) = pending("explained", &share("8Gi"), 0)?;
    pods.push(pod);
    claims.push(claim);
    let mut snapshot = Snapshot::new(&all, &slices, &[], &classes()?, claims, pods);
    drop((all, slices));
    let settings = explain::Settings {
        policies: point.policies(),
        schedulers: schedulers(),
    };
    let started = processor_time();
    let report = explain::pod_with_changes(&mut snapshot, NAMESPACE, "explained", &settings)?;
    let took = processor_time().saturating_sub(started);
    ensure!(!report.changes.is_empty(), "no change is suggested");
    Ok(took.as_secs_f64() * 1e3)
}
