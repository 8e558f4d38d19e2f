//! Builds the cluster's Go programs from the modules pinned in `go/`, once per set of pins.
//!
//! A module's programs lie in `<cache>/go/<module>-<hash>`; the hash covers the pins and all other inputs of the
//! build. The cache is `$XDG_CACHE_HOME/drava` or `~/.cache/drava`, and can be removed at any time.

mod module;

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;

use crate::process::{self, Limit, Stream};
use crate::progress::Progress;
use crate::version::Kubernetes;
use module::Module;

/// Directories of the programs, one per module.
#[derive(Clone, Debug)]
pub(crate) struct Tools {
    /// kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kubectl.
    pub(crate) kubernetes: PathBuf,
    /// etcd.
    pub(crate) etcd: PathBuf,
    /// containerd, containerd-shim-runc-v2, ctr.
    pub(crate) containerd: PathBuf,
    /// bridge, host-local, loopback.
    pub(crate) cni: PathBuf,
    /// runc.
    pub(crate) runc: PathBuf,
    /// Whether runc can install seccomp filters.
    pub(crate) seccomp: bool,
    /// helm.
    pub(crate) helm: PathBuf,
    /// pause.
    pub(crate) pause: PathBuf,
}

impl Tools {
    /// Directories and their names in the node.
    pub(crate) fn directories(&self) -> [(&'static str, &Path); 5] {
        [
            ("kubernetes", &self.kubernetes),
            ("etcd", &self.etcd),
            ("containerd", &self.containerd),
            ("cni", &self.cni),
            ("runc", &self.runc),
        ]
    }
}

/// Builds missing programs.
pub(crate) fn build(kubernetes: Kubernetes) -> Result<Tools> {
    let cache = cache_dir()?;
    let seccomp = has_libseccomp();
    let build = |module: &Module| build_module(module, &cache);
    Ok(Tools {
        etcd: build(&module::etcd())?,
        containerd: build(&module::containerd()?)?,
        cni: build(&module::cni())?,
        runc: build(&module::runc(seccomp))?,
        seccomp,
        pause: build(&module::pause())?,
        kubernetes: build(&module::kubernetes(kubernetes))?,
        helm: build(&module::helm()?)?,
    })
}

/// Builds the programs of a cluster of this release that the cache lacks.
///
/// # Errors
/// Fails when a module cannot be fetched or compiled.
pub fn build_tools(kubernetes: Kubernetes) -> Result<()> {
    build(kubernetes).map(drop)
}

/// Builds Helm if the cache lacks it, for uses without a cluster.
pub fn helm() -> Result<PathBuf> {
    Ok(build_module(&module::helm()?, &cache_dir()?)?.join("helm"))
}

/// Returns the source of the newest Kubernetes, which has the schemas of its API, from the module cache; downloads it if the
/// cache lacks it.
///
/// # Errors
/// When the module cannot be fetched.
pub fn kubernetes_source() -> Result<PathBuf> {
    let mut command = Command::new("go");
    command
        .args(["mod", "download", "-json", "k8s.io/kubernetes"])
        .current_dir(module::kubernetes(Kubernetes::default()).dir())
        .env("GOWORK", "off")
        .env("GOFLAGS", "-mod=readonly")
        .stdin(Stdio::null());
    let output = process::output(&mut command, Limit::BUILD)?;
    let module: Value = serde_json::from_slice(&output.stdout).with_context(|| {
        let message = String::from_utf8_lossy(&output.stderr);
        format!("download k8s.io/kubernetes: {}", message.trim())
    })?;
    let directory = module["Dir"].as_str().with_context(|| {
        let message = module["Error"].as_str().unwrap_or("no directory");
        format!("download k8s.io/kubernetes: {message}")
    })?;
    Ok(directory.into())
}

/// Builds promtool, which checks and tests alerts, if the cache lacks it.
///
/// # Errors
/// When the module cannot be fetched or compiled.
pub fn promtool() -> Result<PathBuf> {
    Ok(build_module(&module::promtool(), &cache_dir()?)?.join("promtool"))
}

/// Builds the Prometheus server if the cache lacks it.
///
/// # Errors
/// When the module cannot be fetched or compiled.
pub fn prometheus() -> Result<PathBuf> {
    Ok(build_module(&module::prometheus(), &cache_dir()?)?.join("prometheus"))
}

/// Builds Kueue's manager if the cache lacks it.
///
/// # Errors
/// When the module cannot be fetched or compiled.
pub fn kueue() -> Result<PathBuf> {
    Ok(build_module(&module::kueue(), &cache_dir()?)?.join("kueue"))
}

/// Returns the program of the Go module in `directory`, for this release; builds it if the cache lacks it. The newest
/// release is pinned by `go.mod`, others by `kubernetes-MINOR.mod`.
///
/// # Errors
/// When the module cannot be fetched or compiled.
pub fn build_program(
    directory: &Path,
    program: &'static str,
    release: Kubernetes,
) -> Result<PathBuf> {
    let pins = match release {
        Kubernetes::V1_36 => "kubernetes-1.36.mod",
        Kubernetes::V1_37 => "go.mod",
    };
    let module = module::program(directory, program, pins);
    Ok(build_module(&module, &cache_dir()?)?.join(program))
}

/// Builds one module into the cache and returns the directory of its programs.
fn build_module(module: &Module, cache: &Path) -> Result<PathBuf> {
    let name = format!("{}-{}", module.folder, module.key()?);
    let built = cache.join("go").join(&name);
    if built.is_dir() {
        return Ok(built);
    }
    fs::create_dir_all(cache.join("go"))
        .with_context(|| format!("create {}", cache.join("go").display()))?;
    let step = Progress::step(format!("Build {}", module.programs().join(", ")));
    let lock = File::create(cache.join("go").join(format!("{name}.lock")))
        .context("open the build's lock")?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        step.note("waiting for another command that builds the module");
        flock(&lock, FlockOperation::LockExclusive).context("wait for the build's lock")?;
    }
    if built.is_dir() {
        step.done_with("built by another command");
        return Ok(built);
    }
    // Files of a killed build are overwritten; the rename publishes the result atomically.
    let scratch = cache.join("go").join(format!("{name}.unfinished"));
    let _ = fs::remove_dir_all(&scratch);
    fs::create_dir(&scratch).with_context(|| format!("create {}", scratch.display()))?;
    compile(module, &scratch, &step)?;
    fs::rename(&scratch, &built)
        .with_context(|| format!("rename {} to {}", scratch.display(), built.display()))?;
    let _ = fs::remove_file(cache.join("go").join(format!("{name}.lock")));
    step.done();
    Ok(built)
}

fn compile(module: &Module, into: &Path, step: &Progress) -> Result<()> {
    let mut command = Command::new("go");
    command
        .arg("build")
        .arg("-v")
        .args(module.flags())
        .arg("-o");
    command.arg(match module.program {
        Some(program) => into.join(program).into_os_string(),
        None => with_slash(into),
    });
    command.args(&module.packages).current_dir(module.dir());
    command
        .env("CGO_ENABLED", if module.cgo { "1" } else { "0" })
        .env("GOWORK", "off")
        .env("GOFLAGS", "-mod=readonly");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let mut lines = vec![];
    let mut packages = 0;
    let status = process::lines(&mut command, Stream::Stderr, Limit::BUILD, |line| {
        if !line.contains(' ') {
            packages += 1;
        }
        step.note(format!("{packages} packages compiled; {line}"));
        lines.push(line.to_owned());
        Ok(())
    })?;
    if !status.success() {
        // With -v, go prints the names of compiled packages; they do not belong into the error message.
        let messages: Vec<_> = lines
            .iter()
            .filter(|line| line.contains(' '))
            .map(String::as_str)
            .collect();
        bail!(
            "cannot build {}:\n{}",
            module.programs().join(", "),
            messages.join("\n")
        );
    }
    Ok(())
}

/// Appends a slash: `go build -o` writes several programs only into a path that is a directory.
fn with_slash(dir: &Path) -> OsString {
    let mut text = dir.as_os_str().to_owned();
    text.push("/");
    text
}

fn has_libseccomp() -> bool {
    let mut command = Command::new("pkg-config");
    command
        .args(["--exists", "libseccomp"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    process::status(&mut command, Limit::REQUEST).is_ok_and(|status| status.success())
}

/// Cache of built programs: `$XDG_CACHE_HOME/drava`, or `~/.cache/drava`.
pub fn cache_dir() -> Result<PathBuf> {
    cache_below(env::var_os("XDG_CACHE_HOME"), env::var_os("HOME"))
        .context("no cache directory for built programs: set XDG_CACHE_HOME or HOME")
}

fn cache_below(xdg_cache_home: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let set = |variable: Option<OsString>| {
        variable
            .filter(|value| Path::new(value).is_absolute())
            .map(PathBuf::from)
    };
    set(xdg_cache_home)
        .or_else(|| set(home).map(|home| home.join(".cache")))
        .map(|cache| cache.join("drava"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_dir_follows_xdg_base_directory_rules() {
        let os = |text: &str| Some(OsString::from(text));
        assert_eq!(cache_below(os("/x"), os("/root")), Some("/x/drava".into()));
        assert_eq!(
            cache_below(os("relative"), os("/root")),
            Some("/root/.cache/drava".into())
        );
        assert_eq!(cache_below(None, None), None);
    }
}
