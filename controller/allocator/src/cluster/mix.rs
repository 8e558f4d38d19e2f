//! The mix of requests, and the loss of GPUs of a placement.

use super::Cluster;
use crate::fragmentation::mix::TypicalRequest;
use crate::fragmentation::{IdleGpu, NodeLoss, NodeRoom};
use crate::pod_request::PodRequest;
use crate::search::input::PoolView;
use crate::selector::Selectors;

impl Cluster {
    /// Counts the request of a new pod.
    pub fn observe_request(&mut self, pod_request: &PodRequest) {
        let requests = &pod_request.demand.requests;
        if self.mix.observe(&pod_request.claims, requests) {
            self.rankings.mix_changed();
        }
    }

    /// Returns the loss of placements on a node of a pod that requests `demand`.
    pub(crate) fn node_loss<'p>(
        &self,
        node: &str,
        demand: NodeRoom,
        pools: &'p [PoolView<'p>],
    ) -> NodeLoss<'p> {
        let allocatable = self.node(node).map(|node| node.room()).unwrap_or_default();
        let requested = NodeRoom::of(&self.requested_on(node, ""));
        let room = allocatable.minus(requested);
        let accepts = |request: &TypicalRequest| accepts(pools, request, &self.selectors);
        NodeLoss::new(&self.mix, (room, demand), idle_gpus(pools), accepts)
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

/// Returns whether a device of the node matches all selectors of the request.
fn accepts(pools: &[PoolView<'_>], request: &TypicalRequest, selectors: &Selectors) -> bool {
    let mut devices = pools.iter().flat_map(|view| &view.pool.devices);
    devices.any(|device| {
        let mut all = request.selectors.iter();
        all.all(|selector| device.selected_by(selectors, selector).unwrap_or_default())
    })
}
