//! Generated cases: small clusters whose free amounts are close to what the claims request.

use serde_json::{Value, json};

use crate::random::Random;

mod claims;
mod cluster;

pub use cluster::devices;

/// Group of cases. Each concentrates on one part of the semantics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Shares of GPUs and whole GPUs.
    Shares,
    /// Request policies: defaults, minimum, maximum, steps, valid values.
    Rounding,
    /// Partitions coupled by counters.
    Partitions,
    /// Pools that are incomplete, invalid, or have slices of old generations.
    Pools,
    /// Taints and tolerations.
    Taints,
    /// CEL selectors, including those that fail.
    Selectors,
    /// `matchAttribute` and `distinctAttribute`.
    Constraints,
    /// `firstAvailable`.
    Alternatives,
    /// `allocationMode: All`.
    All,
    /// Admin access.
    AdminAccess,
    /// Several claims of one pod.
    SeveralClaims,
    /// Any of the above. The policies of the allocator see neither memory nor MIG partitions to rank, so both allocators
    /// select the first device that fits.
    FirstFit,
    /// Many requests for one device each, all of one GPU.
    OneGpu,
    /// Requests of which the last ones select few devices, which the first ones can use, too.
    LateSelectors,
}

impl Class {
    /// Every class.
    pub const EVERY: [Self; 14] = [
        Self::Shares,
        Self::Rounding,
        Self::Partitions,
        Self::Pools,
        Self::Taints,
        Self::Selectors,
        Self::Constraints,
        Self::Alternatives,
        Self::All,
        Self::AdminAccess,
        Self::SeveralClaims,
        Self::FirstFit,
        Self::OneGpu,
        Self::LateSelectors,
    ];

    /// Returns the probabilities of the class.
    fn mix(self) -> Mix {
        let base = Mix::default();
        match self {
            Self::Shares => base,
            Self::Rounding => Mix {
                odd_policies: 90,
                ..base
            },
            Self::Partitions => Mix {
                partitions: 85,
                ..base
            },
            Self::Pools => Mix {
                pools: 3,
                broken_pools: 35,
                split_slices: 60,
                all: 15,
                ..base
            },
            Self::Taints => Mix {
                taints: 45,
                all: 15,
                partitions: 25,
                ..base
            },
            Self::Selectors => Mix {
                selectors: 70,
                failing_selectors: 6,
                partitions: 25,
                ..base
            },
            Self::Constraints => Mix {
                constraints: 90,
                several_devices: 70,
                pools: 2,
                partitions: 30,
                ..base
            },
            Self::Alternatives => Mix {
                alternatives: 80,
                partitions: 40,
                constraints: 20,
                ..base
            },
            Self::All => Mix {
                all: 60,
                partitions: 25,
                idle: 70,
                constraints: 15,
                several_devices: 50,
                ..base
            },
            Self::AdminAccess => Mix {
                admin: 60,
                partitions: 30,
                taints: 10,
                ..base
            },
            Self::SeveralClaims => Mix {
                claims: 3,
                partitions: 30,
                constraints: 20,
                idle: 60,
                ..base
            },
            Self::FirstFit => Mix {
                memory: "frameBuffer",
                partition_type: "slice",
                claims: 2,
                partitions: 40,
                pools: 2,
                split_slices: 40,
                taints: 10,
                selectors: 25,
                constraints: 25,
                alternatives: 25,
                several_devices: 40,
                odd_policies: 20,
                all: 8,
                idle: 50,
                ..base
            },
            Self::OneGpu => Mix {
                one_gpu: 100,
                partitions: 100,
                idle: 60,
                gpus: 4,
                ..base
            },
            Self::LateSelectors => Mix {
                late_selectors: 100,
                idle: 75,
                gpus: 7,
                ..base
            },
        }
    }
}

/// Probabilities in percent, and limits.
#[derive(Debug, Clone, Copy)]
struct Mix {
    /// Name of the memory capacity.
    memory: &'static str,
    /// Published type of partitions.
    partition_type: &'static str,
    /// GPUs with partitions.
    partitions: u64,
    /// Most pools of a node.
    pools: u64,
    /// Pools with a defect.
    broken_pools: u64,
    /// Pools with several device slices.
    split_slices: u64,
    /// Devices with taints.
    taints: u64,
    /// Requests with a selector.
    selectors: u64,
    /// Selectors that fail on some devices.
    failing_selectors: u64,
    /// Claims with constraints.
    constraints: u64,
    /// Requests with alternatives.
    alternatives: u64,
    /// Requests for all devices.
    all: u64,
    /// Requests with admin access.
    admin: u64,
    /// Most claims of the pod.
    claims: u64,
    /// Requests for several devices, and claims with several requests.
    several_devices: u64,
    /// GPUs with unusual request policies.
    odd_policies: u64,
    /// GPUs without allocations.
    idle: u64,
    /// Most GPUs of a pool.
    gpus: u64,
    /// Claims with many requests for devices of one GPU.
    one_gpu: u64,
    /// Claims of which the last requests select few devices.
    late_selectors: u64,
}

impl Default for Mix {
    fn default() -> Self {
        Self {
            memory: "memory",
            partition_type: "mig",
            partitions: 0,
            pools: 1,
            broken_pools: 0,
            split_slices: 15,
            taints: 0,
            selectors: 10,
            failing_selectors: 0,
            constraints: 0,
            alternatives: 0,
            all: 0,
            admin: 0,
            claims: 1,
            several_devices: 30,
            odd_policies: 10,
            idle: 35,
            gpus: 3,
            one_gpu: 0,
            late_selectors: 0,
        }
    }
}

/// Returns case `index` of a class.
#[must_use]
pub fn case(seed: u64, class: Class, index: u64) -> Value {
    let mut random = Random::new(seed, class as u64, index);
    let mix = class.mix();
    let mut cluster = cluster::Generator::new(&mut random, mix);
    for node in 0..cluster.random.between(1, 2) {
        cluster.add_node(&format!("n{node}"));
    }
    let (nodes, slices, allocated) = cluster.into_parts();
    let claims = claims::generate(&mut random, mix);
    json!({
        "nodes": nodes,
        "slices": slices,
        "classes": claims::classes(mix),
        "allocated": allocated,
        "claims": claims,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;

    #[test]
    fn cases_are_valid_and_reproducible() {
        for class in Class::EVERY {
            for index in 0..50 {
                let generated = case(1, class, index);
                assert_eq!(generated, case(1, class, index));
                Case::parse(&generated).unwrap();
            }
            assert_ne!(case(1, class, 0), case(2, class, 0));
        }
    }
}
