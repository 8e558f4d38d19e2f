//! Configuration of the node's container runtime: settings with which pods get GPUs without a claim, or no GPU with one.
//!
//! Containers of a claim get their devices by CDI. If NVIDIA's runtime is the default, images of CUDA, whose environment
//! requests all GPUs, see every GPU of the node without a claim and without limits.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use drava_api::event::EventReason;
use tokio_util::sync::CancellationToken;
use toml_edit::{DocumentMut, Item};

use crate::kubelet::claims::blocking;
use crate::report::{Reporter, Subject};

/// Main files of containerd's configuration in distributions of Kubernetes that bring their own containerd: k3s, RKE2,
/// MicroK8s, k0s; and the sockets of these. Where one runs, the node's other files have no effect on pods.
const DISTRIBUTIONS: [(&str, &str); 4] = [
    (
        "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
        "/run/k3s/containerd/containerd.sock",
    ),
    (
        "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
        "/run/k3s/containerd/containerd.sock",
    ),
    (
        "/var/snap/microk8s/current/args/containerd.toml",
        "/var/snap/microk8s/common/run/containerd.sock",
    ),
    ("/etc/k0s/containerd.toml", "/run/k0s/containerd.sock"),
];
/// Main file of containerd's configuration. Without the file, containerd has its defaults, which have no fault.
const CONTAINERD: &str = "/etc/containerd/config.toml";
/// Files that containerd 2.2 and later import without a main file.
const DEFAULT_IMPORTS: &str = "/etc/containerd/conf.d/*.toml";
/// Socket of the node's containerd.
const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
/// Most files of a configuration. More are not read.
const MAX_FILES: usize = 256;
/// Socket with which kubelet uses Docker, and Docker's configuration.
const DOCKER: [&str; 2] = ["/run/cri-dockerd.sock", "/etc/docker/daemon.json"];
/// Main file of CRI-O's configuration, and the directory of files that precede it.
const CRIO: [&str; 2] = ["/etc/crio/crio.conf", "/etc/crio/crio.conf.d"];
/// Plugins of the container runtime interface: of containerd 2 (version 3 of the file), and of earlier releases (version 2).
const PLUGINS: [&str; 2] = ["io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"];
/// Time between two checks.
const INTERVAL: Duration = Duration::from_secs(10);
/// Time after which a fault is reported again, because the API server deletes events after an hour.
const REPEAT: Duration = Duration::from_secs(20 * 60);

/// A setting that defeats claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// CDI is off.
    CdiOff {
        /// The file.
        file: PathBuf,
    },
    /// NVIDIA's runtime is the default.
    NvidiaDefault {
        /// The file.
        file: PathBuf,
        /// Name of the runtime.
        runtime: String,
        /// Setting that makes another runtime the default, and the program to restart.
        remedy: &'static str,
    },
    /// The node has no configuration that this module knows.
    Unknown,
}

impl Fault {
    /// Returns the reason of the event that reports the fault.
    #[must_use]
    pub const fn reason(&self) -> EventReason {
        match self {
            Self::CdiOff { .. } | Self::NvidiaDefault { .. } => EventReason::RuntimeMisconfigured,
            Self::Unknown => EventReason::RuntimeUnchecked,
        }
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::CdiOff { file } => write!(
                f,
                "{} has enable_cdi = false, so that containers do not get the devices of their claims; set enable_cdi = true and \
                 restart containerd",
                file.display()
            ),
            Self::NvidiaDefault {
                file,
                runtime,
                remedy,
            } => write!(
                f,
                "{} makes {runtime:?} the default runtime, so that images which set NVIDIA_VISIBLE_DEVICES see all GPUs without a \
                 claim; set {remedy}",
                file.display()
            ),
            Self::Unknown => f.write_str(
                "cannot check the container runtime, because the node has no configuration of containerd or CRI-O at a known \
                 path; make sure that CDI is on and that NVIDIA's runtime is not the default",
            ),
        }
    }
}

/// Configuration of a container runtime.
#[derive(Debug)]
pub enum RuntimeConfig {
    /// Files of containerd, the main file first.
    Containerd(Vec<ConfigFile>),
    /// Files of CRI-O, the main file first.
    Crio(Vec<ConfigFile>),
    /// File of Docker, behind cri-dockerd.
    Docker(ConfigFile),
}

/// A file of the configuration.
#[derive(Debug)]
pub struct ConfigFile {
    /// Path on the node.
    pub path: PathBuf,
    /// Content.
    pub text: String,
}

/// Returns the faults of the configurations of a node. Later files precede earlier ones, as in the runtimes. A file that is
/// no TOML has no fault: a runtime would not start with it.
#[must_use]
pub fn check(configs: &[RuntimeConfig]) -> Vec<Fault> {
    if configs.is_empty() {
        return vec![Fault::Unknown];
    }
    let faults = configs.iter().flat_map(|config| match config {
        RuntimeConfig::Containerd(files) => check_containerd(files),
        RuntimeConfig::Crio(files) => Vec::from_iter(check_crio(files)),
        RuntimeConfig::Docker(file) => Vec::from_iter(check_docker(file)),
    });
    faults.collect()
}

fn parsed(files: &[ConfigFile]) -> Vec<(&Path, DocumentMut)> {
    let files = files.iter();
    files
        .filter_map(|file| Some((file.path.as_path(), file.text.parse().ok()?)))
        .collect()
}

fn is_nvidia(name: &str) -> bool {
    name.contains("nvidia")
}

fn check_containerd(files: &[ConfigFile]) -> Vec<Fault> {
    let parsed = parsed(files);
    let setting = |keys: &[&str]| {
        let mut found = parsed.iter().rev().flat_map(|(path, document)| {
            PLUGINS
                .iter()
                .filter_map(move |plugin| Some((*path, member(document, plugin, keys)?)))
        });
        found.next()
    };
    let mut faults = Vec::new();
    if let Some((file, value)) = setting(&["enable_cdi"])
        && value.as_bool() == Some(false)
    {
        faults.push(Fault::CdiOff {
            file: file.to_owned(),
        });
    }
    if let Some((file, value)) = setting(&["containerd", "default_runtime_name"])
        && let Some(runtime) = value.as_str()
    {
        let keys = ["containerd", "runtimes", runtime, "options", "BinaryName"];
        let program = setting(&keys).and_then(|(_, program)| program.as_str());
        if is_nvidia(runtime) || program.is_some_and(is_nvidia) {
            faults.push(Fault::NvidiaDefault {
                file: file.to_owned(),
                runtime: runtime.to_owned(),
                remedy: "default_runtime_name = \"runc\" and restart containerd",
            });
        }
    }
    faults
}

fn check_crio(files: &[ConfigFile]) -> Option<Fault> {
    let parsed = parsed(files);
    let setting = |keys: &[&str]| {
        let mut found = parsed.iter().rev().filter_map(|(path, document)| {
            let section = document.get("crio")?.get("runtime")?;
            let value = keys.iter().try_fold(section, |item, key| item.get(key))?;
            Some((*path, value.as_str()?.to_owned()))
        });
        found.next()
    };
    let (file, runtime) = setting(&["default_runtime"])?;
    let program = setting(&["runtimes", &runtime, "runtime_path"]);
    let is_fault = is_nvidia(&runtime) || program.is_some_and(|(_, program)| is_nvidia(&program));
    is_fault.then(|| Fault::NvidiaDefault {
        file: file.to_owned(),
        runtime,
        remedy: "default_runtime = \"crun\" and restart CRI-O",
    })
}

fn check_docker(file: &ConfigFile) -> Option<Fault> {
    let config: serde_json::Value = serde_json::from_str(&file.text).ok()?;
    let runtime = config.get("default-runtime")?.as_str()?;
    let program = config.get("runtimes").and_then(|all| all.get(runtime));
    let program = program.and_then(|runtime| runtime.get("path")?.as_str());
    let is_fault = is_nvidia(runtime) || program.is_some_and(is_nvidia);
    is_fault.then(|| Fault::NvidiaDefault {
        file: file.path.clone(),
        runtime: runtime.to_owned(),
        remedy: "\"default-runtime\": \"runc\" and restart Docker",
    })
}

fn member<'a>(document: &'a DocumentMut, plugin: &str, keys: &[&str]) -> Option<&'a Item> {
    let plugin = document.get("plugins")?.get(plugin)?;
    keys.iter().try_fold(plugin, |item, key| item.get(key))
}

/// Reads the configurations below `root`, the root of the node; none for an unknown runtime.
#[must_use]
pub fn read(root: &Path) -> Vec<RuntimeConfig> {
    let is_there = |socket: &str| below(root, Path::new(socket)).exists();
    // An uninstalled distribution may leave its directory.
    let is_left_over = |socket: &str| !is_there(socket) && is_there(CONTAINERD_SOCKET);
    let of_distributions: Vec<RuntimeConfig> = DISTRIBUTIONS
        .iter()
        .filter(|(_, socket)| !is_left_over(socket))
        .filter_map(|(main, _)| containerd(root, Path::new(main)))
        .collect();
    if !of_distributions.is_empty() {
        return of_distributions;
    }
    let main = Path::new(CONTAINERD);
    let has_containerd = main.parent().is_some_and(|dir| below(root, dir).is_dir());
    let of_containerd = containerd(root, main);
    let defaults = || RuntimeConfig::Containerd(imported(root, Path::new(DEFAULT_IMPORTS)));
    let of_containerd = of_containerd.or_else(|| has_containerd.then(defaults));
    let [socket, config] = DOCKER;
    let of_docker = is_there(socket).then(|| read_file(root, Path::new(config)));
    let of_docker = of_docker.flatten().map(RuntimeConfig::Docker);
    let of_others = of_containerd.into_iter().chain(crio(root));
    of_others.chain(of_docker).collect()
}

/// Reads the main file of containerd, its imports, and theirs: each file once, those of a file after all that were named before.
fn containerd(root: &Path, path: &Path) -> Option<RuntimeConfig> {
    let mut files = vec![read_file(root, path)?];
    let mut next = 0;
    while let Some(file) = files.get(next) {
        next += 1;
        for file in imports(root, file) {
            let is_known = files.iter().any(|known| known.path == file.path);
            if !is_known && files.len() < MAX_FILES {
                files.push(file);
            }
        }
    }
    Some(RuntimeConfig::Containerd(files))
}

/// Reads the files that a file of containerd imports.
fn imports(root: &Path, file: &ConfigFile) -> Vec<ConfigFile> {
    let document: DocumentMut = file.text.parse().unwrap_or_default();
    let imports = document.get("imports").and_then(Item::as_array);
    let patterns = imports
        .into_iter()
        .flat_map(|imports| imports.iter().filter_map(|import| import.as_str()));
    // A relative pattern is one of the directory of the file.
    let directory = file.path.parent().unwrap_or(Path::new("/"));
    patterns
        .flat_map(|pattern| imported(root, &directory.join(pattern)))
        .collect()
}

fn crio(root: &Path) -> Option<RuntimeConfig> {
    let [main, directory] = CRIO.map(Path::new);
    let mut files = Vec::from_iter(read_file(root, main));
    files.extend(imported(root, &directory.join("*")));
    let is_present = !files.is_empty() || below(root, directory).is_dir();
    is_present.then_some(RuntimeConfig::Crio(files))
}

fn read_file(root: &Path, path: &Path) -> Option<ConfigFile> {
    let text = fs::read_to_string(below(root, path)).ok()?;
    Some(ConfigFile {
        path: path.to_owned(),
        text,
    })
}

fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Returns the files of a pattern with at most one `*` in its last part, such as `/etc/containerd/conf.d/*.toml`.
fn imported(root: &Path, pattern: &Path) -> Vec<ConfigFile> {
    let name = pattern.file_name().and_then(|name| name.to_str());
    let Some((directory, (start, end))) = pattern
        .parent()
        .zip(name.and_then(|name| name.split_once('*')))
    else {
        return Vec::from_iter(read_file(root, pattern));
    };
    let Ok(entries) = fs::read_dir(below(root, directory)) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with(start) && name.ends_with(end))
        .collect();
    names.sort_unstable();
    names
        .iter()
        .filter_map(|name| read_file(root, &directory.join(name)))
        .collect()
}

/// Reports faults of the node's container runtime, and their end, until `stop`.
pub(crate) async fn report(root: PathBuf, reporter: Reporter, stop: CancellationToken) {
    let mut reported: Vec<(Fault, Instant)> = Vec::new();
    loop {
        let root = root.clone();
        if let Ok(faults) = blocking(move || check(&read(&root))).await {
            let is_ended = |fault: &Fault| {
                !faults.contains(fault) && fault.reason() == EventReason::RuntimeMisconfigured
            };
            let ended = reported.iter().any(|(fault, _)| is_ended(fault));
            reported.retain(|(fault, since)| faults.contains(fault) && since.elapsed() < REPEAT);
            if ended {
                let note =
                    "the container runtime no longer has the setting that was reported".to_owned();
                reporter.event(Subject::Node, EventReason::RuntimeCorrected, note);
            }
            for fault in faults {
                if !reported.iter().any(|(known, _)| *known == fault) {
                    reporter.event(Subject::Node, fault.reason(), fault.to_string());
                    reported.push((fault, Instant::now()));
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str) -> Vec<String> {
        let file = ConfigFile {
            path: CONTAINERD.into(),
            text: text.to_owned(),
        };
        let config = RuntimeConfig::Containerd(vec![file]);
        check(&[config]).iter().map(Fault::to_string).collect()
    }

    #[test]
    fn finds_nvidia_as_default_runtime_in_both_generations() {
        for plugin in PLUGINS {
            let text =
                format!("[plugins.'{plugin}'.containerd]\ndefault_runtime_name = 'nvidia'\n");
            let found = faults(&text);
            assert!(
                found.len() == 1 && found[0].contains("makes \"nvidia\" the default runtime"),
                "{found:?}"
            );
            let text = format!(
                "[plugins.\"{plugin}\".containerd]\ndefault_runtime_name = \"gpu\"\n\
                 [plugins.\"{plugin}\".containerd.runtimes.gpu.options]\nBinaryName = \"/usr/bin/nvidia-container-runtime\"\n"
            );
            assert_eq!(faults(&text).len(), 1, "by the program");
            let text = text.replace("\"gpu\"", "\"runc\"");
            assert_eq!(faults(&text), Vec::<String>::new());
        }
    }

    #[test]
    fn finds_cdi_off_in_both_generations() {
        for plugin in PLUGINS {
            let text = |value| format!("[plugins.'{plugin}']\nenable_cdi = {value}\n");
            assert!(faults(&text("false"))[0].contains("enable_cdi = false"));
            assert!(faults(&text("true")).is_empty());
        }
        assert!(faults("version = 3\n").is_empty());
        assert!(faults("no toml").is_empty());
    }

    #[test]
    fn later_import_precedes() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("etc/containerd/conf.d");
        fs::create_dir_all(&directory).unwrap();
        let write = |name: &str, text: &str| {
            fs::write(root.path().join("etc/containerd").join(name), text).unwrap();
        };
        assert_eq!(
            check(&read(root.path())),
            [],
            "containerd with its defaults"
        );
        write(
            "config.toml",
            "imports = ['/etc/containerd/conf.d/*.toml']\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = false\n",
        );
        write(
            "conf.d/99-nvidia.toml",
            "[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n\
             [plugins.'io.containerd.cri.v1.runtime'.containerd]\ndefault_runtime_name = 'nvidia'\n",
        );
        write("conf.d/99-nvidia.off", "no toml");
        assert_eq!(
            check(&read(root.path())),
            [Fault::NvidiaDefault {
                file: "/etc/containerd/conf.d/99-nvidia.toml".into(),
                runtime: "nvidia".into(),
                remedy: "default_runtime_name = \"runc\" and restart containerd",
            }]
        );
    }

    /// Returns a root of a node with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = below(root.path(), Path::new(path));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const NVIDIA: &str =
        "[plugins.'io.containerd.cri.v1.runtime'.containerd]\ndefault_runtime_name = 'nvidia'\n";

    #[test]
    fn reads_containerd_of_distributions() {
        for (main, _) in DISTRIBUTIONS {
            let imports = "imports = ['conf.d/*.toml']\n";
            let directory = Path::new(main).parent().unwrap().join("conf.d/nvidia.toml");
            let root = root(&[
                (main, imports),
                (directory.to_str().unwrap(), NVIDIA),
                // Of a containerd that runs no pods.
                (
                    CONTAINERD,
                    "[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = false\n",
                ),
            ]);
            let faults = check(&read(root.path()));
            let [Fault::NvidiaDefault { file, .. }] = &faults[..] else {
                panic!("{main}: {faults:?}")
            };
            assert_eq!(*file, directory);
        }
    }

    /// Returns the files with NVIDIA's runtime as the default.
    fn defaults(files: &[(&str, &str)]) -> Vec<String> {
        let root = root(files);
        let faults = check(&read(root.path())).into_iter();
        let files = faults.map(|fault| match fault {
            Fault::NvidiaDefault { file, .. } => file.display().to_string(),
            Fault::CdiOff { .. } | Fault::Unknown => fault.to_string(),
        });
        files.collect()
    }

    #[test]
    fn reads_imports_of_imports_once() {
        let (first, second) = ("/etc/containerd/a.toml", "/etc/containerd/b/b.toml");
        let nested = format!("imports = ['/etc/containerd/*.toml']\n{NVIDIA}");
        let files = [
            (CONTAINERD, "imports = ['a.toml']\n"),
            (first, "imports = ['b/*.toml']\n"),
            (second, &nested),
        ];
        assert_eq!(defaults(&files), [second]);
    }

    #[test]
    fn reads_default_imports_without_main_file() {
        let file = "/etc/containerd/conf.d/99-nvidia.toml";
        assert_eq!(defaults(&[(file, NVIDIA)]), [file]);
    }

    #[test]
    fn passes_over_distribution_that_was_left_behind() {
        for (main, socket) in DISTRIBUTIONS {
            let files = [(main, ""), (CONTAINERD, NVIDIA), (CONTAINERD_SOCKET, "")];
            assert_eq!(defaults(&files), [CONTAINERD], "{main}");
            let files = [
                (main, ""),
                (CONTAINERD, NVIDIA),
                (CONTAINERD_SOCKET, ""),
                (socket, ""),
            ];
            assert_eq!(defaults(&files), [""; 0], "{main} runs");
        }
    }

    #[test]
    fn reads_docker_behind_kubelet() {
        let [socket, config] = DOCKER;
        let text = |runtime: &str| {
            format!(
                r#"{{"default-runtime": {runtime:?}, "runtimes": {{"gpu": {{"path": "nvidia-container-runtime"}}}}}}"#
            )
        };
        for runtime in ["nvidia", "gpu"] {
            let files = [(config, &*text(runtime)), (socket, "")];
            assert_eq!(defaults(&files), [config], "{runtime}");
        }
        assert_eq!(defaults(&[(config, &text("runc")), (socket, "")]), [""; 0]);
        // Of a Docker that runs no pods.
        let files = [(config, &*text("nvidia")), (CONTAINERD, "")];
        assert_eq!(defaults(&files), [""; 0]);
    }

    #[test]
    fn reads_crio() {
        let config = |name: &str| format!("[crio.runtime]\ndefault_runtime = {name:?}\n");
        let found = |main: &str, last: &str| {
            let root = root(&[
                ("/etc/crio/crio.conf", &config(main)),
                (
                    "/etc/crio/crio.conf.d/10-runtimes",
                    "[crio.runtime.runtimes.gpu]\nruntime_path = '/usr/bin/nvidia-container-runtime'\n",
                ),
                ("/etc/crio/crio.conf.d/99-last.conf", &config(last)),
            ]);
            check(&read(root.path()))
                .iter()
                .map(Fault::to_string)
                .collect::<Vec<_>>()
        };
        assert_eq!(found("nvidia", "crun"), [""; 0], "later files precede");
        for name in ["nvidia", "gpu"] {
            let faults = found("crun", name);
            assert!(
                faults.len() == 1
                    && faults[0]
                        .contains(&format!("99-last.conf makes {name:?} the default runtime"))
                    && faults[0].contains("set default_runtime = \"crun\" and restart CRI-O"),
                "{faults:?}"
            );
        }
    }

    #[test]
    fn reports_unknown_runtime_as_unchecked() {
        let root = root(&[("/etc/docker/daemon.json", "{}")]);
        let faults = check(&read(root.path()));
        assert_eq!(faults, [Fault::Unknown]);
        assert_eq!(faults[0].reason(), EventReason::RuntimeUnchecked);
        let text = faults[0].to_string();
        assert!(
            text.contains("cannot check the container runtime"),
            "{text}"
        );
    }
}
