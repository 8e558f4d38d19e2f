//! Reads the container of the state that the runtime writes to stdin.
//!
//! Only fields that the hook needs are parsed; others are ignored, because a newer runtime may add fields and values.
//! Source: OCI runtime specification, "State" and `config.json`, "Root", "Mounts", "Process" and "Linux: Mount Label".

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::root::{Root, RootError};

/// Size limit of the state: an id, a PID, two paths and the pod's annotations, which Kubernetes limits to 256 KiB.
const MAX_STATE: u64 = 1 << 20;
/// Size limit of `config.json`; files with many mounts and a seccomp profile have about 100 KiB.
const MAX_CONFIG: u64 = 16 << 20;

#[derive(Deserialize)]
struct State {
    bundle: PathBuf,
    #[serde(default)]
    pid: u32,
}

#[derive(Deserialize)]
struct Config {
    root: RootConfig,
    #[serde(default)]
    mounts: Vec<Mount>,
    #[serde(default)]
    process: Process,
    #[serde(default)]
    linux: Linux,
}

#[derive(Deserialize)]
struct Mount {
    destination: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Process {
    env: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Linux {
    mount_label: String,
}

/// A container that the runtime creates.
pub(crate) struct Container {
    /// Process that becomes the first one, as the runtime sees it.
    pub(crate) pid: u32,
    /// Root directory.
    pub(crate) root: Root,
    /// SELinux context of file systems that are mounted for the container; empty without SELinux.
    pub(crate) mount_label: String,
    /// Paths in the container at which the runtime mounts something.
    pub(crate) mounts: Vec<String>,
    /// Environment of the first process, `NAME=value`.
    environment: Vec<String>,
}

impl Container {
    /// Returns the value of a variable of the image or the pod.
    pub(crate) fn variable(&self, name: &str) -> Option<&str> {
        let mut pairs = self
            .environment
            .iter()
            .filter_map(|pair| pair.split_once('='));
        pairs.find(|(of, _)| *of == name).map(|(_, value)| value)
    }
}

#[derive(Deserialize)]
struct RootConfig {
    path: PathBuf,
}

/// The container's root cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ContainerError {
    #[error("cannot read the container's state from stdin")]
    State(#[source] ParseError),
    #[error("cannot open {path}")]
    Config { path: PathBuf, source: io::Error },
    #[error("cannot read {path}")]
    ConfigContents { path: PathBuf, source: ParseError },
    #[error(transparent)]
    Root(#[from] RootError),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ParseError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("larger than {0} bytes")]
    TooLarge(u64),
    #[error("not JSON of the OCI runtime specification")]
    Json(#[from] serde_json::Error),
}

/// Reads the container whose state is on `stdin`.
pub(crate) fn read(stdin: impl Read) -> Result<Container, ContainerError> {
    let state: State = parse(stdin, MAX_STATE).map_err(ContainerError::State)?;
    let path = state.bundle.join("config.json");
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(source) => return Err(ContainerError::Config { path, source }),
    };
    let config: Config = match parse(file, MAX_CONFIG) {
        Ok(config) => config,
        Err(source) => return Err(ContainerError::ConfigContents { path, source }),
    };
    // An absolute path replaces the bundle's path.
    Ok(Container {
        pid: state.pid,
        root: Root::open(state.bundle.join(config.root.path))?,
        mount_label: config.linux.mount_label,
        mounts: config
            .mounts
            .into_iter()
            .map(|mount| mount.destination)
            .collect(),
        environment: config.process.env,
    })
}

fn parse<T: DeserializeOwned>(reader: impl Read, limit: u64) -> Result<T, ParseError> {
    let mut bytes = Vec::new();
    reader.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(ParseError::TooLarge(limit));
    }
    Ok(serde_json::from_slice(&bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(stdin: &[u8]) -> String {
        let error = read(stdin).err().unwrap();
        crate::one_line(&error)
    }

    #[test]
    fn resolves_relative_root_in_bundle() {
        let bundle = tempfile::tempdir().unwrap();
        std::fs::create_dir(bundle.path().join("rootfs")).unwrap();
        std::fs::write(bundle.path().join("rootfs/marker"), "here").unwrap();
        let state = format!(
            r#"{{"ociVersion": "9.9", "bundle": {:?}, "new": {{}}}}"#,
            bundle.path()
        );
        let absolute = bundle.path().join("rootfs");
        for path in [std::path::Path::new("rootfs"), &absolute] {
            let config = format!(r#"{{"root": {{"path": {path:?}}}, "new": [1]}}"#);
            std::fs::write(bundle.path().join("config.json"), config).unwrap();
            let container = read(state.as_bytes()).unwrap();
            let marker = container.root.read("/marker", 9).unwrap();
            assert_eq!(marker.unwrap(), b"here");
            assert_eq!(
                (container.mount_label.as_str(), container.variable("A")),
                ("", None)
            );
        }
    }

    #[test]
    fn reads_label_of_mounts_and_environment() {
        let bundle = tempfile::tempdir().unwrap();
        let config = r#"{"root": {"path": "."}, "process": {"env": ["A=1=2", "B="]},
            "linux": {"mountLabel": "system_u:object_r:container_file_t:s0:c1,c2"}}"#;
        std::fs::write(bundle.path().join("config.json"), config).unwrap();
        let state = format!(r#"{{"bundle": {:?}}}"#, bundle.path());
        let container = read(state.as_bytes()).unwrap();
        assert_eq!(
            container.mount_label,
            "system_u:object_r:container_file_t:s0:c1,c2"
        );
        assert_eq!(container.variable("A"), Some("1=2"));
        assert_eq!(container.variable("B"), Some(""));
    }

    #[test]
    fn errors_name_file_and_cause() {
        assert!(
            failure(b"").contains("state from stdin: not JSON"),
            "{}",
            failure(b"")
        );
        assert!(failure(b"{}").contains("missing field `bundle`"));
        assert!(
            failure(br#"{"bundle": "/nonexistent"}"#)
                .contains("cannot open /nonexistent/config.json")
        );
        let endless = io::repeat(b' ');
        let error = crate::one_line(&read(endless).err().unwrap());
        assert!(error.contains("larger than 1048576 bytes"), "{error}");

        let bundle = tempfile::tempdir().unwrap();
        std::fs::write(
            bundle.path().join("config.json"),
            r#"{"root": {"path": "missing"}}"#,
        )
        .unwrap();
        let error = failure(format!(r#"{{"bundle": {:?}}}"#, bundle.path()).as_bytes());
        assert!(error.contains("/missing"), "{error}");
    }
}
