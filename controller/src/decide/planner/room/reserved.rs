//! The reservation that keeps the devices of a pod that would fit without it.

use std::collections::BTreeSet;

use drava_allocator::explanation::Explanation;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::searched::{Suspended, Undecided};
use drava_allocator::turn::Turn;
use drava_api::reason::Reason;
use drava_explanation::owner::name_for;

use crate::decide::ledger::{Owner, Purpose, Reservation};
use crate::decide::planner::Planner;
use crate::decide::planner::decision::Group;
use crate::decide::planner::world::World;
use crate::pods::pod::qualified_name;

/// Nodes of one reservation that are tried; a gang may have reserved devices on many.
const MAX_NODES: usize = 8;

impl Planner {
    /// Returns for whom the devices are reserved that would serve a single pod, which fits on no other.
    ///
    /// # Errors
    /// When the turn is too short.
    pub(in crate::decide::planner) fn reserved_room(
        &mut self,
        group: &Group,
        turn: &mut Turn,
    ) -> Result<Option<Explanation>, Suspended> {
        let [request] = &group.requests[..] else {
            return Ok(None);
        };
        let request = &request.pod_request;
        let others: Vec<(Owner, Reservation)> = self
            .commitments
            .ledger
            .reservations()
            .filter(|(_, reservation)| {
                let mut pods = reservation.pods.iter();
                pods.all(|pod| pod.uid != request.uid)
            })
            .map(|(owner, reservation)| (owner.clone(), reservation.clone()))
            .collect();
        if others.is_empty() {
            return Ok(None);
        }
        if let Some(known) = self
            .backlog
            .rejections
            .at(&self.world)
            .reserved_for(request)
        {
            return Ok(known.clone());
        }
        // A pod that fits on no node fits without the reservations on one of theirs, if at all.
        let fitting = self.world.without(&others, |world| {
            fitting_reservation(world, request, &others, turn)
        });
        let reader = request.claims.first();
        let reader = reader.map_or("", |claim| claim.id.namespace.as_str());
        let explanation = fitting?.and_then(|(owner, purpose, node)| {
            let (kind, name) = match owner {
                Owner::Pod(uid) => {
                    let pod = self.world.live_pods.get(uid)?;
                    ("pod", qualified_name(&pod.reference))
                }
                Owner::Gang(gang) => ("gang", gang.qualified()),
            };
            // The readers of the pod's events and condition may know the names of its namespace.
            let owner = name_for(reader, kind, &name);
            let why = match purpose {
                Purpose::HeadOfQueue => "the head of the queue",
                Purpose::Preemption => "for which other pods end",
            };
            let message =
                format!("the pod fits on {node}, but its devices are reserved for {owner}, {why}");
            Some(Explanation::rejected(Reason::Reserved, message))
        });
        // Otherwise the searches were too short to tell.
        if !turn.is_out_of_searches() {
            self.backlog
                .rejections
                .at(&self.world)
                .reserved(request, explanation.clone());
        }
        Ok(explanation)
    }
}

/// Returns the owner of the first of these reservations that keeps the devices of a pod, and the node.
fn fitting_reservation<'r>(
    world: &World,
    request: &PodRequest,
    reservations: &'r [(Owner, Reservation)],
    turn: &mut Turn,
) -> Result<Option<(&'r Owner, Purpose, String)>, Suspended> {
    let policies = world.settings.policies;
    for (owner, reservation) in reservations {
        let pods = reservation.pods.iter();
        let nodes: BTreeSet<&str> = pods.map(|pod| pod.placement.node.as_str()).collect();
        for node in nodes.into_iter().take(MAX_NODES) {
            match world.cluster.decide_on_in(node, request, policies, turn) {
                Ok(_) => return Ok(Some((owner, reservation.purpose, node.to_owned()))),
                Err(Undecided::Rejected(_)) => {}
                Err(Undecided::Suspended(suspended)) => return Err(suspended),
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use drava_allocator::placement::Policies;
    use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
    use drava_api::listed::Change;
    use k8s_openapi::api::core::v1::Pod;
    use k8s_openapi::api::resource::v1::ResourceClaim;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use serde_json::json;
    use tokio::time::Instant;

    use crate::action::Action;
    use crate::decide::planner::{DecisionTime, Planner, Settings};
    use crate::fixture::{claim, class, node, object, pod, slice};

    /// Returns the texts of the events and the condition of a small pod, where a pod or a gang of namespace `team-a` is the head.
    fn texts(namespace: &str, is_gang: bool) -> Vec<String> {
        let settings = Settings {
            policies: Policies {
                node: NodePlacementPolicy::Binpack,
                gpu: GpuPlacementPolicy::Binpack,
            },
            schedulers: vec!["default-scheduler".to_owned()],
            release_after: Duration::from_secs(60),
            preemption: true,
        };
        let mut planner = Planner::new(settings, Box::new(|| "share".to_owned()));
        planner.class(applied(class()));
        planner.node(applied(node("n1")));
        planner.slice(applied(slice("n1")));
        planner.set_synced();
        let now = Instant::now();
        let time = DecisionTime {
            instant: now,
            time: Time(object(json!("2026-01-01T00:00:00Z"))),
            is_slice_over: |_| false,
        };
        let mut runs = claim("runs", "60Gi");
        runs.status = Some(object(json!({
            "allocation": {"devices": {"results": [{
                "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu", "shareID": "s",
                "consumedCapacity": {"memory": "60Gi", "cores": "0", "slots": "1"},
            }]}},
            "reservedFor": [{"resource": "pods", "name": "runs", "uid": "pod-runs"}],
        })));
        let mut running = pod("runs", &["runs"]);
        running.spec.as_mut().unwrap().node_name = Some("n1".to_owned());
        let mut head = pod("head", &["head"]);
        if is_gang {
            head.metadata.annotations = Some(object(
                json!({"gpu.drava.dev/gang": "g", "gpu.drava.dev/gang-min": "1"}),
            ));
        }
        let mut add = |namespace: &str, mut claim: ResourceClaim, mut pod: Pod| {
            claim.metadata.namespace = Some(namespace.to_owned());
            pod.metadata.namespace = Some(namespace.to_owned());
            planner.claim(applied(claim), now);
            planner.pod(applied(pod));
            planner.actions(&time)
        };
        add("team-a", runs, running);
        add("team-a", claim("head", "70Gi"), head);
        let actions = add(namespace, claim("small", "10Gi"), pod("small", &["small"]));
        let texts = actions.into_iter().filter_map(|action| match action {
            Action::PublishEvent(event) => Some(event.message),
            Action::WritePodCondition(update) => update.condition.message,
            _ => None,
        });
        texts.collect()
    }

    fn applied<K>(object: K) -> Change<K> {
        Change::Applied(Box::new(object))
    }

    /// Events and conditions are read by those who may read one namespace.
    #[test]
    fn names_no_owner_of_another_namespace() {
        for (namespace, is_gang, owner) in [
            ("team-a", false, "pod team-a/head"),
            ("team-a", true, "gang team-a/g"),
            ("team-b", false, "a pod of another namespace"),
            ("team-b", true, "a gang of another namespace"),
        ] {
            let text = format!(
                "Reserved: the pod fits on n1, but its devices are reserved for {owner}, the head of the queue"
            );
            assert_eq!(
                texts(namespace, is_gang),
                [text.clone(), text.clone(), text],
                "events of pod and claim, and condition"
            );
        }
    }
}
