//! The model of the API server, with the tenants, kube-scheduler and the claim controller of Kubernetes.

use std::collections::{BTreeMap, BTreeSet};

use drava_api::listed::{Change, DeletedObject};
use drava_api::names;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::fixture::{claim, object, pod};
use crate::watch::Observation;

use crate::fixture::random::Random;

mod connection;
mod pods;

pub(super) use connection::service;
use pods::{gang_of, is_gated};
pub(super) use pods::{namespace, quota};

/// Memory of the GPU of each node, GiB.
const GPU_GIB: u64 = 80;
/// Pods at a time.
const MAX_PODS: usize = 14;

/// A version of an object, or its deletion.
#[derive(Clone)]
pub(super) enum Event {
    Pod(String, Option<Value>),
    Claim(String, Option<Value>),
}

pub(super) fn observation(event: &Event) -> Observation {
    match event {
        Event::Pod(_, Some(pod)) => {
            Observation::Pod(Change::Applied(Box::new(object(pod.clone()))))
        }
        Event::Claim(_, Some(claim)) => {
            Observation::Claim(Change::Applied(Box::new(object(claim.clone()))))
        }
        Event::Pod(name, None) => Observation::Pod(Change::Deleted(deleted(name, "pod"))),
        Event::Claim(name, None) => Observation::Claim(Change::Deleted(deleted(name, "uid"))),
    }
}

fn deleted(name: &str, kind: &str) -> DeletedObject {
    DeletedObject {
        namespace: "default".to_owned(),
        name: name.to_owned(),
        uid: format!("{kind}-{name}"),
    }
}

/// A write that is executed later.
struct Late {
    replica: usize,
    name: String,
    is_status: bool,
    body: Value,
    ticks: usize,
}

pub(super) struct Server {
    random: Random,
    is_faulty: bool,
    version: u64,
    pods: BTreeMap<String, Value>,
    claims: BTreeMap<String, Value>,
    pub(super) history: Vec<Event>,
    late: Vec<Late>,
    /// Replicas that are stopped.
    stopped: BTreeSet<usize>,
    holder: usize,
    policy_holder: usize,
    created: usize,
    /// Claims of templates that are not generated so far, with their memory, and those that their pods do not name so far; by
    /// name, each with its pod.
    ungenerated: BTreeMap<String, (String, String)>,
    unnamed: BTreeMap<String, String>,
    /// Gangs of which all members were allocated at the same time.
    complete_gangs: BTreeSet<String>,
    /// Pods that were bound.
    pub(super) served: usize,
    counts: BTreeMap<&'static str, usize>,
    problems: Vec<String>,
}

impl Server {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            is_faulty: true,
            version: 100,
            pods: BTreeMap::new(),
            claims: BTreeMap::new(),
            history: Vec::new(),
            late: Vec::new(),
            stopped: BTreeSet::new(),
            holder: 0,
            policy_holder: 0,
            created: 0,
            ungenerated: BTreeMap::new(),
            unnamed: BTreeMap::new(),
            complete_gangs: BTreeSet::new(),
            served: 0,
            counts: BTreeMap::new(),
            problems: Vec::new(),
        }
    }

    pub(super) fn set_holder(&mut self, id: usize) {
        self.holder = id;
    }

    /// Returns the holder that the admission policy knows.
    pub(super) fn policy_holder(&self) -> usize {
        self.policy_holder
    }

    /// Stops a replica or continues it: no request of a stopped one is sent, and it receives no response.
    pub(super) fn set_stopped(&mut self, id: usize, is_stopped: bool) {
        self.count("stop or continue");
        if is_stopped {
            self.stopped.insert(id);
        } else {
            self.stopped.remove(&id);
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Returns the changes since `cursor` as a new list shows them.
    pub(super) fn missed(&self, cursor: usize) -> Vec<Observation> {
        let mut gone: BTreeMap<(bool, &String), Event> = BTreeMap::new();
        for event in &self.history[..] {
            let (is_pod, name) = match event {
                Event::Pod(name, _) => (true, name),
                Event::Claim(name, _) => (false, name),
            };
            gone.insert((is_pod, name), event.clone());
        }
        let is_new = |event: &&Event| {
            cursor > 0 || !matches!(event, Event::Pod(_, None) | Event::Claim(_, None))
        };
        gone.values().filter(is_new).map(observation).collect()
    }

    fn put_claim(&mut self, name: &str, change: impl FnOnce(&mut Value)) {
        self.version += 1;
        let claim = self.claims.get_mut(name).unwrap();
        change(claim);
        claim["metadata"]["resourceVersion"] = self.version.to_string().into();
        let event = Event::Claim(name.to_owned(), Some(claim.clone()));
        self.history.push(event);
        self.check_gpus();
        self.note_complete_gangs();
    }

    fn put_pod(&mut self, name: &str, change: impl FnOnce(&mut Value)) {
        self.version += 1;
        let pod = self.pods.get_mut(name).unwrap();
        change(pod);
        pod["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.history
            .push(Event::Pod(name.to_owned(), Some(pod.clone())));
    }

    /// Checks the invariant that this model is for.
    fn check_gpus(&mut self) {
        let mut used: BTreeMap<String, u64> = BTreeMap::new();
        for claim in self.claims.values() {
            for result in results(claim) {
                let memory = result["consumedCapacity"]["memory"].as_str().unwrap();
                let gib: u64 = memory.trim_end_matches("Gi").parse().unwrap();
                *used.entry(result["pool"].to_string()).or_default() += gib;
            }
        }
        for (pool, gib) in used {
            if gib > GPU_GIB {
                self.problems.push(format!(
                    "pool {pool}: {gib} GiB of {GPU_GIB} GiB are allocated"
                ));
            }
        }
    }

    /// Lets tenants, kube-scheduler and the claim controller act, and executes late writes.
    pub(super) fn tick(&mut self, is_faulty: bool) {
        self.is_faulty = is_faulty;
        if self.policy_holder != self.holder && self.random.chance(15) {
            self.policy_holder = self.holder;
        }
        for mut late in std::mem::take(&mut self.late) {
            if late.ticks == 0 {
                self.patch(late.replica, &late.name, late.is_status, &late.body);
            } else {
                late.ticks -= 1;
                self.late.push(late);
            }
        }
        if is_faulty && self.pods.len() < MAX_PODS && self.random.chance(8) {
            if self.random.chance(20) {
                self.create_gang();
            } else {
                self.create();
            }
        }
        self.generate_claims();
        let names: Vec<String> = self.pods.keys().cloned().collect();
        for name in names {
            // The end of another member has ended it.
            if !self.pods.contains_key(&name) {
                continue;
            }
            self.schedule(&name);
            let is_bound = self.pods[&name]["spec"]["nodeName"].is_string();
            let ends = if is_bound { 4 } else { usize::from(is_faulty) };
            if self.random.below(200) < ends {
                self.end(&name);
            }
        }
        if is_faulty && self.random.chance(3) {
            let claims: Vec<String> = self.claims.keys().cloned().collect();
            if let Some(name) = self.random.choose(&claims) {
                self.count("finalizer removed by a tenant");
                self.put_claim(&name, |claim| claim["metadata"]["finalizers"] = Value::Null);
            }
        }
    }

    /// A tenant creates a pod with one or two claims, or one that shares the claim of another pod.
    fn create(&mut self) {
        let is_gated = self.random.chance(50);
        if self.random.chance(20) {
            self.create_pod(&["20Gi", "20Gi"], is_gated, &Value::Null);
            return;
        }
        let memory = self
            .random
            .choose(&["10Gi", "20Gi", "40Gi", "70Gi"])
            .unwrap();
        self.create_pod(&[memory], is_gated, &Value::Null);
    }

    /// Creates a pod with a claim for each amount of memory.
    fn create_pod(&mut self, memory: &[&str], is_gated: bool, annotations: &Value) {
        self.created += 1;
        let name = format!("p{:04}", self.created);
        // As the webhook leaves a translated pod.
        let is_templated = self.random.chance(30);
        let mut claims = Vec::new();
        for (index, memory) in memory.iter().enumerate() {
            let suffix = if index == 0 { "" } else { "-2" };
            let claim_name = &format!("{name}{suffix}");
            claims.push(claim_name.clone());
            if is_templated {
                let generated = (name.clone(), (*memory).to_owned());
                self.ungenerated.insert(claim_name.clone(), generated);
                continue;
            }
            let created = serde_json::to_value(claim(claim_name, memory)).unwrap();
            let admitted = self.admitted(created);
            self.claims.insert(claim_name.clone(), admitted);
            self.put_claim(claim_name, |_| {});
        }
        let names: Vec<&str> = claims.iter().map(String::as_str).collect();
        let mut created = serde_json::to_value(pod(&name, &names)).unwrap();
        let second = self.created;
        created["metadata"]["creationTimestamp"] =
            format!("2026-01-01T{:02}:{:02}:00Z", second / 60 % 24, second % 60).into();
        if is_gated {
            created["spec"]["schedulingGates"] = json!([{"name": names::ALLOCATION_GATE}]);
        }
        created["metadata"]["annotations"] = annotations.clone();
        if is_templated {
            let entries = claims
                .iter()
                .map(|claim| json!({"name": claim, "resourceClaimTemplateName": "t"}));
            created["spec"]["resourceClaims"] = entries.collect();
        }
        self.pods.insert(name.clone(), created);
        self.put_pod(&name, |_| {});
    }

    /// Returns a new claim as the admission policy leaves it, if the policy is there.
    fn admitted(&mut self, mut claim: Value) -> Value {
        if self.random.chance(70) {
            self.count("finalizer added at creation");
            claim["metadata"]["finalizers"] = json!([names::CLAIM_FINALIZER]);
        }
        claim
    }

    /// kube-scheduler reserves the claims of a pod and binds it, or does not.
    fn schedule(&mut self, name: &str) {
        let pod = &self.pods[name];
        let claims = claims_of(pod);
        if claims.iter().any(|claim| self.unnamed.contains_key(claim)) {
            return;
        }
        let nodes: BTreeSet<String> = claims
            .iter()
            .filter_map(|claim| node_of(self.claims.get(claim)?))
            .collect();
        let is_allocated = claims.iter().all(|claim| {
            self.claims
                .get(claim)
                .is_some_and(|claim| node_of(claim).is_some())
        });
        let (Some(node), true, false) = (
            nodes.first().cloned(),
            is_allocated && nodes.len() == 1,
            pod["spec"]["nodeName"].is_string() || is_gated(pod),
        ) else {
            return;
        };
        if self.is_faulty && !self.random.chance(5) {
            return;
        }
        if self.is_faulty && self.random.chance(10) {
            self.reject(&claims);
            return;
        }
        for claim in &claims {
            let consumer =
                json!([{"resource": "pods", "name": name, "uid": format!("pod-{name}")}]);
            self.put_claim(claim, |claim| claim["status"]["reservedFor"] = consumer);
        }
        self.put_pod(name, |pod| pod["spec"]["nodeName"] = node.into());
        self.served += 1;
    }

    /// kube-scheduler finds that a pod does not fit on the node of its claims, and releases one of them.
    fn reject(&mut self, claims: &[String]) {
        let unreserved = claims.iter().find(|claim| {
            let claim = &self.claims[*claim];
            !results(claim).is_empty() && !claim["status"]["reservedFor"].is_array()
        });
        if let Some(claim) = unreserved.cloned() {
            self.count("released by kube-scheduler");
            self.put_claim(&claim, |claim| claim["status"] = json!({}));
        }
    }

    /// A pod ends with the other members of its gang.
    fn end(&mut self, name: &str) {
        let members = match gang_of(&self.pods[name]) {
            Some(gang) => self.members(gang),
            None => vec![name.to_owned()],
        };
        for name in members {
            self.end_pod(&name);
        }
    }

    /// A pod ends. Its claims are deleted with it, or stay.
    fn end_pod(&mut self, name: &str) {
        self.version += 1;
        let pod = self.pods.remove(name).unwrap();
        self.history.push(Event::Pod(name.to_owned(), None));
        for claim in claims_of(&pod) {
            self.unnamed.remove(&claim);
            if self.ungenerated.remove(&claim).is_some() {
                continue;
            }
            if self.random.chance(50) {
                self.claims.remove(&claim);
                self.version += 1;
                self.history.push(Event::Claim(claim, None));
            } else if self.claims[&claim]["status"]["reservedFor"].is_array() {
                // The claim controller of Kubernetes.
                self.put_claim(&claim, |claim| {
                    claim["status"] = json!({});
                    claim["metadata"]["finalizers"] = Value::Null;
                });
            }
        }
    }

    /// Executes a patch.
    fn patch(&mut self, replica: usize, name: &str, is_status: bool, body: &Value) -> Answer {
        if self.policy_holder != replica {
            self.count("rejected by the admission policy");
            return failure(
                422,
                "ValidatingAdmissionPolicy 'drava-controller-lease' denied request",
            );
        }
        let Some(found) = self.claims.get(name) else {
            return failure(404, "not found");
        };
        for guard in ["uid", "resourceVersion"] {
            if body["metadata"][guard] != found["metadata"][guard] {
                self.count("conflict");
                return failure(409, "the object has been modified");
            }
        }
        let part = if is_status { "status" } else { "metadata" };
        let mut patched = found.clone();
        let mut change = body[part].clone();
        if let Some(fields) = change.as_object_mut() {
            fields.remove("uid");
            fields.remove("resourceVersion");
        }
        merge(&mut patched[part], &change);
        if is_status {
            let (before, after) = (!results(found).is_empty(), !results(&patched).is_empty());
            let is_reserved = found["status"]["reservedFor"].is_array();
            if before && (after || is_reserved) {
                return failure(422, "status.allocation: the allocation is immutable");
            }
            self.count(if after { "allocated" } else { "released" });
            let finalizers = patched["metadata"]["finalizers"].to_string();
            if after && !finalizers.contains(names::CLAIM_FINALIZER) {
                let problem = format!("allocated without its finalizer: {patched}");
                self.problems.push(problem);
            }
        }
        self.put_claim(name, |claim| *claim = patched);
        (StatusCode::OK, self.claims[name].clone())
    }

    /// Serves a request, with the faults before its execution.
    fn serve(&mut self, replica: usize, request: &Request) -> Result<Answer, String> {
        if request.path.ends_with("/events") {
            return Ok((StatusCode::CREATED, request.body.clone()));
        }
        if request.method == Method::GET && request.path.ends_with("/resourceclaims") {
            let items: Vec<&Value> = self.claims.values().take(1).collect();
            let list =
                json!({"metadata": {"resourceVersion": self.version.to_string()}, "items": items});
            return Ok((StatusCode::OK, list));
        }
        if request.path.contains("/gpuquotas/") {
            let mut quota = quota();
            quota["status"] = request.body["status"].clone();
            return Ok((StatusCode::OK, quota));
        }
        if request.path.contains("/pods/") && request.method == Method::PATCH {
            return self.serve_pod(request);
        }
        let (name, is_status) = request.target();
        if request.method == Method::GET {
            let objects = match request.path.contains("/pods/") {
                true => &self.pods,
                false => &self.claims,
            };
            let found = objects.get(name).cloned();
            return Ok(found.map_or_else(
                || failure(404, "not found"),
                |claim| (StatusCode::OK, claim),
            ));
        }
        if request.is_dry_run {
            let found = self.claims.get(name).cloned().unwrap_or_else(|| json!({}));
            return Ok(if self.policy_holder == replica {
                (StatusCode::OK, found)
            } else {
                failure(
                    422,
                    "ValidatingAdmissionPolicy 'drava-controller-lease' denied request",
                )
            });
        }
        let fault = if self.is_faulty {
            self.random.below(100)
        } else {
            100
        };
        match fault {
            0..=3 => {
                self.count("request lost");
                return Err("connection reset".to_owned());
            }
            4..=7 => {
                self.count("executed late");
                let ticks = self.random.below(100);
                let (name, body) = (name.to_owned(), request.body.clone());
                self.late.push(Late {
                    replica,
                    name,
                    is_status,
                    body,
                    ticks,
                });
                return Err("request timed out".to_owned());
            }
            8..=9 => return Ok(failure(500, "etcdserver: leader changed")),
            10..=12 if self.claims.contains_key(name) => {
                self.put_claim(name, |claim| {
                    claim["metadata"]["labels"] = json!({"a": "b"})
                });
            }
            _ => {}
        }
        let answer = self.patch(replica, name, is_status, &request.body);
        if (13..=17).contains(&fault) {
            self.count("response lost");
            return Err("connection reset".to_owned());
        }
        Ok(answer)
    }

    /// Returns whether no pod is left, and no allocation.
    pub(super) fn is_idle(&self) -> bool {
        self.pods.is_empty() && self.claims.values().all(|claim| results(claim).is_empty())
    }

    /// Returns the violations so far, and what is left at the end.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = self.problems.clone();
        problems.extend(self.pods.values().map(|pod| {
            let claims = claims_of(pod);
            let claims: Vec<_> = claims.iter().map(|claim| &self.claims[claim]).collect();
            format!("pod was not served: {pod}, claims {claims:?}")
        }));
        let allocated = self
            .claims
            .values()
            .filter(|claim| !results(claim).is_empty());
        problems.extend(allocated.map(|claim| format!("allocation leaked: {claim}")));
        problems
    }

    pub(super) fn summary(&self) -> String {
        format!("{} pods served, {:?}", self.served, self.counts)
    }
}

type Answer = (StatusCode, Value);

struct Request {
    method: Method,
    path: String,
    is_dry_run: bool,
    body: Value,
}

impl Request {
    /// Returns the name of the claim, and whether its status is the target.
    fn target(&self) -> (&str, bool) {
        let mut parts = self.path.rsplit('/');
        match parts.next().unwrap() {
            "status" => (parts.next().unwrap(), true),
            name => (name, false),
        }
    }
}

fn claims_of(pod: &Value) -> Vec<String> {
    let claims = pod["spec"]["resourceClaims"].as_array().unwrap().iter();
    claims
        .map(|claim| {
            let generated = claim["name"].as_str().unwrap();
            claim["resourceClaimName"].as_str().unwrap_or(generated)
        })
        .map(str::to_owned)
        .collect()
}

fn results(claim: &Value) -> Vec<&Value> {
    let results = &claim["status"]["allocation"]["devices"]["results"];
    results.as_array().into_iter().flatten().collect()
}

/// Returns the node of an allocated claim.
fn node_of(claim: &Value) -> Option<String> {
    let pool = results(claim).first()?["pool"].as_str()?;
    Some(pool.split_once('/')?.0.to_owned())
}

/// Applies a JSON merge patch.
fn merge(target: &mut Value, patch: &Value) {
    let Some(fields) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in fields {
        if value.is_null() {
            target.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut target[key], value);
        }
    }
}

fn failure(code: u16, message: &str) -> Answer {
    // Without the reason, a 404 may come from a proxy, and proves nothing.
    let reason = if code == 404 { "NotFound" } else { "" };
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message, "reason": reason});
    (StatusCode::from_u16(code).unwrap(), status)
}
