//! What is searched for, and where.

use std::collections::BTreeSet;
use std::sync::Arc;

use drava_api::config::PlacementPolicy;

use crate::claim::ClaimSpec;
use crate::pool::Pool;
use crate::usage::Usage;

/// What a pod asks for.
#[derive(Debug, Clone)]
pub struct Ask<'a> {
    /// Claims to allocate.
    pub claims: &'a [ClaimSpec],
    /// Containers that see several devices.
    pub containers: &'a [ContainerDevices],
    /// Policy between cards; a claim's own goes first.
    pub gpu_policy: PlacementPolicy,
}

/// What one container sees of the claims.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerDevices {
    /// Name of the container.
    pub name: String,
    /// Positions in [`Ask::claims`] with the main request name that it sees; all requests when `None`.
    pub sees: Vec<(usize, Option<String>)>,
    /// Cards that it has already, from claims allocated before.
    pub cards: BTreeSet<Arc<str>>,
}

/// One pool of the node with what is in use of it.
#[derive(Debug, Clone, Copy)]
pub struct PoolView<'a> {
    /// Name of the pool.
    pub name: &'a str,
    /// Its devices.
    pub pool: &'a Pool,
    /// What is in use.
    pub usage: &'a Usage,
}

/// Position of a device among the pools of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceRef {
    /// Position of the pool.
    pub pool: usize,
    /// Position in the pool.
    pub index: usize,
}
