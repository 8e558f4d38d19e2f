//! Follows the claims with a label in the namespaces that matter to this node: a watch of each namespace, and reviews of what the
//! claims mean.
//!
//! The API server hands each event of a claim to all watches of its namespace and to all watches of all namespaces. A watch of all
//! namespaces by each node would make every event of the cluster work for every node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::listed::Listed;
use drava_connection::Limits;
use futures::StreamExt as _;
use futures::future::poll_fn;
use futures::stream::BoxStream;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource as _};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::kubelet::claims::{ClaimService, blocking, cached_list};
use crate::node::claim::ClaimUid;
use crate::prepare::effects::Effects;
use crate::prepare::record::{Loaded, RecordError, RecordStore};

/// Longest time between two reviews: a claim can be prepared after it got its label.
const REVIEW: Duration = Duration::from_secs(2);

/// Time after which an interrupted watch is started again, and a failed list repeated.
const RETRY: Duration = Duration::from_secs(2);

/// Time between two lists of all namespaces, for claims with devices of this node of which the node has no record. The API server
/// answers them from memory.
const SWEEP: Duration = Duration::from_secs(600);

/// Time limit of such a list.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5);

/// Acts on claims with a label.
pub(super) trait Follower {
    /// Whether a claim matters that names devices of this node while no claim of its namespace is prepared here.
    const SWEEPS: bool;

    /// What is kept of a claim. A claim of which the same is kept as before has not changed.
    type Kept: PartialEq + Send;

    /// Returns what is kept of a claim with the label; `None` if it does not matter to this node.
    fn keep(&self, claim: Listed<ResourceClaim>) -> Option<Self::Kept>;

    /// A claim with the label has changed, or has it no more.
    fn changed(&mut self, uid: &ClaimUid);

    /// Reviews all claims. `found` is what is kept of those with the label, `None` while that is not known of a namespace. Returns when
    /// the next review is due; within [`REVIEW`] in any case.
    fn review(
        &mut self,
        found: Option<&Found<Self::Kept>>,
    ) -> impl Future<Output = Option<Instant>> + Send;
}

/// What is kept of the claims with the label.
pub(super) type Found<K> = BTreeMap<ClaimUid, K>;

type Events = BoxStream<'static, watcher::Result<Event<Listed<ResourceClaim>>>>;

/// The claims with the label in the namespaces that are watched.
pub(super) struct Labelled<K> {
    found: Found<K>,
    namespaces: BTreeMap<String, Namespace<K>>,
}

struct Namespace<K> {
    events: Events,
    /// Claims of a list that is not complete.
    listed: Found<K>,
    /// Those of its claims that are found; `None` before one list was complete.
    own: Option<BTreeSet<ClaimUid>>,
}

impl<K: PartialEq> Labelled<K> {
    pub(super) const fn new() -> Self {
        Self {
            found: BTreeMap::new(),
            namespaces: BTreeMap::new(),
        }
    }

    /// Returns what is kept of all claims, once it is known for all namespaces.
    pub(super) fn found(&self) -> Option<&Found<K>> {
        let are_listed = self.namespaces.values().all(|one| one.own.is_some());
        are_listed.then_some(&self.found)
    }

    /// Watches these namespaces, and further ones of which something is kept.
    fn watch(&mut self, wanted: &BTreeSet<String>, start: impl Fn(&str) -> Events) {
        self.namespaces.retain(|name, namespace| {
            let own = namespace.own.as_ref();
            wanted.contains(name) || own.is_some_and(|own| !own.is_empty())
        });
        for name in wanted {
            if !self.namespaces.contains_key(name) {
                self.add(name.clone(), start(name));
            }
        }
    }

    /// Watches a namespace without events.
    #[cfg(test)]
    pub(super) fn of_namespace(name: &str) -> Self {
        let mut labelled = Self::new();
        labelled.add(name.to_owned(), futures::stream::pending().boxed());
        labelled
    }

    fn add(&mut self, name: String, events: Events) {
        let namespace = Namespace {
            events,
            listed: BTreeMap::new(),
            own: None,
        };
        self.namespaces.insert(name, namespace);
    }

    /// Returns the next event of a watch. Never without watches.
    async fn next(&mut self) -> (String, watcher::Result<Event<Listed<ResourceClaim>>>) {
        poll_fn(|context| {
            for (name, namespace) in &mut self.namespaces {
                // A watch starts itself again, so it has no end.
                if let Poll::Ready(Some(event)) = namespace.events.poll_next_unpin(context) {
                    return Poll::Ready((name.clone(), event));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Applies an event of a namespace. Returns whether what is kept has changed.
    pub(super) fn apply(
        &mut self,
        name: &str,
        event: Event<Listed<ResourceClaim>>,
        follower: &mut impl Follower<Kept = K>,
    ) -> bool {
        let Some(namespace) = self.namespaces.get_mut(name) else {
            return false;
        };
        match event {
            Event::Init => namespace.listed.clear(),
            Event::InitApply(claim) => {
                if let Some(uid) = ClaimUid::of(claim.meta())
                    && let Some(kept) = follower.keep(claim)
                {
                    namespace.listed.insert(uid, kept);
                }
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut namespace.listed);
                let before = namespace.own.replace(listed.keys().cloned().collect());
                for uid in before.iter().flatten() {
                    self.found.remove(uid);
                }
                self.found.extend(listed);
                return true;
            }
            Event::Apply(claim) => {
                let Some(uid) = ClaimUid::of(claim.meta()) else {
                    return false;
                };
                let after = follower.keep(claim);
                let is_changed = self.found.get(&uid) != after.as_ref();
                let own = namespace.own.get_or_insert_default();
                match after {
                    Some(kept) => {
                        own.insert(uid.clone());
                        self.found.insert(uid.clone(), kept);
                    }
                    None => {
                        own.remove(&uid);
                        self.found.remove(&uid);
                    }
                }
                follower.changed(&uid);
                return is_changed;
            }
            Event::Delete(claim) => {
                let Some(uid) = ClaimUid::of(claim.meta()) else {
                    return false;
                };
                namespace.own.get_or_insert_default().remove(&uid);
                follower.changed(&uid);
                return self.found.remove(&uid).is_some();
            }
        }
        false
    }
}

/// Namespaces of the claims of this node, by their records.
#[derive(Default)]
struct Recorded(BTreeMap<ClaimUid, String>);

impl Recorded {
    /// Reads the records that are new. One that cannot be read is read again the next time.
    fn update(&mut self, store: &RecordStore) -> Result<BTreeSet<String>, RecordError> {
        let recorded: BTreeSet<ClaimUid> = store.list()?.recorded.into_iter().collect();
        self.0.retain(|uid, _| recorded.contains(uid));
        for uid in recorded {
            if !self.0.contains_key(&uid)
                && let Loaded::Present(record) = store.load(&uid)?
            {
                self.0.insert(uid, record.claim.namespace);
            }
        }
        Ok(self.0.values().cloned().collect())
    }
}

/// Follows the claims that `selector` selects by their labels until `stop`.
pub(super) async fn follow<E: Effects, F: Follower>(
    claims: &Arc<ClaimService<E>>,
    selector: &str,
    follower: F,
    stop: CancellationToken,
) {
    let following = Following {
        client: claims.client.clone(),
        selector,
        follower,
        labelled: Labelled::new(),
        recorded: Recorded::default(),
        swept: BTreeSet::new(),
        is_swept: !F::SWEEPS,
        sweep_at: Instant::now(),
        failure: None,
    };
    stop.run_until_cancelled(following.run(claims)).await;
}

struct Following<'a, F: Follower> {
    client: Client,
    selector: &'a str,
    follower: F,
    labelled: Labelled<F::Kept>,
    recorded: Recorded,
    /// Namespaces of the claims that the last list of all namespaces found.
    swept: BTreeSet<String>,
    /// Whether one such list was complete, if any is made.
    is_swept: bool,
    sweep_at: Instant,
    /// Last error of a request or a file.
    failure: Option<String>,
}

impl<F: Follower> Following<'_, F> {
    async fn run<E: Effects>(mut self, claims: &Arc<ClaimService<E>>) {
        let (mut scan_at, mut review_at) = (Instant::now(), Instant::now());
        loop {
            let is_due = tokio::select! {
                (name, event) = self.labelled.next() => match event {
                    Ok(event) => self.labelled.apply(&name, event, &mut self.follower),
                    Err(error) => {
                        self.note("cannot watch claims", &describe(&error));
                        false
                    }
                },
                () = tokio::time::sleep_until(review_at) => true,
            };
            if !is_due {
                continue;
            }
            if scan_at <= Instant::now() {
                self.scan(claims).await;
                scan_at = Instant::now() + REVIEW;
            }
            let found = self.labelled.found().filter(|_| self.is_swept);
            let due = self.follower.review(found).await;
            let latest = Instant::now() + REVIEW;
            review_at = due.map_or(latest, |due| due.min(latest));
        }
    }

    /// Watches the namespaces that matter now.
    async fn scan<E: Effects>(&mut self, claims: &Arc<ClaimService<E>>) {
        if F::SWEEPS && self.sweep_at <= Instant::now() {
            self.sweep().await;
        }
        let (applier, mut recorded) = (
            Arc::clone(&claims.applier),
            std::mem::take(&mut self.recorded),
        );
        let read = blocking(move || {
            let namespaces = recorded.update(applier.store());
            (recorded, namespaces)
        });
        let namespaces = match read.await {
            Ok((recorded, namespaces)) => {
                self.recorded = recorded;
                namespaces.map_err(|error| describe(&error))
            }
            Err(error) => Err(describe(&error)),
        };
        match namespaces {
            Ok(mut wanted) => {
                wanted.extend(self.swept.iter().cloned());
                let (client, selector) = (&self.client, self.selector);
                self.labelled
                    .watch(&wanted, |name| events(client, name, selector));
            }
            Err(error) => self.note("cannot read the records of claims", &error),
        }
    }

    /// Lists the claims of all namespaces for those that matter to this node.
    async fn sweep(&mut self) {
        let api: Api<Listed<ResourceClaim>> = Api::all(self.client.clone());
        let parameters = cached_list().labels(self.selector);
        let listed = tokio::time::timeout(SWEEP_TIMEOUT, api.list(&parameters)).await;
        let listed = listed.map_err(|_| format!("no answer within {} s", SWEEP_TIMEOUT.as_secs()));
        match listed.and_then(|list| list.map_err(|error| describe(&error))) {
            Ok(list) => {
                let namespace = |claim: Listed<ResourceClaim>| {
                    let name = claim.meta().namespace.clone()?;
                    self.follower.keep(claim).map(|_| name)
                };
                self.swept = list.items.into_iter().filter_map(namespace).collect();
                self.is_swept = true;
                self.sweep_at = Instant::now() + SWEEP;
            }
            Err(error) => {
                self.note("cannot list claims", &error);
                self.sweep_at = Instant::now() + RETRY;
            }
        }
    }

    /// Logs a failure unless the last one was the same.
    fn note(&mut self, what: &str, error: &str) {
        if self.failure.as_deref() != Some(error) {
            tracing::warn!(error, selector = self.selector, "{what}");
            self.failure = Some(error.to_owned());
        }
    }
}

/// Watches the claims with a label in a namespace.
fn events(client: &Client, namespace: &str, selector: &str) -> Events {
    let api: Api<Listed<ResourceClaim>> = Api::namespaced(client.clone(), namespace);
    let config = Limits::LONG_WATCHES.watch().labels(selector);
    let rest = |event: watcher::Result<_>| async {
        if event.is_err() {
            tokio::time::sleep(RETRY).await;
        }
        event
    };
    watcher(api, config).then(rest).boxed()
}
