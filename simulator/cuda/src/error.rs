//! `CUresult` codes with their names and texts.

use std::ffi::{CStr, c_uint};

use simulator_machine::client::ClientError;
use simulator_machine::protocol::Refusal;

pub(crate) type CUresult = c_uint;

macro_rules! errors {
    ($($name:ident = $value:literal, $symbol:literal, $text:literal;)*) => {
        /// `CUresult` without `CUDA_SUCCESS`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(dead_code, reason = "the list has every code with a name")]
        pub(crate) enum CudaError {
            $($name = $value,)*
        }

        /// Returns the name and the text of a code.
        pub(crate) fn name(code: CUresult) -> Option<(&'static CStr, &'static CStr)> {
            match code {
                0 => Some((c"CUDA_SUCCESS", c"no error")),
                $($value => Some(($symbol, $text)),)*
                _ => None,
            }
        }

        impl CudaError {
            /// Returns the error with a code.
            pub(crate) fn of_code(code: CUresult) -> Option<Self> {
                match code {
                    $($value => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

errors! {
    InvalidValue = 1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument";
    OutOfMemory = 2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory";
    NotInitialized = 3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error";
    Deinitialized = 4, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down";
    StubLibrary = 34, c"CUDA_ERROR_STUB_LIBRARY", c"CUDA driver is a stub library";
    DeviceUnavailable = 46, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"CUDA-capable device(s) is/are busy or unavailable";
    NoDevice = 100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected";
    InvalidDevice = 101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal";
    InvalidImage = 200, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid";
    InvalidContext = 201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context";
    MapFailed = 205, c"CUDA_ERROR_MAP_FAILED", c"mapping of buffer object failed";
    UnmapFailed = 206, c"CUDA_ERROR_UNMAP_FAILED", c"unmapping of buffer object failed";
    AlreadyMapped = 208, c"CUDA_ERROR_ALREADY_MAPPED", c"resource already mapped";
    NotMapped = 211, c"CUDA_ERROR_NOT_MAPPED", c"resource not mapped";
    EccUncorrectable = 214, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"uncorrectable ECC error encountered";
    UnsupportedLimit = 215, c"CUDA_ERROR_UNSUPPORTED_LIMIT", c"limit is not supported on this architecture";
    ContextAlreadyInUse = 216, c"CUDA_ERROR_CONTEXT_ALREADY_IN_USE", c"exclusive-thread device already in use by a different thread";
    PeerAccessUnsupported = 217, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", c"peer access is not supported between these two devices";
    InvalidPtx = 218, c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed";
    InvalidSource = 300, c"CUDA_ERROR_INVALID_SOURCE", c"device kernel image is invalid";
    FileNotFound = 301, c"CUDA_ERROR_FILE_NOT_FOUND", c"file not found";
    OperatingSystem = 304, c"CUDA_ERROR_OPERATING_SYSTEM", c"OS call failed or operation not supported on this OS";
    InvalidHandle = 400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle";
    IllegalState = 401, c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state";
    NotFound = 500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found";
    NotReady = 600, c"CUDA_ERROR_NOT_READY", c"device not ready";
    IllegalAddress = 700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered";
    LaunchOutOfResources = 701, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"too many resources requested for launch";
    LaunchTimeout = 702, c"CUDA_ERROR_LAUNCH_TIMEOUT", c"the launch timed out and was terminated";
    PeerAccessAlreadyEnabled = 704, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access is already enabled";
    PeerAccessNotEnabled = 705, c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", c"peer access has not been enabled";
    PrimaryContextActive = 708, c"CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", c"cannot set while device is active in this process";
    ContextIsDestroyed = 709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed";
    HostMemoryAlreadyRegistered = 712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"part or all of the requested memory range is already mapped";
    HostMemoryNotRegistered = 713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"pointer does not correspond to a registered memory region";
    LaunchFailed = 719, c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure";
    CooperativeLaunchTooLarge = 720, c"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", c"too many blocks in cooperative launch";
    NotPermitted = 800, c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted";
    NotSupported = 801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported";
    SystemNotReady = 802, c"CUDA_ERROR_SYSTEM_NOT_READY", c"system not yet initialized";
    SystemDriverMismatch = 803, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"system has unsupported display driver / cuda driver combination";
    CompatNotSupportedOnDevice = 804, c"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", c"forward compatibility was attempted on non supported HW";
    MpsConnectionFailed = 805, c"CUDA_ERROR_MPS_CONNECTION_FAILED", c"MPS client failed to connect to the MPS control daemon or the MPS server";
    MpsRpcFailure = 806, c"CUDA_ERROR_MPS_RPC_FAILURE", c"the remote procedural call between the MPS server and the MPS client failed";
    MpsServerNotReady = 807, c"CUDA_ERROR_MPS_SERVER_NOT_READY", c"MPS server is not ready to accept new MPS client requests";
    MpsMaxClientsReached = 808, c"CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", c"the hardware resources required to create MPS client have been exhausted";
    MpsMaxConnectionsReached = 809, c"CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", c"the hardware resources required to support device connections have been exhausted";
    MpsClientTerminated = 810, c"CUDA_ERROR_MPS_CLIENT_TERMINATED", c"the MPS client has been terminated by the server";
    StreamCaptureUnsupported = 900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing";
    StreamCaptureInvalidated = 901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"operation failed due to a previous error during capture";
    StreamCaptureMerge = 902, c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"operation would result in a merge of separate capture sequences";
    StreamCaptureUnmatched = 903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"capture was not ended in the same stream as it began";
    StreamCaptureUnjoined = 904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"capturing stream has unjoined work";
    StreamCaptureIsolation = 905, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"dependency created on uncaptured work in another stream";
    StreamCaptureImplicit = 906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"operation would make the legacy stream depend on a capturing blocking stream";
    CapturedEvent = 907, c"CUDA_ERROR_CAPTURED_EVENT", c"operation not permitted on an event last recorded in a capturing stream";
    StreamCaptureWrongThread = 908, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"attempt to terminate a thread-local capture sequence from another thread";
    Timeout = 909, c"CUDA_ERROR_TIMEOUT", c"wait operation timed out";
    GraphExecUpdateFailure = 910, c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", c"the graph update was not performed because it included changes which violated constraints specific to instantiated graph update";
    Unknown = 999, c"CUDA_ERROR_UNKNOWN", c"unknown error";
}

impl CudaError {
    /// Returns the sticky error with a code.
    pub(crate) fn sticky(code: u64) -> Option<Self> {
        let sticky = [
            Self::DeviceUnavailable,
            Self::EccUncorrectable,
            Self::IllegalAddress,
            Self::LaunchFailed,
        ];
        sticky
            .into_iter()
            .find(|error| u64::from(CUresult::from(*error)) == code)
    }
}

impl From<CudaError> for CUresult {
    fn from(error: CudaError) -> Self {
        error as Self
    }
}

impl From<ClientError> for CudaError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::NoMachine { .. } => Self::NoDevice,
            // The daemon ended while the program was running.
            ClientError::Wire(_) | ClientError::Unexpected => Self::Unknown,
            ClientError::Refused(refusal) => refusal.into(),
        }
    }
}

impl From<Refusal> for CudaError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Protocol => Self::SystemDriverMismatch,
            Refusal::NotFound => Self::InvalidHandle,
            Refusal::OutOfMemory => Self::OutOfMemory,
            Refusal::Lost => Self::Unknown,
            Refusal::Failed => Self::OperatingSystem,
            Refusal::NoPermission => Self::NotPermitted,
            Refusal::Unavailable => Self::DeviceUnavailable,
            Refusal::MpsNotReady => Self::MpsServerNotReady,
            Refusal::MpsFull => Self::MpsMaxClientsReached,
            Refusal::MpsFailed => Self::MpsRpcFailure,
            Refusal::Invalid
            | Refusal::InUse
            | Refusal::InsufficientResources
            | Refusal::NotSupported => Self::InvalidValue,
        }
    }
}

impl From<rustix::io::Errno> for CudaError {
    fn from(errno: rustix::io::Errno) -> Self {
        match errno {
            rustix::io::Errno::NOMEM => Self::OutOfMemory,
            _ => Self::OperatingSystem,
        }
    }
}
