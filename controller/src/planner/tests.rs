//! Scenarios of the managed mode, with the API server, kube-scheduler and the clock played by the test.

use serde_json::json;

use super::*;
use crate::fixture::{claim, class, node, object, pod, slice};

const RELEASE_AFTER: Duration = Duration::from_secs(60);

/// The planner with the objects of a cluster.
struct World {
    planner: Planner,
    now: Instant,
    version: u64,
    claims: BTreeMap<String, ResourceClaim>,
    told: Vec<(String, &'static str, String)>,
}

impl World {
    /// A cluster whose nodes have one card each.
    fn new(nodes: &[&str]) -> Self {
        let settings = Settings {
            policies: Policies {
                node: drava_api::config::PlacementPolicy::Binpack,
                gpu: drava_api::config::PlacementPolicy::Binpack,
            },
            schedulers: vec!["default-scheduler".to_owned()],
            release_after: RELEASE_AFTER,
        };
        let mut ids = 0;
        let share_ids = Box::new(move || {
            ids += 1;
            format!("share-{ids}")
        });
        let mut world = Self {
            planner: Planner::new(settings, share_ids),
            now: Instant::now(),
            version: 100,
            claims: BTreeMap::new(),
            told: Vec::new(),
        };
        world.planner.class(applied(class()));
        for name in nodes {
            world.planner.node(applied(node(name)));
            world.planner.slice(applied(slice(name)));
        }
        world.planner.set_synced();
        world
    }

    fn add_claim(&mut self, claim: ResourceClaim) {
        self.observe(claim);
    }

    fn add_pod(&mut self, pod: Pod) {
        self.planner.pod(applied(pod));
    }

    /// A pod with a claim of its own.
    fn wish(&mut self, name: &str, memory: &str) {
        self.add_claim(claim(name, memory));
        self.add_pod(pod(name, &[name]));
    }

    fn observe(&mut self, mut claim: ResourceClaim) {
        self.version += 1;
        claim.metadata.resource_version = Some(self.version.to_string());
        let name = claim.metadata.name.clone().unwrap();
        self.claims.insert(name, claim.clone());
        self.planner.claim(applied(claim), self.now);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    fn moment(&self) -> Moment {
        Moment {
            instant: self.now,
            time: object(json!("2026-01-01T00:00:00Z")),
        }
    }

    /// What is to be done now, without what is only said.
    fn actions(&mut self) -> (Vec<Job>, Vec<Release>) {
        let (mut jobs, mut releases) = (Vec::new(), Vec::new());
        for action in self.planner.actions(&self.moment()) {
            match action {
                Action::Allocate(job) => jobs.push(job),
                Action::Release(release) => releases.push(release),
                Action::Tell(notice) => self.told.push((
                    format!(
                        "{}/{}",
                        notice.regarding.kind.unwrap(),
                        notice.regarding.name.unwrap()
                    ),
                    notice.reason,
                    notice.message,
                )),
            }
        }
        (jobs, releases)
    }

    /// Carries a job out.
    fn write(&mut self, job: Job) {
        let mut written = Vec::new();
        for write in &job.writes {
            let mut claim = self.claims[write.claim.metadata.name.as_ref().unwrap()].clone();
            let annotations = claim.metadata.annotations.get_or_insert_default();
            annotations.insert(
                names::ALLOCATED_FOR_ANNOTATION.to_owned(),
                job.pod_uid.clone(),
            );
            claim.status.get_or_insert_default().allocation = Some(write.allocation.clone());
            self.version += 1;
            claim.metadata.resource_version = Some(self.version.to_string());
            self.claims
                .insert(claim.metadata.name.clone().unwrap(), claim.clone());
            written.push(claim);
        }
        self.end(job, written, None);
    }

    fn end(&mut self, job: Job, claims: Vec<ResourceClaim>, failure: Option<JobFailure>) {
        let keys = job
            .writes
            .iter()
            .map(|write| object_key(&write.claim.metadata))
            .collect();
        let outcome = JobOutcome {
            pod_uid: job.pod_uid,
            keys,
            claims,
            failure,
        };
        self.planner.written(outcome, self.now);
    }

    /// Decides and carries out everything; `pod → node` in the order of decisions.
    fn settle(&mut self) -> Vec<String> {
        let mut placed = Vec::new();
        for _ in 0..20 {
            let (jobs, releases) = self.actions();
            assert!(releases.is_empty(), "unexpected releases: {releases:?}");
            if jobs.is_empty() {
                return placed;
            }
            for job in jobs {
                placed.push(format!(
                    "{} → {}",
                    job.pod.name.as_deref().unwrap(),
                    job.node
                ));
                self.write(job);
            }
        }
        panic!("the planner does not come to rest");
    }

    /// kube-scheduler reserves a claim.
    fn reserve(&mut self, claim: &str, pod: &str) {
        let mut claim = self.claims[claim].clone();
        let consumer = json!({"resource": "pods", "name": pod, "uid": format!("pod-{pod}")});
        claim.status.get_or_insert_default().reserved_for = Some(vec![object(consumer)]);
        self.observe(claim);
    }

    /// Somebody takes an allocation back.
    fn deallocate(&mut self, claim: &str) {
        let mut claim = self.claims[claim].clone();
        claim.status = None;
        self.observe(claim);
    }

    fn carry_out(&mut self, release: &Release) {
        let mut claim = self.claims[release.claim.metadata.name.as_ref().unwrap()].clone();
        claim.status = None;
        claim.metadata.annotations = None;
        self.version += 1;
        claim.metadata.resource_version = Some(self.version.to_string());
        self.claims
            .insert(claim.metadata.name.clone().unwrap(), claim.clone());
        self.planner
            .released(&object_key(&claim.metadata), Some(claim), self.now);
    }

    fn pod_gone(&mut self, name: &str) {
        self.planner.pod(Change::Gone(Gone {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: format!("pod-{name}"),
        }));
    }

    fn claim_gone(&mut self, name: &str) {
        self.claims.remove(name);
        let gone = Gone {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{name}"),
        };
        self.planner.claim(Change::Gone(gone), self.now);
    }

    fn told_about(&self, object: &str) -> Vec<&str> {
        self.told
            .iter()
            .filter(|(about, _, _)| about == object)
            .map(|(_, _, message)| message.as_str())
            .collect()
    }
}

fn applied<K>(object: K) -> Change<K> {
    Change::Applied(Box::new(object))
}

#[test]
fn nothing_is_decided_on_half_a_picture() {
    let mut world = World::new(&["n1"]);
    world.planner.synced = false;
    world.wish("a", "8Gi");
    assert!(world.actions().0.is_empty());
    assert_eq!(world.planner.next_deadline(), None);
    world.planner.set_synced();
    assert_eq!(world.settle(), ["a → n1"]);
}

#[test]
fn an_allocation_has_all_that_kube_scheduler_needs() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "8Gi");
    let (mut jobs, _) = world.actions();
    let job = jobs.remove(0);
    assert_eq!(
        serde_json::to_value(&job.writes[0].allocation).unwrap(),
        json!({
            "allocationTimestamp": "2026-01-01T00:00:00Z",
            "devices": {
                "results": [{
                    "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
                    "shareID": "share-1", "consumedCapacity": {"memory": "8Gi", "cores": "0"},
                }],
                "config": [{"source": "FromClass", "opaque": {"driver": "gpu.drava.dev", "parameters": {
                    "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "priority": 10,
                }}}],
            },
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
                {"key": "metadata.name", "operator": "In", "values": ["n1"]},
            ]}]},
        })
    );
}

#[test]
fn what_is_being_written_is_taken() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "50Gi");
    world.wish("b", "50Gi");
    let (jobs, _) = world.actions();
    assert_eq!(
        jobs.len(),
        1,
        "the second does not fit beside the first, which is on its way"
    );
    assert_eq!(
        world.told_about("Pod/b"),
        ["0/1 nodes: 1 InsufficientMemory (largest free piece 30 GiB on n1/gpu-0)"]
    );
    assert_eq!(
        world.told_about("ResourceClaim/b").len(),
        1,
        "the claim says so, too"
    );
}

#[test]
fn a_freed_card_wakes_who_waits() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "50Gi");
    assert_eq!(world.settle(), ["a → n1"]);
    world.reserve("a", "a");
    world.wish("b", "50Gi");
    assert!(world.settle().is_empty());
    world.pod_gone("a");
    world.claim_gone("a");
    assert_eq!(world.settle(), ["b → n1"]);
}

#[test]
fn the_same_text_is_said_once() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "100Gi");
    world.settle();
    for _ in 0..5 {
        world.pass(Duration::from_secs(20));
        world.planner.node(applied(object(json!({
            "metadata": {"name": "n2", "labels": {"changed": format!("{:?}", world.now)}},
        }))));
        world.settle();
    }
    assert_eq!(
        world.told_about("Pod/a"),
        [
            "0/1 nodes: 1 InsufficientMemory (100 GiB is more than any card has: the largest has 80 GiB, n1/gpu-0)"
        ]
    );
    // A new node is news.
    world.planner.slice(applied(slice("n2")));
    world.settle();
    assert_eq!(world.told_about("Pod/a").len(), 2);
}

#[test]
fn higher_priority_and_greater_age_go_first() {
    let mut world = World::new(&["n1"]);
    for (name, priority, created) in [("young", 0, 20), ("old", 0, 10), ("important", 5, 30)] {
        world.add_claim(claim(name, "70Gi"));
        let mut pod = pod(name, &[name]);
        pod.metadata.creation_timestamp =
            Some(object(json!(format!("2026-01-01T00:00:{created}Z"))));
        pod.spec.as_mut().unwrap().priority = Some(priority);
        world.add_pod(pod);
    }
    assert_eq!(world.settle(), ["important → n1"]);
    world.pod_gone("important");
    world.claim_gone("important");
    assert_eq!(world.settle(), ["old → n1"]);
}

#[test]
fn an_allocation_that_nobody_reserves_is_released_and_planned_elsewhere() {
    let mut world = World::new(&["n1", "n2"]);
    world.wish("a", "8Gi");
    assert_eq!(world.settle(), ["a → n1"]);
    world.pass(RELEASE_AFTER - Duration::from_secs(1));
    assert!(world.actions().1.is_empty(), "too early");
    assert_eq!(
        world.planner.next_deadline(),
        Some(world.now + Duration::from_secs(1))
    );
    world.pass(Duration::from_secs(1));
    let (_, releases) = world.actions();
    assert_eq!(releases.len(), 1);
    assert!(world.actions().1.is_empty(), "once");
    world.carry_out(&releases[0]);
    assert!(world.settle().is_empty(), "a pause first");
    assert_eq!(
        world.told_about("Pod/a"),
        [
            "claim a had devices on node n1, but the pod was not bound there; planning again, that node last"
        ]
    );
    world.pass(Duration::from_secs(2));
    assert_eq!(world.settle(), ["a → n2"]);
    world.reserve("a", "a");
    world.pass(RELEASE_AFTER * 2);
    assert!(
        world.actions().1.is_empty(),
        "a reserved claim is never released"
    );
}

#[test]
fn a_release_that_failed_is_tried_again() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "8Gi");
    world.settle();
    world.pass(RELEASE_AFTER);
    let (_, releases) = world.actions();
    world
        .planner
        .released(&object_key(&releases[0].claim.metadata), None, world.now);
    assert!(world.actions().1.is_empty());
    world.pass(Duration::from_secs(5));
    assert_eq!(world.actions().1.len(), 1);
}

#[test]
fn an_allocation_taken_back_by_kube_scheduler_is_planned_again_with_its_siblings() {
    let mut world = World::new(&["n1", "n2"]);
    for name in ["a", "b"] {
        world.add_claim(claim(name, "8Gi"));
    }
    world.add_pod(pod("p", &["a", "b"]));
    assert_eq!(world.settle(), ["p → n1"]);
    world.deallocate("a");
    let (jobs, releases) = world.actions();
    assert!(jobs.is_empty());
    assert_eq!(releases.len(), 1, "the other claim of the pod goes, too");
    assert_eq!(releases[0].claim.metadata.name.as_deref(), Some("b"));
    world.carry_out(&releases[0]);
    world.pass(Duration::from_secs(10));
    assert_eq!(world.settle(), ["p → n2"]);
}

#[test]
fn a_pod_that_vanishes_frees_its_devices() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "70Gi");
    world.settle();
    world.pod_gone("a");
    world.wish("b", "70Gi");
    assert!(world.settle().is_empty());
    world.pass(Duration::from_secs(2));
    let (_, releases) = world.actions();
    assert_eq!(releases[0].why, "no pod waits for it");
    world.carry_out(&releases[0]);
    assert_eq!(world.settle(), ["b → n1"]);
}

#[test]
fn a_node_that_vanishes_frees_its_devices() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "8Gi");
    world.settle();
    world.planner.node(Change::Gone(Gone {
        name: "n1".to_owned(),
        ..Gone::default()
    }));
    let (_, releases) = world.actions();
    assert_eq!(releases[0].why, "the node is gone");
}

#[test]
fn allocations_of_others_are_left_alone() {
    let mut world = World::new(&["n1"]);
    let mut foreign = claim("a", "8Gi");
    foreign.status = Some(object(json!({"allocation": {"devices": {"results": [{
        "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
        "shareID": "x", "consumedCapacity": {"memory": "60Gi"},
    }]}}})));
    world.add_claim(foreign);
    world.pass(RELEASE_AFTER * 2);
    assert!(world.actions().1.is_empty());
    world.wish("b", "30Gi");
    assert!(world.settle().is_empty(), "but what they hold counts");
}

#[test]
fn pods_that_share_a_claim_are_planned_together_and_written_once() {
    let mut world = World::new(&["n1", "n2"]);
    // Only three CPUs are left on the first node.
    let mut busy = pod("busy", &[]);
    busy.spec = Some(object(
        json!({"nodeName": "n1", "containers": [{"name": "c", "resources": {"requests": {"cpu": "5"}}}]}),
    ));
    world.add_pod(busy);
    world.add_claim(claim("shared", "8Gi"));
    for name in ["p1", "p2", "p3", "p4"] {
        world.add_pod(pod(name, &["shared"]));
    }
    let (jobs, _) = world.actions();
    assert_eq!(jobs.len(), 1);
    assert_eq!(jobs[0].node, "n2", "four pods do not fit on the first");
    assert!(
        world.actions().0.is_empty(),
        "the others wait for the outcome"
    );
    for job in jobs {
        world.write(job);
    }
    assert!(world.settle().is_empty(), "all are served");
}

#[test]
fn a_failed_write_frees_what_it_took_and_is_tried_again_later() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "70Gi");
    let (mut jobs, _) = world.actions();
    let failure = JobFailure {
        message: "refused".to_owned(),
        tell: true,
    };
    world.end(jobs.remove(0), Vec::new(), Some(failure));
    world.wish("b", "70Gi");
    assert_eq!(
        world.settle(),
        ["b → n1"],
        "what the failed write had taken is free"
    );
    assert_eq!(world.told_about("Pod/a")[0], "refused");
    world.pod_gone("b");
    world.claim_gone("b");
    assert!(world.settle().is_empty(), "a pause after the failure");
    world.pass(Duration::from_secs(1));
    assert_eq!(world.settle(), ["a → n1"]);
}

#[test]
fn pods_of_others_are_left_alone() {
    let mut world = World::new(&["n1"]);
    for name in ["scheduler", "gated", "ended", "deleted", "none", "running"] {
        world.add_claim(claim(name, "1Gi"));
    }
    let change = |name: &str, change: fn(&mut Pod)| {
        let mut pod = pod(name, &[name]);
        change(&mut pod);
        pod
    };
    world.add_pod(change("scheduler", |pod| {
        pod.spec.as_mut().unwrap().scheduler_name = Some("volcano".to_owned())
    }));
    world.add_pod(change("gated", |pod| {
        pod.spec.as_mut().unwrap().scheduling_gates =
            Some(vec![object(json!({"name": "example.com/later"}))]);
    }));
    world.add_pod(change("ended", |pod| {
        pod.status.as_mut().unwrap().phase = Some("Failed".to_owned())
    }));
    world.add_pod(change("deleted", |pod| {
        pod.metadata.deletion_timestamp = Some(object(json!("2026-01-01T00:00:00Z")))
    }));
    world.add_pod(change("running", |pod| {
        pod.status.as_mut().unwrap().phase = Some("Running".to_owned())
    }));
    world.add_pod(pod("none", &[]));
    assert!(world.settle().is_empty());
    assert!(world.told.is_empty());
    // Whoever names the node has bypassed the scheduler, and waits for the claim.
    world.add_claim(claim("named", "1Gi"));
    world.add_pod(change("named", |pod| {
        let spec = pod.spec.as_mut().unwrap();
        spec.scheduler_name = Some("volcano".to_owned());
        spec.node_name = Some("n1".to_owned());
    }));
    assert_eq!(world.settle(), ["named → n1"]);
}

#[test]
fn a_claim_made_for_another_pod_is_not_used() {
    let mut world = World::new(&["n1"]);
    let mut owned = claim("p-gpu-x", "8Gi");
    owned.metadata.owner_references = Some(vec![object(json!({
        "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "an-earlier-p", "controller": true,
    }))]);
    world.add_claim(owned.clone());
    let mut templated = pod("p", &[]);
    templated.spec.as_mut().unwrap().resource_claims = Some(vec![object(
        json!({"name": "gpu", "resourceClaimTemplateName": "t"}),
    )]);
    world.add_pod(templated.clone());
    assert!(world.settle().is_empty(), "the claim is not yet made");
    templated.status = Some(object(
        json!({"phase": "Pending", "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "p-gpu-x"}]}),
    ));
    world.add_pod(templated);
    assert!(world.settle().is_empty(), "not this pod's");
    owned.metadata.owner_references.as_mut().unwrap()[0].uid = "pod-p".to_owned();
    world.observe(owned);
    assert_eq!(world.settle(), ["p → n1"]);
}

#[test]
fn late_events_do_not_undo_what_is_known() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "70Gi");
    let before = world.claims["a"].clone();
    world.settle();
    // The event of the creation arrives after the answer to the write.
    world.planner.claim(applied(before), world.now);
    world.wish("b", "70Gi");
    assert!(world.settle().is_empty());
    assert!(
        world.told_about("Pod/a").is_empty(),
        "nothing was taken back"
    );
    world.pass(Duration::from_secs(10));
    assert!(world.settle().is_empty(), "nothing is planned again");
}

#[test]
fn a_malformed_pool_is_named_once() {
    let mut world = World::new(&["n1", "n2"]);
    let mut broken = slice("n1");
    broken.metadata.resource_version = Some("2".to_owned());
    let devices = broken.spec.devices.as_mut().unwrap();
    devices.push(devices[0].clone());
    world.planner.slice(applied(broken));
    world.wish("a", "8Gi");
    assert_eq!(world.settle(), ["a → n2"]);
    world.settle();
    assert_eq!(
        world.told_about("Node/n1"),
        ["the devices of pool n1/gpus are not used: slice slice-n1: duplicate device gpu-0-vgpu"]
    );
}

#[test]
fn many_pods_are_written_a_few_at_a_time() {
    let mut world = World::new(&["n1"]);
    for index in 0..100 {
        let name = format!("p{index:03}");
        let mut small = pod(&name, &[&name]);
        small.spec.as_mut().unwrap().containers[0].resources = None;
        world.add_claim(claim(&name, "1Mi"));
        world.add_pod(small);
    }
    let (jobs, _) = world.actions();
    assert_eq!(jobs.len(), MAX_WRITING);
    for job in jobs {
        world.write(job);
    }
    assert_eq!(world.settle().len(), 100 - MAX_WRITING);
}
