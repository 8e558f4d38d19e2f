//! Permissions of the service accounts.

use drava_api::names;

use super::installation::CONFLICTS;
use super::state::{ClusterState, Permission};
use super::{Fault, Finding};

/// Flags of the controller that come with rules of the chart's roles.
const EVICTION: &str = "--preemption=true";
const CERTIFICATE: &str = "--webhook-certificate-lifetime=";
const COMPATIBILITY: &str = "--compatibility=";
const RECOMMENDATIONS: &str = "--recommendations=true";

/// Name of the Secret and of the configurations of the webhook.
const WEBHOOK_NAME: &str = "drava-webhook";

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    state.denied.iter().map(finding).collect()
}

fn finding(permission: &Permission) -> Finding {
    let Permission {
        account: (namespace, account),
        verb,
        group,
        resource,
        name,
        namespace: scope,
    } = permission;
    let group = if group.is_empty() {
        ""
    } else {
        &format!(".{group}")
    };
    let name = name.map_or_else(String::new, |name| format!(" {name}"));
    let scope = if scope.is_empty() {
        String::new()
    } else {
        format!(" in namespace {scope}")
    };
    Finding {
        fault: Fault::PermissionMissing,
        object: format!("serviceaccount {namespace}/{account}"),
        problem: format!("may not {verb} {resource}{group}{name}{scope}"),
        fix: format!(
            "run helm upgrade with the drava chart, which restores its ClusterRoles and bindings; {CONFLICTS}"
        ),
    }
}

/// Returns the permissions that the components need, one for each rule of the chart's roles.
pub(super) fn required(state: &ClusterState) -> Vec<Permission> {
    const DRA: &str = "resource.k8s.io";
    const EVENTS: &str = "events.k8s.io";
    const ADMISSION: &str = "admissionregistration.k8s.io";
    let Some(template) = state.driver_template() else {
        return Vec::new();
    };
    let namespace = state.namespace().to_owned();
    let account = |template: &k8s_openapi::api::core::v1::PodTemplateSpec| {
        let name = template.spec.as_ref()?.service_account_name.clone()?;
        Some((namespace.clone(), name))
    };
    let permission = |account: &(String, String), verb, group, resource, name| Permission {
        account: account.clone(),
        verb,
        group,
        resource,
        name,
        namespace: String::new(),
    };
    let mut required = Vec::new();
    if let Some(driver) = account(template) {
        let rules = [
            ("get", "", "nodes", None),
            ("watch", "", "nodes", None),
            ("list", names::GROUP, "gpunodeprofiles", None),
            ("patch", names::GROUP, "gpunodeprofiles/status", None),
            ("list", DRA, "resourceslices", None),
            ("create", DRA, "resourceslices", None),
            ("delete", DRA, "resourceslices", None),
            ("list", DRA, "resourceclaims", None),
            ("watch", DRA, "resourceclaims", None),
            ("patch", DRA, "resourceclaims/status", None),
            (
                "associated-node:patch",
                DRA,
                "resourceclaims/driver",
                Some(names::DRIVER),
            ),
            ("get", "", "pods", None),
            ("create", EVENTS, "events", None),
        ];
        required.extend(
            rules.map(|(verb, group, resource, name)| {
                permission(&driver, verb, group, resource, name)
            }),
        );
    }
    let controller = state
        .controller()
        .filter(|_| state.is_managed())
        .and_then(|deployment| account(&deployment.spec.template));
    if let Some(controller) = controller {
        let rules = [
            ("watch", "", "pods", None),
            ("watch", "", "nodes", None),
            ("watch", "", "namespaces", None),
            ("watch", "", "persistentvolumeclaims", None),
            ("watch", "", "persistentvolumes", None),
            ("watch", "storage.k8s.io", "storageclasses", None),
            (
                "update",
                names::GROUP,
                "gpucontrollerleaders",
                Some("drava-controller"),
            ),
            (
                "patch",
                names::GROUP,
                "gpucontrollerleaders/status",
                Some("drava-controller"),
            ),
            ("watch", names::GROUP, "gpucontrollerleaders", None),
            ("watch", names::GROUP, "gpuquotas", None),
            ("patch", names::GROUP, "gpuquotas/status", None),
            ("watch", names::GROUP, "gpupolicies", None),
            ("patch", names::GROUP, "gpupolicies/status", None),
            ("list", names::GROUP, "placementexplanations", None),
            ("delete", names::GROUP, "placementexplanations", None),
            ("update", names::GROUP, "placementexplanations/status", None),
            ("watch", DRA, "resourceslices", None),
            ("watch", DRA, "deviceclasses", None),
            ("watch", DRA, "devicetaintrules", None),
            ("watch", DRA, "resourceclaims", None),
            ("watch", DRA, "resourceclaimtemplates", None),
            ("patch", DRA, "resourceclaims", None),
            ("patch", DRA, "resourceclaims/status", None),
            ("patch", DRA, "resourceclaims/binding", None),
            ("patch", "", "pods", None),
            ("patch", "", "pods/status", None),
            ("create", EVENTS, "events", None),
        ];
        required.extend(rules.map(|(verb, group, resource, name)| {
            permission(&controller, verb, group, resource, name)
        }));
        // Rules of optional features, by the flags of the controller.
        let optional = [
            (EVICTION, ("create", "", "pods/eviction", None)),
            (
                RECOMMENDATIONS,
                ("create", names::GROUP, "gpusharerecommendations", None),
            ),
            (
                RECOMMENDATIONS,
                (
                    "update",
                    names::GROUP,
                    "gpusharerecommendations/status",
                    None,
                ),
            ),
            (RECOMMENDATIONS, ("get", "batch", "jobs", None)),
            (
                COMPATIBILITY,
                ("create", DRA, "resourceclaimtemplates", None),
            ),
            (COMPATIBILITY, ("watch", "", "resourcequotas", None)),
            (
                CERTIFICATE,
                (
                    "patch",
                    ADMISSION,
                    "mutatingwebhookconfigurations",
                    Some(WEBHOOK_NAME),
                ),
            ),
            (
                CERTIFICATE,
                (
                    "patch",
                    ADMISSION,
                    "validatingwebhookconfigurations",
                    Some(WEBHOOK_NAME),
                ),
            ),
        ];
        for (flag, (verb, group, resource, name)) in optional {
            if state.has_controller_flag(flag) {
                required.push(permission(&controller, verb, group, resource, name));
            }
        }
        let mut in_namespace = vec![permission(
            &controller,
            "update",
            "coordination.k8s.io",
            "leases",
            Some("drava-controller"),
        )];
        if state.has_controller_flag(CERTIFICATE) {
            in_namespace.push(permission(
                &controller,
                "update",
                "",
                "secrets",
                Some(WEBHOOK_NAME),
            ));
        }
        required.extend(in_namespace.into_iter().map(|permission| Permission {
            namespace: namespace.clone(),
            ..permission
        }));
    }
    required
}
