//! Watches of GpuQuotas and GpuPolicies, if the API server serves them.
//!
//! Helm does not install CustomResourceDefinitions on every upgrade, and administrators may leave them out. Without the
//! definition there are no objects, and the watch starts when it is installed.

use std::fmt::Debug;
use std::time::Duration;

use drava_api::listed::Change;
use drava_api::names;
use futures::stream::{self, BoxStream, StreamExt};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;

use super::served::{is_served, once_then_pause};
use super::{Kind, Observation, keep, observe};
use crate::connection;

/// Time between two checks whether the kind is served by now.
const RECHECK: Duration = Duration::from_secs(60);
/// Time between two attempts to find that out.
const RETRY: Duration = Duration::from_secs(2);

/// Watches the objects of a kind. If they are not served, the list is complete and empty.
pub(super) fn observe_served<K>(
    client: Client,
    kind: Kind,
    wrap: fn(Change<K>) -> Observation,
) -> BoxStream<'static, Observation>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    stream::unfold((client, false), move |(client, is_reported)| async move {
        let served = is_served(&client, names::API_VERSION, kind.as_str()).await;
        let is_absent = matches!(served, Ok(false));
        if is_absent && !is_reported {
            tracing::info!(
                "the CustomResourceDefinition {}.{} is not installed; none apply",
                kind.as_str(),
                names::GROUP
            );
        }
        let observations = match served {
            Ok(true) => {
                let config = connection::watch();
                observe(&client, kind, config, keep, wrap)
            }
            Ok(false) => once_then_pause(Observation::Listed(kind), RECHECK),
            Err(error) => {
                let failure = Observation::WatchFailed(kind, (&error).into());
                once_then_pause(failure, RETRY)
            }
        };
        Some((observations, (client, is_reported || is_absent)))
    })
    .flatten()
    .boxed()
}
