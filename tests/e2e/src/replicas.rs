//! The replicas of the controller: which one leads, and a leader that is stopped between two writes.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{Namespace, TestCluster, TestNode, wait};

const SYSTEM: &str = "drava-system";
/// Time in which a leader sends a few writes, and not those of a whole gang.
const INTERVAL: Duration = Duration::from_millis(2);
/// Scheduling gate of pods that are not to be allocated for yet.
const HOLD: &str = "test.drava.dev/hold";

impl TestCluster {
    /// Returns the pod that holds the lease.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn leader(&self) -> Result<String> {
        let lease = self.get(&["lease", "drava-controller", "-n", SYSTEM])?;
        let holder = lease["spec"]["holderIdentity"].as_str();
        Ok(holder.unwrap_or_default().to_owned())
    }

    /// Returns the restarts of each replica of the controller.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn controller_restarts(&self) -> Result<BTreeMap<String, u64>> {
        let select = "app.kubernetes.io/component=controller";
        let pods = self.get(&["pods", "-n", SYSTEM, "-l", select])?;
        let pods = pods["items"].as_array().context("no list of pods")?;
        let restarts = |pod: &Value| {
            let name = pod["metadata"]["name"].as_str()?.to_owned();
            let status = &pod["status"]["containerStatuses"][0];
            Some((name, status["restartCount"].as_u64()?))
        };
        Ok(pods.iter().filter_map(restarts).collect())
    }
}

impl Namespace<'_> {
    /// Creates pods with one claim each that the leader sees while it is stopped, and lets the leader run in short intervals
    /// until it has sent a write. The leader is stopped afterwards.
    ///
    /// # Errors
    /// When kubectl fails or the leader writes nothing.
    pub fn stop_while_it_writes(
        &self,
        node: &TestNode,
        leader: &str,
        pods: &[(String, String)],
    ) -> Result<()> {
        let gate = format!("  schedulingGates: [{{name: {HOLD}}}]\n  containers:");
        let held = |(_, manifest): &(String, String)| manifest.replace("  containers:", &gate);
        let manifests: Vec<String> = pods.iter().map(held).collect();
        self.apply(&manifests.join("\n---\n"))?;
        wait("every pod has a claim", || {
            let claims = self.list("resourceclaims")?.len();
            Ok((claims == pods.len()).then_some(()))
        })?;
        ensure!(
            node.signal_pod(leader, "STOP")? > 0,
            "no process of {leader}"
        );
        let gates = json!({"spec": {"schedulingGates": [{"name": HOLD, "$patch": "delete"}]}});
        let patch = ["patch", "pods", "--patch", &gates.to_string()];
        let names: Vec<&str> = pods.iter().map(|(name, _)| name.as_str()).collect();
        self.kubectl(&[&patch[..], &names].concat())?;
        wait("the leader writes a claim", || {
            node.resume_pod_for(leader, INTERVAL)?;
            let (written, _) = self.written_claims()?;
            Ok((written > 0).then_some(()))
        })
    }

    /// Returns how many claims are allocated, and how many there are.
    fn written_claims(&self) -> Result<(usize, usize)> {
        let claims = self.list("resourceclaims")?;
        let is_written = |claim: &&Value| !claim["status"]["allocation"].is_null();
        Ok((claims.iter().filter(is_written).count(), claims.len()))
    }

    /// Returns whether the leader has sent some of the writes for the claims of the namespace, and not all.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn is_partly_written(&self) -> Result<bool> {
        let (written, all) = self.written_claims()?;
        Ok(written > 0 && written < all)
    }

    /// Deletes all pods and waits until their claims are gone.
    ///
    /// # Errors
    /// When kubectl fails or a claim remains.
    pub fn delete_all_pods(&self) -> Result<()> {
        let delete = ["--all", "--grace-period=1", "--timeout=90s"];
        self.kubectl(&[&["delete", "pods"], &delete[..]].concat())?;
        wait("no claim is left", || {
            Ok(self.list("resourceclaims")?.is_empty().then_some(()))
        })
    }
}
