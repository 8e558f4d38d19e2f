//! The examples for Kueue and Volcano, checked against the custom resource definitions of these projects.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use drava_e2e::{TestCluster, go_module};

/// A definition that is deleted with the value.
struct Definition<'c> {
    cluster: &'c TestCluster,
    file: String,
}

impl<'c> Definition<'c> {
    fn install(cluster: &'c TestCluster, file: &Path) -> Result<Self> {
        let definition = Self {
            cluster,
            file: file.display().to_string(),
        };
        let file = ["-f", &definition.file];
        // The annotation of client-side apply would be too long.
        cluster.kubectl(["apply", "--server-side"].iter().chain(&file))?;
        cluster.wait_for_definition(&file)?;
        Ok(definition)
    }
}

impl Drop for Definition<'_> {
    fn drop(&mut self) {
        let delete = [
            "delete",
            "--ignore-not-found",
            "--timeout=60s",
            "-f",
            &self.file,
        ];
        if let Err(error) = self.cluster.kubectl(delete) {
            eprintln!("cannot delete {}: {error:#}", self.file);
        }
    }
}

/// Checks that the API server accepts all objects of the example, with the definitions in these files of a module.
fn check(name: &str, (module, sum): (&str, &str), files: &[&str], objects: &[&str]) -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace(name)?;
    let sources = go_module(module, sum)?;
    let _installed = files
        .iter()
        .map(|file| Definition::install(&cluster, &sources.join(file)))
        .collect::<Result<Vec<_>>>()?;
    let example = format!(
        "{}/../../deploy/examples/{name}/{name}.yaml",
        env!("CARGO_MANIFEST_DIR")
    );
    let create = ["create", "--dry-run=server", "-o", "name", "-f", &example];
    let created = tenant.kubectl(&create)?;
    for object in objects {
        ensure!(created.contains(object), "no {object} in {created}");
    }
    // The definitions do reject what they do not know.
    let broken =
        std::fs::read_to_string(&example)?.replacen("spec:\n", "spec:\n  unknownField: 1\n", 1);
    let rejection = tenant.dry_run(&broken).err().context("accepted")?;
    ensure!(
        format!("{rejection:#}").contains("unknownField"),
        "{rejection:#}"
    );
    Ok(())
}

#[test]
fn kueue_accepts_manifests_of_its_example() -> Result<()> {
    check(
        "kueue",
        (
            "sigs.k8s.io/kueue@v0.19.2",
            "h1:mPNzr37u0nwI7ikST5QQl5gg6EgtYOAvC9ZbTgywdN8=",
        ),
        &[
            "config/components/crd/bases/kueue.x-k8s.io_clusterqueues.yaml",
            "config/components/crd/bases/kueue.x-k8s.io_localqueues.yaml",
            "config/components/crd/bases/kueue.x-k8s.io_resourceflavors.yaml",
        ],
        &[
            "resourceflavor",
            "clusterqueue",
            "localqueue",
            "job.batch/trainer",
        ],
    )
}

#[test]
fn volcano_accepts_manifests_of_its_example() -> Result<()> {
    check(
        "volcano",
        (
            "volcano.sh/volcano@v1.15.1",
            "h1:M0iGzhy1dvod2GFy1QiyWdv1jmmNfHW4+2WoRU7CIAk=",
        ),
        &[
            "config/crd/volcano/bases/scheduling.volcano.sh_queues.yaml",
            "config/crd/volcano/bases/batch.volcano.sh_jobs.yaml",
        ],
        &[
            "queue.scheduling.volcano.sh/research",
            "job.batch.volcano.sh/training",
        ],
    )
}
