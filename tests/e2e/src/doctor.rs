//! Injection of faults that `kubectl drava doctor` finds.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::TestCluster;

const SYSTEM: &str = "drava-system";

/// Checks that the doctor finds these faults after `inject` and nothing after `repair`, and that the finding of the first
/// fault names the object and the fix.
///
/// # Errors
/// When the doctor finds something else, or a step fails.
pub fn finds(
    cluster: &TestCluster,
    faults: &[&str],
    (object, fix): (&str, &str),
    inject: impl FnOnce() -> Result<()>,
    repair: impl FnOnce() -> Result<()>,
) -> Result<()> {
    cluster.wait_for_faults(&[])?;
    let found = inject().and_then(|()| cluster.wait_for_faults(faults));
    repair()?;
    names(&found?, faults.first().context("no fault")?, object, fix)?;
    cluster.wait_for_faults(&[])?;
    Ok(())
}

/// Checks that a finding of the fault names the object and the fix.
///
/// # Errors
/// When no finding does.
pub fn names(findings: &[Value], fault: &str, object: &str, fix: &str) -> Result<()> {
    let has = |finding: &Value, field: &str, text: &str| {
        let value = finding[field].as_str().unwrap_or_default();
        value.contains(text)
    };
    let is_found = findings.iter().any(|finding| {
        finding["fault"] == fault && has(finding, "object", object) && has(finding, "fix", fix)
    });
    ensure!(
        is_found,
        "no {fault} of {object} with {fix:?} in {findings:?}"
    );
    Ok(())
}

/// Patches an object of the namespace of drava, or of the cluster.
///
/// # Errors
/// When the API server rejects the patch.
pub fn patch(cluster: &TestCluster, object: &[&str], kind: &str, patch: &Value) -> Result<()> {
    let (kind, patch) = (format!("--type={kind}"), patch.to_string());
    let args = [&["-n", SYSTEM, "patch"], object, &[&kind, "-p", &patch]].concat();
    cluster.kubectl(args)?;
    Ok(())
}

/// Removes the rule with this resource from the controller's ClusterRole.
///
/// # Errors
/// When the ClusterRole has no such rule.
pub fn remove_rule(cluster: &TestCluster, resource: &str) -> Result<()> {
    let role = cluster.get(&["clusterrole", "drava-controller"])?;
    let rules = role["rules"].as_array().context("rules")?;
    let of_resource = |rule: &Value| {
        let resources = rule["resources"].as_array();
        resources.is_some_and(|all| all.iter().any(|one| one == resource))
    };
    let index = rules.iter().position(of_resource).context("no rule")?;
    let remove = json!([{"op": "remove", "path": format!("/rules/{index}")}]);
    patch(
        cluster,
        &["clusterrole", "drava-controller"],
        "json",
        &remove,
    )
}
