//! Watches of kinds that the API server serves only sometimes. Without it there are no objects: the list is complete and
//! empty.

use std::fmt::Debug;
use std::time::Duration;

use drava_allocator::taint::rule_from_v1beta2;
use drava_api::listed::Change;
use drava_api::names;
use drava_connection::Limits;
use futures::stream::{self, BoxStream, StreamExt};
use k8s_openapi::api::resource::{v1, v1beta2};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;

use super::{Kind, Observation, keep, observe};

/// Time between two attempts to find out whether a kind is served.
pub(super) const RETRY: Duration = Duration::from_secs(2);
/// Time between two checks whether a kind of drava is served by now.
const DEFINITIONS_RECHECK: Duration = Duration::from_secs(60);
/// Time between two checks whether DeviceTaintRules are served by now.
const TAINT_RULES_RECHECK: Duration = Duration::from_secs(300);

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

/// Watches a kind of drava. Helm does not install CustomResourceDefinitions on every upgrade, and administrators may leave
/// them out. The watch starts when the definition is installed.
pub(super) fn observe_definition<K>(
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
                let config = Limits::SHORT_WATCHES.watch();
                observe(&client, kind, config, keep, wrap)
            }
            Ok(false) => once_then_pause(Observation::Listed(kind), DEFINITIONS_RECHECK),
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

/// Version in which the rules are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V1Beta2,
}

/// Watches the DeviceTaintRules. Kubernetes 1.37 serves `v1`; 1.36 serves `v1beta2` if an administrator turns it on.
pub(super) fn observe_taint_rules(client: Client) -> BoxStream<'static, Observation> {
    stream::repeat(client)
        .then(|client| async move {
            match served_version(&client).await {
                Ok(version) => taint_rules(&client, version),
                Err(error) => {
                    let failure = Observation::WatchFailed(Kind::TaintRules, (&error).into());
                    once_then_pause(failure, RETRY)
                }
            }
        })
        .flatten()
        .boxed()
}

fn taint_rules(client: &Client, version: Option<Version>) -> BoxStream<'static, Observation> {
    let config = Limits::SHORT_WATCHES.watch();
    match version {
        Some(Version::V1) => observe(
            client,
            Kind::TaintRules,
            config,
            keep,
            Observation::TaintRule,
        ),
        Some(Version::V1Beta2) => observe(client, Kind::TaintRules, config, keep, from_v1beta2),
        None => once_then_pause(Observation::Listed(Kind::TaintRules), TAINT_RULES_RECHECK),
    }
}

fn from_v1beta2(change: Change<v1beta2::DeviceTaintRule>) -> Observation {
    Observation::TaintRule(match change {
        Change::Applied(rule) => Change::Applied(Box::new(rule_from_v1beta2(*rule))),
        Change::Deleted(deleted) => Change::Deleted(deleted),
    })
}

/// Returns the preferred version in which the rules are served.
async fn served_version(client: &Client) -> kube::Result<Option<Version>> {
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
