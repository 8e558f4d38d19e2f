//! Who waits, for what, and until when; and what was found out about those that wait.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use super::missing_claims::MissingClaims;
use super::progress::SuspendedDecisions;
use super::rejections::Rejections;
use super::round::{DecisionCount, Refresh, Round};
use crate::queue::PodQueue;

/// See the [module](self).
#[derive(Default)]
pub(super) struct Backlog {
    pub(super) queue: PodQueue,
    pub(super) missing_claims: MissingClaims,
    pub(super) suspended_decisions: SuspendedDecisions,
    pub(super) rejections: Rejections,
    /// Pods that could not be evicted, and are not tried again before this time.
    pub(super) protected: BTreeMap<String, Instant>,
    /// Pods whose minimum runtime ends at this time.
    pub(super) in_minimum_runtime: BTreeMap<String, Instant>,
    /// Pods for which no other is evicted before this time.
    pub(super) eviction_delays: BTreeMap<String, Instant>,
    /// Namespaces in which claims have released devices since the last decisions.
    pub(super) released_in: BTreeSet<String>,
    pub(super) activate_all: bool,
    /// Whether something has changed that helps none of the pods that wait, but may be the reason of one.
    pub(super) are_reasons_outdated: bool,
    pub(super) refresh: Refresh,
    /// Whether the owner of a reservation was decided and has none any longer: others may use the devices.
    pub(super) has_room_ended: bool,
    pub(super) round: Round,
    pub(super) decisions: DecisionCount,
}
