//! NVLink fabric of a GPU.

use std::fmt;

use nvml_wrapper_sys::bindings as sys;

/// Membership in an NVLink fabric (`nvmlGpuFabricInfo_t`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Fabric {
    /// UUID of the fabric's cluster, lowercase with dashes. All zeros for the fabric of one node, such as an HGX board:
    /// the value does not connect GPUs of different nodes.
    pub cluster_uuid: String,
    /// Clique: GPUs of one cluster and clique are connected by NVLink.
    pub clique: u32,
}

/// Registration of a GPU with its NVLink fabric (`nvmlGpuFabricState_t`). Until it is complete, `cuInit` fails with
/// `CUDA_ERROR_SYSTEM_NOT_READY`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FabricState {
    /// The fabric manager has not configured the GPU.
    NotStarted,
    /// The fabric manager is configuring the GPU.
    InProgress,
    /// The GPU is part of the fabric.
    Completed,
    /// The registration failed with this NVML code.
    Failed(u32),
}

/// Health of a GPU's NVLink fabric as NVML reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FabricHealth {
    /// `NVML_GPU_FABRIC_HEALTH_MASK_*`: 0 if the driver reports none.
    pub mask: u32,
    /// `NVML_GPU_FABRIC_HEALTH_SUMMARY_*`: 0 if the driver reports none.
    pub summary: u8,
}

impl FabricHealth {
    /// Returns what is wrong. The summary counts only where the mask names nothing.
    #[must_use]
    pub fn defects(self) -> Vec<FabricDefect> {
        let of_bits = |shift| (self.mask >> shift) & 3 == IS_TRUE;
        let conditions = [
            (
                sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW,
                FabricDefect::DegradedBandwidth,
            ),
            (
                sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY,
                FabricDefect::RouteRecovery,
            ),
            (
                sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY,
                FabricDefect::RouteUnhealthy,
            ),
            (
                sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY,
                FabricDefect::AccessTimeoutRecovery,
            ),
        ];
        let conditions = conditions.into_iter();
        let mut defects: Vec<_> = conditions
            .filter_map(|(shift, defect)| of_bits(shift).then_some(defect))
            .collect();
        let configuration = (self.mask
            >> sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION)
            & sys::NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION;
        if configuration > sys::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE {
            defects.push(FabricDefect::Configuration(configuration));
        }
        if defects.is_empty() {
            match u32::from(self.summary) {
                sys::NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY => {
                    defects.push(FabricDefect::Unhealthy);
                }
                sys::NVML_GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY => {
                    defects.push(FabricDefect::LimitedCapacity);
                }
                _ => {}
            }
        }
        defects
    }
}

/// Value of a condition in the health mask that holds. 0 is "not supported", 2 is "false".
const IS_TRUE: u32 = sys::NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE;

/// A defect of an NVLink fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FabricDefect {
    /// The bandwidth of the links is degraded.
    DegradedBandwidth,
    /// Routes are being recovered.
    RouteRecovery,
    /// A route is unhealthy.
    RouteUnhealthy,
    /// Recovery from access timeouts is in progress.
    AccessTimeoutRecovery,
    /// The fabric is configured incorrectly, with this code of NVML.
    Configuration(u32),
    /// The fabric works with limited capacity.
    LimitedCapacity,
    /// NVML names no part.
    Unhealthy,
}

impl fmt::Display for FabricDefect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::DegradedBandwidth => "the bandwidth of its links is degraded",
            Self::RouteRecovery => "its routes are being recovered",
            Self::RouteUnhealthy => "a route is unhealthy",
            Self::AccessTimeoutRecovery => "it recovers from access timeouts",
            Self::Configuration(code) => {
                let cause = match *code {
                    sys::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_INCORRECT_SYSGUID => {
                        "the system GUID is wrong"
                    }
                    sys::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_INCORRECT_CHASSIS_SN => {
                        "the serial number of the chassis is wrong"
                    }
                    sys::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NO_PARTITION => {
                        "the GPU is in no partition"
                    }
                    sys::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_INSUFFICIENT_NVLINKS => {
                        "NVLinks are missing"
                    }
                    _ => return write!(f, "its configuration is incorrect (NVML's code {code})"),
                };
                return write!(f, "its configuration is incorrect: {cause}");
            }
            Self::LimitedCapacity => "it works with limited capacity",
            Self::Unhealthy => "NVML names no part",
        };
        f.write_str(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parts_of_unhealthy_fabric() {
        let defects = |mask, summary| FabricHealth { mask, summary }.defects();
        // Not supported, and all "false".
        assert_eq!((defects(0, 0), defects(0x1aa, 1)), (vec![], vec![]));
        for (mask, defect) in [
            (0x1a9, FabricDefect::DegradedBandwidth),
            (0x1a6, FabricDefect::RouteRecovery),
            (0x19a, FabricDefect::RouteUnhealthy),
            (0x16a, FabricDefect::AccessTimeoutRecovery),
            (0x5aa, FabricDefect::Configuration(5)),
        ] {
            assert_eq!(defects(mask, 2), [defect], "{mask:#x}");
        }
        let both = [
            FabricDefect::DegradedBandwidth,
            FabricDefect::RouteUnhealthy,
        ];
        assert_eq!(defects(0x199, 2), both);
        assert_eq!(defects(0x1aa, 2), [FabricDefect::Unhealthy]);
        assert_eq!(defects(0, 3), [FabricDefect::LimitedCapacity]);
        let missing = FabricDefect::Configuration(5).to_string();
        assert_eq!(
            missing,
            "its configuration is incorrect: NVLinks are missing"
        );
    }
}
