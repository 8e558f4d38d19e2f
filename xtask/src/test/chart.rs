//! Checks the Helm charts: lint, the schema of their values, their rendering, and the effect of values. Each rendering is checked
//! against the schemas of Kubernetes.
//!
//! The rendering of the default values is checked in below `deploy/kustomize`, without Helm's hooks, so that a review shows the
//! effect of a change of a chart. `UPDATE_RENDERS=1 cargo xtask test --only chart` updates it.

mod openapi;
mod simulator;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use drava_cluster::process::{self, Limit};
use drava_cluster::workspace_root;

use super::libtest::Outcome;
use super::log::Log;
use openapi::Schemas;

/// Values that belong together and what they add to the rendering of the default values.
struct Effect {
    name: &'static str,
    values: &'static [&'static str],
    /// Parts of lines that the default rendering does not have.
    added: &'static [&'static str],
    /// Parts of lines that only the default rendering has.
    removed: &'static [&'static str],
}

const EFFECTS: [Effect; 15] = [
    Effect {
        name: "gke",
        values: &[
            "driver.driverRoot=/home/kubernetes/bin/nvidia",
            "driver.devRoot=/",
            "driver.stateDir=/home/kubernetes/bin/drava",
            "driver.devCharLinks=false",
        ],
        added: &[
            "--state-dir=/home/kubernetes/bin/drava",
            "--driver-root=/home/kubernetes/bin/nvidia",
            "--driver-root-mount=/driver-root/nvidia",
            "--dev-root=/",
            "{name: state, mountPath: /home/kubernetes/bin/drava}",
            "hostPath: {path: /home/kubernetes/bin, type: DirectoryOrCreate}",
            r#"\"hostPath\":{\"path\":\"/home/kubernetes/bin\"},\"name\":\"state\""#,
        ],
        removed: &["--dev-char-dir", "mountPath: /dev-char", "/var/lib/drava"],
    },
    Effect {
        name: "user namespace",
        values: &["controller.hostUsers=false"],
        added: &["hostUsers: false"],
        removed: &[],
    },
    Effect {
        name: "prices",
        values: &["prices.gpuHour=3", "prices.models.L4.gpuHour=1"],
        added: &[
            "name: drava-prices",
            r#"gpu.drava.dev/prices: "true""#,
            r#"\"gpuHour\":3,\"models\":{\"L4\":{\"gpuHour\":1}}"#,
        ],
        removed: &[],
    },
    Effect {
        name: "recommendations",
        values: &["recommendations.enabled=true"],
        added: &[
            "--recommendations=true",
            "resources: [gpusharerecommendations]",
            "resources: [gpusharerecommendations/status]",
            "resources: [jobs]",
        ],
        removed: &[],
    },
    Effect {
        name: "native",
        values: &["scheduling.mode=native"],
        added: &[
            "--scheduling=native",
            "extendedResourceName: nvidia.com/gpu",
        ],
        removed: &["name: drava-controller", "name: drava-webhook"],
    },
    Effect {
        name: "images",
        values: &[
            "image.registry=registry.example.com/mirror",
            "image.digests.driver=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "imagePullSecrets[0].name=pull",
        ],
        added: &[
            "registry.example.com/mirror/drava-dra-driver:0.1.0@sha256:0123456789abcdef",
            "registry.example.com/mirror/drava-controller:0.1.0",
            "- name: pull",
        ],
        removed: &[],
    },
    Effect {
        name: "node driver",
        values: &[
            "driver.coexistenceGuard=false",
            "driver.driverRoot=/run/nvidia/driver",
            "driver.delivery=shim",
            "driver.health.ignoreXids={74,119}",
            "driver.health.fatalXids={31}",
            "driver.health.taintEffect=NoExecute",
            "log.format=text",
            "metrics.aliases=true",
        ],
        added: &[
            "--ignore-other-owners",
            "--driver-root=/run/nvidia/driver",
            "--driver-root-mount=/driver-root/driver",
            "hostPath: {path: /run/nvidia, type: DirectoryOrCreate}",
            "--delivery=shim",
            "--xid-ignore=74,119",
            "--xid-fatal=31",
            "--unhealthy-effect=NoExecute",
            "--log-format=text",
            "--metric-aliases",
        ],
        removed: &[],
    },
    Effect {
        name: "compatibility",
        values: &[
            "compatibility.enabled=true",
            "compatibility.settings.shareClass=fraction",
            "compatibility.nodes.labels={gpu=on,volcano.sh/vgpu.enabled=true}",
            "compatibility.nodes.taints={volcano.sh/vgpu}",
        ],
        added: &[
            r#"--compatibility={\"shareClass\":\"fraction\"}"#,
            "name: compatibility.gpu.drava.dev",
            "path: /compatibility",
            "key: volcano.sh/vgpu.enabled",
            "key: volcano.sh/vgpu\n",
            "resources: [resourcequotas, limitranges]",
        ],
        removed: &[],
    },
    Effect {
        name: "admission",
        values: &[
            "controller.replicas=1",
            "crds.install=false",
            "admission.catchAllTolerationClasses[0]=team-gpu",
            "admission.exemptNamespaces[0]=monitoring",
            "admission.ownClasses[0]=shares-of-team",
        ],
        added: &[
            "replicas: 1",
            "team-gpu",
            "monitoring",
            "\"shares-of-team\"]",
        ],
        removed: &["replicas: 2", "kind: CustomResourceDefinition"],
    },
    Effect {
        name: "certificate",
        values: &[
            "webhook.certificate.provider=certManager",
            "webhook.exemptNamespaces[0]=monitoring",
        ],
        added: &[
            "cert-manager.io/inject-ca-from: drava-system/drava-webhook",
            "kind: Certificate",
            "kind: Issuer",
            "- monitoring",
        ],
        removed: &[],
    },
    Effect {
        name: "pods",
        values: &[
            "driver.podLabels.team=platform",
            "driver.extraEnv[0].name=TZ",
            "controller.podLabels.tier=control",
            "controller.extraEnv[0].name=SSL_CERT_DIR",
            "networkPolicy.enabled=true",
        ],
        added: &[
            "team: platform",
            "- name: TZ",
            "tier: control",
            "- name: SSL_CERT_DIR",
            "kind: NetworkPolicy",
            "- {port: webhook}",
        ],
        removed: &[],
    },
    Effect {
        name: "arguments and accounts",
        values: &[
            "driver.extraArgs[0]=--log-filter-listen=127.0.0.1:9393",
            "driver.serviceAccount.annotations.of=driver",
            "controller.extraArgs[0]=--listen=[::]:8080",
            "controller.serviceAccount.annotations.of=controller",
        ],
        added: &[
            "            - --log-format=json\n            - --log-filter-listen=127.0.0.1:9393\n",
            "of: driver",
            "            - --log-format=json\n            - --listen=[::]:8080\n",
            "of: controller",
        ],
        removed: &[],
    },
    Effect {
        name: "updates",
        values: &[
            "driver.updateStrategy.rollingUpdate.maxSurge=0",
            "driver.updateStrategy.rollingUpdate.maxUnavailable=10%",
            "controller.updateStrategy.type=Recreate",
        ],
        added: &["maxSurge: 0", "maxUnavailable: 10%", "type: Recreate"],
        removed: &["maxSurge: 1", "maxUnavailable: 0"],
    },
    Effect {
        name: "openshift",
        values: &["openshift.enabled=true"],
        added: &[
            "name: system:openshift:scc:privileged",
            "name: system:openshift:scc:nonroot-v2",
            r#"\"serviceAccountName\":\"drava-uninstall\""#,
        ],
        removed: &[],
    },
    Effect {
        name: "metrics",
        values: &[
            "metrics.podMonitor.enabled=true",
            "metrics.podMonitor.labels.release=prometheus",
            "metrics.alerts.enabled=true",
            "metrics.dashboards.enabled=true",
            "prices.gpuHour=3",
            "prices.memoryGibHour=5",
            "metrics.alerts.runbookUrlPrefix=https://runbooks.example.com/",
        ],
        added: &[
            "kind: PodMonitor",
            "release: prometheus",
            // Of the driver and of the controller. Without it Prometheus renames the labels of the subject.
            "honorLabels: true\n      relabelings:",
            "honorLabels: true\n\n",
            "kind: PrometheusRule",
            "name: drava-dashboard-cluster",
            "name: drava-dashboard-costs",
            // The prices are the values of its variables.
            r#"\"text\": \"3\",\n          \"value\": \"3\""#,
            r#"\"name\": \"gpu_hour\",\n        \"query\": \"3\""#,
            r#"\"name\": \"memory_gib_hour\",\n        \"query\": \"5\""#,
            "name: drava-dashboard-gpus",
            "name: drava-dashboard-scheduling",
            "name: drava-dashboard-workloads",
            "https://runbooks.example.com/",
        ],
        removed: &[],
    },
];

/// Values that the schema rejects, each with the path that the message names.
const REJECTED: [(&str, &str); 23] = [
    // To the programs it is the name of a module.
    ("log.level=verbose", "'/log/level'"),
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
    (
        "driver.resources.limits.memroy=1Gi",
        "'/driver/resources/limits'",
    ),
    (
        "prices.gpuHours=1",
        "'/prices': additional properties 'gpuHours'",
    ),
    ("driver.extraEnv[0].value=x", "'/driver/extraEnv/0'"),
    (
        "controller.extraArgs[0]=verbose",
        "'/controller/extraArgs/0'",
    ),
    (
        "driver.serviceAccount.name=x",
        "'/driver/serviceAccount': additional properties 'name'",
    ),
    ("controler.replicas=3", "additional properties 'controler'"),
    ("test.image=", "'/test/image'"),
    (
        "metrics.podMonitor.interval=often",
        "'/metrics/podMonitor/interval'",
    ),
];

/// A chart of `deploy/helm`.
struct Chart {
    /// Name, which is that of the release, too.
    name: &'static str,
    namespace: &'static str,
    /// Rendering of the default values below `deploy/kustomize`.
    kustomize: &'static str,
    effects: &'static [Effect],
    /// Values that the schema rejects, each with the path that the message names.
    rejected: &'static [(&'static str, &'static str)],
}

const DRAVA: Chart = Chart {
    name: "drava",
    namespace: "drava-system",
    kustomize: "drava.yaml",
    effects: &EFFECTS,
    rejected: &REJECTED,
};

/// Runs the stage.
pub(crate) fn check(log: &mut Log) -> Result<Outcome> {
    let helm = drava_cluster::helm().context("build Helm")?;
    let schemas = Schemas::of_kubernetes()?;
    let mut outcome = Outcome::default();
    for chart in [&DRAVA, &simulator::CHART] {
        outcome += chart.check(&helm, &schemas, log)?;
    }
    let registry = DRAVA.template(
        &helm,
        &["global.imageRegistry=registry.internal:5000/mirror"],
    );
    outcome += Outcome::of_check("registry", uses_registry(registry));
    outcome += Outcome::of_check("simulated GPUs", simulator::check_values(&helm));
    Ok(outcome)
}

impl Chart {
    fn check(&self, helm: &Path, schemas: &Schemas, log: &mut Log) -> Result<Outcome> {
        let mut lint = Command::new(helm);
        lint.args(["lint", "--strict"]).arg(self.directory());
        let mut outcome = log.check(lint)?;
        let default = render(self.template(helm, &[]))?;
        let name = format!("schemas of {}", self.name);
        outcome += Outcome::of_check(&name, schemas.check(&default));
        for effect in self.effects {
            let has_effect = render(self.template(helm, effect.values)).and_then(|text| {
                effect.check(&default, &text)?;
                schemas.check(&text)
            });
            outcome += Outcome::of_check(effect.name, has_effect);
        }
        // Hooks are Helm's: without them, kustomize applies the same objects.
        let mut kustomize = self.template(helm, &[]);
        kustomize.arg("--no-hooks");
        let file = workspace_root()
            .join("deploy/kustomize")
            .join(self.kustomize);
        let name = format!("kustomize-{}", self.name);
        outcome += compare(&name, &file, render(kustomize)?.as_bytes(), log)?;
        for (value, path) in self.rejected {
            outcome += Outcome::of_check(value, rejects(self.template(helm, &[value]), path));
        }
        Ok(outcome)
    }

    fn directory(&self) -> PathBuf {
        workspace_root().join("deploy/helm").join(self.name)
    }

    /// `helm template` with these values.
    fn template(&self, helm: &Path, values: &[&str]) -> Command {
        let mut template = Command::new(helm);
        template.args(["template", self.name]).arg(self.directory());
        template.args(["--namespace", self.namespace, "--kube-version", "1.37.1"]);
        template.args(values.iter().flat_map(|value| ["--set", value]));
        template
    }
}

impl Effect {
    /// Checks the rendering with its values against that of the default values.
    fn check(&self, default: &str, rendered: &str) -> Result<()> {
        for (wanted, present, absent) in [
            (self.added, rendered, default),
            (self.removed, default, rendered),
        ] {
            for part in wanted {
                ensure!(present.contains(part), "no rendering has {part}");
                ensure!(!absent.contains(part), "both renderings have {part}");
            }
        }
        Ok(())
    }
}

/// Returns what a successful rendering prints.
fn render(mut template: Command) -> Result<String> {
    let output = process::output(template.stdin(Stdio::null()), Limit::REQUEST)?;
    if !output.status.success() {
        bail!("render: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
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
fn uses_registry(template: Command) -> Result<()> {
    let text = render(template)?;
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
