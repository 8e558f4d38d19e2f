use drava_compatibility::ShareClass;
use k8s_openapi::api::core::v1::PodSpec;
use serde_json::Value;

use super::*;
use crate::fixture::object;

/// Settings in which pods without annotation get shares.
fn shares() -> Settings {
    Settings {
        share_class: ShareClass::Vgpu,
        ..Settings::default()
    }
}

/// The first manifest of Volcano's guide.
fn volcano_pod() -> Value {
    json!({
        "metadata": {"name": "p", "namespace": "default", "labels": {"app": "a"}},
        "spec": {"containers": [{"name": "main", "image": "cuda", "resources": {"limits": {
            "cpu": "1",
            "volcano.sh/vgpu-number": "1",
            "volcano.sh/vgpu-memory": "1000",
            "volcano.sh/vgpu-cores": "10",
        }}}]},
    })
}

/// Applies the operations, all of which set a value.
fn translated(pod: &Value) -> Value {
    let translation = translate(pod, &shares(), std::iter::empty())
        .unwrap()
        .unwrap();
    let mut pod = pod.clone();
    for operation in translation.operations {
        let path = operation["path"].as_str().unwrap();
        let (parent, key) = path.rsplit_once('/').unwrap();
        pod.pointer_mut(parent).unwrap()[key] = operation["value"].clone();
    }
    pod
}

#[test]
fn references_template_named_by_hash_of_claim() {
    let pod: Pod = object(translated(&volcano_pod()));
    let (name, claim) = accept(&pod).unwrap().unwrap();
    let spec: &PodSpec = pod.spec.as_ref().unwrap();
    let entry = &spec.resource_claims.as_ref().unwrap()[0];
    assert_eq!(entry.resource_claim_template_name.as_ref(), Some(&name));
    let resources = spec.containers[0].resources.as_ref().unwrap();
    assert_eq!(resources.limits.as_ref().unwrap().len(), 1, "cpu stays");
    assert_eq!(resources.claims.as_ref().unwrap()[0].name, entry.name);
    let labels = pod.metadata.labels.as_ref().unwrap();
    assert_eq!(labels["app"], "a");
    assert_eq!(labels[names::TRANSLATED_LABEL], "true");
    let claim = json!(claim);
    assert_eq!(
        claim["devices"]["requests"][0]["exactly"]["capacity"]["requests"],
        json!({"memory": "1000Mi", "cores": "10"})
    );
}

#[test]
fn leaves_pod_without_translated_resource() {
    let mut pod = volcano_pod();
    pod["spec"]["containers"][0]["resources"] = json!({"limits": {"example.com/gpu": "1"}});
    assert_eq!(translate(&pod, &shares(), std::iter::empty()), Ok(None));
}

#[test]
fn names_field_that_cannot_be_translated() {
    let mut pod = volcano_pod();
    pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] = json!("1000");
    let refusal = translate(&pod, &shares(), std::iter::empty()).unwrap_err();
    assert!(
        refusal.contains("one device plugin per container"),
        "{refusal}"
    );
}

#[test]
fn ignores_pod_that_was_not_translated() {
    assert!(matches!(accept(&object(volcano_pod())), Ok(None)));
}

#[test]
fn rejects_forged_claim() {
    let good = translated(&volcano_pod());
    let annotation = &good["metadata"]["annotations"][names::TRANSLATED_CLAIM_ANNOTATION];
    let claim: Value = serde_json::from_str(annotation.as_str().unwrap()).unwrap();
    let forged = |path: &str, key: &str, value: Value| {
        let mut claim = claim.clone();
        claim.pointer_mut(path).unwrap()[key] = value;
        let claim: ResourceClaimSpec = object(claim);
        let name = template_name(&claim);
        let mut pod = good.clone();
        pod["metadata"]["annotations"][names::TRANSLATED_CLAIM_ANNOTATION] =
            json!(claim).to_string().into();
        pod["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] = name.into();
        accept(&object(pod))
    };
    let exactly = "/devices/requests/0/exactly";
    assert!(
        forged(exactly, "count", json!(2)).is_ok(),
        "the check itself accepts a consistent claim"
    );
    for (key, value) in [
        ("deviceClassName", json!("gpu.example.com")),
        ("adminAccess", json!(true)),
        ("tolerations", json!([{"operator": "Exists"}])),
    ] {
        assert!(
            matches!(forged(exactly, key, value), Err(AcceptError::NotTranslated)),
            "{key}"
        );
    }
    let config = json!([{"opaque": {"driver": "gpu.example.com", "parameters": {}}}]);
    assert!(matches!(
        forged("/devices", "config", config),
        Err(AcceptError::NotTranslated)
    ));
    let mut other = good.clone();
    other["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] = "other".into();
    assert!(matches!(
        accept(&object(other)),
        Err(AcceptError::NotReferenced(_))
    ));
    let mut malformed = good;
    malformed["metadata"]["annotations"][names::TRANSLATED_CLAIM_ANNOTATION] = "{".into();
    assert!(matches!(
        accept(&object(malformed)),
        Err(AcceptError::Malformed(_))
    ));
}

#[test]
fn refuses_pod_whose_limit_would_be_lost() {
    let pod = volcano_pod();
    let translate_under = |resource: &str| {
        let limited = [resource.to_owned()];
        let limits = [("ResourceQuota gpus".to_owned(), limited.as_slice())];
        translate(&pod, &shares(), limits.into_iter())
    };
    for resource in [
        "requests.volcano.sh/vgpu-number",
        "limits.volcano.sh/vgpu-memory",
        "volcano.sh/vgpu-cores",
    ] {
        let refusal = translate_under(resource).unwrap_err();
        assert!(
            refusal.starts_with(&format!("ResourceQuota gpus limits {resource}")),
            "{refusal}"
        );
    }
    for resource in ["requests.cpu", "requests.nvidia.com/gpu", "pods"] {
        assert!(translate_under(resource).unwrap().is_some(), "{resource}");
    }
}
