//! `cargo xtask screenshots`: the images of the console in `docs/images`, as its tests show it in headless Chromium.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use drava_cluster::prerequisite::Prerequisite;
use drava_cluster::process::{self, Limit};
use drava_cluster::workspace_root;

/// Screenshot of the tests, and image in `docs/images`.
const IMAGES: [(&str, &str); 9] = [
    ("gpus-1-light", "console-gpus"),
    ("gpus-500-dark", "console-map"),
    ("tenants-1-dark", "console-tenants"),
    ("queue-1-light", "console-queue"),
    ("quotas-1-dark", "console-quotas"),
    ("gpus-phone", "console-phone-gpus"),
    ("tenants-phone", "console-phone-tenants"),
    ("queue-phone", "console-phone-queue"),
    ("gpus-tenant", "console-tenant"),
];

/// Largest image, in bytes: every clone has all versions of it.
const MAX_BYTES: u64 = 200_000;

/// Command line of `cargo xtask screenshots`.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> Result<()> {
    ensure!(
        Prerequisite::Chromium.is_met(),
        "missing: {}",
        Prerequisite::Chromium
    );
    let mut command = drava_cluster::cargo_command();
    command.args("test -p kubectl-drava --test console shows_all_views".split(' '));
    let limit = Limit::total(Duration::from_secs(1800));
    let status = process::status(&mut command, limit)?;
    ensure!(status.success(), "the tests of the console fail");
    let root = workspace_root();
    for (screenshot, image) in IMAGES {
        let from = root.join(format!("target/console/{screenshot}.png"));
        let bytes = fs::read(&from).with_context(|| format!("cannot read {}", from.display()))?;
        ensure!(
            bytes.len() as u64 <= MAX_BYTES,
            "{} has {} bytes, more than {MAX_BYTES}",
            from.display(),
            bytes.len()
        );
        write(&root.join(format!("docs/images/{image}.png")), &bytes)?;
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{} ({} kB)", path.display(), bytes.len() / 1000);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_show_every_image() {
        let page = fs::read_to_string(workspace_root().join("docs/console.md")).unwrap();
        for (_, image) in IMAGES {
            assert!(page.contains(&format!("images/{image}.png")), "{image}");
        }
        let images = fs::read_dir(workspace_root().join("docs/images")).unwrap();
        for image in images {
            let image = image.unwrap();
            let name = image.file_name().into_string().unwrap();
            let is_written = IMAGES
                .iter()
                .any(|(_, written)| name == format!("{written}.png"));
            assert!(is_written, "{name} is no image of a command");
            assert!(image.metadata().unwrap().len() <= MAX_BYTES, "{name}");
        }
    }
}
