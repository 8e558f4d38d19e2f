//! Content of the limits page of a share. Pure.

use drava_vgpu_abi as abi;

use super::{Prepared, Share};
use crate::gpus::capacity;
use crate::gpus::inventory::NodeInventory;
use crate::node::claim::ClaimUid;

/// Memory limit of a new page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InitialMemory {
    /// What the share holds.
    Held,
    /// None: other shares may use memory that the share is guaranteed, and the agent raises the limit when they have given it back.
    None,
}

/// Returns the limits page of a share.
pub(super) fn page(
    claim: &ClaimUid,
    device: &Prepared,
    share: &Share,
    inventory: &NodeInventory,
    memory: InitialMemory,
) -> abi::LimitsSpec {
    use drava_api::config::{ComputePolicy, MemoryPolicy};
    let reserve = inventory
        .gpu(&device.gpu.uuid)
        .map_or(0, capacity::driver_reserve_bytes);
    let held = share.held();
    let cores = cores(held.cores);
    abi::LimitsSpec {
        claim_uid: id_text(claim.as_str()),
        share_id: id_text(share.id.as_str()),
        device_uuid: device_uuid(&device.gpu.uuid),
        limits: abi::Limits {
            memory_limit_bytes: Some(match memory {
                InitialMemory::Held => held.memory_bytes,
                InitialMemory::None => 0,
            }),
            driver_reserve_bytes: reserve,
            driver_excess_bytes: 0,
            driver_surplus_bytes: 0,
            lent_bytes: 0,
            cores,
            compute_policy: match share.compute_policy {
                ComputePolicy::Balance => abi::ComputePolicy::Balance,
                ComputePolicy::Fixed => abi::ComputePolicy::Fixed,
                // MPS divides the multiprocessors, so no launch waits or is counted.
                ComputePolicy::Spatial | ComputePolicy::None => abi::ComputePolicy::None,
            },
            priority: abi::Priority::new(i32::from(share.priority.get()))
                .unwrap_or(abi::Priority::DEFAULT),
            memory_policy: match share.memory_policy {
                MemoryPolicy::Hard => abi::MemoryPolicy::Hard,
                MemoryPolicy::Spill => abi::MemoryPolicy::Spill,
            },
            broken_region: abi::BrokenRegion::Closed,
            can_suspend: share.can_suspend,
            rate_us_per_s: None,
        },
    }
}

/// Returns a guarantee of GPU time for the page; at most all of it.
pub(crate) fn cores(percent: u64) -> abi::Cores {
    let percent = u32::try_from(percent.min(capacity::ALL_CORES));
    let cores = percent.ok().and_then(abi::Cores::new);
    cores.unwrap_or(abi::Cores::BEST_EFFORT)
}

fn id_text(text: &str) -> abi::IdText {
    #[expect(
        clippy::expect_used,
        reason = "claim UIDs and share IDs are short printable ASCII"
    )]
    abi::IdText::new(text).expect("parsed IDs fit the page")
}

fn device_uuid(text: &str) -> abi::DeviceUuid {
    #[expect(
        clippy::expect_used,
        reason = "the plan of a share parses the UUID of the GPU"
    )]
    text.parse().expect("the plan parsed the UUID")
}
