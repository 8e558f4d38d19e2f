//! Waits until a share has grown or shrunk.

use std::time::Duration;

use anyhow::bail;
use drava_api::condition::ConditionReason;
use drava_api::reason::Reason;
use drava_explanation::growth::{granted, is_allocated};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, Client, ResourceExt as _};
use tokio::time::Instant;

use super::share::{unsettled, withdrawal};
use crate::tenant;

/// Time between two reads of a claim.
const POLL: Duration = Duration::from_millis(250);

/// Time between two reads of the events of a claim: the controller tries it every second.
const POLL_EVENTS: Duration = Duration::from_secs(1);

/// Waits until the limits of the share include a companion. One that only replaces larger ones is deleted if it does not fit in time:
/// left alone, it would add to them later.
pub(super) async fn for_growth(
    client: &Client,
    claims: &Api<ResourceClaim>,
    companion: &ResourceClaim,
    replaces: bool,
    deadline: Instant,
) -> anyhow::Result<()> {
    let name = companion.name_any();
    let mut next_events = Instant::now() + POLL_EVENTS;
    loop {
        let found = claims.get(&name).await;
        let found =
            found.map_err(|error| tenant::refused(error, &format!("get resourceclaim {name}")))?;
        let Some(state) = unsettled(&found) else {
            return Ok(());
        };
        if let Some(refusal) = refusal(&found) {
            bail!("{refusal}");
        }
        let now = Instant::now();
        let is_late = now >= deadline;
        if is_late || now >= next_events {
            next_events = now + POLL_EVENTS;
            let events = events_of(client, &found).await;
            let newest = events.as_ref().ok().and_then(|events| newest(events));
            // An event from before the allocation says nothing.
            let invalid = newest.filter(|_| !is_allocated(&found)).and_then(invalid);
            if let Some(why) = invalid {
                delete(claims, &name, why).await?;
                bail!("the share cannot grow: {why}. Claim {name} was deleted again");
            }
            if is_late {
                let why = match &events {
                    _ if is_allocated(&found) => format!("claim {name} {state}"),
                    Ok(_) => newest.and_then(|event| event.message.clone()).unwrap_or_else(|| {
                        "the controller has not answered; shares grow with scheduling.mode=managed only"
                            .to_owned()
                    }),
                    Err(error) => {
                        format!("it is not allocated; {error}")
                    }
                };
                if replaces {
                    delete(claims, &name, &why).await?;
                    bail!(
                        "the share did not change in time: what it keeps must fit beside what it has for a moment, and {why}. Claim \
                         {name} was deleted again; --memory of the claim alone gives all back"
                    );
                }
                bail!(
                    "the share did not grow in time: {why}. Claim {name} waits on; withdraw it with {}",
                    withdrawal(&found)
                );
            }
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Deletes a companion that is to add to no share.
async fn delete(claims: &Api<ResourceClaim>, name: &str, why: &str) -> anyhow::Result<()> {
    let deleted = claims.delete(name, &DeleteParams::default()).await;
    let action = format!("delete resourceclaim {name}, which is to add to no share ({why})");
    deleted.map_err(|error| tenant::refused(error, &action))?;
    Ok(())
}

/// Returns the refusal of the node driver.
pub(super) fn refusal(companion: &ResourceClaim) -> Option<String> {
    let condition = granted(companion)?;
    (condition.reason == ConditionReason::Refused.as_str()).then(|| {
        format!(
            "the node driver refused claim {}: {}. The claim stays and holds its capacity; withdraw it with {}",
            companion.name_any(),
            condition.message,
            withdrawal(companion)
        )
    })
}

async fn events_of(client: &Client, claim: &ResourceClaim) -> anyhow::Result<Vec<Event>> {
    let namespace = claim.namespace().unwrap_or_default();
    let events: Api<Event> = Api::namespaced(client.clone(), &namespace);
    let of_claim = format!("involvedObject.uid={}", claim.uid().unwrap_or_default());
    let found = events.list(&ListParams::default().fields(&of_claim)).await;
    let action = format!("list events in namespace {namespace}");
    let found = found.map_err(|error| tenant::refused(error, &action))?;
    Ok(found.items)
}

/// Returns the event that was observed last.
pub(crate) fn newest(events: &[Event]) -> Option<&Event> {
    let observed = |event: &&Event| -> Option<Timestamp> {
        let series = event.series.as_ref();
        let last = series.and_then(|series| series.last_observed_time.as_ref());
        let times = [
            last.map(|time| time.0),
            event.last_timestamp.as_ref().map(|time| time.0),
            event.event_time.as_ref().map(|time| time.0),
        ];
        times.into_iter().flatten().max()
    };
    events.iter().max_by_key(observed)
}

/// Returns the message of an event that says that the claim never adds to the share.
pub(super) fn invalid(event: &Event) -> Option<&str> {
    let message = event.message.as_deref()?;
    let (code, _) = message.split_once(':')?;
    (code == Reason::InvalidCompanion.as_str()).then_some(message)
}

/// Waits until a share has given back what a companion added.
pub(super) async fn for_shrinking(
    claims: &Api<ResourceClaim>,
    name: &str,
    deadline: Instant,
) -> anyhow::Result<()> {
    loop {
        let found = claims.get_opt(name).await;
        let found =
            found.map_err(|error| tenant::refused(error, &format!("get resourceclaim {name}")))?;
        let Some(found) = found else {
            return Ok(());
        };
        if Instant::now() >= deadline {
            let message = granted(&found)
                .map_or_else(String::new, |condition| format!(": {}", condition.message));
            bail!(
                "the share did not give back claim {name} in time{message}. It does so as soon as it can"
            );
        }
        tokio::time::sleep(POLL).await;
    }
}
