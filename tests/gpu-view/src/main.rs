//! `gpu-view`: a table of GPUs, read from NVML.
//!
//! It is installed as `nvidia-smi` in the demo's images, which contain no file of NVIDIA's. It loads the process's
//! `libnvidia-ml.so.1`, so it shows a share in a container with a share, and works on a real driver too. It implements
//! the options, output and exit statuses that scripts use.

use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;

use clap::Parser;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

mod list;
mod partitions;
mod query;
mod table;

use query::Format;

/// Shows the GPUs of this machine.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// List each GPU with its UUID.
    #[arg(short = 'L', long)]
    list_gpus: bool,
    /// Comma-separated fields of each GPU, such as name,memory.used; requires --format=csv.
    #[arg(
        long,
        value_name = "FIELDS",
        requires = "format",
        value_delimiter = ','
    )]
    query_gpu: Vec<String>,
    /// Format of the fields: csv, csv,noheader or csv,noheader,nounits.
    #[arg(long)]
    format: Option<Format>,
    /// Show only this GPU: index, UUID or PCI bus ID.
    #[arg(short = 'i', long, value_name = "GPU")]
    id: Option<String>,
}

/// Error of a view, in the words of `nvidia-smi`.
#[derive(Debug, thiserror::Error)]
enum ViewError {
    #[error(
        "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display Driver is properly installed and present in your system.\nPlease also try adding directory that contains libnvidia-ml.so to your system PATH."
    )]
    NoLibrary,
    #[error(
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running."
    )]
    NoDriver,
    #[error("No devices were found")]
    NoDevices,
    #[error("Field \"{0}\" is not a valid field to query.")]
    UnknownField(String),
    #[error("Failed to initialize NVML: {0}")]
    Initialize(#[source] NvmlError),
    #[error("{0}")]
    Nvml(#[from] NvmlError),
}

impl ViewError {
    /// Exit status of `nvidia-smi` for this error.
    fn exit_code(&self) -> u8 {
        match self {
            Self::NoLibrary => 12,
            Self::NoDriver => 9,
            Self::NoDevices => 6,
            Self::UnknownField(_) => 2,
            Self::Initialize(_) | Self::Nvml(_) => 255,
        }
    }
}

fn main() -> ExitCode {
    let (text, code) = match run(&Arguments::parse()) {
        Ok(text) => (text, ExitCode::SUCCESS),
        // On standard output, as scripts expect.
        Err(error) => (format!("{error}\n"), ExitCode::from(error.exit_code())),
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        // A closed pipe (`| head -1`) is not an error.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            eprintln!("gpu-view: cannot write to standard output: {error}");
            ExitCode::FAILURE
        }
        _ => code,
    }
}

fn run(arguments: &Arguments) -> Result<String, ViewError> {
    let nvml = Nvml::init().map_err(|error| match error {
        NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound => ViewError::NoLibrary,
        NvmlError::DriverNotLoaded => ViewError::NoDriver,
        error => ViewError::Initialize(error),
    })?;
    let devices = match &arguments.id {
        Some(id) => vec![find(&nvml, id)?],
        None => (0..nvml.device_count()?)
            .map(|index| nvml.device_by_index(index))
            .collect::<Result<_, _>>()?,
    };
    if devices.is_empty() {
        return Err(ViewError::NoDevices);
    }
    if arguments.list_gpus {
        return list::list(&devices);
    }
    match arguments.format {
        Some(format) if !arguments.query_gpu.is_empty() => {
            query::query(&nvml, &devices, &arguments.query_gpu, format)
        }
        _ => table::table(&nvml, &devices),
    }
}

fn find<'nvml>(nvml: &'nvml Nvml, id: &str) -> Result<nvml_wrapper::Device<'nvml>, ViewError> {
    let found = if let Ok(index) = id.parse() {
        nvml.device_by_index(index)
    } else if id.starts_with("GPU-") {
        nvml.device_by_uuid(id)
    } else {
        nvml.device_by_pci_bus_id(id)
    };
    found.map_err(|error| match error {
        NvmlError::NotFound | NvmlError::InvalidArg => ViewError::NoDevices,
        error => error.into(),
    })
}
