//! Keys of Kubernetes objects.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Namespace and name.
pub type ObjectKey = (String, String);

/// Returns namespace and name of an object.
#[must_use]
pub fn object_key(metadata: &ObjectMeta) -> ObjectKey {
    (
        metadata.namespace.clone().unwrap_or_default(),
        metadata.name.clone().unwrap_or_default(),
    )
}
