//! Devices that are reserved for pods whose claims are not written.
//!
//! A pod that waits for devices holds those that are free, so that pods behind it in the queue do not take them: the head
//! of the queue, and a pod for which others were evicted. Pods ahead of the owner ignore the reservation.
//!
//! Reservations are not stored. They follow from the queue and the cluster: the owner is decided before every pod behind
//! it, also by a new leader, and pods that are being deleted are the cheapest ones to wait for.

use drava_allocator::object::ObjectKey;
use drava_allocator::placement::Placement;
use tokio::time::Instant;

use crate::gang::GangName;
use crate::queue::QueueOrder;

/// Owner of a reservation.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    /// A pod, by UID.
    Pod(String),
    /// A gang.
    Gang(GangName),
}

/// Why devices are reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The owner is the first pod of the queue that waits for the end of other pods.
    HeadOfQueue,
    /// The owner fits when pods that are being deleted have ended; they may have been evicted for it.
    Preemption,
}

/// See the [module](self).
#[derive(Debug, Clone)]
pub(crate) struct Reservation {
    /// Why the devices are reserved.
    pub(crate) purpose: Purpose,
    /// Order of the owner in the queue.
    pub(crate) order: QueueOrder,
    /// Devices by the UID of the pod; of a gang, those of all members.
    pub(crate) placements: Vec<(String, Placement)>,
    /// When it is decided again, even without a change.
    pub(crate) review_at: Instant,
}

impl Reservation {
    /// Returns the claims with reserved devices.
    pub(crate) fn claims(&self) -> impl Iterator<Item = ObjectKey> {
        let placements = self.placements.iter();
        placements
            .flat_map(|(_, placement)| &placement.claims)
            .map(|claim| (claim.claim.namespace.clone(), claim.claim.name.clone()))
    }
}
