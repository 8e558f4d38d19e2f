//! Watch of the DeviceTaintRules in the version that the API server serves, if any.
//!
//! Kubernetes 1.37 serves `v1`; 1.36 serves `v1beta2` if an administrator turns it on.

use std::time::Duration;

use drava_allocator::taint::rule_from_v1beta2;
use drava_api::listed::Change;
use futures::stream::{self, BoxStream, StreamExt};
use k8s_openapi::api::resource::{v1, v1beta2};
use kube::Client;

use super::served::{is_served, once_then_pause};
use super::{Kind, Observation, keep, observe};
use crate::connection;

/// Time between two checks whether the rules are served by now.
const RECHECK: Duration = Duration::from_secs(300);
/// Time between two attempts to find the served version.
const RETRY: Duration = Duration::from_secs(2);

/// Version in which the rules are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V1Beta2,
}

/// Watches the rules. If they are not served, the list is complete and empty.
pub(super) fn observe_served(client: Client) -> BoxStream<'static, Observation> {
    stream::repeat(client)
        .then(|client| async move {
            match served(&client).await {
                Ok(version) => observations(&client, version),
                Err(error) => {
                    let failure = Observation::WatchFailed(Kind::TaintRules, (&error).into());
                    once_then_pause(failure, RETRY)
                }
            }
        })
        .flatten()
        .boxed()
}

fn observations(client: &Client, version: Option<Version>) -> BoxStream<'static, Observation> {
    let config = connection::watch();
    match version {
        Some(Version::V1) => observe(
            client,
            Kind::TaintRules,
            config,
            keep,
            Observation::TaintRule,
        ),
        Some(Version::V1Beta2) => observe(client, Kind::TaintRules, config, keep, from_v1beta2),
        None => once_then_pause(Observation::Listed(Kind::TaintRules), RECHECK),
    }
}

fn from_v1beta2(change: Change<v1beta2::DeviceTaintRule>) -> Observation {
    Observation::TaintRule(match change {
        Change::Applied(rule) => Change::Applied(Box::new(rule_from_v1beta2(*rule))),
        Change::Deleted(deleted) => Change::Deleted(deleted),
    })
}

/// Returns the preferred version in which the rules are served.
async fn served(client: &Client) -> kube::Result<Option<Version>> {
    let versions = [
        (
            <v1::DeviceTaintRule as k8s_openapi::Resource>::API_VERSION,
            Version::V1,
        ),
        (
            <v1beta2::DeviceTaintRule as k8s_openapi::Resource>::API_VERSION,
            Version::V1Beta2,
        ),
    ];
    for (name, version) in versions {
        if is_served(client, name, "devicetaintrules").await? {
            return Ok(Some(version));
        }
    }
    Ok(None)
}
