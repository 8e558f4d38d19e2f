//! Changes of watched objects, from the watches to the planner.

/// A change of a watched object.
#[derive(Debug, Clone)]
pub enum Change<K> {
    /// The object exists in this version.
    Applied(Box<K>),
    /// The object does not exist.
    Deleted(DeletedObject),
}

/// Identity of a deleted object.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeletedObject {
    /// Namespace; empty for a cluster-scoped kind.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}
