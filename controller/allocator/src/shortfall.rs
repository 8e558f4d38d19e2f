//! What a request lacks on a node: a bound for the search of pods whose end makes room, without a simulation of their end.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::claim::{Alternative, Count};
use crate::cluster::Cluster;
use crate::object::ObjectKey;
use crate::turn::Turn;
use crate::usage::requested_access;

/// The devices that a request for several devices lacks on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortfall {
    /// Number of devices, at least.
    pub missing: usize,
    /// Devices that may serve the request when nothing of their GPU is allocated, by pool and GPU.
    devices: BTreeMap<(String, Arc<str>), usize>,
}

impl Cluster {
    /// Returns what a request for several devices lacks on a node; `None` if that is not known.
    #[must_use]
    pub fn shortfall(
        &self,
        node: &str,
        alternative: &Alternative,
        turn: &mut Turn,
    ) -> Option<Shortfall> {
        let Count::Exactly(count) = alternative.count else {
            return None;
        };
        turn.count_node();
        let (mut free, mut devices) = (0_usize, BTreeMap::new());
        // The end of a claim can make a pool usable.
        for view in self.usable_pools_of(node)? {
            for (index, device) in view.pool.devices.iter().enumerate() {
                let mut selectors = alternative
                    .class_selectors
                    .iter()
                    .chain(&alternative.selectors);
                let mut is_over = false;
                let is_selected = selectors.all(|selector| {
                    let selected = device.is_selected_by(&self.selectors, selector, turn);
                    is_over |= selected.is_none();
                    selected.unwrap_or_default()
                });
                if is_over {
                    return None;
                }
                if !is_selected || requested_access(device, alternative).is_err() {
                    continue;
                }
                // A shared device serves a request as often as it has the amounts.
                let served = if device.shared { count } else { 1 };
                if view.usage.evaluate(view.pool, index, alternative).is_ok() {
                    free = free.saturating_add(served);
                }
                let gpu = (view.name.to_owned(), Arc::clone(&device.gpu));
                *devices.entry(gpu).or_default() += served;
            }
        }
        Some(Shortfall {
            missing: count.saturating_sub(free),
            devices,
        })
    }

    /// Returns for how many devices, at most, the end of these claims makes room.
    pub fn made_room_for<'a>(
        &self,
        shortfall: &Shortfall,
        claims: impl Iterator<Item = &'a ObjectKey>,
    ) -> usize {
        let devices = claims.flat_map(|claim| self.held_by(claim));
        let gpus = devices.filter_map(|device| {
            let gpu = self.gpu_of(&device.pool, &device.device)?;
            let gpu = (device.pool.clone(), gpu);
            let devices = *shortfall.devices.get(&gpu)?;
            Some((gpu, devices))
        });
        let gpus: BTreeMap<_, _> = gpus.collect();
        gpus.into_values().fold(0, usize::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
    use k8s_openapi::api::resource::v1::ResourceClaim;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::cluster::Departure;
    use crate::fixture::{
        classes, cluster, node, object, partitioned_slices, pod_request, request, share, slices,
    };
    use crate::placement::Policies;

    const POLICIES: Policies = Policies {
        node: NodePlacementPolicy::Binpack,
        gpu: GpuPlacementPolicy::Binpack,
    };

    fn devices(class: &str, count: usize) -> ResourceClaim {
        let class = format!("{class}.drava.dev");
        request("c", &json!({"deviceClassName": class, "count": count}))
    }

    fn kind() -> impl Strategy<Value = (&'static str, usize)> {
        prop_oneof![
            (Just("gpu"), 1..4_usize),
            (Just("mig"), 1..8_usize),
            (Just("vgpu"), 1..4_usize),
        ]
    }

    fn claim((kind, count): (&str, usize), name: &str) -> ResourceClaim {
        let mut claim = match kind {
            "vgpu" => share(name, &format!("{}Gi", 10 * count), "0"),
            _ => devices(kind, count),
        };
        let name = name.to_owned();
        claim.metadata.uid = Some(format!("uid-{name}"));
        claim.metadata.name = Some(name);
        claim
    }

    proptest! {
        #[test]
        fn pods_whose_end_is_enough_make_room_for_what_is_missing(
            held in prop::collection::vec(kind(), 0..6),
            ended in prop::collection::vec(any::<bool>(), 6),
            (class, count) in kind(),
            is_partitioned in any::<bool>(),
        ) {
            let mut cluster = Cluster::default();
            for class in classes() {
                cluster.upsert_class(class);
            }
            cluster.upsert_node(&node("n1"));
            let published = match is_partitioned {
                true => partitioned_slices("n1", 3),
                false => slices("n1", &[80; 3]),
            };
            for slice in published {
                cluster.upsert_slice(&slice);
            }
            let mut keys = Vec::new();
            for (index, kind) in held.into_iter().enumerate() {
                let claim = claim(kind, &format!("c{index}"));
                let request = pod_request(&cluster, std::slice::from_ref(&claim));
                if let Ok(placement) = cluster.decide(&request, POLICIES) {
                    let results: Vec<_> = placement.claims[0].devices.iter().map(|placed| {
                        let mut result = json!({
                            "request": "gpu", "driver": "gpu.drava.dev", "pool": &*placed.pool, "device": &*placed.device.name,
                        });
                        if let crate::usage::DeviceAccess::Share(amounts, _) = &placed.access {
                            let amounts = amounts.iter().map(|(name, amount)| (name.clone(), json!(amount.to_string())));
                            result["consumedCapacity"] = amounts.collect::<serde_json::Map<_, _>>().into();
                            result["shareID"] = json!("s");
                        }
                        result
                    }).collect();
                    let mut claim = claim;
                    claim.status = Some(object(json!({"allocation": {"devices": {"results": results}}})));
                    cluster.upsert_claim(&claim);
                    keys.push(("default".to_owned(), format!("c{index}")));
                }
            }
            let wanted = pod_request(&cluster, &[devices(class, count)]);
            let Some(several) = wanted.several() else {
                prop_assert_eq!(count, 1);
                return Ok(());
            };
            let shortfall = cluster.shortfall("n1", several, &mut Turn::endless()).unwrap();
            let ended = keys.into_iter().zip(ended).filter_map(|(key, ended)| ended.then_some(key));
            let claims: BTreeSet<ObjectKey> = ended.collect();
            let room: usize = claims.iter().map(|key| cluster.made_room_for(&shortfall, std::iter::once(key))).sum();
            let gone = Departure { claims, ..Departure::default() };
            let fits = cluster.try_without(&gone, |cluster| cluster.decide_on("n1", &wanted, POLICIES).is_ok());
            prop_assert!(!fits || room >= shortfall.missing, "{shortfall:?}, room for {room}");
            // What no end of claims makes room for is not counted.
            let all: usize = shortfall.devices.values().sum();
            prop_assert!(class != "gpu" || all == 3 || is_partitioned);
        }
    }

    #[test]
    fn whole_gpus_are_missing_where_others_have_them() {
        let mut cluster = cluster(&[("n1", &[80, 80, 80])]);
        let first = pod_request(&cluster, &[claim(("gpu", 2), "first")]);
        let placement = cluster.decide(&first, POLICIES).unwrap();
        cluster.assume(&placement);
        let wanted = pod_request(&cluster, &[devices("gpu", 3)]);
        let shortfall = cluster
            .shortfall("n1", wanted.several().unwrap(), &mut Turn::endless())
            .unwrap();
        assert_eq!(shortfall.missing, 2);
    }
}
