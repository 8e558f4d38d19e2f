use drava_api::names::ALLOCATION_GATE;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::runtime::watcher::Event;

use super::*;
use crate::fixture::{claim, class, gated_pod, object, pod};

/// Claim or template spec for another driver.
fn foreign() -> ResourceClaim {
    let mut claim = claim("foreign", "8Gi");
    claim.spec = Some(object(json!({"devices": {"requests": [{
        "name": "gpu",
        "exactly": {
            "deviceClassName": "gpu.example.com",
            "selectors": [{"cel": {"expression": r#"device.driver == "gpu.example.com""#}}],
        },
    }]}})));
    claim
}

fn template(claim: &ResourceClaim) -> ResourceClaimTemplate {
    object(json!({
        "metadata": {"name": claim.metadata.name, "namespace": "default"},
        "spec": {"spec": claim.spec},
    }))
}

fn catalog() -> Catalog {
    let mut catalog = Catalog::default();
    catalog.class(Event::Apply(class()));
    catalog.claim(Event::Apply(claim("own", "8Gi")));
    catalog.claim(Event::Apply(foreign()));
    catalog.template(Event::Apply(template(&claim("own", "8Gi"))));
    catalog.template(Event::Apply(template(&foreign())));
    catalog
}

fn of_template(name: &str) -> Pod {
    let mut pod = pod("p", &[]);
    let entry = json!({"name": "gpu", "resourceClaimTemplateName": name});
    pod.spec.get_or_insert_default().resource_claims = Some(vec![object(entry)]);
    pod
}

fn operations_for(pod: &Pod) -> Vec<Value> {
    let schedulers = ["default-scheduler".to_owned()];
    operations(pod, "default", &catalog(), &schedulers)
}

#[test]
fn gates_pod_with_own_claim_or_template() {
    let added = [
        json!({"op": "add", "path": "/spec/schedulingGates", "value": [{"name": ALLOCATION_GATE}]}),
    ];
    assert_eq!(operations_for(&pod("p", &["own"])), added);
    assert_eq!(operations_for(&of_template("own")), added);
    assert_eq!(operations_for(&pod("p", &["foreign", "own"])), added);
    assert_eq!(
        operations_for(&of_template("created-just-now")),
        added,
        "the watch may not have reported the template yet"
    );
}

#[test]
fn appends_gate_to_foreign_gates() {
    let pod = gated_pod("p", &["own"], &["example.com/quota"]);
    assert_eq!(
        operations_for(&pod),
        [
            json!({"op": "add", "path": "/spec/schedulingGates/-", "value": {"name": ALLOCATION_GATE}})
        ]
    );
}

#[test]
fn leaves_other_pods_unchanged() {
    let mut bound = pod("p", &["own"]);
    bound.spec.get_or_insert_default().node_name = Some("n1".to_owned());
    let mut of_volcano = pod("p", &["own"]);
    of_volcano.spec.get_or_insert_default().scheduler_name = Some("volcano".to_owned());
    for (pod, case) in [
        (pod("p", &[]), "no claim"),
        (pod("p", &["foreign"]), "claim for another driver"),
        (of_template("foreign"), "template for another driver"),
        (pod("p", &["missing"]), "unknown claim"),
        (bound, "bound"),
        (of_volcano, "scheduler that is not served"),
        (gated_pod("p", &["own"], &[ALLOCATION_GATE]), "gated"),
    ] {
        assert!(operations_for(&pod).is_empty(), "{case}");
    }
}

#[test]
fn ignores_namesakes_in_other_namespaces() {
    let schedulers = ["default-scheduler".to_owned()];
    let operations = operations(&pod("p", &["own"]), "other", &catalog(), &schedulers);
    assert!(operations.is_empty());
}

#[test]
fn follows_deleted_and_relisted_objects() {
    let mut catalog = catalog();
    catalog.claim(Event::Delete(claim("own", "8Gi")));
    assert_eq!(catalog.claim_is_own("default", "own"), None);
    catalog.template(Event::Init);
    catalog.template(Event::InitApply(template(&foreign())));
    assert_eq!(
        catalog.template_is_own("default", "own"),
        Some(true),
        "until the list is complete"
    );
    catalog.template(Event::InitDone);
    assert_eq!(catalog.template_is_own("default", "own"), None);
    assert_eq!(catalog.template_is_own("default", "foreign"), Some(false));
}

#[test]
fn gates_member_of_a_gang_without_claims() {
    let mut member = pod("p", &[]);
    assert_eq!(operations_for(&member), Vec::<Value>::new());
    let annotations = [("gpu.drava.dev/gang".to_owned(), "g".to_owned())];
    member.metadata.annotations = Some(annotations.into());
    assert_eq!(operations_for(&member).len(), 1);
}
