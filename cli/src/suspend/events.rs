//! What the controller publishes about the suspension of a share: at its pod, or at its claim if no pod alone has it.

use std::collections::BTreeSet;

use drava_api::event::EventReason;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};

use crate::{resize, tenant};

/// UID and version of an event.
///
/// Times do not tell new events from old ones: they have a resolution of a second, and the clock of the controller is not that
/// of the API server.
type Version = (Option<String>, Option<String>);

/// Events of a pod and its claim.
pub(super) struct Events {
    api: Api<Event>,
    namespace: String,
    /// UIDs of the pod and of the claim.
    objects: [String; 2],
    /// Events from before the request, or why they could not be read: then new ones cannot be told from them.
    old: Result<BTreeSet<Version>, String>,
}

/// The last event about the suspension.
#[derive(Debug, PartialEq)]
pub(super) enum Published {
    /// Published after the request.
    New(Event),
    /// Published before the request, and none after it.
    Old(Event),
    Nothing,
    /// The events cannot be read; why.
    Unreadable(String),
}

impl Events {
    /// Reads the events from before the request.
    pub(super) async fn before_request(client: &Client, pod: &Pod, claim: &ResourceClaim) -> Self {
        let namespace = claim.namespace().unwrap_or_default();
        let mut events = Self {
            api: Api::namespaced(client.clone(), &namespace),
            namespace,
            objects: [pod.uid(), claim.uid()].map(Option::unwrap_or_default),
            old: Ok(BTreeSet::new()),
        };
        let old = events.list().await;
        events.old = old.map(|old| old.iter().map(version).collect());
        events
    }

    /// Returns the last event.
    pub(super) async fn last(&self) -> Published {
        let old = match &self.old {
            Ok(old) => old,
            Err(why) => return Published::Unreadable(why.clone()),
        };
        match self.list().await {
            Ok(events) => last(events, old),
            Err(why) => Published::Unreadable(why),
        }
    }

    async fn list(&self) -> Result<Vec<Event>, String> {
        let mut found = Vec::new();
        for uid in &self.objects {
            let of_object = format!("involvedObject.uid={uid}");
            let of_object = ListParams::default().fields(&of_object);
            let action = format!("list events in namespace {}", self.namespace);
            let listed = self.api.list(&of_object).await;
            let listed = listed.map_err(|error| tenant::refused(error, &action).to_string())?;
            found.extend(listed.items);
        }
        Ok(found)
    }
}

impl Published {
    /// Returns why the controller does not suspend the share, if it has said so after the request.
    pub(super) fn refusal(&self) -> Option<&str> {
        match self {
            Self::New(event) if has_reason(event, EventReason::SuspensionRefused) => {
                event.message.as_deref()
            }
            Self::New(_) | Self::Old(_) | Self::Nothing | Self::Unreadable(_) => None,
        }
    }

    /// Returns what the controller says, or that it says nothing. It repeats an equal event after half an hour only, so an old
    /// one can still hold; its time is given with it.
    pub(super) fn text(&self) -> String {
        let message = |event: &Event| event.message.clone().unwrap_or_default();
        match self {
            Self::New(event) => message(event),
            Self::Old(event) => {
                let time = event.last_timestamp.as_ref();
                let time = time.map_or_else(String::new, |time| format!(", of {},", time.0));
                format!(
                    "the controller has published no answer since the request; its last event{time} was: {}",
                    message(event)
                )
            }
            Self::Nothing => {
                "the controller has not answered; shares are suspended with scheduling.mode=managed only"
                    .to_owned()
            }
            Self::Unreadable(why) => why.clone(),
        }
    }
}

/// Returns the last event about a suspension, of those after the request if there are any.
fn last(events: Vec<Event>, old: &BTreeSet<Version>) -> Published {
    let reasons = [
        EventReason::ShareSuspended,
        EventReason::ShareResumed,
        EventReason::SuspensionRefused,
    ];
    let events = events.into_iter();
    let own = events.filter(|event| reasons.iter().any(|reason| has_reason(event, *reason)));
    let (before, after): (Vec<_>, Vec<_>) = own.partition(|event| old.contains(&version(event)));
    let newest = |events: &[Event]| resize::newest_event(events).cloned();
    match (newest(&after), newest(&before)) {
        (Some(event), _) => Published::New(event),
        (None, Some(event)) => Published::Old(event),
        (None, None) => Published::Nothing,
    }
}

fn has_reason(event: &Event, reason: EventReason) -> bool {
    event.reason.as_deref() == Some(reason.as_str())
}

fn version(event: &Event) -> Version {
    (event.uid(), event.resource_version())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(uid: &str, reason: &str, second: u32) -> Event {
        serde_json::from_value(json!({
            "metadata": {"uid": uid, "resourceVersion": "1"},
            "involvedObject": {},
            "reason": reason,
            "message": uid,
            "lastTimestamp": format!("2026-01-01T00:00:{second:02}Z"),
        }))
        .unwrap()
    }

    /// An event of the second of the request is new, and so is one of a controller whose clock is late.
    #[test]
    fn tells_new_events_from_old_ones_without_a_clock() {
        let old = event("old", "SuspensionRefused", 30);
        let known = BTreeSet::from([version(&old)]);
        let other = event("other", "Scheduled", 40);
        let of = |new: &[Event]| {
            let new = new.iter().cloned();
            last(new.chain([old.clone(), other.clone()]).collect(), &known)
        };
        assert_eq!(of(&[]), Published::Old(old.clone()));
        assert_eq!(of(&[]).refusal(), None);
        for second in [30, 20] {
            let refused = event("new", "SuspensionRefused", second);
            assert_eq!(of(std::slice::from_ref(&refused)).refusal(), Some("new"));
            let later = event("later", "ShareSuspended", second + 1);
            let found = of(&[refused, later.clone()]);
            assert_eq!(
                (found.refusal(), found.text().as_str()),
                (None, "later"),
                "the newest decides"
            );
        }
        let mut again = old.clone();
        again.metadata.resource_version = Some("2".to_owned());
        assert_eq!(of(&[again]).refusal(), Some("old"), "it was repeated");
        assert_eq!(last(vec![other], &known), Published::Nothing);
    }

    #[test]
    fn dates_old_event() {
        assert_eq!(
            Published::Old(event("why", "ShareResumed", 5)).text(),
            "the controller has published no answer since the request; its last event, of 2026-01-01T00:00:05Z, was: why"
        );
    }
}
