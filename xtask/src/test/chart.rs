//! Checks the Helm chart: lint, the schema of its values, and its rendering with each set of values that is promised.
//!
//! The renderings are checked in under `deploy/helm/renders`, so that a review sees what a change of the chart does.
//! `UPDATE_RENDERS=1 cargo xtask test --only chart` writes them anew.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use drava_cluster::workspace_root;

use super::stage::{Count, Log};

/// Name of a rendering and the values that it is made with.
const RENDERS: [(&str, &[&str]); 3] = [
    ("default", &[]),
    ("native", &["scheduling.mode=native"]),
    (
        "custom",
        &[
            "image.registry=registry.example.com/mirror",
            "imagePullSecrets[0].name=pull",
            "driver.driverRoot=/run/nvidia/driver",
            "driver.delivery=shim",
            "controller.replicas=1",
            "admission.extraClasses[0]=team-gpu",
            "admission.exemptNamespaces[0]=monitoring",
            "log.format=text",
        ],
    ),
];

/// Values that the schema must refuse.
const REFUSED: [&str; 5] = [
    "driver.delivery=both",
    "scheduling.mode=magic",
    "scheduling.gpuPolicy=random",
    "driver.driverRoot=relative",
    "controler.replicas=3",
];

/// Runs the stage.
pub(crate) fn check(log: &mut Log) -> Result<Count> {
    let helm = drava_cluster::helm().context("build Helm")?;
    let chart = workspace_root().join("deploy/helm/drava");
    let mut count = Count::default();
    let mut lint = Command::new(&helm);
    lint.args(["lint", "--strict"]).arg(&chart);
    count += log.check(lint)?;
    for (name, values) in RENDERS {
        let mut template = Command::new(&helm);
        template.args(["template", "drava"]).arg(&chart).args([
            "--namespace",
            "drava-system",
            "--kube-version",
            "1.37.1",
        ]);
        for value in values {
            template.args(["--set", value]);
        }
        let output = template
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("render {name}"))?;
        if !output.status.success() {
            bail!("render {name}: {}", String::from_utf8_lossy(&output.stderr));
        }
        count += compare(name, &output.stdout, log)?;
    }
    for value in REFUSED {
        let mut template = Command::new(&helm);
        template.args(["template", "drava"]).arg(&chart).args([
            "--kube-version",
            "1.37.1",
            "--set",
            value,
        ]);
        let refused = log.check(template)?.failed == 1;
        if !refused {
            log.note(&format!("the schema accepts {value}"))?;
        }
        count += Count {
            passed: usize::from(refused),
            failed: usize::from(!refused),
            skipped: 0,
        };
    }
    Ok(count)
}

fn compare(name: &str, rendered: &[u8], log: &mut Log) -> Result<Count> {
    let path = workspace_root()
        .join("deploy/helm/renders")
        .join(format!("{name}.yaml"));
    if std::env::var_os("UPDATE_RENDERS").is_some() {
        std::fs::create_dir_all(path.parent().context("a rendering without a folder")?)?;
        std::fs::write(&path, rendered).with_context(|| format!("write {}", path.display()))?;
    }
    let expected = std::fs::read(&path).unwrap_or_default();
    if expected == rendered {
        return Ok(Count {
            passed: 1,
            failed: 0,
            skipped: 0,
        });
    }
    let fresh = workspace_root().join(format!("target/test-logs/{name}.yaml"));
    std::fs::write(&fresh, rendered)?;
    let mut diff = Command::new("diff");
    diff.arg("-u").arg(&path).arg(&fresh);
    log.check(diff)?;
    log.note(&format!(
        "{} is out of date; UPDATE_RENDERS=1 writes it anew",
        path.display()
    ))?;
    Ok(Count {
        passed: 0,
        failed: 1,
        skipped: 0,
    })
}
