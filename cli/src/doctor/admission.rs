//! Admission policies and webhooks.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use x509_parser::pem::Pem;

use super::state::{ClusterState, Webhook};
use super::{Fault, Finding};

/// Policies without which drava is unsafe. Other policies of the chart are optional.
const DRIVER_POLICY: &str = "drava-driver-own-node";
const CONTROLLER_POLICY: &str = "drava-controller-lease";

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    let mut findings = policies(state);
    findings.extend(webhooks(state));
    findings
}

fn policies(state: &ClusterState) -> Vec<Finding> {
    let (Some(policies), Some(bindings)) = (&state.policies, &state.bindings) else {
        return Vec::new();
    };
    let policies: BTreeSet<&str> = policies
        .iter()
        .filter_map(|policy| policy.metadata.name.as_deref())
        .collect();
    let bound: BTreeSet<&str> = bindings
        .iter()
        .map(|binding| binding.spec.policy_name.as_str())
        .collect();
    let mut expected: BTreeSet<&str> = policies.union(&bound).copied().collect();
    expected.insert(DRIVER_POLICY);
    if state.is_managed() {
        expected.insert(CONTROLLER_POLICY);
    }
    let finding = |policy: &str, problem: &str| Finding {
        fault: Fault::PolicyMissing,
        object: format!("validatingadmissionpolicy {policy}"),
        problem: problem.to_owned(),
        fix: "run helm upgrade with the drava chart".to_owned(),
    };
    expected
        .into_iter()
        .filter_map(
            |policy| match (policies.contains(policy), bound.contains(policy)) {
                (true, true) => None,
                (true, false) => Some(finding(policy, "no binding puts the policy into force")),
                (false, _) => Some(finding(policy, "the policy does not exist")),
            },
        )
        .collect()
}

/// Kinds of the configurations of the webhook, with what is missing without each.
const CONFIGURATIONS: [(&str, &str); 2] = [
    (
        "mutatingwebhookconfiguration",
        "new pods are neither gated nor translated",
    ),
    (
        "validatingwebhookconfiguration",
        "configs of claims are not checked when they are written",
    ),
];

fn webhooks(state: &ClusterState) -> Vec<Finding> {
    let (Some(webhooks), Some(endpoints)) = (&state.webhooks, &state.endpoints) else {
        return Vec::new();
    };
    let has_endpoint = |namespace: &str, service: &str| {
        endpoints.iter().any(|slice| {
            let labels = slice.metadata.labels.as_ref();
            let of_service = labels.and_then(|labels| labels.get("kubernetes.io/service-name"));
            slice.metadata.namespace.as_deref() == Some(namespace)
                && of_service.map(String::as_str) == Some(service)
                && slice.endpoints.iter().flatten().any(|endpoint| {
                    endpoint
                        .conditions
                        .as_ref()
                        .and_then(|conditions| conditions.ready)
                        // Unknown is to be taken as ready (EndpointConditions).
                        .unwrap_or(true)
                })
        })
    };
    let is_there = |kind: &str| {
        let mut configurations = webhooks.iter().map(|webhook| &webhook.configuration);
        configurations.any(|configuration| configuration.starts_with(kind))
    };
    let listens = state.has_controller_flag("--webhook-listen");
    let missing = CONFIGURATIONS
        .iter()
        .filter(|(kind, _)| listens && !is_there(kind));
    let missing = missing.map(|(kind, effect)| Finding {
        fault: Fault::WebhookDown,
        object: format!("{kind} drava-webhook"),
        problem: format!("it does not exist, so that {effect}"),
        fix: super::installation::UPGRADE.to_owned(),
    });
    let down = webhooks
        .iter()
        .filter(|webhook| !has_endpoint(&webhook.service.0, &webhook.service.1))
        .map(|webhook| {
            let (namespace, service) = &webhook.service;
            Finding {
                fault: Fault::WebhookDown,
                object: webhook.configuration.clone(),
                problem: format!(
                    "webhook {} is down: service {namespace}/{service} has no ready endpoint",
                    webhook.name
                ),
                fix: format!("see kubectl get pods -n {namespace}"),
            }
        });
    let untrusted = webhooks
        .iter()
        .filter_map(|webhook| untrusted(webhook, state.now, state.namespace()));
    missing.chain(down).chain(untrusted).collect()
}

fn untrusted(webhook: &Webhook, now: Option<Timestamp>, namespace: &str) -> Option<Finding> {
    let problem = match (webhook.trusted_until, now) {
        (None, _) => "has no trusted certificate".to_owned(),
        (Some(until), Some(now)) if until <= now => {
            format!("trusts certificates that expired at {until}")
        }
        (Some(_), _) => return None,
    };
    Some(Finding {
        fault: Fault::WebhookUntrusted,
        object: webhook.configuration.clone(),
        problem: format!(
            "webhook {} {problem}, so that the API server cannot call it",
            webhook.name
        ),
        fix: format!("see kubectl logs -n {namespace} deployment/drava-controller"),
    })
}

/// Returns the end of the validity of the newest certificate in a PEM bundle.
pub(super) fn trusted_until(bundle: &[u8]) -> Option<Timestamp> {
    Pem::iter_from_buffer(bundle)
        .filter_map(|pem| {
            let pem = pem.ok()?;
            let end = pem.parse_x509().ok()?.validity().not_after.timestamp();
            Timestamp::from_second(end).ok()
        })
        .max()
}
