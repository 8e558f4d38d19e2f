//! Whether the API server serves a resource.

use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt};
use kube::Client;

use super::Observation;

/// Returns whether the resource is served in this version of its API group.
///
/// # Errors
/// When the API server does not tell.
pub(super) async fn is_served(
    client: &Client,
    group_version: &str,
    resource: &str,
) -> kube::Result<bool> {
    match client.list_api_group_resources(group_version).await {
        Ok(list) => Ok(list.resources.iter().any(|served| served.name == resource)),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the observation, and ends after a pause.
pub(super) fn once_then_pause(
    observation: Observation,
    pause: Duration,
) -> BoxStream<'static, Observation> {
    let pause = stream::once(tokio::time::sleep(pause)).filter_map(|()| async { None });
    stream::iter([observation]).chain(pause).boxed()
}
