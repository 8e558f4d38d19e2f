//! CEL values with methods only, of types that Kubernetes adds: quantities, versions, addresses, networks, URLs and named
//! formats.

use std::any::Any;
use std::fmt::Debug;

use cel::common::types::Type;
use cel::common::value::{StaticVal, Val};

/// Content of an [`Opaque`] value; `==` of CEL is its equality.
pub(crate) trait Content: Debug + Clone + PartialEq + Send + Sync + 'static {
    /// Returns the type in CEL.
    fn cel_type() -> &'static Type;
}

/// A CEL value without operators other than `==`.
#[derive(Debug, Clone)]
pub(crate) struct Opaque<T>(pub(crate) T);

impl<T: Content> Val for Opaque<T> {
    fn get_type(&self) -> &Type {
        T::cel_type()
    }

    fn cel_type() -> &'static Type {
        T::cel_type()
    }

    fn equals(&self, other: &dyn Val) -> bool {
        other
            .downcast_ref::<Self>()
            .is_some_and(|other| other.0 == self.0)
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v>
    where
        Self: 'v,
    {
        Box::new(self.clone())
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl<T: Content> StaticVal for Opaque<T> {}
