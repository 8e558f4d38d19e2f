//! Claim templates of translated pods: the webhook creates them with the pods. The leader creates those that are missing, and
//! deletes those that no pod references.
//!
//! [`TemplatePlan`] decides; [`maintain`] sends the requests. Both follow from the observed pods and templates alone, so a
//! new leader continues.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_allocator::object::ObjectKey;
use drava_api::error::describe;
use drava_api::listed::Listed;
use drava_api::names;
use drava_connection::Limits;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{
    ResourceClaimSpec, ResourceClaimTemplate, ResourceClaimTemplateSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, Resource};
use tokio::time::Instant;

use super::accept;
use crate::watch::objects::{Objects, readable};
use crate::write::lease::{Term, WRITE_TIMEOUT};

/// Time for which an unreferenced template stays, for the next pod of its workload.
const RETENTION: Duration = Duration::from_secs(600);
/// Time for which the creation of a pod waits for that of its template.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between two passes without a change, and after a failed request.
const PERIOD: Duration = Duration::from_secs(5);

/// A request to send.
#[derive(Debug, PartialEq)]
enum TemplateAction {
    Create(ObjectKey, Box<ResourceClaimSpec>),
    Delete { key: ObjectKey, uid: String },
}

/// What the pods need, and what exists.
#[derive(Debug, Default)]
struct TemplatePlan {
    /// Template of each translated pod.
    pods: Objects<(String, ResourceClaimSpec)>,
    /// UIDs of the templates.
    templates: Objects<String>,
    /// When a template was found unreferenced.
    unreferenced: BTreeMap<ObjectKey, Instant>,
}

impl TemplatePlan {
    fn pod(&mut self, event: watcher::Event<Pod>) {
        self.pods.apply(event, |pod| {
            if drava_allocator::cluster::is_finished(&pod) {
                return None;
            }
            accept(&pod).unwrap_or_else(|error| {
                tracing::warn!(
                    error = describe(&error),
                    pod = pod.metadata.name,
                    namespace = pod.metadata.namespace,
                    "cannot create the claim template of a translated pod"
                );
                None
            })
        });
    }

    fn template(&mut self, event: watcher::Event<ResourceClaimTemplate>) {
        self.templates
            .apply(event, |template| template.metadata.uid);
    }

    /// Returns the requests to send now.
    fn actions(&mut self, now: Instant) -> Vec<TemplateAction> {
        if !self.pods.is_complete() || !self.templates.is_complete() {
            return Vec::new();
        }
        let mut referenced = BTreeSet::new();
        let mut actions = Vec::new();
        for ((namespace, _), (name, claim)) in self.pods.iter() {
            let key = (namespace.clone(), name.clone());
            if self.templates.get(namespace, name).is_none() && !referenced.contains(&key) {
                actions.push(TemplateAction::Create(key.clone(), Box::new(claim.clone())));
            }
            referenced.insert(key);
        }
        self.unreferenced.retain(|key, _| {
            self.templates.get(&key.0, &key.1).is_some() && !referenced.contains(key)
        });
        for (key, uid) in self.templates.iter() {
            if referenced.contains(key) {
                continue;
            }
            let since = *self.unreferenced.entry(key.clone()).or_insert(now);
            if now.duration_since(since) >= RETENTION {
                actions.push(TemplateAction::Delete {
                    key: key.clone(),
                    uid: uid.clone(),
                });
            }
        }
        actions
    }
}

/// Creates the template of a translated pod, unless it exists. Without an answer in time the leader creates it later.
pub(crate) async fn create(client: &Client, key: &ObjectKey, claim: &ResourceClaimSpec) {
    let api = Api::<ResourceClaimTemplate>::namespaced(client.clone(), &key.0);
    let (parameters, template) = (PostParams::default(), template(key, claim));
    let request = api.create(&parameters, &template);
    match tokio::time::timeout(ADMISSION_TIMEOUT, request).await {
        Ok(Ok(_)) => {}
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => {}
        Ok(Err(error)) => log(key, &describe(&error)),
        Err(_) => log(key, "request timed out"),
    }
}

/// Creates and deletes templates during the term. `watching` is the client of the watches.
pub async fn maintain(client: Client, watching: Client, term: &Term) {
    let config = Limits::SHORT_WATCHES
        .watch()
        .labels(names::TRANSLATED_LABEL);
    let pods = Api::<Listed<Pod>>::all(watching.clone());
    let mut pods = watcher(pods, config.clone()).default_backoff().boxed();
    let templates = Api::<Listed<ResourceClaimTemplate>>::all(watching);
    let mut templates = watcher(templates, config).default_backoff().boxed();
    let mut plan = TemplatePlan::default();
    while term.is_valid() {
        tokio::select! {
            Some(event) = pods.next() => observe(event, |event| plan.pod(event)),
            Some(event) = templates.next() => observe(event, |event| plan.template(event)),
            () = tokio::time::sleep(PERIOD) => {}
            () = term.ended() => return,
        }
        while let Some(Some(event)) = pods.next().now_or_never() {
            observe(event, |event| plan.pod(event));
        }
        while let Some(Some(event)) = templates.next().now_or_never() {
            observe(event, |event| plan.template(event));
        }
        for action in plan.actions(Instant::now()) {
            if !term.is_valid() {
                return;
            }
            send(&client, &action, &mut plan).await;
        }
    }
}

fn observe<K: Resource<DynamicType = ()> + Default>(
    event: Result<watcher::Event<Listed<K>>, watcher::Error>,
    apply: impl FnMut(watcher::Event<K>),
) {
    match event {
        Ok(event) => readable(event).into_iter().for_each(apply),
        Err(error) => tracing::warn!(
            error = describe(&error),
            "watch of translated pods failed; restarting it"
        ),
    }
}

/// Sends a request; a created template counts before the watch reports it.
async fn send(client: &Client, action: &TemplateAction, plan: &mut TemplatePlan) {
    let api = |key: &ObjectKey| Api::<ResourceClaimTemplate>::namespaced(client.clone(), &key.0);
    match action {
        TemplateAction::Create(key, claim) => {
            let template = template(key, claim);
            let (api, parameters) = (api(key), PostParams::default());
            let request = api.create(&parameters, &template);
            match tokio::time::timeout(WRITE_TIMEOUT, request).await {
                Ok(Ok(created)) => plan.template(watcher::Event::Apply(created)),
                // Created by a user or by the previous leader; the pods use it.
                Ok(Err(kube::Error::Api(status))) if status.code == 409 => {}
                Ok(Err(error)) => log(key, &describe(&error)),
                Err(_) => log(key, "request timed out"),
            }
        }
        TemplateAction::Delete { key, uid } => {
            let parameters = DeleteParams {
                preconditions: Some(Preconditions {
                    uid: Some(uid.clone()),
                    resource_version: None,
                }),
                ..DeleteParams::default()
            };
            let api = api(key);
            let request = api.delete(&key.1, &parameters);
            match tokio::time::timeout(WRITE_TIMEOUT, request).await {
                Ok(Ok(_)) => {}
                Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {}
                Ok(Err(error)) => log(key, &describe(&error)),
                Err(_) => log(key, "request timed out"),
            }
        }
    }
}

fn log((namespace, name): &ObjectKey, error: &str) {
    tracing::warn!(
        error,
        namespace,
        template = name,
        "cannot create or delete a claim template; trying again"
    );
}

fn template((namespace, name): &ObjectKey, claim: &ResourceClaimSpec) -> ResourceClaimTemplate {
    ResourceClaimTemplate {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            namespace: Some(namespace.clone()),
            labels: Some([(names::TRANSLATED_LABEL.to_owned(), "true".to_owned())].into()),
            ..ObjectMeta::default()
        },
        spec: Some(ResourceClaimTemplateSpec {
            metadata: None,
            spec: Some(claim.clone()),
        }),
    }
}

#[cfg(test)]
mod tests;
