//! Reads the [`ClusterState`] with the user's permissions.

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
    ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaimTemplate, ResourceSlice};
use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::fmt::rfc2822;
use kube::api::{ListParams, PostParams};
use kube::client::Body;
use kube::{Api, Client};

use drava_allocator::pool::PoolProblem;
use drava_api::error::describe;
use drava_api::node_profile::GpuNodeProfile;

use drava_explanation::snapshot::{self, ListError, list};

use super::state::{ClusterState, Permission, Version, Webhook};
use super::{access, admission};
use crate::kueue::Kueue;

/// Label of all objects of the chart.
const CHART_LABEL: &str = "app.kubernetes.io/name=drava";

/// Reads the cluster.
///
/// # Errors
/// If nodes, pods, slices, device classes, claims or the workloads of drava cannot be listed.
pub(crate) async fn fetch(client: &Client) -> anyhow::Result<ClusterState> {
    let ours = ListParams::default().labels(CHART_LABEL);
    let all = ListParams::default();
    let snapshot = snapshot::take(client).await?;
    let mut state = ClusterState {
        nodes: list::<Node>(client, &all).await?,
        excluded_pools: snapshot
            .cluster
            .excluded_pools()
            // The claim is a finding of its own.
            .filter(|(_, _, problem)| !matches!(problem, PoolProblem::ClaimUnreadable { .. }))
            .map(|(pool, _, problem)| format!("pool {pool} is excluded from allocation: {problem}"))
            .collect(),
        classes: list::<DeviceClass>(client, &all).await?,
        unreadable: snapshot.unreadable,
        claims: snapshot.claims,
        pods: snapshot.pods,
        slices: list::<ResourceSlice>(client, &all).await?,
        daemon_sets: list::<DaemonSet>(client, &ours).await?,
        deployments: list::<Deployment>(client, &ours).await?,
        ..ClusterState::default()
    };
    let mut unchecked = Vec::new();
    (state.server, state.now) = server(client, &mut unchecked).await;
    state.templates = optional(
        list::<ResourceClaimTemplate>(client, &all).await,
        &mut unchecked,
    );
    state.profiles = optional(list::<GpuNodeProfile>(client, &all).await, &mut unchecked);
    state.leases = optional(leases(client, &all).await, &mut unchecked);
    state.events = optional(list::<Event>(client, &all).await, &mut unchecked);
    state.policies = optional(
        list::<ValidatingAdmissionPolicy>(client, &ours).await,
        &mut unchecked,
    );
    state.bindings = optional(
        list::<ValidatingAdmissionPolicyBinding>(client, &ours).await,
        &mut unchecked,
    );
    state.endpoints = optional(list::<EndpointSlice>(client, &ours).await, &mut unchecked);
    let mutating = optional(
        list::<MutatingWebhookConfiguration>(client, &ours).await,
        &mut unchecked,
    );
    let validating = optional(
        list::<ValidatingWebhookConfiguration>(client, &ours).await,
        &mut unchecked,
    );
    state.webhooks = mutating
        .zip(validating)
        .map(|(mutating, validating)| webhooks(&mutating, &validating));
    state.kueue = kueue(client).await.unwrap_or_else(|error| {
        unchecked.push(error.to_string());
        Kueue::Unknown
    });
    for permission in access::required(&state) {
        match is_allowed(client, &permission).await {
            Ok(true) => {}
            Ok(false) => state.denied.push(permission),
            Err(error) => {
                unchecked.push(format!("permissions of drava: {}", describe(&error)));
                break;
            }
        }
    }
    state.unchecked = unchecked;
    Ok(state)
}

/// Reads the workloads of Kueue. Users who may not read them may see whether the API server serves them.
async fn kueue(client: &Client) -> anyhow::Result<Kueue> {
    let request = http::Request::get("/apis/kueue.x-k8s.io").body(Vec::new())?;
    match client.request::<serde_json::Value>(request).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Kueue::NotInstalled),
        _ => Kueue::fetch(client, None).await,
    }
}

/// Returns the objects, or notes why they cannot be read.
fn optional<T>(objects: Result<Vec<T>, ListError>, unchecked: &mut Vec<String>) -> Option<Vec<T>> {
    objects
        .map_err(|error| unchecked.push(describe(&error)))
        .ok()
}

/// Namespace of the leases of nodes.
const NODE_LEASES: &str = "kube-node-lease";

/// Lists the leases. Those of nodes have their managed fields, which lists of all objects leave out: the times of the API
/// server in them show the clocks of the nodes. Only kubelets write there.
async fn leases(client: &Client, all: &ListParams) -> Result<Vec<Lease>, ListError> {
    let mut leases = list::<Lease>(client, all).await?;
    let of_nodes = Api::<Lease>::namespaced(client.clone(), NODE_LEASES);
    if let Ok(of_nodes) = of_nodes.list(&ListParams::default()).await {
        leases.retain(|lease| lease.metadata.namespace.as_deref() != Some(NODE_LEASES));
        leases.extend(of_nodes.items);
    }
    Ok(leases)
}

/// Returns version and time of the API server.
async fn server(
    client: &Client,
    unchecked: &mut Vec<String>,
) -> (Option<Version>, Option<Timestamp>) {
    let mut note = |error: &dyn std::error::Error| {
        unchecked.push(format!("version of the API server: {}", describe(error)));
    };
    let request = match http::Request::get("/version").body(Body::empty()) {
        Ok(request) => request,
        Err(error) => {
            note(&error);
            return (None, None);
        }
    };
    let response = match client.send(request).await {
        Ok(response) => response,
        Err(error) => {
            note(&error);
            return (None, None);
        }
    };
    let date = response.headers().get(http::header::DATE);
    let now = date
        .and_then(|date| rfc2822::parse(date.to_str().ok()?).ok())
        .map(|date| date.timestamp());
    let version = match response.into_body().collect_bytes().await {
        Ok(body) => serde_json::from_slice::<serde_json::Value>(&body)
            .ok()
            .and_then(|version| Version::parse(version["gitVersion"].as_str()?)),
        Err(error) => {
            note(&error);
            None
        }
    };
    (version, now)
}

fn webhooks(
    mutating: &[MutatingWebhookConfiguration],
    validating: &[ValidatingWebhookConfiguration],
) -> Vec<Webhook> {
    let webhook =
        |kind: &str, configuration: Option<&str>, name: &str, client: &WebhookClientConfig| {
            let service = client.service.as_ref()?;
            Some(Webhook {
                configuration: format!("{kind} {}", configuration.unwrap_or_default()),
                name: name.to_owned(),
                service: (service.namespace.clone(), service.name.clone()),
                trusted_until: client
                    .ca_bundle
                    .as_ref()
                    .and_then(|bundle| admission::trusted_until(&bundle.0)),
            })
        };
    let mutating = mutating.iter().flat_map(|configuration| {
        let name = configuration.metadata.name.as_deref();
        let webhooks = configuration.webhooks.iter().flatten();
        webhooks.filter_map(move |hook| {
            webhook(
                "mutatingwebhookconfiguration",
                name,
                &hook.name,
                &hook.client_config,
            )
        })
    });
    let validating = validating.iter().flat_map(|configuration| {
        let name = configuration.metadata.name.as_deref();
        let webhooks = configuration.webhooks.iter().flatten();
        webhooks.filter_map(move |hook| {
            webhook(
                "validatingwebhookconfiguration",
                name,
                &hook.name,
                &hook.client_config,
            )
        })
    });
    mutating.chain(validating).collect()
}

/// Asks the API server whether a service account has a permission.
async fn is_allowed(client: &Client, permission: &Permission) -> Result<bool, kube::Error> {
    let (namespace, account) = &permission.account;
    let (resource, subresource) = match permission.resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
        None => (permission.resource, None),
    };
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(format!("system:serviceaccount:{namespace}:{account}")),
            groups: Some(vec![
                "system:serviceaccounts".to_owned(),
                format!("system:serviceaccounts:{namespace}"),
                "system:authenticated".to_owned(),
            ]),
            resource_attributes: Some(ResourceAttributes {
                verb: Some(permission.verb.to_owned()),
                group: Some(permission.group.to_owned()),
                resource: Some(resource.to_owned()),
                subresource,
                name: permission.name.map(str::to_owned),
                namespace: (!permission.namespace.is_empty()).then(|| permission.namespace.clone()),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let reviews = Api::<SubjectAccessReview>::all(client.clone());
    let answer = reviews.create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}
