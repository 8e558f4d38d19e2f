//! Posts notices as core/v1 Events, which `kubectl describe` shows. Best effort: an event that cannot be posted is
//! logged, and never holds anything up.

use drava_api::error::describe;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::mpsc;

use crate::notice::Notice;

/// Notices that may wait for the API server.
const QUEUE: usize = 4096;
/// Longest message that the API server takes.
const MAX_MESSAGE_BYTES: usize = 1024;
/// Longest part of the object's name in the event's name.
const MAX_NAME_BYTES: usize = 200;

/// Where notices are handed in.
#[derive(Debug, Clone)]
pub struct Poster(mpsc::Sender<Notice>);

impl Poster {
    /// Starts posting; ends when the last clone of the poster is gone.
    #[must_use]
    pub fn start(client: Client) -> Self {
        let (sender, mut notices) = mpsc::channel::<Notice>(QUEUE);
        tokio::spawn(async move {
            while let Some(notice) = notices.recv().await {
                post(&client, notice).await;
            }
        });
        Self(sender)
    }

    /// Hands in a notice.
    pub fn post(&self, notice: Notice) {
        if let Err(error) = self.0.try_send(notice) {
            tracing::warn!(%error, "too many events wait to be posted; one is left out");
        }
    }
}

async fn post(client: &Client, notice: Notice) {
    let namespace = notice
        .regarding
        .namespace
        .clone()
        .unwrap_or_else(|| "default".to_owned());
    let object = notice.regarding.name.clone().unwrap_or_default();
    let event = event(notice, &namespace, Timestamp::now());
    let api: Api<Event> = Api::namespaced(client.clone(), &namespace);
    if let Err(error) = api.create(&PostParams::default(), &event).await {
        tracing::warn!(
            error = describe(&error),
            namespace,
            object,
            reason = event.reason,
            "cannot post an event"
        );
    }
}

fn event(notice: Notice, namespace: &str, now: Timestamp) -> Event {
    let object = notice.regarding.name.as_deref().unwrap_or_default();
    let time = Time(now);
    let component = notice.reason.component().as_str().to_owned();
    Event {
        metadata: ObjectMeta {
            name: Some(format!(
                "{}.{:x}",
                cut(object, MAX_NAME_BYTES),
                now.as_nanosecond()
            )),
            namespace: Some(namespace.to_owned()),
            ..ObjectMeta::default()
        },
        type_: Some(notice.reason.event_type().as_str().to_owned()),
        reason: Some(notice.reason.as_str().to_owned()),
        message: Some(cut(&notice.message, MAX_MESSAGE_BYTES).to_owned()),
        involved_object: notice.regarding,
        source: Some(EventSource {
            component: Some(component.clone()),
            host: None,
        }),
        reporting_component: Some(component),
        first_timestamp: Some(time.clone()),
        last_timestamp: Some(time),
        count: Some(1),
        ..Event::default()
    }
}

/// The first `limit` bytes, at a character's border.
fn cut(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cutting_respects_characters() {
        assert_eq!(cut("abc", 2), "ab");
        assert_eq!(cut("aé", 2), "a");
        assert_eq!(cut("a", 2), "a");
    }
}
