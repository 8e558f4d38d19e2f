//! Manifests of the tests: a template and a pod that uses it, and what a test wants to vary.

/// A pod `name` with one claim from a template of the same name, whose single request asks `class` for `capacity`
/// (YAML flow mapping such as `{memory: 8Gi}`; empty for none).
#[must_use]
pub fn pod_with_share(name: &str, class: &str, capacity: &str) -> String {
    let capacity = if capacity.is_empty() {
        String::new()
    } else {
        format!("capacity: {{requests: {capacity}}}")
    };
    pod_with_request(
        name,
        &format!("{{deviceClassName: {class}, {capacity}}}"),
        "",
    )
}

/// A pod `name` with one claim whose request is `exactly` and whose `spec.devices.config` is `config` (YAML flow style).
#[must_use]
pub fn pod_with_request(name: &str, exactly: &str, config: &str) -> String {
    let config = if config.is_empty() {
        String::new()
    } else {
        format!("config: {config}")
    };
    format!(
        "
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {{name: {name}}}
spec:
  spec:
    devices:
      requests: [{{name: gpu, exactly: {exactly}}}]
      {config}
---
{}",
        pod(name, &format!("resourceClaimTemplateName: {name}"))
    )
}

/// A pod `name` that sleeps, with one claim that `source` names.
#[must_use]
pub fn pod(name: &str, source: &str) -> String {
    let claims = format!("resourceClaims: [{{name: gpu, {source}}}]");
    sleeping(name, &claims, "resources: {claims: [{name: gpu}]}")
}

/// A pod `name` without a claim.
#[must_use]
pub fn pod_without_claim(name: &str) -> String {
    sleeping(name, "", "")
}

/// A pod that sleeps, with a line of its own in the pod's spec and in the container's.
fn sleeping(name: &str, of_pod: &str, of_container: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 1
  {of_pod}
  containers:
  - name: app
    image: localhost/drava-demo:dev
    imagePullPolicy: IfNotPresent
    command: [sleep, infinity]
    {of_container}
"
    )
}
