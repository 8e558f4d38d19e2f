//! Why a GPU lacks a way to enforce limits, each with its remedy.
//!
//! The node driver publishes the reason as an attribute of the devices, and names it where it refuses a claim. `kubectl drava doctor`
//! reads the attribute, so all three have one text.

use std::fmt;

macro_rules! obstacles {
    ($(#[doc = $about:literal])+ $kind:ident { $($name:ident: $value:literal, $problem:literal, $remedy:literal;)* }) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $kind {
            $(#[doc = $problem] $name,)*
        }

        impl $kind {
            /// All obstacles.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the obstacle as the value of an attribute.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $value,)*
                }
            }

            /// Returns the problem.
            #[must_use]
            pub const fn problem(self) -> &'static str {
                match self {
                    $(Self::$name => $problem,)*
                }
            }

            /// Returns what removes the obstacle. UUID is that of the GPU.
            #[must_use]
            pub const fn remedy(self) -> &'static str {
                match self {
                    $(Self::$name => $remedy,)*
                }
            }

            /// Returns the text for the GPU with this UUID.
            #[must_use]
            pub fn of_gpu(self, uuid: &str) -> String {
                self.to_string().replace("UUID", uuid)
            }

            /// Returns the obstacle with this value.
            #[must_use]
            pub fn parse(value: &str) -> Option<Self> {
                let mut all = Self::ALL.iter().copied();
                all.find(|obstacle| obstacle.as_str() == value)
            }
        }

        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}; {}", self.problem(), self.remedy())
            }
        }
    };
}

obstacles! {
    /// Why the NVIDIA driver cannot limit the memory of a cgroup on a GPU. The text has the remedy.
    LimitObstacle {
        NotTried: "not-tried",
            "the node driver has not tried yet whether the NVIDIA driver limits memory",
            "wait for its next scan of the GPUs";
        OldDriver: "driver-before-615",
            "the NVIDIA driver is older than release 615, the first one that limits memory by cgroup",
            "install NVIDIA driver 615 or later on the node";
        NoCgroupV2: "no-cgroup-v2",
            "the node has no cgroup v2 at /sys/fs/cgroup",
            "boot the node with cgroup v2 (kernel parameter systemd.unified_cgroup_hierarchy=1)";
        NoController: "no-dmem-controller",
            "the NVIDIA driver refuses limits, and the kernel has no cgroup controller dmem",
            "run Linux 6.14 or later with the controller dmem on the node, or load the NVIDIA driver with its backend misc";
        NotEnabled: "dmem-not-enabled",
            "the cgroup controller dmem cannot be enabled in /sys/fs/cgroup of the node",
            "let the node driver write to cgroup.subtree_control there";
        Mig: "mig-mode",
            "the GPU is in MIG mode, which limits partitions and has no limits of cgroups",
            "claim a MIG partition, or switch MIG mode off";
        Refused: "not-supported",
            "the NVIDIA driver supports no memory limits on the GPU",
            "see the documentation of the driver for the module parameter of their backend";
        Failed: "failed",
            "the NVIDIA driver does not set or does not keep a memory limit",
            "see the log of the node driver";
    }
}

obstacles! {
    /// Why a GPU that may have shares has none with `computePolicy: spatial`. The text has the remedy, where UUID is that of the
    /// GPU.
    SpatialObstacle {
        NoMps: "no-mps",
            "the driver root has no nvidia-cuda-mps-control or no nvidia-cuda-mps-server",
            "install the programs of MPS of the NVIDIA driver's release there";
        NoLoader: "no-loader",
            "the driver root lacks the dynamic loader or the libc of nvidia-cuda-mps-control or nvidia-cuda-mps-server",
            "use a driver root with a system in it, such as / or that of a driver container";
        Exclusive: "compute-mode-exclusive-process",
            "compute mode is Exclusive_Process, which admits one program or MPS server only",
            "run `nvidia-smi -c DEFAULT -i UUID` on the node";
        Prohibited: "compute-mode-prohibited",
            "compute mode is Prohibited",
            "run `nvidia-smi -c DEFAULT -i UUID` on the node";
        OtherMps: "other-mps",
            "processes use the GPU through an MPS daemon that drava did not start",
            "stop that daemon (`echo quit | nvidia-cuda-mps-control` where it runs)";
        OldGpu: "before-volta",
            "the GPU is older than Volta, where MPS neither separates the memory of its clients nor knows parts of the multiprocessors",
            "use a GPU with compute capability 7.0 or later";
        Directory: "unsafe-mps-directory",
            "another user owns a directory of /run/drava/mps on the node or can write to it, so programs must not trust its sockets",
            "remove that directory";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_obstacles_by_their_values() {
        for obstacle in LimitObstacle::ALL {
            assert_eq!(LimitObstacle::parse(obstacle.as_str()), Some(*obstacle));
        }
        for obstacle in SpatialObstacle::ALL {
            assert_eq!(SpatialObstacle::parse(obstacle.as_str()), Some(*obstacle));
        }
        assert_eq!(LimitObstacle::parse("none"), None);
        assert_eq!(SpatialObstacle::parse("supported"), None);
    }
}
