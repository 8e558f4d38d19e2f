//! Watches of the PodGroups of the APIs that the API server serves.

use std::time::Duration;

use drava_api::error::describe;
use futures::stream::{self, BoxStream, StreamExt};
use k8s_openapi::api::scheduling::v1beta1;
use kube::runtime::watcher;
use kube::{Client, CustomResource};
use serde::{Deserialize, Serialize};

use super::served::{is_served, once_then_pause};
use super::{Kind, Observation, observe, trim};
use crate::change::Change;
use crate::pod_group::{PodGroupApi, PodGroupChange};

/// Time between two checks whether an API is served by now.
const RECHECK: Duration = Duration::from_secs(30);
/// Time between two attempts to find that out.
const RETRY: Duration = Duration::from_secs(2);

/// `spec` of a PodGroup of Volcano, as far as it is needed.
#[derive(CustomResource, Debug, Clone, Serialize, Deserialize)]
#[kube(
    group = "scheduling.volcano.sh",
    version = "v1beta1",
    kind = "VolcanoPodGroup",
    plural = "podgroups",
    namespaced,
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
struct VolcanoPodGroupSpec {
    min_member: Option<i64>,
}

/// `spec` of a PodGroup of the coscheduling plugin, as far as it is needed.
#[derive(CustomResource, Debug, Clone, Serialize, Deserialize)]
#[kube(
    group = "scheduling.x-k8s.io",
    version = "v1alpha1",
    kind = "CoschedulingPodGroup",
    plural = "podgroups",
    namespaced,
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
struct CoschedulingPodGroupSpec {
    min_member: Option<i64>,
}

/// Watches the PodGroups of an API. If they are not served, the list is complete and empty.
pub(super) fn observe_served(client: Client, api: PodGroupApi) -> BoxStream<'static, Observation> {
    let kind = kind(api);
    stream::repeat(client)
        .then(move |client| async move {
            let served = is_served(&client, group_version(api), "podgroups").await;
            let state = |is_served| Observation::PodGroup(PodGroupChange::Served(api, is_served));
            match served {
                Ok(true) => stream::iter([state(true)])
                    .chain(observations(&client, api))
                    .boxed(),
                Ok(false) => stream::iter([state(false)])
                    .chain(once_then_pause(Observation::Listed(kind), RECHECK))
                    .boxed(),
                Err(error) => {
                    once_then_pause(Observation::WatchFailed(kind, describe(&error)), RETRY)
                }
            }
        })
        .flatten()
        .boxed()
}

const fn kind(api: PodGroupApi) -> Kind {
    match api {
        PodGroupApi::Kubernetes => Kind::PodGroups,
        PodGroupApi::Volcano => Kind::VolcanoPodGroups,
        PodGroupApi::Coscheduling => Kind::CoschedulingPodGroups,
    }
}

const fn group_version(api: PodGroupApi) -> &'static str {
    match api {
        PodGroupApi::Kubernetes => "scheduling.k8s.io/v1beta1",
        PodGroupApi::Volcano => "scheduling.volcano.sh/v1beta1",
        PodGroupApi::Coscheduling => "scheduling.x-k8s.io/v1alpha1",
    }
}

fn observations(client: &Client, api: PodGroupApi) -> BoxStream<'static, Observation> {
    let config = watcher::Config::default();
    match api {
        PodGroupApi::Kubernetes => observe(client, kind(api), config, trim, of_kubernetes),
        PodGroupApi::Volcano => observe(client, kind(api), config, trim, of_volcano),
        PodGroupApi::Coscheduling => observe(client, kind(api), config, trim, of_coscheduling),
    }
}

fn of_kubernetes(change: Change<v1beta1::PodGroup>) -> Observation {
    group_change(PodGroupApi::Kubernetes, change, |group| {
        let policy = group.spec.scheduling_policy;
        Some(policy.gang?.min_count.into())
    })
}

fn of_volcano(change: Change<VolcanoPodGroup>) -> Observation {
    group_change(PodGroupApi::Volcano, change, |group| group.spec.min_member)
}

fn of_coscheduling(change: Change<CoschedulingPodGroup>) -> Observation {
    group_change(PodGroupApi::Coscheduling, change, |group| {
        group.spec.min_member
    })
}

/// Returns the observation of a change. A group without a minimum starts with one pod.
fn group_change<K: kube::ResourceExt>(
    api: PodGroupApi,
    change: Change<K>,
    min_of: impl FnOnce(K) -> Option<i64>,
) -> Observation {
    let (namespace, name, min) = match change {
        Change::Applied(group) => {
            let (namespace, name) = (group.namespace().unwrap_or_default(), group.name_any());
            let min = min_of(*group).and_then(|min| usize::try_from(min).ok());
            (namespace, name, Some(min.unwrap_or(1).max(1)))
        }
        Change::Deleted(group) => (group.namespace, group.name, None),
    };
    Observation::PodGroup(PodGroupChange::Group {
        api,
        namespace,
        name,
        min,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture::object;

    #[test]
    fn reads_minimum_of_each_api() {
        let metadata = json!({"name": "g", "namespace": "n"});
        let of_member = |kind: &str, version: &str, min: i64| json!({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": {"minMember": min}});
        let volcano = of_member("PodGroup", group_version(PodGroupApi::Volcano), 4);
        let coscheduling = of_member("PodGroup", group_version(PodGroupApi::Coscheduling), 0);
        let kubernetes = json!({
            "metadata": metadata, "spec": {"schedulingPolicy": {"gang": {"minCount": 3}}},
        });
        let applied = [
            (
                of_kubernetes(Change::Applied(Box::new(object(kubernetes)))),
                3,
            ),
            (of_volcano(Change::Applied(Box::new(object(volcano)))), 4),
            (
                of_coscheduling(Change::Applied(Box::new(object(coscheduling)))),
                1,
            ),
        ];
        for (observation, expected) in applied {
            let Observation::PodGroup(PodGroupChange::Group { min, name, .. }) = observation else {
                panic!("{observation:?}");
            };
            assert_eq!((name.as_str(), min), ("g", Some(expected)));
        }
    }
}
