//! Which pods a change can help: their decisions are due again.

use std::collections::BTreeSet;

use drava_allocator::object::ObjectKey;

use crate::pods::gang::GangName;

/// See the [module](self). [`Backlog::wake`](super::backlog::Backlog::wake) finds the pods.
#[derive(Debug)]
pub(super) enum Wake {
    /// No pod.
    None,
    /// No pod, but the reasons of some may be outdated.
    Reasons,
    /// All.
    All,
    /// Those that the node can serve now, all if it is new.
    Node {
        /// Name of the node.
        name: String,
        /// Whether it was not known before.
        is_new: bool,
    },
    /// Those with rules about the pods of other nodes.
    NodeDeleted(String),
    /// Those that the node does not refuse regardless of its devices.
    Devices {
        /// Name of the node.
        node: String,
    },
    /// Those with rules about other pods: one was bound.
    Bound,
    /// Those that the end of a pod on this node can help.
    Ended {
        /// Name of the node.
        node: String,
    },
    /// Those of a higher priority: a pod of this one can be evicted for them.
    Above(i32),
    /// The members of a gang.
    Gang(GangName),
    /// Those that reference a claim.
    Users(ObjectKey),
    /// Those of the namespaces.
    Namespaces(BTreeSet<String>),
    /// Those of the namespace whose claims do not exist.
    MissingClaims {
        /// The namespace.
        namespace: String,
    },
}

impl Wake {
    /// Returns whom a change wakes that can help all pods, or none.
    pub(super) const fn all_if(can_help: bool) -> Self {
        if can_help { Self::All } else { Self::None }
    }
}
