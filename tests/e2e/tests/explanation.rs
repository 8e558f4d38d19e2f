//! Explanations by object.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::{Value, json};

fn share(name: &str, memory: &str) -> String {
    pod_with_share(name, "vgpu.drava.dev", &format!("{{memory: {memory}}}"))
}

/// Fills the GPUs, and creates pod `large`, which needs 40 GiB where 20 GiB are free.
fn with_pending_pod(tenant: &Namespace<'_>) -> Result<()> {
    for (name, memory) in [("first", "60Gi"), ("second", "70Gi")] {
        tenant.apply(&share(name, memory))?;
        tenant.running(name)?;
    }
    tenant.apply(&share("large", "40Gi"))?;
    tenant.event("large", "InsufficientMemory")?;
    Ok(())
}

fn request(name: &str, pod: &str, ttl: u32) -> String {
    format!(
        "{{apiVersion: gpu.drava.dev/v1alpha1, kind: PlacementExplanation, metadata: {{name: {name}}}, spec: {{podName: {pod}, ttlSeconds: {ttl}}}}}"
    )
}

fn wait_for_state(tenant: &Namespace<'_>, name: &str, state: &str) -> Result<Value> {
    wait(&format!("PlacementExplanation {name} is {state}"), || {
        let found = tenant.find("placementexplanation", name)?;
        let status = found.context("no object")?["status"].clone();
        Ok((status["state"] == state).then_some(status))
    })
}

#[test]
fn explains_pod_on_request_for_its_time() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("explanation")?;
    with_pending_pod(&tenant)?;
    tenant.apply(&request("why", "large", 600))?;
    tenant.apply(&request("absent", "absent", 600))?;
    let status = wait_for_state(&tenant, "why", "Infeasible")?;
    let text = status.to_string();
    ensure!(
        status["reasons"]["InsufficientMemory"] == 1
            && text.contains("request at most")
            && text.contains(&format!("end {}/first", tenant.name())),
        "{text}"
    );
    wait_for_state(&tenant, "absent", "PodMissing")?;
    tenant.example("placement-explanation")?;
    wait_for_state(&tenant, "trainer", "Infeasible")?;
    // It follows the pod.
    tenant.delete_pods(&["first"])?;
    tenant.running("large")?;
    let status = wait_for_state(&tenant, "why", "Placed")?;
    ensure!(status["changes"].is_null(), "{status}");
    tenant.apply(&request("brief", "large", 3))?;
    wait("the explanation is deleted after its time", || {
        let found = tenant.find("placementexplanation", "brief")?;
        Ok(found.is_none().then_some(()))
    })
}

/// Kubernetes adds the roles of the chart to its own, so that their users need no other role.
#[test]
fn built_in_roles_have_explanations_and_recommendations() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("built-in-roles")?;
    let (explanations, recommendations) = ("placementexplanations", "gpusharerecommendations");
    for role in ["view", "edit", "admin"] {
        let name = format!("drava-{role}");
        let bind = [format!("--clusterrole={role}"), format!("--user={name}")];
        tenant.kubectl(&["create", "rolebinding", &name, &bind[0], &bind[1]])?;
        let can = |verb: &str, resource: &str| -> Result<bool> {
            let attributes = json!({
                "namespace": tenant.name(), "verb": verb, "group": "gpu.drava.dev", "resource": resource,
            });
            let review = json!({
                "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
                "spec": {"user": name, "resourceAttributes": attributes},
            });
            let answer = tenant.dry_run(&review.to_string())?;
            let allowed = answer["status"]["allowed"].as_bool();
            allowed.with_context(|| format!("no answer: {answer}"))
        };
        wait(&format!("role {role} has those of the chart"), || {
            Ok(can("list", explanations)?.then_some(()))
        })?;
        ensure!(
            can("list", recommendations)?,
            "{role} reads no recommendations"
        );
        let is_editor = role != "view";
        ensure!(can("create", explanations)? == is_editor, "{role} creates");
        for (verb, resource) in [
            ("create", recommendations),
            ("patch", "placementexplanations/status"),
            ("patch", "gpuquotas"),
        ] {
            ensure!(!can(verb, resource)?, "{role} may {verb} {resource}");
        }
    }
    Ok(())
}

/// With the role of a tenant the API server refuses lists of all namespaces; the answers come from the namespace.
#[test]
fn tenant_commands_answer_within_the_namespace() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("own-answers")?;
    with_pending_pod(&tenant)?;
    let kubeconfig = cluster.kubeconfig_of_tenant(&tenant)?;
    let kubeconfig = kubeconfig.to_str().context("a path")?;
    let run = |command: &[&str]| {
        let connection = ["--kubeconfig", kubeconfig, "-n", tenant.name()];
        cluster.drava(&[command, &connection].concat())
    };
    for (command, answer, note) in [
        (
            &["explain", "pod", "large"][..],
            "pod fits after one of these changes:".replacen(
                "pod",
                &format!("pod {}/large", tenant.name()),
                1,
            ),
            "the answer comes from the controller",
        ),
        (
            &["top"],
            "first".to_owned(),
            "only the claims of your namespace are shown",
        ),
        (
            &["gangs"],
            "no pod has the annotation".to_owned(),
            "only the gangs of your namespace are shown",
        ),
    ] {
        let output = run(command)?;
        ensure!(
            output.code == 0 && output.stdout.contains(&answer),
            "{output:?}"
        );
        let lines: Vec<&str> = output.stderr.lines().collect();
        ensure!(
            matches!(lines[..], [line] if line.starts_with("note: you may not list ") && line.ends_with(note)),
            "{output:?}"
        );
    }
    let created = tenant.kubectl(&["get", "placementexplanations", "-o", "name"])?;
    ensure!(created.is_empty(), "explain left {created}");
    for command in ["doctor", "quota", "simulate -f /dev/null", "node node-0"] {
        let command: Vec<&str> = command.split(' ').collect();
        let output = run(&command)?;
        let lines: Vec<&str> = output.stderr.lines().collect();
        ensure!(
            output.code == 1
                && matches!(lines[..], [line] if line.starts_with("error: you may not list ")),
            "{output:?}"
        );
    }
    Ok(())
}
