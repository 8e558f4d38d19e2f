//! Watches of the PodGroups of the APIs that the API server serves.

use std::time::Duration;

use drava_api::listed::Change;
use drava_connection::Limits;
use futures::stream::{self, BoxStream, StreamExt};
use k8s_openapi::api::scheduling::v1beta1;
use kube::{Client, CustomResource};
use serde::{Deserialize, Serialize};

use super::served::{RETRY, is_served, once_then_pause};
use super::{Kind, Observation, keep, observe};
use crate::pods::gang::PodGroupApi;
use crate::pods::pod;
use crate::pods::pod_group::{Disruption, GroupSpec, PodGroupChange};

/// Time between two checks whether an API is served by now.
const RECHECK: Duration = Duration::from_secs(30);

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
            let served = is_served(&client, api.api_version(), "podgroups").await;
            let state = |is_served| Observation::PodGroup(PodGroupChange::Served(api, is_served));
            match served {
                Ok(true) => stream::iter([state(true)])
                    .chain(observations(&client, api))
                    .boxed(),
                Ok(false) => stream::iter([state(false)])
                    .chain(once_then_pause(Observation::Listed(kind), RECHECK))
                    .boxed(),
                Err(error) => {
                    once_then_pause(Observation::WatchFailed(kind, (&error).into()), RETRY)
                }
            }
        })
        .flatten()
        .boxed()
}

pub(super) const fn kind(api: PodGroupApi) -> Kind {
    match api {
        PodGroupApi::Kubernetes => Kind::PodGroups,
        PodGroupApi::Volcano => Kind::VolcanoPodGroups,
        PodGroupApi::Coscheduling => Kind::CoschedulingPodGroups,
    }
}

fn observations(client: &Client, api: PodGroupApi) -> BoxStream<'static, Observation> {
    let config = Limits::SHORT_WATCHES.watch();
    match api {
        PodGroupApi::Kubernetes => observe(client, kind(api), config, keep, of_kubernetes),
        PodGroupApi::Volcano => observe(client, kind(api), config, keep, of_volcano),
        PodGroupApi::Coscheduling => observe(client, kind(api), config, keep, of_coscheduling),
    }
}

fn of_kubernetes(change: Change<v1beta1::PodGroup>) -> Observation {
    group_change(PodGroupApi::Kubernetes, change, |group| {
        let spec = group.spec;
        let gang = spec.scheduling_policy.gang;
        let disruption = match spec.disruption_mode {
            Some(mode) if mode.all.is_some() => Disruption::All,
            // The default of the API.
            Some(_) | None => Disruption::Single,
        };
        GroupSpec {
            min: minimum(gang.map(|gang| gang.min_count.into())),
            priority: spec.priority,
            may_preempt: spec.preemption_policy.map(|policy| policy != pod::NEVER),
            disruption,
            composite: spec.parent_composite_pod_group_name,
        }
    })
}

fn of_volcano(change: Change<VolcanoPodGroup>) -> Observation {
    group_change(PodGroupApi::Volcano, change, |group| {
        of_members(group.spec.min_member)
    })
}

fn of_coscheduling(change: Change<CoschedulingPodGroup>) -> Observation {
    group_change(PodGroupApi::Coscheduling, change, |group| {
        of_members(group.spec.min_member)
    })
}

fn of_members(min: Option<i64>) -> GroupSpec {
    GroupSpec {
        min: minimum(min),
        ..GroupSpec::default()
    }
}

/// Returns the number of pods that a group needs; one without a minimum starts with one pod.
fn minimum(min: Option<i64>) -> usize {
    let min = min.and_then(|min| usize::try_from(min).ok());
    min.unwrap_or(1).max(1)
}

/// Returns the observation of a change.
fn group_change<K: kube::ResourceExt>(
    api: PodGroupApi,
    change: Change<K>,
    spec_of: impl FnOnce(K) -> GroupSpec,
) -> Observation {
    let (namespace, name, spec) = match change {
        Change::Applied(group) => {
            let (namespace, name) = (group.namespace().unwrap_or_default(), group.name_any());
            (namespace, name, Some(spec_of(*group)))
        }
        Change::Deleted(group) => (group.namespace, group.name, None),
    };
    Observation::PodGroup(PodGroupChange::Group {
        api,
        namespace,
        name,
        spec,
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
        let volcano = of_member("PodGroup", PodGroupApi::Volcano.api_version(), 4);
        let coscheduling = of_member("PodGroup", PodGroupApi::Coscheduling.api_version(), 0);
        let kubernetes = json!({
            "metadata": metadata, "spec": {
                "schedulingPolicy": {"gang": {"minCount": 3}}, "disruptionMode": {"all": {}}, "priority": 5,
                "preemptionPolicy": "Never",
                "parentCompositePodGroupName": "job",
            },
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
            let Observation::PodGroup(PodGroupChange::Group {
                api, spec, name, ..
            }) = observation
            else {
                panic!("{observation:?}");
            };
            let spec = spec.unwrap();
            assert_eq!((name.as_str(), spec.min), ("g", expected));
            if api == PodGroupApi::Kubernetes {
                assert_eq!((spec.priority, spec.disruption), (Some(5), Disruption::All));
                assert_eq!(spec.may_preempt, Some(false));
                assert_eq!(spec.composite.as_deref(), Some("job"));
            }
        }
    }
}
