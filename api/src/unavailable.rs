//! Reasons why devices of a GPU are not usable, each with its remedy.
//!
//! The node driver writes a reason as the value of the taint [`names::UNHEALTHY_TAINT`](crate::names::UNHEALTHY_TAINT), and
//! in events. `kubectl drava doctor` reads the taint. The GPU itself has no fault: faults have other values, such as `xid-79`.

use std::fmt;

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident: $value:literal, $problem:literal, $remedy:expr;)*) => {
        /// Reason why a GPU, or devices of a GPU, are not published or not usable. The text has the remedy.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum UnavailableReason {
            $($(#[doc = $doc])+ $name,)*
        }

        impl UnavailableReason {
            /// All reasons.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the reason as the value of a taint.
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

            /// Returns what removes the reason on the node, without the name of the GPU; `None` if nothing on the node does.
            const fn remedy(self) -> Option<&'static str> {
                match self {
                    $(Self::$name => $remedy,)*
                }
            }
        }
    };
}

reasons! {
    /// MIG mode is enabled, so the GPU has partitions only.
    Mig: "mig-mode",
        "MIG mode is enabled, so the GPU has partitions only",
        Some("run `nvidia-smi -mig 0` to use it whole or shared");
    /// MIG mode is disabled, so the GPU has no partitions.
    MigDisabled: "mig-mode-disabled",
        "MIG mode is disabled, so the GPU has no partitions",
        Some("run `nvidia-smi -mig 1` to partition it");
    /// MIG mode is enabled, and NVML lists no profile.
    NoMigProfiles: "no-mig-profiles",
        "MIG mode is enabled, and NVML lists no profile",
        Some("upgrade the NVIDIA driver, or run `nvidia-smi -mig 0`");
    /// A MIG instance that drava did not create uses the slices or engines.
    ForeignInstance: "foreign-mig-instance",
        "a MIG instance that drava did not create uses its slices or engines",
        Some("run `nvidia-smi mig -lgi` to find it");
    /// Compute mode Prohibited.
    Prohibited: "compute-mode-prohibited",
        "compute mode is Prohibited",
        Some("run `nvidia-smi -c DEFAULT` to use the GPU");
    /// Compute mode Exclusive_Process.
    ExclusiveProcess: "compute-mode-exclusive-process",
        "compute mode is Exclusive_Process",
        Some("run `nvidia-smi -c DEFAULT` to allow shares");
    /// Processes use the GPU through MPS.
    Mps: "mps",
        "processes use the GPU through MPS, which bypasses the limits of shares",
        Some("stop the MPS control daemon to allow shares");
    /// Confidential computing.
    ConfidentialComputing: "confidential-computing",
        "confidential computing is on, which excludes shares",
        None;
    /// NVML reports no memory size.
    NoMemoryFigure: "no-memory-figure",
        "NVML reports no memory size for the GPU",
        None;
    /// The driver reserve uses all memory.
    NoMemory: "no-memory",
        "the GPU has no memory to share",
        None;
    /// The node profile excludes the GPU.
    ProfileExcluded: "profile-excluded",
        "the node profile excludes the GPU",
        None;
    /// The mode of the node profile excludes the device.
    ProfileMode: "profile-mode",
        "the mode of the node profile excludes the device",
        None;
    /// The node profile does not list the MIG profile.
    ProfileMigProfiles: "profile-mig-profiles",
        "the node profile does not list the MIG profile",
        None;
    /// The node profile pins other partitions.
    ProfileMigLayout: "profile-mig-layout",
        "the node profile pins other MIG partitions",
        None;
    /// The node profile changes amounts of the device.
    ProfileAmounts: "profile-amounts",
        "the node profile changes the amounts of the device",
        None;
    /// A device plugin offers the GPUs of the node.
    DevicePlugin: "device-plugin",
        "a device plugin offers the GPUs of this node",
        Some("remove it from the node, or the label gpu.drava.dev/enabled");
    /// Another DRA driver publishes the GPU.
    OtherDriver: "other-driver",
        "another DRA driver publishes the GPU",
        Some("remove it from the node, or the label gpu.drava.dev/enabled");
    /// The mode of the node profile needs MIG mode, which takes a reset of the GPU.
    ResetForMig: "reset-for-mig",
        "the node profile needs MIG mode, which this GPU changes at a reset only",
        Some("drain the GPU, then run `nvidia-smi -mig 1 -i UUID` and `nvidia-smi --gpu-reset -i UUID`");
    /// The mode of the node profile needs MIG mode off, which takes a reset of the GPU.
    ResetForShares: "reset-for-shares",
        "the node profile needs MIG mode off, which this GPU changes at a reset only",
        Some("drain the GPU, then run `nvidia-smi -mig 0 -i UUID` and `nvidia-smi --gpu-reset -i UUID`");
}

impl UnavailableReason {
    /// Returns the reason with this value of a taint; `None` for faults of the GPU.
    #[must_use]
    pub fn parse(value: &str) -> Option<Self> {
        let mut all = Self::ALL.iter().copied();
        all.find(|reason| reason.as_str() == value)
    }

    /// Returns whether a reset of the GPU is required for what the node profile says.
    #[must_use]
    pub const fn is_reset(self) -> bool {
        matches!(self, Self::ResetForMig | Self::ResetForShares)
    }

    /// Returns the text for the GPU with this UUID: commands name the GPU.
    #[must_use]
    pub fn of_gpu(self, uuid: &str) -> String {
        self.to_string().replace("UUID", uuid)
    }

    /// Returns the remedy for the GPU with this UUID; `None` if nothing on the node removes the reason.
    #[must_use]
    pub fn remedy_of_gpu(self, uuid: &str) -> Option<String> {
        Some(self.remedy()?.replace("UUID", uuid))
    }

    /// Returns whether the administrator's node profile or another owner of the GPU is the reason, so that the device
    /// itself works.
    #[must_use]
    pub const fn is_of_profile(self) -> bool {
        match self {
            Self::ProfileExcluded
            | Self::ProfileMode
            | Self::ProfileMigProfiles
            | Self::ProfileMigLayout
            | Self::ProfileAmounts
            | Self::DevicePlugin
            | Self::OtherDriver => true,
            Self::Mig
            | Self::MigDisabled
            | Self::NoMigProfiles
            | Self::ForeignInstance
            | Self::Prohibited
            | Self::ExclusiveProcess
            | Self::Mps
            | Self::ConfidentialComputing
            | Self::NoMemoryFigure
            | Self::NoMemory
            | Self::ResetForMig
            | Self::ResetForShares => false,
        }
    }
}

impl fmt::Display for UnavailableReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.problem())?;
        match self.remedy() {
            Some(remedy) => write!(f, "; {remedy}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn finds_each_reason_by_the_value_of_its_taint() {
        for reason in UnavailableReason::ALL {
            assert_eq!(UnavailableReason::parse(reason.as_str()), Some(*reason));
        }
        let values: BTreeSet<&str> = UnavailableReason::ALL
            .iter()
            .map(|one| one.as_str())
            .collect();
        assert_eq!(values.len(), UnavailableReason::ALL.len());
        assert_eq!(UnavailableReason::parse("xid-79"), None);
    }
}
