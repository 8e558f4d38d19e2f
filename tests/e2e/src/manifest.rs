//! Manifests of the tests: a claim template and a pod that uses it, with variable parts.

/// Returns a pod `name` with one claim from a template of the same name. The template requests `capacity` of
/// `class` (YAML flow mapping such as `{memory: 8Gi}`; empty for no capacity).
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

/// Returns a pod `name` with one claim. The request is `exactly`; `spec.devices.config` is `config` (YAML flow style).
#[must_use]
pub fn pod_with_request(name: &str, exactly: &str, config: &str) -> String {
    let template = claim_template(name, exactly, config);
    let pod = pod(name, &format!("resourceClaimTemplateName: {name}"));
    format!("{template}---\n{pod}")
}

/// Returns a claim template `name`. The request is `exactly`; `spec.devices.config` is `config` (YAML flow style).
#[must_use]
pub fn claim_template(name: &str, exactly: &str, config: &str) -> String {
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
"
    )
}

/// Returns a sleeping pod `name` with one claim, referenced by `source`.
#[must_use]
pub fn pod(name: &str, source: &str) -> String {
    let claims = format!("resourceClaims: [{{name: gpu, {source}}}]");
    sleeping(name, &claims, "resources: {claims: [{name: gpu}]}")
}

/// Returns a pod `name` without a claim.
#[must_use]
pub fn pod_without_claim(name: &str) -> String {
    sleeping(name, "", "")
}

/// Returns a sleeping pod with an additional line in the pod's spec and one in the container's spec.
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
