//! Commands of the documentation, and how each of them is tested.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use drava_cluster::workspace_root;

/// How a command is tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// The test of the documentation runs it.
    Run,
    /// The test with this name does what the command does.
    Test(&'static str),
    /// The task of xtask with this file does what the command does, on every run of the tests.
    Harness(&'static str),
    /// The command does something to a machine that the tests do not have.
    Not(&'static str),
}

use Check::{Harness, Not, Run, Test};

/// The commands of README and guides. Comments are removed and continued lines are joined.
pub const COMMANDS: &[(&str, Check)] = &[
    ("cargo xtask demo", Harness("xtask/src/demo.rs")),
    // Output of the demo.
    ("kubectl get pods -o wide", Run),
    (
        "kubectl wait --for=condition=Ready pod/inference --timeout=120s",
        Run,
    ),
    ("kubectl exec inference -- nvidia-smi", Run),
    (
        "kubectl exec training -- nvidia-smi",
        Harness("xtask/src/demo.rs"),
    ),
    (
        "kubectl exec inference -- cuda-probe alloc --mib 7664",
        Harness("xtask/src/demo.rs"),
    ),
    (
        "kubectl exec inference -- cuda-probe alloc --mib 7665",
        Harness("xtask/src/demo.rs"),
    ),
    (
        "kubectl describe resourceclaim inference-gpu-2zsjb",
        Harness("xtask/src/demo.rs"),
    ),
    (
        "kubectl drava explain pod distributed",
        Harness("xtask/src/demo.rs"),
    ),
    ("cargo xtask test", Harness("xtask/src/test.rs")),
    ("cargo xtask gpu", Not("needs a real GPU")),
    (
        "cargo xtask image --profile release --out images",
        Harness("xtask/src/image.rs"),
    ),
    (
        "cargo xtask release --repository <address of the sources> --url <address of the folder with the files>",
        Not("builds all programs for a release, which takes long; unit tests compare its archives"),
    ),
    (
        "helm install gpu-simulator deploy/helm/gpu-simulator --namespace gpu-simulator --create-namespace --set image.registry=localhost,image.tag=dev",
        Test("node_gets_gpus_of_the_chart_and_keeps_nothing"),
    ),
    (
        "helm install drava deploy/helm/drava --namespace drava-system --create-namespace -f deploy/helm/gpu-simulator/drava.yaml --set image.registry=localhost,image.tag=dev",
        Test("node_gets_gpus_of_the_chart_and_keeps_nothing"),
    ),
    (
        "kubectl apply -f deploy/examples/quickstart",
        Test("quickstart_shares_a_gpu_and_queues_the_third_pod"),
    ),
    ("kubectl label node <node> gpu.drava.dev/enabled=true", Run),
    (
        "helm install drava deploy/helm/drava --namespace drava-system --create-namespace --set image.registry=<your registry> --set image.tag=<the tag that you pushed>",
        Harness("xtask/src/deploy.rs"),
    ),
    (
        "kubectl create namespace drava-system",
        Test("installs_from_private_registry_without_egress"),
    ),
    (
        "kubectl create secret docker-registry <secret> -n drava-system --docker-server=<your registry> --docker-username=<user> --docker-password=<password>",
        Test("installs_from_private_registry_without_egress"),
    ),
    (
        "helm install drava deploy/helm/drava --namespace drava-system -f images/values.yaml --set global.imageRegistry=<your registry> --set 'imagePullSecrets[0].name=<secret>'",
        Test("installs_from_private_registry_without_egress"),
    ),
    (
        "kubectl apply -k deploy/kustomize",
        Test("kustomize_applies_the_objects_of_the_chart"),
    ),
    (
        "kubectl -n drava-system rollout status daemonset/drava-dra-driver",
        Run,
    ),
    (
        "helm test drava --namespace drava-system",
        Test("upgrade_leaves_computing_program_alone"),
    ),
    ("kubectl drava doctor", Run),
    ("kubectl drava top", Run),
    (
        "kubectl drava top --watch",
        Test("explains_claims_and_shows_a_live_view"),
    ),
    ("kubectl drava explain pod <pod>", Run),
    ("kubectl drava simulate -f <manifest>", Run),
    (
        "kubectl -n drava-system port-forward <driver pod> 9395",
        Test("log_filter_is_set_over_a_forwarded_port"),
    ),
    (
        "curl -X PUT --data info,drava_dra_driver=debug localhost:9395/log-filter",
        Test("log_filter_is_set_over_a_forwarded_port"),
    ),
    ("kubectl drava gangs", Run),
    (
        "kubectl drava cost --prometheus monitoring/prometheus-operated:9090 --since 30d",
        Test("prometheus_has_metrics_and_fires_alerts"),
    ),
    ("kubectl drava recommend -n web", Run),
    (
        "kubectl drava recommend --prometheus monitoring/prometheus-operated:9090 --since 2w",
        Test("prometheus_has_metrics_and_fires_alerts"),
    ),
    (
        "kubectl drava resize trainer-0 --memory 12Gi -n research",
        Test("running_share_grows_and_gives_back"),
    ),
    (
        "kubectl drava suspend <pod>",
        Test("share_is_suspended_and_resumed"),
    ),
    (
        "kubectl drava suspend trainer-0 -n research",
        Test("share_is_suspended_and_resumed"),
    ),
    (
        "kubectl drava resume trainer-0 -n research",
        Test("share_is_suspended_and_resumed"),
    ),
    ("kubectl drava quota", Run),
    (
        "kubectl drava console",
        Not("serves until it is ended; the tests of the console run it"),
    ),
    ("kubectl drava migrate -f <manifests>", Run),
    (
        "kubectl drava migrate -f jobs.yaml -f quota.yaml > new.yaml",
        Run,
    ),
    ("kubectl apply --dry-run=server -f new.yaml", Run),
    (
        "kubectl get deployments,cronjobs -n research -o yaml | kubectl drava migrate -f - > new.yaml",
        Run,
    ),
    (
        "kubectl get configmaps -n kube-system -o yaml | kubectl drava migrate -f - --values values.yaml > profiles.yaml",
        Test("migrated_configs_are_accepted"),
    ),
    ("kubectl describe resourceclaim <claim>", Run),
    ("kubectl describe pod <pod>", Run),
    (
        "helm upgrade drava deploy/helm/drava -n drava-system --reset-then-reuse-values --set compatibility.enabled=true",
        Test("upgrade_leaves_computing_program_alone"),
    ),
    (
        "kubectl label namespace <namespace> gpu.drava.dev/compatibility=true",
        Run,
    ),
    (
        "helm upgrade drava deploy/helm/drava -n drava-system --reset-then-reuse-values --set driver.delivery=shim",
        Test("stubs_limit_shares_without_preload"),
    ),
    (
        "kubectl drava drain <node>",
        Test("drain_evicts_and_uncordon_allows_again"),
    ),
    (
        "kubectl annotate node <node> gpu.drava.dev/release-nvml=true",
        Run,
    ),
    (
        "kubectl annotate node <node> gpu.drava.dev/release-nvml-",
        Run,
    ),
    ("kubectl drava uncordon <node>", Run),
    (
        "helm upgrade drava deploy/helm/drava --namespace drava-system --reset-then-reuse-values --set image.tag=<new tag>",
        Test("upgrade_leaves_computing_program_alone"),
    ),
    (
        "helm uninstall drava --namespace drava-system",
        Test("uninstall_waits_for_claims_and_leaves_nothing"),
    ),
    (
        "kubectl delete crd gpunodeprofiles.gpu.drava.dev gpupolicies.gpu.drava.dev gpuquotas.gpu.drava.dev gpucontrollerleaders.gpu.drava.dev gpusharerecommendations.gpu.drava.dev placementexplanations.gpu.drava.dev",
        Test("uninstall_waits_for_claims_and_leaves_nothing"),
    ),
    ("kubectl get gpunodeprofiles", Run),
    (
        "kubectl describe gpunodeprofile notebooks",
        Test("profile_changes_under_running_pod"),
    ),
    ("kubectl get gpuquotas", Run),
    (
        "kubectl get pods -A --field-selector status.phase=Pending",
        Run,
    ),
    (
        r#"kubectl patch pod <pod> -n <namespace> -p '{"spec":{"schedulingGates":[{"$patch":"delete","name":"gpu.drava.dev/allocation"}]}}'"#,
        Run,
    ),
    (
        "cargo build -p libvgpu --profile preload",
        Harness("tests/cluster/src/cargo.rs"),
    ),
    (
        "LD_PRELOAD=$PWD/target/preload/libvgpu.so DRAVA_MEMORY_LIMIT=4Gi DRAVA_CORES=30 python train.py",
        Not("needs a real GPU; cargo xtask gpu runs programs so"),
    ),
];

/// Programs that begin a command.
const PROGRAMS: [&str; 6] = [
    "kubectl ",
    "helm ",
    "cargo ",
    "LD_PRELOAD=",
    "nvidia-smi ",
    "curl ",
];

/// A command with the file that has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Documented {
    /// Path below the root of the repository.
    pub file: PathBuf,
    /// The command, without comment.
    pub command: String,
}

/// Returns the commands of README, of the guides, of the reference and of libvgpu.
///
/// # Errors
/// When a file cannot be read.
pub fn commands() -> Result<Vec<Documented>> {
    let mut files = vec![
        PathBuf::from("README.md"),
        PathBuf::from("libvgpu/README.md"),
    ];
    for directory in ["docs", "docs/reference"] {
        let directory = workspace_root().join(directory);
        for entry in fs::read_dir(&directory).context("read docs")? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "md") {
                files.push(path.strip_prefix(workspace_root())?.to_owned());
            }
        }
    }
    files.sort();
    let mut found = Vec::new();
    for file in files {
        let text = read(&file)?;
        found.extend(blocks(&text).into_iter().map(|command| Documented {
            file: file.clone(),
            command,
        }));
    }
    Ok(found)
}

/// Returns the examples whose manifests the README of the example applies.
///
/// # Errors
/// When a file cannot be read.
pub fn applied_examples() -> Result<Vec<(String, Vec<String>)>> {
    let directory = workspace_root().join("deploy/examples");
    let mut examples = Vec::new();
    for entry in fs::read_dir(&directory).context("read deploy/examples")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let text = read(&Path::new("deploy/examples").join(&name).join("README.md"))?;
        let applied = blocks(&text).into_iter().filter_map(|command| {
            let manifest = command.strip_prefix("kubectl apply ")?.rsplit(' ').next()?;
            Some(manifest.to_owned())
        });
        examples.push((name, applied.collect()));
    }
    examples.sort();
    Ok(examples)
}

fn read(file: &Path) -> Result<String> {
    let path = workspace_root().join(file);
    fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}

/// Returns the commands of indented blocks, and of blocks with the languages `sh` and `console` or without a language.
fn blocks(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut fence: Option<bool> = None;
    let (mut was_blank, mut is_block) = (true, false);
    for line in text.lines() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            fence = match fence {
                Some(_) => None,
                None => Some(matches!(language, "" | "sh" | "console")),
            };
            is_block = false;
            continue;
        }
        let is_indented = line.starts_with("    ") && !line.trim().is_empty();
        is_block = is_indented && (was_blank || is_block);
        was_blank = line.trim().is_empty() || line.starts_with('#');
        match fence {
            Some(true) => lines.push(line.trim_start_matches("$ ").trim()),
            None if is_block => lines.push(line.trim()),
            Some(false) | None => {}
        }
    }
    joined(&lines)
        .into_iter()
        .filter(|line| PROGRAMS.iter().any(|program| line.starts_with(program)))
        .collect()
}

/// Joins continued lines, and removes comments.
fn joined(lines: &[&str]) -> Vec<String> {
    let mut joined: Vec<String> = Vec::new();
    let mut is_continued = false;
    for line in lines {
        let line = line.split(" #").next().unwrap_or_default().trim_end();
        let (line, continues) = match line.strip_suffix('\\') {
            Some(line) => (line.trim_end(), true),
            None => (line, false),
        };
        match joined.last_mut() {
            Some(last) if is_continued => {
                last.push(' ');
                last.push_str(line);
            }
            _ => joined.push(line.to_owned()),
        }
        is_continued = continues;
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_commands_of_blocks() {
        let text = "Text:\n\n    kubectl get pods   # comment\n    helm install a \\\n        --set b=c\n\n- item\n    kubectl no block\n\n\
                    ```yaml\nkubectl: no\n```\n```sh\ncargo build\n```\n```\n$ kubectl version\nkubectl\n```\n";
        assert_eq!(
            blocks(text),
            [
                "kubectl get pods",
                "helm install a --set b=c",
                "cargo build",
                "kubectl version"
            ]
        );
    }
}
