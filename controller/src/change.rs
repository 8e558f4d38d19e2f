//! A change of a watched object, as the watches tell it and the planner takes it.

/// A change of a watched object.
#[derive(Debug, Clone)]
pub enum Change<K> {
    /// It exists in this version.
    Applied(Box<K>),
    /// It is gone.
    Gone(Gone),
}

/// What is left of an object that is gone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Gone {
    /// Namespace; empty for a cluster-wide kind.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}
