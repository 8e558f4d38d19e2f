//! Writes that are answered with the metadata of the object: the rest is what was written, and is not parsed again.

use std::fmt::Debug;

use kube::api::{PartialObjectMeta, Patch, PatchParams};
use kube::core::Request;
use kube::{Api, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Patches the status of an object, as [`Api::patch_metadata`] patches the rest of it.
pub(super) async fn patch_status<K>(
    api: &Api<K>,
    name: &str,
    parameters: &PatchParams,
    patch: &Patch<impl Serialize + Debug>,
) -> kube::Result<PartialObjectMeta<K>>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    // The path of the object in the place of the collection, because only a patch of an object can ask for its metadata.
    let object = Request::new(format!("{}/{name}", api.resource_url()));
    let request = object
        .patch_metadata("status", parameters, patch)
        .map_err(kube::Error::BuildRequest)?;
    api.clone().into_client().request(request).await
}
