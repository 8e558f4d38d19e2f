//! State that the console shows, and its changes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Bytes;
use serde::Serialize;
use tokio::sync::watch;

use super::view::{self, Limits, View};
use crate::decision::DecisionOptions;
use crate::measured::{Gap, Use};
use drava_explanation::snapshot::{Objects, Snapshot};

/// State that the console shows.
#[derive(Debug)]
pub(super) struct Live {
    decision: DecisionOptions,
    source: Origin,
    state: Mutex<State>,
    /// Number of changes so far.
    generation: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    snapshot: Snapshot,
    measured: Use,
    /// Why not all is measured.
    gap: Option<Gap>,
    access: BTreeMap<Kind, Access>,
    /// The last document, with the generation that it shows.
    document: Option<(u64, Bytes)>,
}

/// Where the state is from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
enum Origin {
    Cluster { context: String },
    Dump,
}

/// Kind of objects that the view needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Slices,
    Claims,
    Pods,
    Nodes,
    Classes,
    TaintRules,
    OldTaintRules,
    Quotas,
    Policies,
    Namespaces,
    VolumeClaims,
    Volumes,
    StorageClasses,
    Leaders,
}

/// Whether the objects of a kind can be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Access {
    /// The first list is not complete.
    Pending,
    /// All are read, also those of a kind that is not served.
    Complete,
    /// All are listed periodically, because the user may not watch them.
    Polled,
    /// Only those of this namespace are read.
    Namespace(String),
    /// The user may not list them.
    Denied,
    /// The connection is broken; the last known objects are shown.
    Failing(String),
}

/// What the page reads.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Document<'a> {
    source: &'a Origin,
    version: &'static str,
    generation: u64,
    /// Whether the first list of every kind is complete.
    is_complete: bool,
    /// Whether the broken connection makes the state old.
    is_stale: bool,
    #[serde(flatten)]
    view: View,
}

impl Live {
    /// Creates an empty state of a cluster.
    pub(super) fn new(context: String, decision: DecisionOptions) -> Self {
        Self::with(Origin::Cluster { context }, Snapshot::default(), decision)
    }

    /// Creates the state of a dump, which does not change.
    pub(super) fn recorded(objects: Objects, decision: DecisionOptions) -> Self {
        Self::with(Origin::Dump, objects.into_snapshot().0, decision)
    }

    fn with(source: Origin, snapshot: Snapshot, decision: DecisionOptions) -> Self {
        Self {
            decision,
            source,
            state: Mutex::new(State {
                snapshot,
                measured: Use::default(),
                gap: None,
                access: BTreeMap::new(),
                document: None,
            }),
            generation: watch::Sender::new(1),
        }
    }

    /// Changes the objects.
    pub(super) fn change(&self, change: impl FnOnce(&mut Snapshot)) {
        change(&mut self.lock().snapshot);
        self.generation.send_modify(|generation| *generation += 1);
    }

    /// Notes whether the objects of a kind can be read.
    pub(super) fn set_access(&self, kind: Kind, access: Access) {
        let before = self.lock().access.insert(kind, access.clone());
        if before != Some(access) {
            self.generation.send_modify(|generation| *generation += 1);
        }
    }

    /// Replaces what claims use.
    pub(super) fn set_measured(&self, measured: Use, gap: Option<Gap>) {
        let mut state = self.lock();
        if state.measured == measured && state.gap == gap {
            return;
        }
        (state.measured, state.gap) = (measured, gap);
        drop(state);
        self.generation.send_modify(|generation| *generation += 1);
    }

    /// Returns whether a page follows the changes.
    pub(super) fn is_followed(&self) -> bool {
        self.generation.receiver_count() > 0
    }

    /// Returns the generations from now on.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// Renders the first complete model, before a page asks for it: in a large cluster the decisions on the queue take long.
    pub(super) async fn prepare(self: Arc<Self>) {
        let mut changes = self.changes();
        while !is_complete(&self.lock().access) {
            if changes.changed().await.is_err() {
                return;
            }
        }
        // The page asks again if this fails.
        let _ = tokio::task::spawn_blocking(move || self.document()).await;
    }

    /// Returns the model as JSON.
    pub(super) fn document(&self) -> Bytes {
        let generation = *self.generation.borrow();
        let mut state = self.lock();
        if let Some((known, document)) = &state.document
            && *known == generation
        {
            return document.clone();
        }
        let access = &state.access;
        let (mut limits, mut faults) = (limits(access), faults(access));
        match &state.gap {
            Some(gap @ Gap::Denied(_)) => limits.details.push(gap.to_string()),
            Some(gap @ Gap::Failing(_)) => faults.push(gap.to_string()),
            None => {}
        }
        let settings = self.decision.settings(state.snapshot.settings.as_ref());
        let document = Document {
            source: &self.source,
            version: env!("CARGO_PKG_VERSION"),
            generation,
            is_complete: is_complete(access),
            is_stale: access
                .values()
                .any(|access| matches!(access, Access::Failing(_))),
            view: view::view(
                &state.snapshot,
                &state.measured,
                can_explain(access).then_some(&settings),
                limits,
                faults,
            ),
        };
        // Maps with strings as keys are always valid JSON.
        let document = Bytes::from(serde_json::to_vec(&document).unwrap_or_default());
        state.document = Some((generation, document.clone()));
        document
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A change is applied by one call, so a panic leaves no half of it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kind {
    /// Plural name in texts.
    const fn name(self) -> &'static str {
        match self {
            Self::Slices => Limits::SLICES,
            Self::Claims => "resourceclaims",
            Self::Pods => "pods",
            Self::Nodes => "nodes",
            Self::Classes => "deviceclasses",
            Self::TaintRules | Self::OldTaintRules => "devicetaintrules",
            Self::Quotas => "gpuquotas",
            Self::Policies => "gpupolicies",
            Self::Namespaces => "namespaces",
            Self::VolumeClaims => "persistentvolumeclaims",
            Self::Volumes => "persistentvolumes",
            Self::StorageClasses => "storageclasses",
            Self::Leaders => "gpucontrollerleaders",
        }
    }

    /// What the view lacks without these objects; `None` if only rare explanations depend on them.
    const fn purpose(self) -> Option<&'static str> {
        match self {
            Self::Slices => Some("no GPU can be shown"),
            Self::Claims => Some("allocations are unknown"),
            Self::Pods => Some("the queue is unknown"),
            Self::Nodes => Some("conditions of nodes are unknown"),
            Self::Classes => Some("requests cannot be explained"),
            Self::TaintRules | Self::OldTaintRules => Some("cordoned GPUs are shown as free"),
            Self::Quotas => Some("quotas are not shown"),
            Self::Namespaces => Some("quotas that select namespaces by label are not computed"),
            Self::Leaders => Some("GPUs that are reserved for pods are shown as free"),
            Self::Policies | Self::VolumeClaims | Self::Volumes | Self::StorageClasses => None,
        }
    }

    /// Returns whether the reasons of pending pods are wrong without all of these objects.
    const fn is_needed_to_explain(self) -> bool {
        matches!(
            self,
            Self::Slices
                | Self::Claims
                | Self::Pods
                | Self::Nodes
                | Self::Classes
                | Self::Quotas
                | Self::Namespaces
                | Self::TaintRules
                | Self::OldTaintRules
        )
    }
}

/// Returns whether the first list of every kind is complete.
fn is_complete(access: &BTreeMap<Kind, Access>) -> bool {
    !access.values().any(|access| *access == Access::Pending)
}

/// Returns whether the allocator has what it needs for a decision.
fn can_explain(access: &BTreeMap<Kind, Access>) -> bool {
    let mut needed = access
        .iter()
        .filter(|(kind, _)| kind.is_needed_to_explain());
    needed.all(|(_, access)| match access {
        Access::Complete | Access::Polled | Access::Failing(_) => true,
        Access::Pending | Access::Namespace(_) | Access::Denied => false,
    })
}

/// Returns what the user may not read.
fn limits(access: &BTreeMap<Kind, Access>) -> Limits {
    let mut limits = Limits::default();
    for (kind, access) in access {
        let name = kind.name();
        let detail = match access {
            Access::Pending | Access::Complete | Access::Failing(_) => continue,
            Access::Polled => {
                format!("{name} are read every 30 s: you may list them, and not watch them")
            }
            Access::Namespace(namespace) => {
                limits.namespace = Some(namespace.clone());
                format!(
                    "only {name} of namespace {namespace} are shown: you may not list those of all namespaces; what other \
                     namespaces use is not visible"
                )
            }
            Access::Denied => {
                limits.hidden.insert(name);
                let Some(purpose) = kind.purpose() else {
                    continue;
                };
                format!(
                    "you may not list {name}: {purpose}; `kubectl auth can-i list {name} -A` shows your permission"
                )
            }
        };
        // One kind is read in several versions.
        if !limits.details.contains(&detail) {
            limits.details.push(detail);
        }
    }
    if !can_explain(access) && is_complete(access) {
        limits.details.push(
            "reasons of pending pods are those that the controller wrote last: other reasons depend on objects that you may \
             not list"
                .to_owned(),
        );
    }
    limits
}

/// Returns texts about faults of the connection.
fn faults(access: &BTreeMap<Kind, Access>) -> Vec<String> {
    let faults = access.iter().filter_map(|(kind, access)| match access {
        Access::Failing(error) => Some(format!(
            "cannot read {}: {error}; trying again",
            kind.name()
        )),
        _ => None,
    });
    faults.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(of: &[(Kind, Access)]) -> BTreeMap<Kind, Access> {
        of.iter().cloned().collect()
    }

    #[test]
    fn names_objects_hidden_by_missing_permissions() {
        let complete = limits(&access(&[(Kind::Nodes, Access::Complete)]));
        assert_eq!(complete, Limits::default());
        let denied = limits(&access(&[(Kind::Nodes, Access::Denied)]));
        assert_eq!(
            denied.details,
            [
                "you may not list nodes: conditions of nodes are unknown; `kubectl auth can-i list nodes -A` shows your \
                 permission",
                "reasons of pending pods are those that the controller wrote last: other reasons depend on objects that you \
                 may not list",
            ]
        );
        assert_eq!(denied.hidden, ["nodes"].into());
        let partial = limits(&access(&[(
            Kind::Claims,
            Access::Namespace("team-a".to_owned()),
        )]));
        assert!(
            partial.details[0].starts_with("only resourceclaims of namespace team-a are shown")
        );
        assert_eq!(partial.details.len(), 2);
        assert_eq!(partial.namespace.as_deref(), Some("team-a"));
        // Rarely needed, and administrators know.
        let rare = limits(&access(&[(Kind::Volumes, Access::Denied)]));
        assert!(rare.details.is_empty());
    }

    #[test]
    fn reasons_need_what_decisions_depend_on() {
        let needed = [Kind::Quotas, Kind::TaintRules, Kind::Namespaces];
        for kind in needed {
            assert!(!can_explain(&access(&[(kind, Access::Denied)])), "{kind:?}");
            assert!(
                can_explain(&access(&[(kind, Access::Complete)])),
                "{kind:?}"
            );
        }
        assert!(can_explain(&access(&[(Kind::Volumes, Access::Denied)])));
    }

    #[test]
    fn names_kind_of_several_versions_once() {
        let limits = limits(&access(&[
            (Kind::TaintRules, Access::Denied),
            (Kind::OldTaintRules, Access::Denied),
        ]));
        let details = limits.details.iter();
        let named =
            details.filter(|detail| detail.starts_with("you may not list devicetaintrules: "));
        assert_eq!(named.count(), 1, "{limits:?}");
    }

    #[test]
    fn tells_faults_from_missing_permissions() {
        let access = access(&[
            (Kind::Nodes, Access::Failing("refused".to_owned())),
            (Kind::Quotas, Access::Denied),
        ]);
        assert_eq!(
            faults(&access),
            ["cannot read nodes: refused; trying again"]
        );
        assert!(!limits(&access).hidden.contains("nodes"));
    }

    #[tokio::test]
    async fn prepares_first_complete_model() {
        let live = Arc::new(Live::new("test".to_owned(), DecisionOptions::default()));
        live.set_access(Kind::Nodes, Access::Pending);
        let prepared = tokio::spawn(Arc::clone(&live).prepare());
        tokio::task::yield_now().await;
        assert_eq!(live.lock().document, None);
        live.set_access(Kind::Nodes, Access::Complete);
        prepared.await.unwrap();
        assert!(live.lock().document.is_some());
    }

    #[test]
    fn renders_each_generation_once() {
        let live = Live::new("test".to_owned(), DecisionOptions::default());
        let changes = live.changes();
        live.set_access(Kind::Nodes, Access::Pending);
        let generation = |document: &Bytes| -> (u64, bool) {
            let value: serde_json::Value = serde_json::from_slice(document).unwrap();
            (
                value["generation"].as_u64().unwrap(),
                value["isComplete"].as_bool().unwrap(),
            )
        };
        let first = live.document();
        assert_eq!(generation(&first), (2, false));
        assert_eq!(first.as_ptr(), live.document().as_ptr());
        live.set_access(Kind::Nodes, Access::Complete);
        live.set_access(Kind::Nodes, Access::Complete);
        assert_eq!(generation(&live.document()), (3, true));
        live.change(|snapshot| snapshot.pods.clear());
        assert_eq!(generation(&live.document()), (4, true));
        assert!(changes.has_changed().unwrap());
    }
}
