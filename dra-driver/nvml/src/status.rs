//! Return codes of NVML.

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;

/// Error of an NVML call (`nvmlReturn_t` in `nvml.h`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Status {
    /// The GPU or the driver does not support the call.
    #[error("not supported by the GPU or the NVIDIA driver")]
    NotSupported,
    /// The library lacks the symbol.
    #[error("NVML has no {0}; upgrade the NVIDIA driver")]
    MissingSymbol(&'static str),
    /// The caller lacks the privilege, or the device file is not accessible.
    #[error("no permission; run as root with access to the device files")]
    NoPermission,
    /// The GPU, instance or profile does not exist.
    #[error("not found")]
    NotFound,
    /// A process uses the object.
    #[error("in use by a process")]
    InUse,
    /// No free slices, engines or placement.
    #[error("insufficient resources: slices or engines are in use")]
    InsufficientResources,
    /// The GPU has fallen off the bus.
    #[error("the GPU has fallen off the bus; reboot the node or power-cycle the GPU")]
    GpuLost,
    /// The GPU must be reset.
    #[error("the GPU must be reset")]
    ResetRequired,
    /// The kernel module is not loaded.
    #[error("the NVIDIA kernel module is not loaded")]
    DriverNotLoaded,
    /// Kernel module and library have different versions.
    #[error(
        "version mismatch of kernel module and library; reboot the node after an upgrade of the NVIDIA driver"
    )]
    VersionMismatch,
    /// The dynamic loader failed.
    #[error("{0}")]
    Load(String),
    /// NVML rejected an argument. An older library rejects a newer struct version this way.
    #[error("invalid argument")]
    InvalidArgument,
    /// The list outgrew the buffer in every attempt.
    #[error("the list grew faster than it could be read")]
    InsufficientSize,
    /// No event before the timeout.
    #[error("timed out")]
    Timeout,
    /// Another error, with NVML's text.
    #[error("{0}")]
    Other(String),
}

impl Status {
    /// Returns whether the error means a missing feature.
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

    /// Returns whether the error is one of the query alone, so that others may succeed.
    #[must_use]
    pub(crate) const fn concerns_query(&self) -> bool {
        match self {
            Self::GpuLost
            | Self::ResetRequired
            | Self::DriverNotLoaded
            | Self::VersionMismatch
            | Self::Load(_) => false,
            Self::NotSupported
            | Self::MissingSymbol(_)
            | Self::InvalidArgument
            | Self::NoPermission
            | Self::NotFound
            | Self::InUse
            | Self::InsufficientResources
            | Self::InsufficientSize
            | Self::Timeout
            | Self::Other(_) => true,
        }
    }

    /// Converts a return code; `None` for success.
    pub(crate) fn from_code(code: sys::nvmlReturn_t) -> Option<Self> {
        if code == sys::nvmlReturn_enum_NVML_SUCCESS {
            return None;
        }
        Some(match code {
            sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => Self::NotSupported,
            sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND => {
                Self::MissingSymbol("function of this name")
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
                Self::MissingSymbol("function of this name")
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
