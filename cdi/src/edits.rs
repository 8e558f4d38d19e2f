//! What a container gets: environment, device nodes, mounts, hooks.

use serde::{Deserialize, Serialize};

/// Options of a bind mount that a tenant can read and, for programs, run.
const READ_ONLY: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
/// Options of a bind mount of data that a tenant can write.
const READ_WRITE: [&str; 6] = ["rw", "nosuid", "nodev", "noexec", "rbind", "rprivate"];
/// Options of a bind mount of data, such as a socket: connecting needs no write access to the mount.
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
    /// Programs that the runtime runs, in this order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Bind mounts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
}

/// A device node in the container. Type, major and minor are those of the node on the host when the container starts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// Path in the container.
    pub path: String,
    /// Path on the node, where it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// What the device cgroup allows: letters of `rwm`. Without it, all three.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
}

impl DeviceNode {
    /// A node that the container may read and write, but not create again.
    #[must_use]
    pub fn read_write(path: impl Into<String>, host_path: impl Into<String>) -> Self {
        let (path, host_path) = (path.into(), host_path.into());
        let host_path = (host_path != path).then_some(host_path);
        Self {
            path,
            host_path,
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
    /// Files that a container reads and runs: libraries, programs.
    #[must_use]
    pub fn read_only(host_path: impl Into<String>, container_path: impl Into<String>) -> Self {
        Self::with_options(host_path, container_path, &READ_ONLY)
    }

    /// Data that a container reads, or a socket that it connects to.
    #[must_use]
    pub fn data(host_path: impl Into<String>, container_path: impl Into<String>) -> Self {
        Self::with_options(host_path, container_path, &DATA)
    }

    /// Data that a container writes.
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

/// A program that the runtime runs while it makes the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hook {
    /// When it runs.
    pub hook_name: HookName,
    /// Program on the node.
    pub path: String,
    /// Arguments, the program's name first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Its environment; none is inherited.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
}

/// When a hook runs (OCI runtime specification, "POSIX-platform Hooks").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HookName {
    /// In the container's mount namespace, after its mounts, before its root is switched to.
    CreateContainer,
}

impl ContainerEdits {
    /// Whether nothing is edited.
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

    /// Adds other edits behind these.
    pub fn append(&mut self, mut other: Self) {
        self.env.append(&mut other.env);
        self.device_nodes.append(&mut other.device_nodes);
        self.hooks.append(&mut other.hooks);
        self.mounts.append(&mut other.mounts);
    }

    /// Sorted, each edit once. Hooks keep their order, which has a meaning; of equal ones the first stays.
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
