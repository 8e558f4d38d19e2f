//! Memory beyond the guarantee of a share: `memory.limit` and how it is given back.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Settings;
use crate::Quantity;

/// Memory that a share uses beyond its guarantee.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub enum MemoryBurst {
    /// Memory of the GPU that no claim holds.
    #[default]
    Unallocated,
    /// Also what other shares are guaranteed and do not use, where their classes lend it.
    Idle,
}

/// How a share gives back memory beyond its guarantee.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum MemoryReclaim {
    /// Its processes are killed if they do not free the memory at once.
    Kill,
}

/// The limit of a share that bursts is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BurstError {
    /// The limit is not an amount of memory.
    #[error("config field memory.limit: {0} is no amount of memory; use for example 12Gi")]
    Amount(Quantity),
    /// The limit is below the guarantee.
    #[error(
        "config field memory.limit: {limit} is less than the {guarantee_mib} MiB that the request guarantees; {}",
        remedy(*.limit, *.guarantee_mib)
    )]
    BelowGuarantee {
        /// The limit.
        limit: Quantity,
        /// The guarantee, MiB.
        guarantee_mib: u64,
    },
    /// The claim does not say how it gives memory back.
    #[error(
        "config field memory.reclaim: missing; a share with a memory.limit above its request must say how it gives memory back \
         when another claim needs it: use `kill` (processes that do not free it at once are killed)"
    )]
    NoReclaim,
}

/// Returns what to do about a limit below the guarantee: most often its unit is missing.
fn remedy(limit: Quantity, guarantee_mib: u64) -> String {
    let number = limit.to_u64_rounded_up().filter(|number| number >> 20 == 0);
    let units = [("Gi", 10), ("Mi", 0)];
    let mut meant = number.into_iter().flat_map(|number| {
        units.map(|(unit, shift)| (unit, number, number.checked_mul(1 << shift)))
    });
    // At most the memory of a large GPU.
    let is_plausible =
        |mib: &Option<u64>| mib.is_some_and(|mib| (guarantee_mib..1 << 19).contains(&mib));
    match meant.find(|(_, _, mib)| is_plausible(mib)) {
        Some((unit, number, _)) => format!("did you mean {number}{unit}?"),
        None => "use more, or remove it".to_owned(),
    }
}

impl Settings {
    /// Returns the memory limit of a share with this guarantee, bytes; `None` if it gets no more than its guarantee.
    ///
    /// # Errors
    /// If the limit is below the guarantee, or above it without a way to give memory back.
    pub fn burst_limit(&self, guarantee_bytes: u64) -> Result<Option<u64>, BurstError> {
        let Some(limit) = self.memory_limit else {
            return Ok(None);
        };
        let bytes = limit.to_i64().and_then(|bytes| u64::try_from(bytes).ok());
        let bytes = bytes.ok_or(BurstError::Amount(limit))?;
        if bytes < guarantee_bytes {
            return Err(BurstError::BelowGuarantee {
                limit,
                guarantee_mib: guarantee_bytes >> 20,
            });
        }
        if bytes == guarantee_bytes {
            return Ok(None);
        }
        match self.memory_reclaim {
            Some(MemoryReclaim::Kill) => Ok(Some(bytes)),
            None => Err(BurstError::NoReclaim),
        }
    }
}
