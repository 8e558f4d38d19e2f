//! Follows the claims with a label, of all nodes: a watch with its events, and reviews of what they mean for this node.

use std::time::Duration;

use drava_api::error::describe;
use drava_api::listed::Listed;
use drava_connection::Limits;
use futures::StreamExt as _;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Longest time between two reviews: a claim can be prepared after it got its label.
const REVIEW: Duration = Duration::from_secs(2);

/// Time after which an interrupted watch is started again.
const RETRY: Duration = Duration::from_secs(2);

/// Acts on claims with a label.
pub(super) trait Follower {
    /// Applies an event of the watch. Returns whether a review is due.
    fn apply(&mut self, event: watcher::Event<Listed<ResourceClaim>>) -> bool;

    /// Reviews all claims. Returns when the next review is due; within [`REVIEW`] in any case.
    fn review(&mut self) -> impl Future<Output = Option<Instant>> + Send;
}

/// Follows the claims that `selector` selects by their labels until `stop`.
pub(super) async fn follow(
    client: Client,
    selector: &str,
    mut follower: impl Follower,
    stop: CancellationToken,
) {
    let api: Api<Listed<ResourceClaim>> = Api::all(client);
    let config = Limits::LONG_WATCHES.watch().labels(selector);
    let mut events = std::pin::pin!(watcher(api, config));
    let (mut watch_from, mut review_at) = (Instant::now(), Instant::now());
    loop {
        let next = async {
            tokio::time::sleep_until(watch_from).await;
            events.next().await
        };
        let is_changed = tokio::select! {
            () = stop.cancelled() => return,
            event = next => match event {
                Some(Ok(event)) => follower.apply(event),
                Some(Err(error)) => {
                    tracing::warn!(error = describe(&error), selector, "cannot watch claims");
                    watch_from = Instant::now() + RETRY;
                    false
                }
                None => return,
            },
            () = tokio::time::sleep_until(review_at) => true,
        };
        if is_changed {
            let due = tokio::select! {
                () = stop.cancelled() => return,
                due = follower.review() => due,
            };
            let latest = Instant::now() + REVIEW;
            review_at = due.map_or(latest, |due| due.min(latest));
        }
    }
}
