//! Installs drava on a cluster as users do: images, then the Helm chart. For the demo and the end-to-end tests.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use drava_cluster::process::{self, Limit};
use drava_cluster::{Cluster, Machine, Options, Profile, Progress, workspace_root};
use sha2::{Digest as _, Sha256};

use crate::image;

/// Driver root of the simulated machine on the node.
const SIMULATED_DRIVER_ROOT: &str = "/opt/drava-sim";

/// Images and programs, built by cargo.
pub(crate) struct Artifacts {
    images: Vec<PathBuf>,
    /// Directory of the workspace's programs.
    pub(crate) programs: PathBuf,
}

/// Builds the images and the programs of the node.
pub(crate) fn build() -> Result<Artifacts> {
    let programs = drava_cluster::build_workspace(Profile::Dev)?;
    let node = programs.file("drava-node")?;
    let directory = node.parent().context("drava-node has no directory")?;
    let directory_of_images = drava_cluster::target_dir().join("images");
    let mut images = image::write(
        &programs,
        Profile::Dev,
        &directory_of_images,
        &image::ALL,
        "dev",
    )?;
    // The nodes of the tests have their own simulated machine.
    images.retain(|archive| {
        archive
            .file_stem()
            .is_none_or(|name| name != image::SIMULATOR)
    });
    Ok(Artifacts {
        images,
        programs: directory.to_owned(),
    })
}

/// Starts a cluster, loads the images and installs drava. Returns when the GPUs are published.
pub(crate) fn start(options: Options, artifacts: &Artifacts) -> Result<Cluster> {
    let nodes = options.nodes.iter();
    let with_gpus = nodes.filter(|node| **node != Machine::None).count();
    let cluster = start_cluster(options, artifacts)?;
    install(&cluster, &artifacts.images)?;
    let step = Progress::step("Wait until the GPUs are published");
    let devices = wait_published(&cluster, with_gpus, &step)?;
    step.done_with(&devices);
    Ok(cluster)
}

/// Starts a cluster and loads the images.
pub(crate) fn start_cluster(options: Options, artifacts: &Artifacts) -> Result<Cluster> {
    let cluster = drava_cluster::up(&Options {
        programs: Some(artifacts.programs.clone()),
        ..options
    })?;
    let step = Progress::step("Load the images");
    for archive in &artifacts.images {
        step.note(archive.display().to_string());
        cluster.load_image(archive)?;
    }
    step.done();
    Ok(cluster)
}

fn install(cluster: &Cluster, images: &[PathBuf]) -> Result<()> {
    let step = Progress::step("Install drava with its Helm chart");
    let build = digest(images)?;
    let mut helm = cluster.helm();
    helm.args(["upgrade", "--install", "drava"])
        .arg(workspace_root().join("deploy/helm/drava"));
    helm.args([
        "--namespace",
        "drava-system",
        "--create-namespace",
        "--wait",
        "--timeout",
        "3m",
    ]);
    for value in [
        "image.registry=localhost",
        "image.tag=dev",
        "log.level=info",
        "compatibility.enabled=true",
        "test.image=localhost/drava-demo:dev",
    ] {
        helm.args(["--set", value]);
    }
    helm.args([
        "--set",
        &format!("driver.driverRoot={SIMULATED_DRIVER_ROOT}"),
    ]);
    // The tag is always `dev`; this annotation makes Kubernetes start new images.
    for component in ["driver", "controller"] {
        helm.args([
            "--set-string",
            &format!("{component}.podAnnotations.gpu\\.drava\\.dev/build={build}"),
        ]);
    }
    let output = process::output(helm.stdin(Stdio::null()), Limit::REQUEST)?;
    if !output.status.success() {
        let pods = cluster
            .kubectl_output(["-n", "drava-system", "describe", "pods"])
            .unwrap_or_default();
        bail!("{}\n{pods}", String::from_utf8_lossy(&output.stderr).trim());
    }
    step.done();
    Ok(())
}

/// Digest of the images.
fn digest(images: &[PathBuf]) -> Result<String> {
    let mut digest = Sha256::new();
    for image in images {
        let mut file = File::open(image).with_context(|| format!("open {}", image.display()))?;
        std::io::copy(&mut file, &mut digest)
            .with_context(|| format!("read {}", image.display()))?;
    }
    Ok(digest
        .finalize()
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

/// Names of devices for one line: all of a few, else the first and the number of the others.
fn summary(names: &[&str]) -> String {
    let (shown, others) = names.split_at(names.len().min(6));
    match others.len() {
        0 => shown.join(" "),
        others => format!("{} and {others} more", shown.join(" ")),
    }
}

/// Waits until `nodes` nodes have published devices, and returns the devices' names.
fn wait_published(cluster: &Cluster, nodes: usize, step: &Progress) -> Result<String> {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let slices = cluster.kubectl_output([
            "get",
            "resourceslices",
            "-o",
            "jsonpath={range .items[*]}{.spec.nodeName}{range .spec.devices[*]} {.name}{end}{'\\n'}{end}",
        ])?;
        // A slice of counters has no devices.
        let slices = slices.lines().filter_map(|slice| slice.split_once(' '));
        let publishers: BTreeSet<_> = slices.clone().map(|(node, _)| node).collect();
        if publishers.len() >= nodes {
            let names: Vec<_> = slices.flat_map(|(_, devices)| devices.split(' ')).collect();
            return Ok(summary(&names));
        }
        ensure!(
            Instant::now() < deadline,
            "{} of {nodes} nodes have published devices; see `kubectl -n drava-system logs daemonset/drava-dra-driver`",
            publishers.len()
        );
        step.note(format!(
            "{} of {nodes} nodes have published",
            publishers.len()
        ));
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// The simulated machine of `--machine FILE`, or the default one.
pub(crate) fn machine(file: Option<&Path>) -> Machine {
    file.map_or_else(Machine::default, |file| Machine::File(file.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::summary;

    #[test]
    fn lists_a_few_devices_and_counts_the_others() {
        assert_eq!(summary(&["gpu-0", "gpu-0-vgpu"]), "gpu-0 gpu-0-vgpu");
        let many = ["a", "b", "c", "d", "e", "f", "g", "h"];
        assert_eq!(summary(&many), "a b c d e f and 2 more");
    }
}
