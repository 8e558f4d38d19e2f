use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use serde_json::json;

use super::*;
use crate::fixture::object;

fn claim() -> ResourceClaimSpec {
    object(json!({"devices": {"requests": [{
        "name": "main", "exactly": {"deviceClassName": "vgpu.drava.dev"},
    }]}}))
}

fn name() -> String {
    drava_compatibility::template_name(&claim())
}

fn pod(pod_name: &str) -> Pod {
    object(json!({
        "metadata": {
            "name": pod_name, "namespace": "default",
            "annotations": {(names::TRANSLATED_CLAIM_ANNOTATION): json!(claim()).to_string()},
        },
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": name()}],
            "containers": [],
        },
    }))
}

fn key() -> ObjectKey {
    ("default".to_owned(), name())
}

fn existing() -> ResourceClaimTemplate {
    let mut template = template(&key(), &claim());
    template.metadata.uid = Some("1".to_owned());
    template
}

/// Plan with complete lists.
fn plan(pods: &[Pod], templates: &[ResourceClaimTemplate]) -> TemplatePlan {
    let mut plan = TemplatePlan::default();
    assert!(
        plan.actions(Instant::now()).is_empty(),
        "lists are incomplete"
    );
    for pod in pods {
        plan.pod(watcher::Event::InitApply(pod.clone()));
    }
    plan.pod(watcher::Event::InitDone);
    assert!(
        plan.actions(Instant::now()).is_empty(),
        "a list is incomplete"
    );
    for template in templates {
        plan.template(watcher::Event::InitApply(template.clone()));
    }
    plan.template(watcher::Event::InitDone);
    plan
}

#[test]
fn creates_missing_template_once() {
    let mut plan = plan(&[pod("a"), pod("b")], &[]);
    let create = TemplateAction::Create(key(), Box::new(claim()));
    let now = Instant::now();
    assert_eq!(plan.actions(now), [create]);
    plan.template(watcher::Event::Apply(existing()));
    assert!(plan.actions(now).is_empty());
}

#[test]
fn deletes_template_unreferenced_for_retention() {
    let mut plan = plan(&[pod("a")], &[existing()]);
    let start = Instant::now();
    assert!(plan.actions(start).is_empty());
    plan.pod(watcher::Event::Delete(pod("a")));
    assert!(plan.actions(start).is_empty());
    let almost = start + RETENTION - Duration::from_secs(1);
    assert!(plan.actions(almost).is_empty());
    let uid = "1".to_owned();
    let delete = TemplateAction::Delete { key: key(), uid };
    assert_eq!(plan.actions(start + RETENTION), [delete]);
    plan.template(watcher::Event::Delete(existing()));
    assert!(plan.actions(start + RETENTION).is_empty());
}

#[test]
fn retains_template_that_is_referenced_again() {
    let mut plan = plan(&[], &[existing()]);
    let start = Instant::now();
    plan.actions(start);
    plan.pod(watcher::Event::Apply(pod("a")));
    plan.actions(start + RETENTION);
    plan.pod(watcher::Event::Delete(pod("a")));
    assert!(plan.actions(start + RETENTION).is_empty());
}
