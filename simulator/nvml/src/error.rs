//! NVML error codes, and their mapping from daemon refusals.

use std::ffi::CStr;

use nvml_wrapper_sys::bindings::nvmlReturn_t;
use simulator_machine::client::ClientError;
use simulator_machine::protocol::Refusal;

macro_rules! errors {
    ($($(#[$meta:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        /// `nvmlReturn_t` without `NVML_SUCCESS`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum NvmlError {
            $($(#[$meta])* $name = $value,)*
        }

        impl From<nvmlReturn_t> for NvmlError {
            fn from(code: nvmlReturn_t) -> Self {
                match code {
                    $($value => Self::$name,)*
                    _ => Self::Unknown,
                }
            }
        }

        /// Text of `nvmlErrorString`.
        pub(crate) fn text(code: nvmlReturn_t) -> &'static CStr {
            match code {
                0 => c"Success",
                $($value => $text,)*
                22 => c"The requested vgpu operation is not available on target device, becasue ECC is enabled",
                24 => c"Ran out of critical resources, other than memory",
                _ => c"Unknown Error",
            }
        }
    };
}

errors! {
    Uninitialized = 1, c"Uninitialized";
    InvalidArgument = 2, c"Invalid Argument";
    NotSupported = 3, c"Not Supported";
    NoPermission = 4, c"Insufficient Permissions";
    NotFound = 6, c"Not Found";
    InsufficientSize = 7, c"Insufficient Size";
    DriverNotLoaded = 9, c"Driver Not Loaded";
    Timeout = 10, c"Timeout";
    FunctionNotFound = 13, c"Function Not Found";
    CorruptedInforom = 14, c"infoROM is corrupted";
    GpuIsLost = 15, c"GPU is lost";
    ResetRequired = 16, c"GPU requires restart";
    LibRmVersionMismatch = 18, c"Driver/library version mismatch";
    InUse = 19, c"In use by another client";
    Memory = 20, c"Insufficient Memory";
    NoData = 21, c"No data";
    InsufficientResources = 23, c"Insufficient Resources";
    ArgumentVersionMismatch = 25, c"The provided version is invalid/unsupported";
    Unknown = 999, c"Unknown Error";
}

impl From<NvmlError> for nvmlReturn_t {
    fn from(error: NvmlError) -> Self {
        error as Self
    }
}

impl From<ClientError> for NvmlError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::NoMachine { .. } | ClientError::Wire(_) => Self::DriverNotLoaded,
            ClientError::Refused(refusal) => refusal.into(),
            ClientError::Unexpected => Self::Unknown,
        }
    }
}

impl From<Refusal> for NvmlError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Protocol => Self::LibRmVersionMismatch,
            Refusal::NotFound => Self::NotFound,
            Refusal::OutOfMemory => Self::Memory,
            Refusal::Lost => Self::GpuIsLost,
            Refusal::InUse => Self::InUse,
            Refusal::InsufficientResources => Self::InsufficientResources,
            Refusal::NotSupported => Self::NotSupported,
            Refusal::Failed => Self::Unknown,
            Refusal::NoPermission => Self::NoPermission,
            Refusal::Invalid => Self::InvalidArgument,
            // NVML has no contexts.
            Refusal::Unavailable | Refusal::MpsNotReady | Refusal::MpsFull | Refusal::MpsFailed => {
                Self::Unknown
            }
        }
    }
}
