//! The planner in a small cluster, with the API server, kube-scheduler and the clock played by the test.

use std::collections::BTreeMap;
use std::time::Duration;

use drava_allocator::cluster::object_key;
use drava_allocator::placement::Policies;
use drava_api::names;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;
use tokio::time::Instant;

use crate::action::{Action, Job, JobFailure, JobOutcome, Release};
use crate::change::{Change, Gone};
use crate::fixture::{claim, class, node, object, pod, slice};
use crate::planner::{Moment, Planner, Settings};

pub(super) const RELEASE_AFTER: Duration = Duration::from_secs(60);

/// The planner with the objects of a cluster.
pub(super) struct World {
    pub(super) planner: Planner,
    pub(super) now: Instant,
    pub(super) version: u64,
    pub(super) claims: BTreeMap<String, ResourceClaim>,
    pub(super) told: Vec<(String, &'static str, String)>,
}

impl World {
    /// A cluster whose nodes have one card each.
    pub(super) fn new(nodes: &[&str]) -> Self {
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

    pub(super) fn add_claim(&mut self, claim: ResourceClaim) {
        self.observe(claim);
    }

    pub(super) fn add_pod(&mut self, pod: Pod) {
        self.planner.pod(applied(pod));
    }

    /// A pod with a claim of its own.
    pub(super) fn wish(&mut self, name: &str, memory: &str) {
        self.add_claim(claim(name, memory));
        self.add_pod(pod(name, &[name]));
    }

    pub(super) fn observe(&mut self, mut claim: ResourceClaim) {
        self.version += 1;
        claim.metadata.resource_version = Some(self.version.to_string());
        let name = claim.metadata.name.clone().unwrap();
        self.claims.insert(name, claim.clone());
        self.planner.claim(applied(claim), self.now);
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    pub(super) fn moment(&self) -> Moment {
        Moment {
            instant: self.now,
            time: object(json!("2026-01-01T00:00:00Z")),
        }
    }

    /// What is to be done now, without what is only said.
    pub(super) fn actions(&mut self) -> (Vec<Job>, Vec<Release>) {
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
                    notice.reason.as_str(),
                    notice.message,
                )),
            }
        }
        (jobs, releases)
    }

    /// Carries a job out.
    pub(super) fn write(&mut self, job: Job) {
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

    pub(super) fn end(
        &mut self,
        job: Job,
        claims: Vec<ResourceClaim>,
        failure: Option<JobFailure>,
    ) {
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
    pub(super) fn settle(&mut self) -> Vec<String> {
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
    pub(super) fn reserve(&mut self, claim: &str, pod: &str) {
        let mut claim = self.claims[claim].clone();
        let consumer = json!({"resource": "pods", "name": pod, "uid": format!("pod-{pod}")});
        claim.status.get_or_insert_default().reserved_for = Some(vec![object(consumer)]);
        self.observe(claim);
    }

    /// Somebody takes an allocation back.
    pub(super) fn deallocate(&mut self, claim: &str) {
        let mut claim = self.claims[claim].clone();
        claim.status = None;
        self.observe(claim);
    }

    pub(super) fn carry_out(&mut self, release: &Release) {
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

    pub(super) fn pod_gone(&mut self, name: &str) {
        self.planner.pod(Change::Gone(Gone {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: format!("pod-{name}"),
        }));
    }

    pub(super) fn claim_gone(&mut self, name: &str) {
        self.claims.remove(name);
        let gone = Gone {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{name}"),
        };
        self.planner.claim(Change::Gone(gone), self.now);
    }

    pub(super) fn told_about(&self, object: &str) -> Vec<&str> {
        self.told
            .iter()
            .filter(|(about, _, _)| about == object)
            .map(|(_, _, message)| message.as_str())
            .collect()
    }
}

pub(super) fn applied<K>(object: K) -> Change<K> {
    Change::Applied(Box::new(object))
}
