//! Pods of the model: gangs, gates, and the writes of the controller to pods.

use drava_api::names::{ALLOCATION_GATE, GANG_ANNOTATION, GANG_MIN_ANNOTATION};
use http::StatusCode;
use serde_json::{Value, json};

use super::{Answer, Request, Server, claims_of, failure, results};
use crate::fixture::claim;

/// Quota of the tenant, GiB: less than the GPUs have.
pub(in super::super) const QUOTA_GIB: u64 = 170;

/// Returns the quota of the tenant's namespace, by its label.
pub(in super::super) fn quota() -> Value {
    json!({
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuQuota",
        "metadata": {"name": "tenant", "uid": "quota", "generation": 1, "resourceVersion": "1"},
        "spec": {
            "namespaceSelector": {"matchLabels": {"tenant": "a"}},
            "limit": {"memory": format!("{QUOTA_GIB}Gi")},
        },
    })
}

/// Returns the tenant's namespace.
pub(in super::super) fn namespace() -> Value {
    json!({"metadata": {"name": "default", "uid": "default", "labels": {"tenant": "a"}}})
}

pub(super) fn is_gated(pod: &Value) -> bool {
    let gates = pod["spec"]["schedulingGates"].as_array();
    gates.is_some_and(|gates| !gates.is_empty())
}

/// Returns the gang of a pod.
pub(super) fn gang_of(pod: &Value) -> Option<&str> {
    pod["metadata"]["annotations"][GANG_ANNOTATION].as_str()
}

impl Server {
    /// A tenant creates a gang of gated pods, each with a claim.
    pub(super) fn create_gang(&mut self) {
        let size = 2 + self.random.below(2);
        let gang = format!("gang-{}", self.created);
        let annotations = json!({GANG_ANNOTATION: gang, GANG_MIN_ANNOTATION: size.to_string()});
        for _ in 0..size {
            self.create_pod(&["20Gi"], true, &annotations);
        }
    }

    /// The claim controller creates claims of templates, and names them in the status of their pods later.
    pub(super) fn generate_claims(&mut self) {
        for (name, pod) in self.unnamed.clone() {
            if self.random.chance(20) {
                self.unnamed.remove(&name);
                let named = json!({"name": name, "resourceClaimName": name});
                self.put_pod(&pod, |pod| {
                    let statuses = &mut pod["status"]["resourceClaimStatuses"];
                    let mut all = statuses.as_array().cloned().unwrap_or_default();
                    all.push(named);
                    *statuses = all.into();
                });
            }
        }
        for (name, (pod, memory)) in self.ungenerated.clone() {
            if self.random.chance(20) {
                self.count("claim generated");
                self.ungenerated.remove(&name);
                let mut generated = serde_json::to_value(claim(&name, &memory)).unwrap();
                generated["metadata"]["ownerReferences"] = json!([{
                    "apiVersion": "v1", "kind": "Pod", "name": pod, "uid": format!("pod-{pod}"), "controller": true,
                }]);
                let admitted = self.admitted(generated);
                self.claims.insert(name.clone(), admitted);
                self.unnamed.insert(name.clone(), pod);
                self.put_claim(&name, |_| {});
            }
        }
    }

    /// Returns the members of a gang.
    pub(super) fn members(&self, gang: &str) -> Vec<String> {
        let pods = self.pods.iter();
        let members = pods.filter(|(_, pod)| gang_of(pod) == Some(gang));
        members.map(|(name, _)| name.clone()).collect()
    }

    /// Notes the gangs that are allocated as a whole.
    pub(super) fn note_complete_gangs(&mut self) {
        let pods: Vec<&Value> = self.pods.values().collect();
        for pod in pods {
            let Some(gang) = gang_of(pod) else { continue };
            let members = self.members(gang);
            let is_allocated = members.iter().all(|name| {
                let claims = claims_of(&self.pods[name]);
                claims.iter().all(|claim| {
                    self.claims
                        .get(claim)
                        .is_some_and(|claim| !results(claim).is_empty())
                })
            });
            let min = pod["metadata"]["annotations"][GANG_MIN_ANNOTATION].as_str();
            if is_allocated && min == Some(&members.len().to_string()) {
                self.complete_gangs.insert(gang.to_owned());
            }
        }
    }

    /// Serves the write of a pod: its condition, or the removal of its gate.
    pub(super) fn serve_pod(&mut self, request: &Request) -> Result<Answer, String> {
        let fault = if self.is_faulty {
            self.random.below(100)
        } else {
            100
        };
        if fault < 4 {
            self.count("pod request lost");
            return Err("connection reset".to_owned());
        }
        let (name, is_status) = request.target();
        let Some(pod) = self.pods.get(name) else {
            return Ok(failure(404, "not found"));
        };
        if request.body["metadata"]["uid"] != pod["metadata"]["uid"] {
            return Ok(failure(409, "the object has been replaced"));
        }
        let version = &request.body["metadata"]["resourceVersion"];
        if !version.is_null() && *version != pod["metadata"]["resourceVersion"] {
            return Ok(failure(409, "the object has been modified"));
        }
        let name = name.to_owned();
        if is_status {
            let conditions = request.body["status"]["conditions"].clone();
            self.put_pod(&name, |pod| pod["status"]["conditions"] = conditions);
        } else if is_gated(pod) {
            let patch = &request.body["spec"]["schedulingGates"][0];
            assert_eq!(patch["name"], ALLOCATION_GATE);
            self.open_gate(&name);
        }
        if fault < 8 {
            self.count("pod response lost");
            return Err("connection reset".to_owned());
        }
        Ok((StatusCode::OK, self.pods[&name].clone()))
    }

    /// Removes the gate of a pod. A gang must have been allocated as a whole before, whichever leader did it.
    fn open_gate(&mut self, name: &str) {
        self.count("gate removed");
        let gang = gang_of(&self.pods[name]).map(str::to_owned);
        if let Some(gang) = gang
            && !self.complete_gangs.contains(&gang)
        {
            let problem = format!("{name}: its gate was removed before {gang} was allocated");
            self.problems.push(problem);
        }
        self.put_pod(name, |pod| pod["spec"]["schedulingGates"] = json!([]));
    }
}
