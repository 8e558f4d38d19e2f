//! Why an NVML call failed, without NVML's types.

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;

/// Outcome of a failed NVML call. Sources: `nvmlReturn_t` in `nvml.h`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Status {
    /// The card or the driver has no such feature.
    #[error("not supported by this card or driver")]
    NotSupported,
    /// The library is older than the call.
    #[error("this NVML has no {0}; a newer NVIDIA driver has it")]
    MissingSymbol(&'static str),
    /// The caller lacks the privilege, or the device file is not accessible.
    #[error("no permission: the device files must be accessible, and changes need root")]
    NoPermission,
    /// The card, instance or profile does not exist (any more).
    #[error("not found")]
    NotFound,
    /// A process uses it.
    #[error("in use by a process")]
    InUse,
    /// No free slices, engines or placement.
    #[error("insufficient resources: the slices or engines are taken")]
    InsufficientResources,
    /// The card has fallen off the bus.
    #[error(
        "the GPU is lost (fallen off the bus); the node needs a reboot or a power cycle of the card"
    )]
    GpuLost,
    /// The card must be reset before it is usable.
    #[error("the GPU needs a reset")]
    ResetRequired,
    /// The kernel module is not loaded.
    #[error("the NVIDIA kernel driver is not loaded")]
    DriverNotLoaded,
    /// Kernel module and library are of different driver versions.
    #[error(
        "driver and library version mismatch: the driver was upgraded and the node not rebooted"
    )]
    VersionMismatch,
    /// The dynamic loader refused the library.
    #[error("{0}")]
    Load(String),
    /// NVML refused an argument: on a struct of a newer version this means an older library.
    #[error("invalid argument")]
    InvalidArgument,
    /// The caller's buffer was too small, again and again: the list grows faster than it is read.
    #[error("the list grew faster than it could be read")]
    InsufficientSize,
    /// Nothing happened in the time given.
    #[error("timed out")]
    Timeout,
    /// Anything else, in NVML's words.
    #[error("{0}")]
    Other(String),
}

impl Status {
    /// The fact asked for does not exist here: a feature less, not a failure.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        match self {
            Self::NotSupported | Self::MissingSymbol(_) | Self::InvalidArgument => true,
            Self::NoPermission
            | Self::NotFound
            | Self::InUse
            | Self::InsufficientResources
            | Self::GpuLost
            | Self::ResetRequired
            | Self::DriverNotLoaded
            | Self::VersionMismatch
            | Self::Load(_)
            | Self::InsufficientSize
            | Self::Timeout
            | Self::Other(_) => false,
        }
    }

    /// Converts a return code; `None` is success.
    pub(crate) fn from_code(code: sys::nvmlReturn_t) -> Option<Self> {
        if code == sys::nvmlReturn_enum_NVML_SUCCESS {
            return None;
        }
        Some(match code {
            sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => Self::NotSupported,
            sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND => {
                Self::MissingSymbol("such function")
            }
            sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => Self::NoPermission,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND => Self::NotFound,
            sys::nvmlReturn_enum_NVML_ERROR_IN_USE => Self::InUse,
            sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES => Self::InsufficientResources,
            sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST => Self::GpuLost,
            sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => Self::ResetRequired,
            sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED => Self::DriverNotLoaded,
            sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH => Self::VersionMismatch,
            sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT
            | sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH => Self::InvalidArgument,
            sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE => Self::InsufficientSize,
            sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT => Self::Timeout,
            other => Self::Other(format!("NVML error {other}: {}", NvmlError::from(other))),
        })
    }
}

impl From<NvmlError> for Status {
    fn from(error: NvmlError) -> Self {
        match error {
            NvmlError::NotSupported | NvmlError::UnexpectedVariant(_) => Self::NotSupported,
            NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => {
                Self::MissingSymbol("such function")
            }
            NvmlError::NoPermission => Self::NoPermission,
            NvmlError::NotFound => Self::NotFound,
            NvmlError::InUse => Self::InUse,
            NvmlError::GpuLost => Self::GpuLost,
            NvmlError::ResetRequired => Self::ResetRequired,
            NvmlError::DriverNotLoaded => Self::DriverNotLoaded,
            NvmlError::LibRmVersionMismatch => Self::VersionMismatch,
            NvmlError::InvalidArg => Self::InvalidArgument,
            NvmlError::InsufficientSize(_) => Self::InsufficientSize,
            NvmlError::Timeout => Self::Timeout,
            NvmlError::LibloadingError(error) => Self::Load(error.to_string()),
            other => Self::Other(other.to_string()),
        }
    }
}
