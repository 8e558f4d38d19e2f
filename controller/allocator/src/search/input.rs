//! Input of the search: the claims of one pod and the pools of one node.

use std::collections::BTreeSet;
use std::sync::Arc;

use drava_api::config::GpuPlacementPolicy;

use crate::claim::ClaimSpec;
use crate::fragmentation::NodeLoss;
use crate::pool::Pool;
use crate::quota::Budget;
use crate::usage::Usage;

/// What is to be allocated for a pod.
#[derive(Debug, Clone)]
pub struct SearchInput<'a> {
    /// Claims to allocate.
    pub claims: &'a [ClaimSpec],
    /// Containers that use several devices.
    pub containers: &'a [ContainerDevices],
    /// Policy between GPUs; a policy of the claim takes precedence.
    pub gpu_policy: GpuPlacementPolicy,
    /// Quotas of the namespace.
    pub budgets: &'a [Budget<'a>],
    /// Whether a device may exceed the limits of the quotas, which give shares their default amounts in any case.
    pub exceeds_limits: bool,
}

/// Devices of one container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerDevices {
    /// Name of the container.
    pub name: String,
    /// Positions in [`SearchInput::claims`] with the main request name that the container uses; all requests when
    /// `None`.
    pub requests: Vec<(usize, Option<String>)>,
    /// GPUs of the container from claims that are allocated.
    pub gpus: BTreeSet<Arc<str>>,
}

impl ContainerDevices {
    /// Returns whether the container uses the devices of a request.
    pub(super) fn uses(&self, claims: &[ClaimSpec], claim: usize, request: usize) -> bool {
        let request = claims
            .get(claim)
            .and_then(|spec| spec.requests.get(request));
        let name = request.map(|request| request.name.as_str());
        self.requests.iter().any(|(used, request)| {
            *used == claim && (request.is_none() || request.as_deref() == name)
        })
    }
}

/// One pool of the node with its usage.
#[derive(Debug, Clone, Copy)]
pub struct PoolView<'a> {
    /// Name of the pool.
    pub name: &'a str,
    /// Its devices.
    pub pool: &'a Pool,
    /// Its usage.
    pub usage: &'a Usage,
}

/// A node on which devices are searched.
#[derive(Debug, Clone, Copy)]
pub struct NodeState<'a> {
    /// Its pools.
    pub pools: &'a [PoolView<'a>],
    /// Loss of placements, if a policy needs it.
    pub(crate) loss: Option<&'a NodeLoss<'a>>,
}

/// Position of a device among the pools of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceRef {
    /// Position of the pool.
    pub pool: usize,
    /// Position in the pool.
    pub index: usize,
}
