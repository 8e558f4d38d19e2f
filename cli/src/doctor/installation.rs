//! The installation: workloads, leader, versions, device classes.

use drava_api::names::class;
use k8s_openapi::api::core::v1::PodTemplateSpec;

use super::state::{ClusterState, Version};
use super::{Fault, Finding};

/// Oldest Kubernetes with the stable DRA API.
const OLDEST: Version = Version(1, 34);
/// Oldest Kubernetes with device taints and consumable capacity on by default.
const OLDEST_MANAGED: Version = Version(1, 36);
/// Lease of the controller.
const LEASE: &str = "drava-controller";
/// Seconds without renewal after which a lease is stale: its duration of 15 s, and a margin for the change of leader.
const STALE_LEASE_SECONDS: i64 = 45;
/// Reinstalls what the chart contains.
pub(super) const UPGRADE: &str = "run helm upgrade with the drava chart";
/// Of objects that kubectl has changed: Helm 4 applies on the server, where the change belongs to kubectl.
pub(super) const CONFLICTS: &str = "Helm 4 needs --force-conflicts to undo a change by kubectl";

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |fault, object: &str, problem: String, fix: String| {
        findings.push(Finding {
            fault,
            object: object.to_owned(),
            problem,
            fix,
        });
    };
    let oldest = if state.is_managed() {
        OLDEST_MANAGED
    } else {
        OLDEST
    };
    if let Some(server) = state.server.filter(|server| *server < oldest) {
        find(
            Fault::ServerTooOld,
            "API server",
            format!(
                "Kubernetes {}.{} is older than {}.{}",
                server.0, server.1, oldest.0, oldest.1
            ),
            "upgrade Kubernetes, or set scheduling.mode=native in the drava chart".to_owned(),
        );
    }
    let Some(driver) = state.driver() else {
        find(
            Fault::NotInstalled,
            "cluster",
            "no DaemonSet of the drava node driver exists".to_owned(),
            "install the drava chart".to_owned(),
        );
        return findings;
    };
    for class in class::ALL {
        let exists = state
            .classes
            .iter()
            .any(|found| found.metadata.name.as_deref() == Some(class));
        if !exists {
            find(
                Fault::ClassMissing,
                &format!("deviceclass {class}"),
                "the device class does not exist".to_owned(),
                UPGRADE.to_owned(),
            );
        }
    }
    let driver_image = state.driver_template().and_then(image_tag);
    let own_version = env!("CARGO_PKG_VERSION");
    let labels = driver.metadata.labels.as_ref();
    if let Some(version) = labels.and_then(|labels| labels.get("app.kubernetes.io/version"))
        && version != own_version
    {
        find(
            Fault::VersionMismatch,
            "kubectl-drava",
            format!("version {own_version} differs from version {version} of the cluster"),
            format!("install kubectl-drava {version}"),
        );
    }
    if state.is_managed() {
        findings.extend(controller(state, driver_image.as_deref()));
    }
    findings
}

fn controller(state: &ClusterState, driver_image: Option<&str>) -> Vec<Finding> {
    let namespace = state.namespace();
    let object = format!("deployment {namespace}/{LEASE}");
    let finding = |fault, object: &str, problem: String, fix: String| Finding {
        fault,
        object: object.to_owned(),
        problem,
        fix,
    };
    let Some(deployment) = state.controller() else {
        return vec![finding(
            Fault::ControllerUnavailable,
            &object,
            "the controller is not installed, so that no claim is allocated".to_owned(),
            UPGRADE.to_owned(),
        )];
    };
    let mut findings = Vec::new();
    let image = image_tag(&deployment.spec.template);
    if let (Some(controller), Some(driver)) = (image.as_deref(), driver_image)
        && controller != driver
    {
        findings.push(finding(
            Fault::VersionMismatch,
            &object,
            format!("image tag {controller} differs from tag {driver} of the node driver"),
            format!("{UPGRADE}; {CONFLICTS}"),
        ));
    }
    let available = deployment
        .status
        .as_ref()
        .and_then(|status| status.available_replicas)
        .unwrap_or_default();
    if available == 0 {
        findings.push(finding(
            Fault::ControllerUnavailable,
            &object,
            "no replica is available, so that no claim is allocated".to_owned(),
            format!(
                "see kubectl describe pods -n {namespace} -l app.kubernetes.io/component=controller"
            ),
        ));
        // Without a replica there is no leader.
        return findings;
    }
    if let (Some(leases), Some(now)) = (&state.leases, state.now) {
        let lease = leases.iter().find(|lease| {
            lease.metadata.name.as_deref() == Some(LEASE)
                && lease.metadata.namespace.as_deref() == Some(namespace)
        });
        let spec = lease.and_then(|lease| lease.spec.as_ref());
        let holder = spec
            .and_then(|spec| spec.holder_identity.as_deref())
            .unwrap_or_default();
        let renewed = spec.and_then(|spec| spec.renew_time.as_ref());
        let age = renewed.map(|time| now.as_second() - time.0.as_second());
        let problem = match (holder, age) {
            ("", _) | (_, None) => Some("no replica of the controller leads".to_owned()),
            (holder, Some(age)) if age > STALE_LEASE_SECONDS => {
                Some(format!("{holder} has not renewed the lease for {age} s"))
            }
            (_, Some(_)) => None,
        };
        if let Some(problem) = problem {
            findings.push(finding(
                Fault::NoLeader,
                &format!("lease {namespace}/{LEASE}"),
                problem,
                format!("see kubectl logs -n {namespace} deployment/{LEASE}"),
            ));
        }
    }
    findings
}

/// Returns the tag of the first image of a pod template. Digests of different images differ in one version.
fn image_tag(template: &PodTemplateSpec) -> Option<String> {
    let image = template
        .spec
        .as_ref()?
        .containers
        .first()?
        .image
        .as_deref()?;
    let name = image.rsplit('/').next()?;
    let name = name.split('@').next()?;
    let (_, tag) = name.split_once(':')?;
    Some(tag.to_owned())
}
