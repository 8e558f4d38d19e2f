//! Watch of the GpuQuotas, if the API server serves them.
//!
//! Helm does not install CustomResourceDefinitions on every upgrade, and administrators may leave them out. Without the
//! definition there are no quotas, and the watch starts when it is installed.

use std::time::Duration;

use drava_api::error::describe;
use drava_api::names;
use futures::stream::{self, BoxStream, StreamExt};
use kube::Client;
use kube::runtime::watcher;

use super::served::{is_served, once_then_pause};
use super::{Kind, Observation, observe, trim};

/// Time between two checks whether the quotas are served by now.
const RECHECK: Duration = Duration::from_secs(60);
/// Time between two attempts to find that out.
const RETRY: Duration = Duration::from_secs(2);

/// Watches the quotas. If they are not served, the list is complete and empty.
pub(super) fn observe_served(client: Client) -> BoxStream<'static, Observation> {
    stream::unfold((client, false), |(client, is_reported)| async move {
        let served = is_served(&client, names::API_VERSION, "gpuquotas").await;
        let is_absent = matches!(served, Ok(false));
        if is_absent && !is_reported {
            tracing::info!(
                "the CustomResourceDefinition gpuquotas.{} is not installed; no quotas apply",
                names::GROUP
            );
        }
        let observations = match served {
            Ok(true) => {
                let config = watcher::Config::default();
                observe(&client, Kind::Quotas, config, trim, Observation::Quota)
            }
            Ok(false) => once_then_pause(Observation::Listed(Kind::Quotas), RECHECK),
            Err(error) => {
                let failure = Observation::WatchFailed(Kind::Quotas, describe(&error));
                once_then_pause(failure, RETRY)
            }
        };
        Some((observations, (client, is_reported || is_absent)))
    })
    .flatten()
    .boxed()
}
