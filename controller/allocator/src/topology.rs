//! Topology of the GPUs of a node: which of them share an NVLink domain, a NUMA node or a PCIe root.
//!
//! The policy `topology` narrows the GPUs down, level by level, to the smallest group that has enough of them. So several
//! GPUs of a pod are close together, and a single GPU does not break a larger group up.

use std::fmt;
use std::ops::Range;

use drava_api::names;

use crate::attribute::Attribute;
use crate::device::Device;

/// What GPUs can have in common, the fastest connection first.
const LEVELS: [&str; 3] = [
    names::attribute::NVLINK_DOMAIN,
    names::attribute::NUMA_NODE,
    names::attribute::PCIE_ROOT,
];

/// Position of the NUMA node in [`LEVELS`].
const NUMA: usize = 1;

/// Place of a GPU: its value at each level, if it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location<'a>([Option<&'a Attribute>; LEVELS.len()]);

impl<'a> Location<'a> {
    /// Returns the place of a device's GPU.
    #[must_use]
    pub fn of(device: &'a Device) -> Self {
        Self(LEVELS.map(|level| device.attribute(level)))
    }

    fn at(self, level: usize) -> Option<&'a Attribute> {
        self.0.get(level).copied().flatten()
    }
}

/// What the GPUs of a pod have in common, the closest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Proximity {
    /// They are one GPU.
    #[default]
    Same,
    /// They have the same NVLink domain.
    NvlinkDomain,
    /// They have the same PCIe root.
    PcieRoot,
    /// They have the same NUMA node.
    NumaNode,
    /// They have the same node only.
    Node,
}

impl fmt::Display for Proximity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Same => "one GPU of the smallest group",
            Self::NvlinkDomain => "the GPUs share an NVLink domain",
            Self::PcieRoot => "the GPUs share a PCIe root",
            Self::NumaNode => "the GPUs share a NUMA node",
            Self::Node => "the GPUs share the node only",
        })
    }
}

/// Returns what these different GPUs have in common.
#[must_use]
pub fn proximity(gpus: &[Location<'_>]) -> Proximity {
    let Some((first, rest)) = gpus.split_first() else {
        return Proximity::Same;
    };
    if rest.is_empty() {
        return Proximity::Same;
    }
    let [nvlink, numa, pcie] = std::array::from_fn(|level| share(*first, rest, level));
    match (nvlink, pcie, numa) {
        (true, ..) => Proximity::NvlinkDomain,
        (_, true, _) => Proximity::PcieRoot,
        (_, _, true) => Proximity::NumaNode,
        _ => Proximity::Node,
    }
}

/// Returns what these different GPUs have in common, as far as the policy `numa` distinguishes it.
#[must_use]
pub fn numa_proximity(gpus: &[Location<'_>]) -> Proximity {
    match gpus.split_first() {
        None | Some((_, [])) => Proximity::Same,
        Some((first, rest)) if share(*first, rest, NUMA) => Proximity::NumaNode,
        Some(_) => Proximity::Node,
    }
}

fn share(first: Location<'_>, rest: &[Location<'_>], level: usize) -> bool {
    let value = first.at(level);
    value.is_some() && rest.iter().all(|gpu| gpu.at(level) == value)
}

/// Returns for each free GPU its rank; the lowest is preferred. A GPU of the smallest group with `needed` free GPUs, and
/// with all GPUs that the pod already has, has rank 0.
#[must_use]
pub fn ranks(held: &[Location<'_>], free: &[Location<'_>], needed: usize) -> Vec<usize> {
    ranks_of_levels(0..LEVELS.len(), held, free, needed)
}

/// Returns the ranks of [`ranks`] with NUMA nodes as the only groups.
#[must_use]
pub fn numa_ranks(held: &[Location<'_>], free: &[Location<'_>], needed: usize) -> Vec<usize> {
    ranks_of_levels(NUMA..NUMA + 1, held, free, needed)
}

fn ranks_of_levels(
    levels: Range<usize>,
    held: &[Location<'_>],
    free: &[Location<'_>],
    needed: usize,
) -> Vec<usize> {
    let mut ranks = vec![0; free.len()];
    for level in levels {
        let in_group = |rank: usize, gpu: &Location<'_>, group: &Attribute| {
            rank == 0 && gpu.at(level) == Some(group)
        };
        let members = |group: &Attribute| {
            let gpus = ranks.iter().zip(free);
            gpus.filter(|(rank, gpu)| in_group(**rank, gpu, group))
                .count()
        };
        // The first of the smallest groups.
        let group = free
            .iter()
            .filter_map(|gpu| gpu.at(level))
            .filter(|group| held.iter().all(|gpu| gpu.at(level) == Some(group)))
            .map(|group| (members(group), group))
            .filter(|(members, _)| *members >= needed.max(1))
            .min_by_key(|(members, _)| *members);
        let Some((_, group)) = group else { continue };
        for (rank, gpu) in ranks.iter_mut().zip(free) {
            // Those of the last level are the closest of those that are left out.
            if *rank == 0 && gpu.at(level) != Some(group) {
                *rank = LEVELS.len() - level;
            }
        }
    }
    ranks
}

#[cfg(test)]
mod tests;
