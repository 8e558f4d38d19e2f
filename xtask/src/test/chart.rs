//! Checks the Helm chart: lint, the schema of its values, and its rendering with each supported set of values.
//!
//! The renderings are checked in under `deploy/helm/renders`, so that a review shows the effect of a change of the chart.
//! `deploy/kustomize` has the rendering of the default values without Helm's hooks.
//! `UPDATE_RENDERS=1 cargo xtask test --only chart` updates them.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use drava_cluster::process::{self, Limit};
use drava_cluster::workspace_root;

use super::libtest::Outcome;
use super::log::Log;

/// Names of renderings and their values.
const RENDERS: [(&str, &[&str]); 4] = [
    ("default", &[]),
    (
        "gke",
        &[
            "driver.driverRoot=/home/kubernetes/bin/nvidia",
            "driver.devRoot=/",
            "driver.stateDir=/home/kubernetes/bin/drava",
            "driver.devCharLinks=false",
        ],
    ),
    ("native", &["scheduling.mode=native"]),
    (
        "custom",
        &[
            "image.registry=registry.example.com/mirror",
            "image.digests.driver=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "driver.coexistenceGuard=false",
            "compatibility.nodes.labels={gpu=on,volcano.sh/vgpu.enabled=true}",
            "compatibility.nodes.taints={volcano.sh/vgpu}",
            "imagePullSecrets[0].name=pull",
            "driver.driverRoot=/run/nvidia/driver",
            "driver.delivery=shim",
            "driver.health.ignoreXids={74,119}",
            "driver.health.fatalXids={31}",
            "driver.health.taintEffect=NoExecute",
            "controller.replicas=1",
            "crds.install=false",
            "admission.catchAllTolerationClasses[0]=team-gpu",
            "admission.exemptNamespaces[0]=monitoring",
            "log.format=text",
            "webhook.certificate.provider=certManager",
            "webhook.exemptNamespaces[0]=monitoring",
            "compatibility.enabled=true",
            "compatibility.settings.shareClass=fraction",
            "metrics.aliases=true",
            "metrics.podMonitor.enabled=true",
            "metrics.podMonitor.labels.release=prometheus",
            "metrics.alerts.enabled=true",
            "metrics.dashboards.enabled=true",
            "metrics.alerts.runbookUrlPrefix=https://runbooks.example.com/",
        ],
    ),
];

/// Values that the schema rejects, each with the path that the message names.
const REJECTED: [(&str, &str); 17] = [
    ("image.digests.driver=latest", "'/image/digests/driver'"),
    (
        "compatibility.nodes.labels={gpu}",
        "'/compatibility/nodes/labels/0'",
    ),
    ("crds.install=maybe", "'/crds/install'"),
    ("driver.delivery=both", "'/driver/delivery'"),
    (
        "driver.health.taintEffect=None",
        "'/driver/health/taintEffect'",
    ),
    (
        "webhook.certificate.provider=vault",
        "'/webhook/certificate/provider'",
    ),
    (
        "compatibility.settings.resource=gpu",
        "'/compatibility/settings': additional properties 'resource'",
    ),
    ("scheduling.mode=magic", "'/scheduling/mode'"),
    ("scheduling.gpuPolicy=random", "'/scheduling/gpuPolicy'"),
    ("driver.driverRoot=relative", "'/driver/driverRoot'"),
    ("driver.devRoot=relative", "'/driver/devRoot'"),
    // Its parent is mounted at the removal.
    ("driver.stateDir=/drava", "'/driver/stateDir'"),
    (
        "driver.driverrot=/",
        "'/driver': additional properties 'driverrot'",
    ),
    (
        "driver.health.ignoreXid=31",
        "'/driver/health': additional properties 'ignoreXid'",
    ),
    ("controler.replicas=3", "additional properties 'controler'"),
    ("test.image=", "'/test/image'"),
    (
        "metrics.podMonitor.interval=often",
        "'/metrics/podMonitor/interval'",
    ),
];

/// Runs the stage.
pub(crate) fn check(log: &mut Log) -> Result<Outcome> {
    let helm = drava_cluster::helm().context("build Helm")?;
    let chart = workspace_root().join("deploy/helm/drava");
    let template = |values: &[&str]| {
        let mut template = Command::new(&helm);
        template.args(["template", "drava"]).arg(&chart).args([
            "--namespace",
            "drava-system",
            "--kube-version",
            "1.37.1",
        ]);
        template.args(values.iter().flat_map(|value| ["--set", value]));
        template
    };
    let mut lint = Command::new(&helm);
    lint.args(["lint", "--strict"]).arg(&chart);
    let mut outcome = log.check(lint)?;
    for (name, values) in RENDERS {
        let mut template = template(values);
        let output = process::output(template.stdin(Stdio::null()), Limit::REQUEST)?;
        if !output.status.success() {
            bail!("render {name}: {}", String::from_utf8_lossy(&output.stderr));
        }
        let file = workspace_root().join(format!("deploy/helm/renders/{name}.yaml"));
        outcome += compare(name, &file, &output.stdout, log)?;
    }
    // Hooks are Helm's: without them, kustomize applies the same objects.
    let mut kustomize = template(&[]);
    kustomize.arg("--no-hooks");
    let output = process::output(kustomize.stdin(Stdio::null()), Limit::REQUEST)?;
    let file = workspace_root().join("deploy/kustomize/drava.yaml");
    outcome += compare("kustomize", &file, &output.stdout, log)?;
    let registry = template(&["global.imageRegistry=registry.internal:5000/mirror"]);
    outcome += Outcome::of_check("registry", uses_registry(registry));
    for (value, path) in REJECTED {
        outcome += Outcome::of_check(value, rejects(template(&[value]), path));
    }
    Ok(outcome)
}

/// Checks that a rendering fails with a message that contains `path`.
fn rejects(mut template: Command, path: &str) -> Result<()> {
    let output = process::output(template.stdin(Stdio::null()), Limit::REQUEST)?;
    let message = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "the schema accepts it");
    ensure!(
        message.contains(path),
        "the message lacks {path}: {message}"
    );
    Ok(())
}

/// Checks that all images of a rendering come from one registry.
fn uses_registry(mut template: Command) -> Result<()> {
    let output = process::output(template.stdin(Stdio::null()), Limit::REQUEST)?;
    let text = String::from_utf8(output.stdout)?;
    let images: Vec<&str> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("image: "))
        .collect();
    // Node driver, controller, the two hooks, and the pod of `helm test`.
    ensure!(images.len() == 5, "images: {images:?}");
    for image in images {
        ensure!(
            image.starts_with("registry.internal:5000/mirror/"),
            "{image} comes from another registry"
        );
    }
    ensure!(
        text.contains("image: registry.internal:5000/mirror/library/debian:13-slim"),
        "the test image keeps its old registry"
    );
    Ok(())
}

fn compare(name: &str, path: &Path, rendered: &[u8], log: &mut Log) -> Result<Outcome> {
    if std::env::var_os("UPDATE_RENDERS").is_some() {
        std::fs::create_dir_all(path.parent().context("a rendering without a folder")?)?;
        std::fs::write(path, rendered).with_context(|| format!("write {}", path.display()))?;
    }
    let expected = std::fs::read(path).unwrap_or_default();
    if expected == rendered {
        return Ok(Outcome::of_check(name, Ok(())));
    }
    let fresh = drava_cluster::target_dir().join(format!("test-logs/{name}.yaml"));
    std::fs::write(&fresh, rendered)?;
    let mut diff = Command::new("diff");
    diff.arg("-u").arg(path).arg(&fresh);
    let mut outcome = log.check(diff)?;
    let advice = format!(
        "{} is stale; UPDATE_RENDERS=1 cargo xtask test --only chart updates it",
        path.display()
    );
    log.note(&advice)?;
    for failure in &mut outcome.failures {
        failure.output.push(advice.clone());
    }
    Ok(outcome)
}
