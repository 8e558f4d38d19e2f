//! Configuration of containerd on the node: settings with which pods get GPUs without a claim, or no GPU with one.
//!
//! Containers of a claim get their devices by CDI. If NVIDIA's runtime is the default, images of CUDA, whose environment
//! requests all GPUs, see every GPU of the node without a claim and without limits.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use drava_api::event::EventReason;
use tokio_util::sync::CancellationToken;
use toml_edit::{DocumentMut, Item};

use crate::claims::blocking;
use crate::report::{Reporter, Subject};

/// Main file of containerd's configuration on the node.
const FILE: &str = "/etc/containerd/config.toml";
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
    },
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
            Self::NvidiaDefault { file, runtime } => write!(
                f,
                "{} makes {runtime:?} the default runtime, so that images which set NVIDIA_VISIBLE_DEVICES see all GPUs without a \
                 claim; set default_runtime_name = \"runc\" and restart containerd",
                file.display()
            ),
        }
    }
}

/// A file of the configuration.
#[derive(Debug)]
pub struct ConfigFile {
    /// Path on the node.
    pub path: PathBuf,
    /// Content.
    pub text: String,
}

/// Returns the faults of a configuration. Later files precede earlier ones, as in containerd. A file that is no TOML has no
/// fault: containerd would not start with it.
#[must_use]
pub fn check(files: &[ConfigFile]) -> Vec<Fault> {
    let parsed: Vec<(&Path, DocumentMut)> = files
        .iter()
        .filter_map(|file| Some((file.path.as_path(), file.text.parse().ok()?)))
        .collect();
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
        let is_nvidia = |name: &str| name.contains("nvidia");
        if is_nvidia(runtime) || program.is_some_and(is_nvidia) {
            faults.push(Fault::NvidiaDefault {
                file: file.to_owned(),
                runtime: runtime.to_owned(),
            });
        }
    }
    faults
}

fn member<'a>(document: &'a DocumentMut, plugin: &str, keys: &[&str]) -> Option<&'a Item> {
    let plugin = document.get("plugins")?.get(plugin)?;
    keys.iter().try_fold(plugin, |item, key| item.get(key))
}

/// Reads the configuration below `root`, the root of the node: the main file and its imports. Without a main file, for
/// example with CRI-O, there is none.
#[must_use]
pub fn read(root: &Path) -> Vec<ConfigFile> {
    let Some(main) = read_file(root, Path::new(FILE)) else {
        return Vec::new();
    };
    let document: DocumentMut = main.text.parse().unwrap_or_default();
    let imports = document.get("imports").and_then(Item::as_array);
    let patterns = imports
        .into_iter()
        .flat_map(|imports| imports.iter().filter_map(|import| import.as_str()));
    let mut files: Vec<ConfigFile> = patterns
        .flat_map(|pattern| imported(root, pattern))
        .collect();
    files.insert(0, main);
    files
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
fn imported(root: &Path, pattern: &str) -> Vec<ConfigFile> {
    let pattern = Path::new("/etc/containerd").join(pattern);
    let name = pattern.file_name().and_then(|name| name.to_str());
    let Some((directory, (start, end))) = pattern
        .parent()
        .zip(name.and_then(|name| name.split_once('*')))
    else {
        return Vec::from_iter(read_file(root, &pattern));
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
            let ended = reported.iter().any(|(fault, _)| !faults.contains(fault));
            reported.retain(|(fault, since)| faults.contains(fault) && since.elapsed() < REPEAT);
            if ended {
                let note = format!("{FILE} no longer has the setting that was reported");
                reporter.event(Subject::Node, EventReason::RuntimeCorrected, note);
            }
            for fault in faults {
                if !reported.iter().any(|(known, _)| *known == fault) {
                    let reason = EventReason::RuntimeMisconfigured;
                    reporter.event(Subject::Node, reason, fault.to_string());
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
            path: FILE.into(),
            text: text.to_owned(),
        };
        check(&[file]).iter().map(Fault::to_string).collect()
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
        assert!(read(root.path()).is_empty(), "another runtime");
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
            }]
        );
    }
}
