//! Container edits: environment, device nodes, mounts, hooks.

use serde::{Deserialize, Serialize};

/// Mount options of files that a tenant can read and execute.
const READ_ONLY: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
/// Mount options of data that a tenant can write.
const READ_WRITE: [&str; 6] = ["rw", "nosuid", "nodev", "noexec", "rbind", "rprivate"];
/// Mount options of read-only data and sockets: connecting to a socket needs no write access to the mount.
const DATA: [&str; 6] = ["ro", "nosuid", "nodev", "noexec", "rbind", "rprivate"];

/// Changes to a container (CDI `containerEdits`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ContainerEdits {
    /// `NAME=value` pairs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Hooks, in the order in which the runtime runs them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Bind mounts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
}

/// A device node in the container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "DeviceNodeFields", into = "DeviceNodeFields")]
pub struct DeviceNode {
    /// Path in the container.
    pub path: String,
    /// Path on the node, where it differs from `path`.
    pub host_path: Option<String>,
    /// Number of a character device; `None` for the type and number of the host's node when the container starts.
    pub number: Option<DeviceNumber>,
    /// Access allowed by the device cgroup: letters of `rwm`. `None` allows all three.
    pub permissions: Option<String>,
}

/// Number of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceNumber {
    /// Number of the kernel driver, not 0.
    pub major: u32,
    /// Number of the device.
    pub minor: u32,
}

/// JSON form of a [`DeviceNode`].
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct DeviceNodeFields {
    path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    host_path: Option<String>,
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<CharacterDevice>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    major: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    minor: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    permissions: Option<String>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum CharacterDevice {
    #[serde(rename = "c")]
    Character,
}

impl TryFrom<DeviceNodeFields> for DeviceNode {
    type Error = &'static str;

    fn try_from(fields: DeviceNodeFields) -> Result<Self, Self::Error> {
        let number = match (fields.kind, fields.major, fields.minor) {
            (None, None, None) => None,
            (Some(CharacterDevice::Character), Some(major), Some(minor)) => {
                Some(DeviceNumber { major, minor })
            }
            _ => return Err("type, major and minor must be set together"),
        };
        Ok(Self {
            path: fields.path,
            host_path: fields.host_path,
            number,
            permissions: fields.permissions,
        })
    }
}

impl From<DeviceNode> for DeviceNodeFields {
    fn from(node: DeviceNode) -> Self {
        Self {
            path: node.path,
            host_path: node.host_path,
            kind: node.number.map(|_| CharacterDevice::Character),
            major: node.number.map(|number| number.major),
            minor: node.number.map(|number| number.minor),
            permissions: node.permissions,
        }
    }
}

impl DeviceNode {
    /// Returns a node that the container can read and write, but not create (`mknod`).
    #[must_use]
    pub fn read_write(path: impl Into<String>, host_path: impl Into<String>) -> Self {
        let (path, host_path) = (path.into(), host_path.into());
        let host_path = (host_path != path).then_some(host_path);
        Self {
            path,
            host_path,
            number: None,
            permissions: Some("rw".to_owned()),
        }
    }

    /// As [`read_write`](Self::read_write), for a character device that needs no node on the host.
    #[must_use]
    pub fn numbered(path: impl Into<String>, number: DeviceNumber) -> Self {
        Self {
            path: path.into(),
            host_path: None,
            number: Some(number),
            permissions: Some("rw".to_owned()),
        }
    }
}

/// A bind mount.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// Path on the node.
    pub host_path: String,
    /// Path in the container.
    pub container_path: String,
    /// Mount options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

impl Mount {
    /// Returns a mount of files that a container reads and executes: libraries, programs.
    #[must_use]
    pub fn read_only(host_path: impl Into<String>, container_path: impl Into<String>) -> Self {
        Self::with_options(host_path, container_path, &READ_ONLY)
    }

    /// Returns a mount of data that a container reads, or of a socket.
    #[must_use]
    pub fn data(host_path: impl Into<String>, container_path: impl Into<String>) -> Self {
        Self::with_options(host_path, container_path, &DATA)
    }

    /// Returns a mount of data that a container writes.
    #[must_use]
    pub fn read_write(host_path: impl Into<String>, container_path: impl Into<String>) -> Self {
        Self::with_options(host_path, container_path, &READ_WRITE)
    }

    fn with_options(
        host_path: impl Into<String>,
        container_path: impl Into<String>,
        options: &[&str],
    ) -> Self {
        Self {
            host_path: host_path.into(),
            container_path: container_path.into(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
        }
    }
}

/// A program that the runtime runs while it creates the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hook {
    /// Stage of the container's creation.
    pub hook_name: HookName,
    /// Path of the program on the node.
    pub path: String,
    /// Arguments, the program's name first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Environment; the runtime's is not inherited.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
}

/// Stage at which a hook runs (OCI runtime specification, "POSIX-platform Hooks").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HookName {
    /// In the container's mount namespace, after the mounts, before `pivot_root`.
    CreateContainer,
    /// In the runtime's namespaces, once the container has its namespaces and cgroup.
    CreateRuntime,
}

impl ContainerEdits {
    /// Returns whether there are no edits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self {
            env,
            device_nodes,
            hooks,
            mounts,
        } = self;
        env.is_empty() && device_nodes.is_empty() && hooks.is_empty() && mounts.is_empty()
    }

    /// Appends `other`.
    pub fn append(&mut self, mut other: Self) {
        self.env.append(&mut other.env);
        self.device_nodes.append(&mut other.device_nodes);
        self.hooks.append(&mut other.hooks);
        self.mounts.append(&mut other.mounts);
    }

    /// Appends `other`, whose mounts replace those at the same paths in the container, as runtimes do.
    pub fn overlay(&mut self, other: Self) {
        let is_replaced = |mount: &Mount| {
            let mut others = other.mounts.iter();
            others.any(|other| other.container_path == mount.container_path)
        };
        self.mounts.retain(|mount| !is_replaced(mount));
        self.append(other);
    }

    /// Returns the edits sorted and without duplicates. Hooks keep their order, which matters; the first of equal hooks
    /// stays.
    #[must_use]
    pub fn normalized(mut self) -> Self {
        self.env.sort_unstable();
        self.env.dedup();
        self.device_nodes.sort_unstable();
        self.device_nodes.dedup();
        self.mounts
            .sort_unstable_by(|a, b| (&a.container_path, a).cmp(&(&b.container_path, b)));
        self.mounts.dedup();
        let mut hooks: Vec<Hook> = Vec::with_capacity(self.hooks.len());
        for hook in self.hooks {
            if !hooks.contains(&hook) {
                hooks.push(hook);
            }
        }
        Self { hooks, ..self }
    }
}
