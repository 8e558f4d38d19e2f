//! `cargo xtask release`: the files of a release in one folder, with their checksums and their provenance.
//!
//! Two runs on one machine with equal sources write equal files: archives have the time of the commit (or `SOURCE_DATE_EPOCH`),
//! sorted entries and no owner.

mod archive;
mod krew;
mod provenance;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use drava_cluster::process::{self, Limit};
use drava_cluster::{Profile, Progress, build_workspace, target_dir, workspace_root};
use sha2::{Digest as _, Sha256};

use crate::image;
use archive::{Archive, Entry};
use krew::Plugin;
use provenance::Source;

/// Command line of `cargo xtask release`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Address of the repository with the sources.
    #[arg(long, value_name = "URL")]
    repository: String,
    /// Address of the folder in which the files will be published; the krew manifest names it.
    #[arg(long)]
    url: String,
    /// Empty or absent directory for the files [default: target/release-files].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Key with which cosign signs the checksums and the provenance.
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Cargo profile of the programs; another than `release` is for trials.
    #[arg(long, default_value_t = Profile::Release)]
    profile: Profile,
    /// Release a work tree with changes, for trials: the provenance names the commit without them.
    #[arg(long)]
    allow_changes: bool,
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
const CHARTS: [&str; 2] = ["drava", image::SIMULATOR];
const PLUGIN: &str = "kubectl-drava";
const SUMS: &str = "SHA256SUMS";
const PROVENANCE: &str = "provenance.intoto.json";

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    let architecture = architecture(env::consts::ARCH)?;
    if args.key.is_some() {
        check_cosign()?;
    }
    check_versions()?;
    let source = source(args)?;
    let time_s = match env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => text.parse().context("read SOURCE_DATE_EPOCH")?,
        Err(_) => source.time_s,
    };
    let out = args
        .out
        .clone()
        .unwrap_or_else(|| target_dir().join("release-files"));
    fs::create_dir_all(&out).with_context(|| format!("create {}", out.display()))?;
    let is_empty = fs::read_dir(&out)?.next().is_none();
    ensure!(
        is_empty,
        "{} has files; use an empty directory",
        out.display()
    );

    let programs = build_workspace(args.profile)?;
    let suffix = format!("{VERSION}-linux-{architecture}");
    for written in image::write(&programs, args.profile, &out, &image::RELEASED, VERSION)? {
        let name = written.file_stem().context("an archive without a name")?;
        let name = format!("{}-{suffix}.oci.tar", name.to_string_lossy());
        fs::rename(&written, out.join(&name)).with_context(|| format!("write {name}"))?;
    }
    let mut images = image::PACKAGES.to_vec();
    images.push(image::SIMULATOR_PACKAGES);
    image::write_bills(&images, "container", &out)?;
    image::write_bills(&[(PLUGIN, &[PLUGIN])], "application", &out)?;

    let step = Progress::step("Write the plugin and the charts");
    let license = Entry::read(&workspace_root().join("LICENSE"), "LICENSE", 0o644)?;
    let program = Entry::read(programs.file(PLUGIN)?, PLUGIN, 0o755)?;
    let name = format!("{PLUGIN}-{suffix}.tar.gz");
    let bytes = Archive::new(time_s, vec![program, license]).gzip()?;
    let plugin = Plugin {
        version: VERSION,
        homepage: &args.repository,
        uri: &format!("{}/{name}", args.url.trim_end_matches('/')),
        sha256: &sha256(&bytes),
        architecture,
    };
    write(&out, &name, &bytes)?;
    write(&out, "drava.yaml", plugin.manifest().as_bytes())?;
    let helm = drava_cluster::helm()?;
    for chart in CHARTS {
        let directory = workspace_root().join("deploy/helm").join(chart);
        let name = format!("{chart}-{VERSION}.tgz");
        let entries = archive::entries(&directory, chart)?;
        write(&out, &name, &Archive::new(time_s, entries).gzip()?)?;
        check_chart(&helm, &out.join(&name))?;
    }
    step.done();

    let statement = provenance::statement(&source, args.profile.name(), architecture, &sums(&out)?);
    let statement = serde_json::to_string_pretty(&statement)? + "\n";
    write(&out, PROVENANCE, statement.as_bytes())?;
    write(&out, SUMS, list(&sums(&out)?).as_bytes())?;
    if let Some(key) = &args.key {
        for file in [SUMS, PROVENANCE] {
            sign(key, &out.join(file))?;
        }
    }
    for (name, sum) in sums(&out)? {
        println!("{sum}  {name}");
    }
    eprintln!(
        "{}: for linux/{architecture} only. Images have the C library of the build machine, so a release for another architecture is \
         built on a machine of it",
        out.display()
    );
    Ok(())
}

/// Name of this machine's architecture in images and in krew.
fn architecture(name: &str) -> Result<&'static str> {
    match name {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        other => bail!("drava has no release for {other}"),
    }
}

/// Charts and programs have one version: a chart selects the images of its own.
fn check_versions() -> Result<()> {
    for chart in CHARTS {
        let file = workspace_root().join(format!("deploy/helm/{chart}/Chart.yaml"));
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        let chart: serde_json::Value = serde_saphyr::from_str(&text)?;
        for field in ["version", "appVersion"] {
            ensure!(
                chart[field] == VERSION,
                "{}: {field} is {}, and that of Cargo.toml {VERSION}",
                file.display(),
                chart[field]
            );
        }
    }
    Ok(())
}

/// Reads the sources of the release.
fn source(args: &Args) -> Result<Source> {
    let changes = git(&["status", "--porcelain"])?;
    ensure!(
        changes.is_empty() || args.allow_changes,
        "the work tree has changes, which no commit has: commit them, or use --allow-changes for a trial"
    );
    let lock = workspace_root().join("Cargo.lock");
    let lock = fs::read(&lock).with_context(|| format!("read {}", lock.display()))?;
    Ok(Source {
        repository: args.repository.clone(),
        commit: git(&["rev-parse", "HEAD"])?,
        time_s: git(&["log", "-1", "--format=%ct"])?.parse()?,
        lock_sha256: sha256(&lock),
        rustc: stdout(Command::new("rustc").arg("--version"))?,
    })
}

fn git(arguments: &[&str]) -> Result<String> {
    stdout(Command::new("git").args(arguments))
}

/// Returns what a program prints about the workspace.
fn stdout(command: &mut Command) -> Result<String> {
    command.current_dir(workspace_root()).stdin(Stdio::null());
    let output = process::output(command, Limit::REQUEST)?;
    ensure!(
        output.status.success(),
        "{} failed: {}",
        command.get_program().display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Checks that Helm reads an archive of a chart.
fn check_chart(helm: &Path, file: &Path) -> Result<()> {
    stdout(Command::new(helm).args(["lint", "--strict"]).arg(file)).map(drop)
}

fn check_cosign() -> Result<()> {
    let found = stdout(Command::new("cosign").arg("version"));
    found.map(drop).context(
        "--key needs cosign, which is not installed or does not start: https://docs.sigstore.dev/cosign/system_config/installation",
    )
}

/// Signs a file; the signature is in a file beside it.
fn sign(key: &str, file: &Path) -> Result<()> {
    let bundle = format!("{}.sigstore.json", file.display());
    let mut cosign = Command::new("cosign");
    cosign
        .args(["sign-blob", "--yes", "--key", key, "--bundle", &bundle])
        .arg(file);
    stdout(&mut cosign).map(drop)
}

fn write(out: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    fs::write(out.join(name), bytes).with_context(|| format!("write {name}"))
}

fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the checksums of the files of a directory.
fn sums(directory: &Path) -> Result<BTreeMap<String, String>> {
    let mut sums = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let bytes = fs::read(entry.path()).with_context(|| format!("read {name}"))?;
        sums.insert(name, sha256(&bytes));
    }
    Ok(sums)
}

/// Formats checksums as `sha256sum --check` reads them.
fn list(sums: &BTreeMap<String, String>) -> String {
    let line = |(name, sum): (&String, &String)| format!("{sum}  {name}\n");
    sums.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sha256sum_accepts_list() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), "b.tgz", b"b").unwrap();
        write(directory.path(), "a.json", b"a").unwrap();
        let text = list(&sums(directory.path()).unwrap());
        assert!(
            text.contains("  a.json\n") && text.ends_with("  b.tgz\n"),
            "{text}"
        );
        let check = |text: &str| {
            write(directory.path(), SUMS, text.as_bytes()).unwrap();
            let mut sha256sum = Command::new("sha256sum");
            sha256sum.args(["--check", "--strict", SUMS]);
            sha256sum
                .current_dir(directory.path())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            sha256sum.status().unwrap().success()
        };
        assert!(check(&text));
        assert!(!check(&text.replace(&sha256(b"a"), &sha256(b"b"))));
    }

    #[test]
    fn charts_have_version_of_programs() {
        check_versions().unwrap();
    }
}
