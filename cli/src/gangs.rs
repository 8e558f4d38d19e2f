//! `kubectl drava gangs`: the gangs of pods, with what each waits for. Annotations of the pods define them, or PodGroups.

use std::collections::BTreeMap;

use anyhow::Context;
use drava_allocator::gang::{self, PodGroupApi};
use drava_api::names::{ALLOCATION_GATE, GANG_ANNOTATION};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ApiResource, DynamicObject, ListParams};
use kube::{Client, ResourceExt};
use serde::Serialize;
use serde_json::Value;

use drava_explanation::table;

/// A gang.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Gang {
    namespace: String,
    name: String,
    /// Number of pods that it needs to start; `None` if no member says so.
    min: Option<usize>,
    /// Unfinished pods.
    members: usize,
    /// Pods that run.
    running: usize,
    /// Pods that are gated until the gang fits.
    gated: usize,
    /// Age of the oldest member.
    age_seconds: i64,
    state: State,
}

/// State of a gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
enum State {
    /// The annotations of no member say how many pods it needs.
    Invalid,
    /// Fewer pods exist than it needs.
    WaitingForMembers,
    /// Its pods do not fit at the same time so far.
    Waiting,
    /// Its pods were allocated, and too few of them run so far.
    Starting,
    /// As many pods run as it needs.
    Running,
}

/// Number of pods that each PodGroup needs, by namespace and name.
pub(crate) type Minimums = BTreeMap<(String, String), usize>;

/// The PodGroups that a user may list.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    pub(crate) minimums: Minimums,
    /// APIs whose PodGroups the user may list in no namespace.
    forbidden: Vec<&'static str>,
    /// APIs whose PodGroups the user may list in the own namespace only.
    limited: Vec<&'static str>,
}

impl Groups {
    /// Returns what the gangs leave out; `limit` is what else the user may not list in all namespaces.
    pub(crate) fn note(&self, limit: Option<&str>) -> Option<String> {
        let forbidden = self.forbidden.join(" and ");
        let limited = self.limited.join(" and ");
        let of_own = "only the gangs of your namespace are shown";
        let note = match (limit, forbidden.as_str(), limited.as_str()) {
            (Some(plural), "", _) => {
                format!("you may not list {plural} in all namespaces; {of_own}")
            }
            (Some(plural), _, _) => format!(
                "you may not list {plural} in all namespaces, and no podgroups of {forbidden}; {of_own}"
            ),
            (None, "", "") => return None,
            (None, "", _) => format!(
                "you may not list podgroups of {limited} in all namespaces; only those of your namespace are considered"
            ),
            (None, _, _) => format!(
                "you may not list podgroups of {forbidden}; the gangs that they define are left out"
            ),
        };
        Some(note)
    }
}

/// Returns the PodGroups of all APIs that the API server serves.
pub(crate) async fn groups(client: &Client, own: &str) -> anyhow::Result<Groups> {
    let mut groups = Groups::default();
    for api in PodGroupApi::ALL {
        let api_version = api.api_version();
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let resource = ApiResource {
            group: group.to_owned(),
            version: version.to_owned(),
            api_version: api_version.to_owned(),
            kind: "PodGroup".to_owned(),
            plural: "podgroups".to_owned(),
        };
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
        let all = ListParams::default();
        let mut listed = api.list(&all).await;
        let mut is_limited = false;
        if has_code(&listed, 403) {
            let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), own, &resource);
            listed = api.list(&all).await;
            is_limited = true;
        }
        if has_code(&listed, 403) {
            // The API server refuses before it knows whether it serves the API.
            let served = client.list_api_group_resources(&resource.api_version).await;
            if !has_code(&served, 404) {
                groups.forbidden.push(group);
            }
            continue;
        }
        if has_code(&listed, 404) {
            continue;
        }
        if is_limited {
            groups.limited.push(group);
        }
        let listed = listed.with_context(|| format!("list podgroups of {group}"))?;
        for group in listed {
            let min = minimum(&group.data);
            groups.minimums.insert(
                (group.namespace().unwrap_or_default(), group.name_any()),
                min,
            );
        }
    }
    Ok(groups)
}

/// Returns whether the API server answers with this code.
fn has_code<T>(result: &kube::Result<T>, code: u16) -> bool {
    matches!(result, Err(kube::Error::Api(status)) if status.code == code)
}

/// Returns the minimum of a PodGroup; one that names none starts with one pod.
fn minimum(group: &Value) -> usize {
    let of_kubernetes = &group["spec"]["schedulingPolicy"]["gang"]["minCount"];
    let min = of_kubernetes
        .as_u64()
        .or_else(|| group["spec"]["minMember"].as_u64());
    min.and_then(|min| usize::try_from(min).ok())
        .unwrap_or(1)
        .max(1)
}

/// Returns the gangs of the pods by namespace and name.
pub(crate) fn gangs(pods: &[Pod], minimums: &Minimums, now: Timestamp) -> Vec<Gang> {
    let mut members: BTreeMap<(String, String), Vec<&Pod>> = BTreeMap::new();
    for pod in pods {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let of_group = || {
            let (_, namespace, name) = gang::reference(pod)?;
            let key = (namespace, name);
            minimums.contains_key(&key).then_some(key.1)
        };
        let of_annotation = annotation(pod, GANG_ANNOTATION).map(str::to_owned);
        if let Some(name) = of_annotation.or_else(of_group) {
            let key = (namespace.to_owned(), name);
            members.entry(key).or_default().push(pod);
        }
    }
    // Members that have finished count while others run.
    members.retain(|_, pods| pods.iter().any(|pod| is_unfinished(pod)));
    members
        .into_iter()
        .map(|(key, pods)| {
            let min = minimums.get(&key).copied();
            summary(key, &pods, min, now)
        })
        .collect()
}

/// Returns the state of the gang of these pods.
fn summary(
    (namespace, name): (String, String),
    pods: &[&Pod],
    min_of_group: Option<usize>,
    now: Timestamp,
) -> Gang {
    let min = pods
        .iter()
        .filter_map(|pod| Some(gang::of(pod).ok()??.min))
        .max()
        .or(min_of_group);
    let count = |is: fn(&Pod) -> bool| pods.iter().filter(|pod| is(pod)).count();
    let running = count(|pod| phase(pod) == "Running");
    let succeeded = count(|pod| phase(pod) == "Succeeded");
    let gated = count(is_gated);
    let members = count(is_unfinished);
    let state = match min {
        None => State::Invalid,
        Some(min) if running + succeeded >= min => State::Running,
        Some(min) if members + succeeded < min => State::WaitingForMembers,
        Some(min) if members + succeeded - gated >= min => State::Starting,
        Some(_) => State::Waiting,
    };
    let created = pods
        .iter()
        .filter_map(|pod| Some(pod.metadata.creation_timestamp.as_ref()?.0))
        .min();
    Gang {
        namespace,
        name,
        min,
        members,
        running,
        gated,
        age_seconds: created.map_or(0, |created| now.duration_since(created).as_secs()),
        state,
    }
}

/// Formats gangs as a table.
pub(crate) fn text(gangs: &[Gang]) -> String {
    if gangs.is_empty() {
        return format!("no pod has the annotation {GANG_ANNOTATION} or a PodGroup\n");
    }
    let rows = gangs.iter().map(|gang| {
        vec![
            gang.namespace.clone(),
            gang.name.clone(),
            gang.min
                .map_or_else(|| "–".to_owned(), |min| min.to_string()),
            gang.members.to_string(),
            gang.running.to_string(),
            gang.gated.to_string(),
            age(gang.age_seconds),
            gang.state.text().to_owned(),
        ]
    });
    table(
        &[
            "NAMESPACE",
            "GANG",
            "MIN",
            "MEMBERS",
            "RUNNING",
            "GATED",
            "AGE",
            "STATE",
        ],
        rows.collect(),
    )
}

/// Formats an age like kubectl, in its largest unit.
fn age(seconds: i64) -> String {
    match seconds {
        ..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

impl State {
    const fn text(self) -> &'static str {
        match self {
            Self::Invalid => "invalid: annotation gpu.drava.dev/gang-min is missing",
            Self::WaitingForMembers => "waiting for members",
            Self::Waiting => "waiting",
            Self::Starting => "starting",
            Self::Running => "running",
        }
    }
}

fn annotation<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    let annotations = pod.metadata.annotations.as_ref()?;
    annotations.get(name).map(String::as_str)
}

fn phase(pod: &Pod) -> &str {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    phase.unwrap_or("Pending")
}

fn is_unfinished(pod: &Pod) -> bool {
    !matches!(phase(pod), "Succeeded" | "Failed")
}

fn is_gated(pod: &Pod) -> bool {
    let gates = pod.spec.iter().flat_map(|spec| &spec.scheduling_gates);
    gates.flatten().any(|gate| gate.name == ALLOCATION_GATE)
}

#[cfg(test)]
mod tests {
    use drava_api::names::GANG_MIN_ANNOTATION;
    use serde_json::json;

    use super::*;

    fn pod(gang: &str, min: Option<&str>, phase: &str, is_gated: bool) -> Pod {
        let gates = if is_gated {
            json!([{"name": ALLOCATION_GATE}])
        } else {
            json!([])
        };
        let mut pod = json!({
            "metadata": {
                "namespace": "research",
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "annotations": {GANG_ANNOTATION: gang},
            },
            "spec": {"containers": [], "schedulingGates": gates},
            "status": {"phase": phase},
        });
        if let Some(min) = min {
            pod["metadata"]["annotations"][GANG_MIN_ANNOTATION] = json!(min);
        }
        serde_json::from_value(pod).expect("valid pod")
    }

    #[test]
    fn counts_members_and_names_state() {
        let pods = [
            pod("few", Some("2"), "Pending", true),
            pod("fits-not", Some("2"), "Pending", true),
            pod("fits-not", Some("2"), "Pending", true),
            pod("invalid", None, "Pending", true),
            pod("runs", Some("2"), "Running", false),
            pod("runs", Some("2"), "Running", false),
            pod("runs", Some("2"), "Pending", true),
            pod("runs", Some("2"), "Succeeded", false),
            pod("starts", Some("2"), "Running", false),
            pod("starts", Some("2"), "Pending", false),
            // A member of an indexed Job has done its part.
            pod("works", Some("3"), "Running", false),
            pod("works", Some("3"), "Running", false),
            pod("works", Some("3"), "Succeeded", false),
            pod("ended", Some("2"), "Succeeded", false),
            pod("ended", Some("2"), "Failed", false),
        ];
        let now = "2026-01-01T00:05:00Z".parse().expect("valid time");
        let table = text(&gangs(&pods, &Minimums::new(), now));
        let rows: Vec<Vec<&str>> = table
            .lines()
            .skip(1)
            .map(|line| line.split_whitespace().skip(1).collect())
            .collect();
        assert_eq!(rows[0][..6], ["few", "2", "1", "0", "1", "5m"]);
        assert!(
            table
                .lines()
                .nth(1)
                .is_some_and(|row| row.ends_with("waiting for members"))
        );
        assert_eq!(rows[1], ["fits-not", "2", "2", "0", "2", "5m", "waiting"]);
        assert_eq!(rows[2][..2], ["invalid", "–"]);
        assert_eq!(rows[3], ["runs", "2", "3", "2", "1", "5m", "running"]);
        assert_eq!(rows[4], ["starts", "2", "2", "1", "0", "5m", "starting"]);
        assert_eq!(rows[5], ["works", "3", "2", "2", "0", "5m", "running"]);
        assert_eq!(rows.len(), 6, "{table}");
    }

    #[test]
    fn says_that_there_is_no_gang() {
        assert_eq!(
            text(&gangs(&[], &Minimums::new(), Timestamp::UNIX_EPOCH)),
            "no pod has the annotation gpu.drava.dev/gang or a PodGroup\n"
        );
    }

    #[test]
    fn lists_gangs_of_every_pod_group() {
        let member = |metadata: Value, spec: Value| -> Pod {
            let mut pod = json!({"metadata": metadata, "spec": spec});
            pod["metadata"]["namespace"] = json!("research");
            pod["spec"]["containers"] = json!([]);
            serde_json::from_value(pod).expect("valid pod")
        };
        let group = |name: &str| json!({"podGroupName": name});
        let pods = [
            member(json!({}), json!({"schedulingGroup": group("kubernetes")})),
            member(
                json!({"annotations": {"scheduling.k8s.io/group-name": "volcano"}}),
                json!({}),
            ),
            member(
                json!({"labels": {"scheduling.x-k8s.io/pod-group": "plugin"}}),
                json!({}),
            ),
            member(
                json!({"labels": {"scheduling.x-k8s.io/pod-group": "unknown"}}),
                json!({}),
            ),
        ];
        let groups = [
            (
                "kubernetes",
                json!({"spec": {"schedulingPolicy": {"gang": {"minCount": 3}}}}),
            ),
            ("volcano", json!({"spec": {"minMember": 2}})),
            ("plugin", json!({"spec": {}})),
        ];
        let minimums =
            groups.map(|(name, group)| (("research".to_owned(), name.to_owned()), minimum(&group)));
        let found = gangs(&pods, &minimums.into(), Timestamp::UNIX_EPOCH);
        let found: Vec<_> = found
            .iter()
            .map(|gang| (gang.name.as_str(), gang.min))
            .collect();
        assert_eq!(
            found,
            [
                ("kubernetes", Some(3)),
                ("plugin", Some(1)),
                ("volcano", Some(2))
            ]
        );
    }
}
