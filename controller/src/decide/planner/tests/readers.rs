//! What metrics, `explain`, `simulate` and the lists of claims say about one state of the cluster, after every step of a random
//! history: they agree on what is allocated, and none of them promises what the planner does not do.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use drava_api::{Quantity, names};
use drava_explanation::explain::{self, State};
use drava_explanation::fixture::settings;
use drava_explanation::simulate;
use drava_explanation::snapshot::Snapshot;
use k8s_openapi::api::core::v1::PodCondition;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::json;

use super::cluster::TestCluster;
use crate::decide::planner::reserved_devices::leader_status;
use crate::fixture::{claim, class, node, pod, slice};
use crate::operate::metrics::NodeMetrics;

const NODES: [&str; 2] = ["n1", "n2"];
const GIB: f64 = (1_u64 << 30) as f64;

/// One step of a history; numbers select memory, priority and pods.
#[derive(Debug, Clone, Copy)]
enum Step {
    Create { memory: usize, priority: i32 },
    CreateMember { memory: usize },
    End(usize),
    Delete(usize),
    Wait,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let memory = 0..4_usize;
    let step = prop_oneof![
        4 => (memory.clone(), 0..3_i32).prop_map(|(memory, priority)| Step::Create { memory, priority }),
        1 => memory.prop_map(|memory| Step::CreateMember { memory }),
        2 => any::<usize>().prop_map(Step::End),
        1 => any::<usize>().prop_map(Step::Delete),
        2 => Just(Step::Wait),
    ];
    proptest::collection::vec(step, 1..25)
}

/// A cluster with what its API server shows of it.
struct History {
    cluster: TestCluster,
    /// As the metrics show them.
    nodes: BTreeMap<String, NodeMetrics>,
    conditions: BTreeMap<String, PodCondition>,
    created: usize,
    seen: Seen,
}

/// What the histories have had, so that no check compares nothing with nothing.
#[derive(Debug, Default)]
struct Seen {
    reserved: usize,
    placed: usize,
    pending: usize,
}

impl History {
    fn take(&mut self, step: Step) {
        const MEMORY: [&str; 4] = ["10Gi", "30Gi", "50Gi", "80Gi"];
        let cluster = &mut self.cluster;
        let named = |number: usize, names: &mut dyn Iterator<Item = &String>| {
            let names: Vec<String> = names.cloned().collect();
            let index = number.checked_rem(names.len())?;
            names.get(index).cloned()
        };
        match step {
            Step::Create { memory, priority } => {
                let name = format!("p-{:02}", self.created);
                let simulated = self.simulated(&name, MEMORY[memory]);
                self.cluster
                    .add_pod_of_priority(&name, MEMORY[memory], priority);
                self.created += 1;
                self.decide();
                return self.check_simulated(&name, priority, simulated.as_deref());
            }
            Step::CreateMember { memory } => {
                cluster.add_member(&format!("m-{:02}", self.created), MEMORY[memory], "2");
                self.created += 1;
            }
            Step::End(number) => {
                if let Some(name) = named(number, &mut cluster.pods.keys()) {
                    cluster.end(&name);
                    cluster.pods.remove(&name);
                }
            }
            Step::Delete(number) => {
                if let Some(name) = named(number, &mut cluster.pods.keys()) {
                    cluster.start_deletion(&name);
                }
            }
            Step::Wait => cluster.advance(Duration::from_secs(20)),
        }
        self.decide();
    }

    /// Returns the node on which `simulate` places a pod that does not exist.
    fn simulated(&self, name: &str, memory: &str) -> Option<String> {
        let mut documents = [json!(claim(name, memory)), json!(pod(name, &[name]))];
        documents[0]["kind"] = json!("ResourceClaim");
        documents[1]["kind"] = json!("Pod");
        let report = simulate::run(
            &mut self.snapshot(),
            Vec::new(),
            documents.into(),
            "default",
            None,
            &settings(),
        );
        let report = json!(report.unwrap());
        let node = report["pods"][0]["node"].as_str();
        node.map(str::to_owned)
    }

    /// `simulate` knows no priority: a pod of a higher one may take what is reserved for others, or evict.
    fn check_simulated(&mut self, name: &str, priority: i32, simulated: Option<&str>) {
        let spec = self.cluster.pods[name].spec.as_ref().unwrap();
        let node = spec.node_name.as_deref();
        match simulated {
            Some(simulated) => {
                self.seen.placed += 1;
                assert!(node.is_some(), "{name}");
                assert!(priority > 0 || node == Some(simulated), "{name}: {node:?}");
            }
            None if priority == 0 => {
                self.seen.pending += 1;
                assert_eq!(node, None, "{name}");
            }
            None => {}
        }
    }

    fn decide(&mut self) {
        let cluster = &mut self.cluster;
        for placed in cluster.settle() {
            cluster.bind(placed.split_once(" → ").unwrap());
        }
        cluster.evict();
        for update in std::mem::take(&mut cluster.pod_conditions) {
            self.conditions
                .insert(update.pod.name.unwrap(), update.condition);
        }
    }

    /// Returns what a user reads.
    fn snapshot(&self) -> Snapshot {
        let pods = self.cluster.pods.iter().map(|(name, pod)| {
            let mut pod = pod.clone();
            if let Some(condition) = self.conditions.get(name) {
                let status = pod.status.get_or_insert_default();
                status
                    .conditions
                    .get_or_insert_default()
                    .push(condition.clone());
            }
            pod
        });
        let mut snapshot = Snapshot::new(
            &NODES.map(node),
            &NODES.map(slice),
            &[],
            &[class()],
            self.cluster.claims.values().cloned().collect(),
            pods.collect(),
        );
        snapshot.reservations = leader_status(
            &self.cluster.planner.commitments.ledger,
            &self.cluster.planner.world.live_pods,
            &self.cluster.planner.world.settings,
        )
        .reservations;
        snapshot
    }

    fn check(&mut self) {
        let metrics = self.cluster.planner.metrics();
        self.nodes
            .extend(self.cluster.planner.changed_node_metrics());
        let mut snapshot = self.snapshot();
        let is_allocated = |name: &str| {
            let claim = &self.cluster.claims[name];
            claim
                .status
                .as_ref()
                .is_some_and(|status| status.allocation.is_some())
        };
        // Allocated: metrics by device and by namespace, and the claims.
        let mut total = 0.0;
        let nodes = NODES.iter();
        let devices = nodes.flat_map(|node| {
            let devices = snapshot.cluster.shared_devices_on(node);
            devices.map(|(device, in_use)| (*node, device, in_use))
        });
        for (node, device, in_use) in devices {
            let allocated = in_use.consumed.get("memory").copied().unwrap_or_default();
            let mut devices = self.nodes[node].devices.iter();
            let measured = devices
                .find(|measured| measured.device == device.name)
                .unwrap();
            let (_, in_metrics) = measured.amounts["memory"];
            assert_eq!(in_metrics / GIB, allocated.to_f64_lossy() / GIB, "{node}");
            total += allocated.to_f64_lossy();
        }
        let billed = metrics
            .namespaces
            .get("default")
            .copied()
            .unwrap_or_default();
        assert_eq!(billed.memory / GIB, total / GIB, "{metrics:?}");
        // Reserved: for pods that wait, and named as such.
        let mut reserved: BTreeMap<(String, &str), f64> = BTreeMap::new();
        for reservation in &snapshot.reservations {
            assert!(!is_allocated(&reservation.claim), "{reservation:?}");
            for device in &reservation.devices {
                let amounts = device.capacity.as_ref().unwrap();
                let memory: Quantity = amounts["memory"].parse().unwrap();
                *reserved
                    .entry((device.pool.clone(), &device.device))
                    .or_default() += memory.to_f64_lossy();
            }
        }
        let nodes = self.nodes.iter();
        let devices = nodes.flat_map(|(node, metrics)| {
            let devices = metrics.devices.iter();
            devices.map(move |device| (node, device))
        });
        for (node, measured) in devices {
            let shown = reserved.remove(&(names::pool(node), &*measured.device));
            let shown = shown.unwrap_or_default();
            assert_eq!(measured.reserved["memory"] / GIB, shown / GIB, "{node}");
        }
        assert!(reserved.is_empty(), "{reserved:?}");
        self.seen.reserved += snapshot.reservations.len();
        // No pod that waits for a reason is said to start.
        for name in self.cluster.pods.keys() {
            let uid = format!("pod-{name}");
            let Some(reason) = self
                .cluster
                .planner
                .backlog
                .queue
                .get(&uid)
                .and_then(|pod| pod.reason)
            else {
                continue;
            };
            let report = explain::pod(&mut snapshot, "default", name, &settings()).unwrap();
            assert_ne!(
                report.state,
                State::Feasible,
                "{name} waits: {reason}; {}",
                report.summary
            );
        }
    }
}

#[test]
fn readers_agree_after_every_step() {
    let seen = RefCell::new(Seen::default());
    let mut runner = TestRunner::new(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(64)
    });
    let outcome = runner.run(&steps(), |steps| {
        let mut history = History {
            cluster: TestCluster::new(&NODES),
            nodes: BTreeMap::new(),
            conditions: BTreeMap::new(),
            created: 0,
            seen: seen.take(),
        };
        for step in steps {
            history.take(step);
            history.check();
        }
        seen.replace(history.seen);
        Ok(())
    });
    outcome.unwrap();
    let Seen {
        reserved,
        placed,
        pending,
    } = seen.into_inner();
    assert!(
        reserved.min(placed).min(pending) > 10,
        "{reserved} {placed} {pending}"
    );
}
