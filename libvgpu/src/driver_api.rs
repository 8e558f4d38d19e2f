//! NVIDIA's libraries: types, tables of functions, and the original functions.

pub(crate) mod cuda;
pub(crate) mod device;
pub(crate) mod driver;
pub(crate) mod functions;
pub(crate) mod nvml;
