//! The commands of README and guides: each runs here, or is tested elsewhere by name.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use drava_cluster::process::{self, Limit};
use drava_cluster::workspace_root;
use drava_e2e::TestCluster;
use drava_e2e::docs::{COMMANDS, Check, applied_examples, commands};
use drava_e2e::manifest::pod_with_share;

/// Returns the sources of all tests.
fn sources_of_tests() -> Result<String> {
    let mut text = String::new();
    let mut directories = ["tests/e2e/tests", "tests/cluster/tests"]
        .map(|directory| workspace_root().join(directory))
        .to_vec();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.is_dir() {
                directories.push(path);
            } else {
                text.push_str(&fs::read_to_string(path)?);
            }
        }
    }
    Ok(text)
}

#[test]
fn every_command_of_documentation_is_tested() -> Result<()> {
    let documented: BTreeSet<String> = commands()?.into_iter().map(|one| one.command).collect();
    let known: BTreeSet<String> = COMMANDS
        .iter()
        .map(|(command, _)| (*command).to_owned())
        .collect();
    let untested: Vec<&String> = documented.difference(&known).collect();
    ensure!(
        untested.is_empty(),
        "no test runs these commands of the documentation: {untested:#?}"
    );
    let stale: Vec<&String> = known.difference(&documented).collect();
    ensure!(
        stale.is_empty(),
        "the documentation has no such commands: {stale:#?}"
    );
    let sources = sources_of_tests()?;
    for (command, check) in COMMANDS {
        match check {
            Check::Run | Check::Not(_) => {}
            Check::Test(name) => ensure!(
                sources.contains(&format!("fn {name}()")),
                "{command}: no test {name}"
            ),
            Check::Harness(file) => ensure!(
                workspace_root().join(file).exists(),
                "{command}: no file {file}"
            ),
        }
    }
    Ok(())
}

#[test]
fn every_example_is_applied_by_a_test() -> Result<()> {
    let sources = sources_of_tests()?;
    for (example, manifests) in applied_examples()? {
        ensure!(
            manifests.contains(&format!("{example}.yaml")),
            "the README of {example} applies {manifests:?}"
        );
        for manifest in manifests {
            let path = workspace_root()
                .join("deploy/examples")
                .join(&example)
                .join(&manifest);
            ensure!(path.exists(), "{} does not exist", path.display());
        }
        ensure!(
            sources.contains(&format!("\"{example}\""))
                || sources.contains(&format!("examples/{example}/")),
            "no test applies example {example}"
        );
    }
    Ok(())
}

/// Directory with the programs of a user and files that commands of the documentation read.
struct Workplace {
    directory: PathBuf,
    path: String,
}

impl Workplace {
    fn new(cluster: &TestCluster, namespace: &str) -> Result<Self> {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("docs");
        let _ = fs::remove_dir_all(&directory);
        let programs = directory.join("bin");
        fs::create_dir_all(&programs)?;
        let kubernetes = cluster.kubernetes();
        for (name, command) in [
            ("kubectl", kubernetes.kubectl()),
            ("helm", kubernetes.helm()),
        ] {
            symlink(command.get_program(), programs.join(name))?;
        }
        symlink(cluster.plugin()?, programs.join("kubectl-drava"))?;
        symlink(workspace_root().join("deploy"), directory.join("deploy"))?;
        fs::copy(kubernetes.kubeconfig(), directory.join("kubeconfig"))?;
        let path = format!(
            "{}:{}",
            programs.display(),
            std::env::var("PATH").unwrap_or_default()
        );
        let workplace = Self { directory, path };
        workplace.run(&format!(
            "kubectl config set-context --current --namespace {namespace}"
        ))?;
        Ok(workplace)
    }

    fn run(&self, command: &str) -> Result<String> {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", command])
            .current_dir(&self.directory)
            .env("PATH", &self.path)
            .env("KUBECONFIG", self.directory.join("kubeconfig"))
            .stdin(std::process::Stdio::null());
        let output = process::output(&mut shell, Limit::REQUEST)?;
        let text = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        ensure!(output.status.success(), "{command}: {text}");
        Ok(text)
    }
}

/// Manifests of another system, which the commands of `migrate` read.
const JOBS: &str = "
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  template:
    spec:
      restartPolicy: Never
      containers:
      - {name: app, image: localhost/drava-demo:dev, resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 1000}}}
";
const QUOTA: &str = "
apiVersion: v1
kind: ResourceQuota
metadata: {name: gpus}
spec: {hard: {requests.nvidia.com/gpu: 4}}
";

#[test]
fn commands_of_documentation_run() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("docs")?;
    let research = cluster.namespace("docs-research")?;
    tenant.apply(&pod_with_share(
        "inference",
        "vgpu.drava.dev",
        "{memory: 1Gi}",
    ))?;
    tenant.running("inference")?;
    let claim = tenant.claim_of("inference")?;
    let workplace = Workplace::new(&cluster, tenant.name())?;
    let manifest = pod_with_share("other", "vgpu.drava.dev", "{memory: 1Gi}");
    for (name, text) in [
        ("jobs.yaml", JOBS),
        ("quota.yaml", QUOTA),
        ("pod.yaml", &manifest),
    ] {
        fs::write(workplace.directory.join(name), text)?;
    }
    let has_taint_rules =
        cluster.has_taint_rules("cordon, drain and uncordon of the documentation")?;
    let needs_taint_rules = |command: &str| {
        ["cordon", "drain", "uncordon"]
            .iter()
            .any(|verb| command.contains(&format!("kubectl drava {verb}")))
    };
    let mut count = 0;
    for (command, check) in COMMANDS {
        if *check != Check::Run || !has_taint_rules && needs_taint_rules(command) {
            continue;
        }
        let command = command
            .replace("<node>", "node-0")
            .replace("<pod>", "inference")
            .replace("<claim>", &claim)
            .replace("<namespace>", tenant.name())
            .replace("<manifest>", "pod.yaml")
            .replace("<manifests>", "jobs.yaml")
            .replace("-n research ", &format!("-n {} ", research.name()));
        ensure!(!command.contains('<'), "{command}: a placeholder is left");
        workplace
            .run(&command)
            .context("a command of the documentation failed")?;
        count += 1;
    }
    ensure!(count > 15, "{count} commands ran");
    // NVML was released and opened again.
    cluster.drava_ready()
}

#[test]
fn notes_of_the_chart_run() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let workplace = Workplace::new(&cluster, "default")?;
    let notes = workplace.run("helm get notes drava -n drava-system")?;
    let commands: Vec<&str> = notes
        .lines()
        .filter_map(|line| line.strip_prefix("  "))
        .filter(|line| {
            ["kubectl ", "helm ", "sed "]
                .iter()
                .any(|program| line.starts_with(program))
        })
        .collect();
    ensure!(commands.len() == 7, "{notes}");
    // The tests of quickstart, doctor and console run them, with the image of the demo.
    let elsewhere = ["sed ", "kubectl drava doctor", "kubectl drava console"];
    for command in commands {
        let command = command.split(" #").next().unwrap_or_default().trim_end();
        if !elsewhere.iter().any(|other| command.starts_with(other)) {
            workplace.run(&command.replace("<node>", "node-0"))?;
        }
    }
    Ok(())
}
