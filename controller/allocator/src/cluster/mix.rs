//! The mix of requests, and the loss of GPUs of a placement.

use super::Cluster;
use crate::fragmentation::mix::TypicalRequest;
use crate::fragmentation::{IdleGpu, LossBasis, NodeLoss, NodeRoom};
use crate::pod_request::PodRequest;
use crate::search::input::PoolView;
use crate::searched::Suspended;
use crate::selector::Selectors;
use crate::turn::{Turn, Work};

impl Cluster {
    /// Counts the request of a new pod.
    pub fn observe_request(&mut self, pod_request: &PodRequest) {
        let requests = &pod_request.demand.requests;
        if self.mix.observe(&pod_request.claims, requests) {
            self.rankings.mix_changed();
        }
    }

    /// Returns the loss of placements on a node of a pod that requests `demand`.
    ///
    /// # Errors
    /// When the turn is too short for the selectors of the mix.
    pub(crate) fn node_loss<'p>(
        &self,
        node: &str,
        demand: NodeRoom,
        pools: &'p [PoolView<'p>],
        turn: &mut Turn,
    ) -> Result<NodeLoss<'p>, Suspended> {
        let room = self.basis_of_loss(node).room;
        let accepts = |request: &TypicalRequest| accepts(pools, request, &self.selectors, turn);
        NodeLoss::new(&self.mix, (room, demand), idle_gpus(pools), accepts)
    }

    /// Returns what the loss of placements on the node depends on.
    pub(crate) fn basis_of_loss(&self, node: &str) -> LossBasis {
        let allocatable = self.node(node).map(|node| node.room()).unwrap_or_default();
        let requested = NodeRoom::of(&self.requested_on(node, ""));
        LossBasis {
            room: allocatable.minus(requested),
            snapshot: self.mix.snapshots(),
        }
    }
}

fn idle_gpus<'p>(pools: &'p [PoolView<'p>]) -> Vec<IdleGpu<'p>> {
    let mut gpus: Vec<IdleGpu<'p>> = Vec::new();
    for (pool, view) in pools.iter().enumerate() {
        for device in &view.pool.devices {
            if !gpus.iter().any(|gpu| gpu.is(pool, &device.gpu)) {
                let memory = view.usage.gpu_memory(view.pool, &device.gpu);
                gpus.push(IdleGpu::new(pool, &device.gpu, memory));
            }
        }
    }
    gpus
}

/// Returns whether a device of the node matches all selectors of the request. One that fails matches none. Known results cost
/// nothing, so a suspended decision comes further in each turn.
fn accepts(
    pools: &[PoolView<'_>],
    request: &TypicalRequest,
    selectors: &Selectors,
    turn: &mut Turn,
) -> Result<bool, Suspended> {
    'devices: for device in pools.iter().flat_map(|view| &view.pool.devices) {
        for selector in &request.selectors {
            match device.is_selected_by(selectors, selector, turn) {
                Some(true) => {}
                Some(false) => continue 'devices,
                None => return Err(Work::Selectors.into()),
            }
        }
        return Ok(true);
    }
    Ok(false)
}
