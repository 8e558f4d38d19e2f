//! The Go modules in `go/` and of other test crates, and their programs.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::state::short_hash;
use crate::version::Kubernetes;

/// A Go module and its programs.
#[derive(Clone, Debug)]
pub(super) struct Module {
    /// Name in the cache.
    pub(super) folder: String,
    directory: PathBuf,
    /// Module file in `directory`.
    pins: &'static str,
    /// Packages; a program is named after the last path element of its package, unless `program` is set.
    pub(super) packages: Vec<&'static str>,
    /// Name of the only program, where it differs from the last path element.
    pub(super) program: Option<&'static str>,
    /// Linker settings, such as `-X`, in addition to stripping.
    linker_flags: String,
    tags: Vec<&'static str>,
    pub(super) cgo: bool,
}

pub(super) fn kubernetes(release: Kubernetes) -> Module {
    let version = release.version();
    let (major, minor) = release.minor().split_once('.').unwrap_or_default();
    let settings = [
        ("gitVersion", version),
        ("gitMajor", major),
        ("gitMinor", minor),
        ("gitTreeState", "clean"),
    ];
    let flag = |(name, value)| {
        format!(
            "-X k8s.io/component-base/version.{name}={value} -X k8s.io/client-go/pkg/version.{name}={value}"
        )
    };
    Module {
        packages: vec![
            "k8s.io/kubernetes/cmd/kube-apiserver",
            "k8s.io/kubernetes/cmd/kube-controller-manager",
            "k8s.io/kubernetes/cmd/kube-scheduler",
            "k8s.io/kubernetes/cmd/kubelet",
            "k8s.io/kubernetes/cmd/kubectl",
        ],
        linker_flags: settings.map(flag).join(" "),
        ..Module::plain(&format!("kubernetes-{}", release.minor()))
    }
}

pub(super) fn etcd() -> Module {
    Module {
        packages: vec!["go.etcd.io/etcd/server/v3"],
        program: Some("etcd"),
        ..Module::plain("etcd")
    }
}

pub(super) fn containerd() -> Result<Module> {
    let version = pinned("containerd", "github.com/containerd/containerd/v2")?;
    Ok(Module {
        packages: vec![
            "github.com/containerd/containerd/v2/cmd/containerd",
            "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
            "github.com/containerd/containerd/v2/cmd/ctr",
        ],
        linker_flags: format!("-X github.com/containerd/containerd/v2/version.Version={version}"),
        ..Module::plain("containerd")
    })
}

pub(super) fn cni() -> Module {
    Module {
        packages: vec![
            "github.com/containernetworking/plugins/plugins/main/bridge",
            "github.com/containernetworking/plugins/plugins/main/loopback",
            "github.com/containernetworking/plugins/plugins/ipam/host-local",
        ],
        ..Module::plain("cni")
    }
}

/// runc enters a container's namespaces with C code. libseccomp adds seccomp filters.
pub(super) fn runc(seccomp: bool) -> Module {
    let tags = if seccomp { vec!["seccomp"] } else { vec![] };
    Module {
        packages: vec!["github.com/opencontainers/runc"],
        tags,
        cgo: true,
        ..Module::plain("runc")
    }
}

pub(super) fn helm() -> Result<Module> {
    let version = pinned("helm", "helm.sh/helm/v4")?;
    Ok(Module {
        packages: vec!["helm.sh/helm/v4/cmd/helm"],
        linker_flags: format!("-X helm.sh/helm/v4/internal/version.version={version}"),
        ..Module::plain("helm")
    })
}

/// Checks and tests alerts. The service discovery of cloud providers would take most of its compile time.
pub(super) fn promtool() -> Module {
    Module {
        packages: vec!["github.com/prometheus/prometheus/cmd/promtool"],
        tags: vec!["remove_all_sd"],
        ..Module::plain("promtool")
    }
}

/// Prometheus, which shares most packages with [`promtool`]. Without the service discovery of cloud providers and without
/// the page, which tests do not need.
pub(super) fn prometheus() -> Module {
    Module {
        directory: modules_dir().join("promtool"),
        packages: vec!["github.com/prometheus/prometheus/cmd/prometheus"],
        tags: vec!["remove_all_sd"],
        ..Module::plain("prometheus")
    }
}

/// Kueue's manager.
pub(super) fn kueue() -> Module {
    Module {
        packages: vec!["sigs.k8s.io/kueue/cmd/kueue"],
        ..Module::plain("kueue")
    }
}

pub(super) fn pause() -> Module {
    Module {
        packages: vec!["drava.dev/cluster/pause"],
        ..Module::plain("pause")
    }
}

/// The one program of the module in `directory`, pinned by the module file `pins`.
pub(super) fn program(directory: &Path, program: &'static str, pins: &'static str) -> Module {
    Module {
        directory: directory.to_owned(),
        pins,
        packages: vec!["."],
        program: Some(program),
        ..Module::plain(program)
    }
}

impl Module {
    fn plain(folder: &str) -> Self {
        Self {
            folder: folder.to_owned(),
            directory: modules_dir().join(folder),
            pins: "go.mod",
            packages: vec![],
            program: None,
            linker_flags: String::new(),
            tags: vec![],
            cgo: false,
        }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.directory
    }

    pub(super) fn programs(&self) -> Vec<&'static str> {
        let last = |package: &&'static str| package.rsplit('/').next().unwrap_or(package);
        self.program.map_or_else(
            || self.packages.iter().map(last).collect(),
            |program| vec![program],
        )
    }

    pub(super) fn flags(&self) -> Vec<String> {
        let mut flags = vec![
            "-trimpath".to_owned(),
            format!("-ldflags=-s -w {}", self.linker_flags)
                .trim_end()
                .to_owned(),
        ];
        if self.pins != "go.mod" {
            flags.push(format!("-modfile={}", self.pins));
        }
        if !self.tags.is_empty() {
            flags.push(format!("-tags={}", self.tags.join(",")));
        }
        flags
    }

    /// Hash of all inputs of the build.
    pub(super) fn key(&self) -> Result<String> {
        let mut text = format!(
            "{:?} {:?} cgo={} {}",
            self.packages,
            self.flags(),
            self.cgo,
            env::consts::ARCH
        )
        .into_bytes();
        let sums = self.pins.replace(".mod", ".sum");
        for name in [self.pins, &sums, "main.go"] {
            let file = self.dir().join(name);
            if file.exists() {
                text.extend(fs::read(&file).with_context(|| format!("read {}", file.display()))?);
            }
        }
        Ok(short_hash(&text))
    }
}

fn modules_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("go")
}

/// Returns the version of `module` pinned in the go.mod of `folder`.
fn pinned(folder: &str, module: &str) -> Result<String> {
    let file = modules_dir().join(folder).join("go.mod");
    let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    version_in(&text, module).with_context(|| format!("{} does not pin {module}", file.display()))
}

fn version_in(go_mod: &str, module: &str) -> Option<String> {
    let mut words = go_mod
        .lines()
        .map(|line| line.trim().trim_start_matches("require ").split(' '));
    words.find_map(|mut words| {
        (words.next() == Some(module))
            .then(|| words.next().map(str::to_owned))
            .flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_hash_covers_flags() {
        assert_eq!(runc(true).key().unwrap(), runc(true).key().unwrap());
        assert_ne!(runc(true).key().unwrap(), runc(false).key().unwrap());
        let releases = Kubernetes::ALL.map(|release| kubernetes(release).key().unwrap());
        assert_ne!(releases[0], releases[1]);
    }

    #[test]
    fn sets_release_in_programs() {
        let flags = kubernetes(Kubernetes::V1_37).flags().join(" ");
        assert!(
            flags.contains("component-base/version.gitVersion=v1.37.1")
                && flags.contains("gitMinor=37"),
            "{flags}"
        );
        assert!(helm().unwrap().linker_flags.contains("version=v4."));
    }

    #[test]
    fn finds_pinned_version_of_exact_module() {
        let go_mod = "require (\n\texample.org/a/b v1.0.0 // indirect\n\texample.org/a v2.0.0\n)\nrequire example.org/c v3.0.0\n";
        assert_eq!(
            version_in(go_mod, "example.org/a").as_deref(),
            Some("v2.0.0")
        );
        assert_eq!(
            version_in(go_mod, "example.org/c").as_deref(),
            Some("v3.0.0")
        );
        assert_eq!(version_in(go_mod, "example.org/d"), None);
    }

    #[test]
    fn every_module_has_go_mod_and_checksums() {
        let modules = [
            etcd(),
            containerd().unwrap(),
            cni(),
            runc(true),
            helm().unwrap(),
            promtool(),
            prometheus(),
            kubernetes(Kubernetes::V1_37),
        ];
        for module in modules {
            assert!(module.dir().join("go.sum").exists(), "{}", module.folder);
            assert!(!module.programs().is_empty());
        }
    }
}
