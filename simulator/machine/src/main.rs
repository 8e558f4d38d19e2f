//! `simulator-machine`: serves a simulated GPU machine, and controls a running one.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand};
use simulator_machine::control::{self, Answer, Command};
use simulator_machine::description::MachineDescription;
use simulator_machine::fabric_manager;
use simulator_machine::kernel::Faults;
use simulator_machine::mps;
use simulator_machine::protocol::{GpuEvent, GpuIndex, MigRequest, ReportedValue};
use simulator_machine::root::{DriverRoot, Files};
use simulator_machine::server::Server;

/// A simulated machine with NVIDIA GPUs.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Simulate the kernel driver until SIGTERM; prints "ready" when clients can connect.
    Serve(Serve),
    /// Query or control the daemon of a driver root.
    Ctl {
        /// Driver root of the daemon.
        #[arg(long)]
        root: PathBuf,
        #[command(subcommand)]
        command: CtlCommand,
    },
}

#[derive(clap::Args)]
struct Serve {
    /// Machine file.
    #[arg(long)]
    machine: PathBuf,
    /// Directory to use as driver root: empty, or of an earlier daemon.
    #[arg(long)]
    root: PathBuf,
    /// Directory with libsimulator_cuda.so and libsimulator_nvml.so, to install into the root.
    #[arg(long)]
    libs: Option<PathBuf>,
    /// Program to install into the root as nvidia-smi.
    #[arg(long, value_name = "FILE")]
    nvidia_smi: Option<PathBuf>,
    /// Name of the node: derives UUIDs and serial numbers from it, so that nodes with the same machine file have different GPUs.
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// Start the fabric manager if the machine has NVSwitches, as NVIDIA's driver container does.
    #[arg(long)]
    fabric_manager: bool,
    /// Stop when standard input is closed, so that the daemon ends with its parent.
    #[arg(long)]
    until_stdin_closes: bool,
    /// Remove everything below the root at the end.
    #[arg(long)]
    remove_root: bool,
}

#[derive(Subcommand)]
enum CtlCommand {
    /// Print memory and processes of every GPU as JSON.
    Status,
    /// Raise an Xid on a GPU.
    Xid {
        /// GPU index.
        #[arg(long)]
        gpu: u32,
        /// Xid code, such as 79.
        #[arg(long)]
        code: u64,
        /// GPU instance; the whole GPU by default.
        #[arg(long)]
        instance: Option<u32>,
    },
    /// Raise an uncorrectable memory error on a GPU.
    DoubleBitEcc {
        /// GPU index.
        #[arg(long)]
        gpu: u32,
    },
    /// Reset a GPU: destroy its MIG instances and apply a pending MIG mode.
    Reset {
        /// GPU index.
        #[arg(long)]
        gpu: u32,
    },
    /// Switch MIG mode, like `nvidia-smi -mig`; on Ampere the mode is pending until a reset.
    MigMode {
        /// GPU index.
        #[arg(long)]
        gpu: u32,
        /// New mode.
        #[arg(long, action = clap::ArgAction::Set)]
        enabled: bool,
    },
    /// Create a GPU instance, like `nvidia-smi mig -cgi`.
    CreateInstance {
        /// GPU index.
        #[arg(long)]
        gpu: u32,
        /// Profile id, such as 19.
        #[arg(long)]
        profile: u32,
        /// First memory slice.
        #[arg(long)]
        start: u32,
    },
    /// Destroy a GPU instance without compute instances, like `nvidia-smi mig -dgi`.
    DestroyInstance {
        /// GPU index.
        #[arg(long)]
        gpu: u32,
        /// GPU instance id, as `status` prints it.
        #[arg(long)]
        instance: u32,
    },
    /// Set the faults of a GPU; without options, remove them.
    Break {
        /// GPU index.
        #[arg(long)]
        gpu: u32,
        /// The GPU has fallen off the bus.
        #[arg(long)]
        lost: bool,
        /// Additional delay of every reply about the GPU.
        #[arg(long, default_value_t = 0)]
        delay_milliseconds: u64,
        /// Context creation fails.
        #[arg(long)]
        refuses_contexts: bool,
        /// Creation of GPU and compute instances fails.
        #[arg(long)]
        refuses_instances: bool,
        /// Recovery action that the driver requests: 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset.
        #[arg(long, default_value_t = 0)]
        recovery_action: u32,
        /// State of the NVLink fabric: 1 not started, 2 in progress.
        #[arg(long)]
        fabric_state: Option<u8>,
        /// Health mask of the NVLink fabric: 1 degraded bandwidth, 4 recovering routes, 16 unhealthy routes.
        #[arg(long, default_value_t = 0)]
        fabric_health_mask: u32,
        /// A repair of the memory (row remapping, page retirement) waits for a reset.
        #[arg(long)]
        repair_pending: bool,
        /// A row of the memory could not be remapped.
        #[arg(long)]
        repair_failed: bool,
        /// A monitor has the MIG instances open: they cannot be destroyed.
        #[arg(long)]
        holds_instances: bool,
        /// Temperature instead of that of the load.
        #[arg(long)]
        temperature_celsius: Option<u32>,
        /// Values that NVML does not report: memory, processes, utilization, temperature, power.
        #[arg(long, value_delimiter = ',')]
        unsupported: Vec<ReportedValue>,
        /// NVML functions that fail, as NAME=CODE, such as nvmlDeviceGetTotalEccErrors=14.
        #[arg(long, value_delimiter = ',', value_parser = failing_function)]
        failing: Vec<(String, u32)>,
    },
}

fn main() -> anyhow::Result<ExitCode> {
    if let Some(code) = mps::run_program().or_else(fabric_manager::run_program) {
        return Ok(code);
    }
    match Arguments::parse().action {
        Action::Serve(arguments) => serve(&arguments)?,
        Action::Ctl { root, command } => ctl(&DriverRoot::new(root), command)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn failing_function(text: &str) -> Result<(String, u32), String> {
    let parsed = text.split_once('=').and_then(|(name, code)| {
        let code = code.parse().ok().filter(|code| *code != 0)?;
        name.starts_with("nvml").then(|| (name.to_owned(), code))
    });
    parsed.ok_or_else(|| format!("{text:?} is not NAME=CODE of an NVML function and its error"))
}

fn serve(arguments: &Serve) -> anyhow::Result<()> {
    let machine = &arguments.machine;
    let mut description = MachineDescription::read(machine)
        .with_context(|| format!("cannot load machine file {}", machine.display()))?;
    if let Some(node) = &arguments.node_name {
        description = description.on_node(node);
    }
    let root = DriverRoot::new(&arguments.root);
    let files = Files {
        libraries: arguments.libs.as_deref(),
        nvidia_smi: arguments.nvidia_smi.as_deref(),
    };
    let has_switches = description.nvswitches.is_some();
    let mut server = Server::start(description, root.clone(), files)?;
    if arguments.until_stdin_closes {
        server.stop_when_closed(&std::io::stdin())?;
    }
    let manager = (arguments.fabric_manager && has_switches).then(|| {
        let root = root.path().to_owned();
        // The server answers it, in this thread.
        std::thread::spawn(move || {
            let started = fabric_manager::start(&root);
            let mut manager = started.inspect_err(|_| stop_this_process())?;
            announce();
            // It ends with its connection to the server.
            manager.wait().map(drop)
        })
    });
    if manager.is_none() {
        announce();
    }
    server.run()?;
    drop(server);
    if let Some(Ok(managed)) = manager.map(std::thread::JoinHandle::join) {
        managed.context("cannot start the fabric manager")?;
    }
    if arguments.remove_root {
        // The server still holds the lock: no other daemon lays the root out.
        root.remove()?;
    }
    Ok(())
}

fn announce() {
    // The parent may have closed the pipe.
    let _ = writeln!(std::io::stdout(), "ready");
}

/// As SIGTERM does.
fn stop_this_process() {
    // A process may signal itself.
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM);
}

fn ctl(root: &DriverRoot, command: CtlCommand) -> anyhow::Result<()> {
    let command = match command {
        CtlCommand::Status => Command::Status,
        CtlCommand::Xid {
            gpu,
            code,
            instance,
        } => Command::Raise(GpuEvent::Xid {
            gpu: GpuIndex(gpu),
            code,
            instance,
        }),
        CtlCommand::DoubleBitEcc { gpu } => {
            Command::Raise(GpuEvent::DoubleBitEcc { gpu: GpuIndex(gpu) })
        }
        CtlCommand::Reset { gpu } => Command::Reset { gpu: GpuIndex(gpu) },
        CtlCommand::MigMode { gpu, enabled } => Command::Mig {
            gpu: GpuIndex(gpu),
            request: MigRequest::SetMode { enabled },
        },
        CtlCommand::CreateInstance {
            gpu,
            profile,
            start,
        } => Command::Mig {
            gpu: GpuIndex(gpu),
            request: MigRequest::CreateGpuInstance {
                profile,
                start: Some(start),
            },
        },
        CtlCommand::DestroyInstance { gpu, instance } => Command::Mig {
            gpu: GpuIndex(gpu),
            request: MigRequest::DestroyGpuInstance {
                gpu_instance: instance,
            },
        },
        CtlCommand::Break {
            gpu,
            lost,
            delay_milliseconds,
            refuses_contexts,
            refuses_instances,
            recovery_action,
            fabric_state,
            fabric_health_mask,
            repair_pending,
            repair_failed,
            holds_instances,
            temperature_celsius,
            unsupported,
            failing,
        } => Command::Break {
            gpu: GpuIndex(gpu),
            faults: Faults {
                lost,
                delay: Duration::from_millis(delay_milliseconds),
                refuses_contexts,
                refuses_instances,
                recovery_action,
                fabric_state,
                fabric_health_mask,
                repair_pending,
                repair_failed,
                holds_instances,
                temperature_celsius,
                unsupported: unsupported.into_iter().collect(),
                failing: failing.into_iter().collect(),
            },
        },
    };
    if let Answer::Status(status) = control::send(root, &command)? {
        println!("{}", serde_json::to_string_pretty(&status)?);
    }
    Ok(())
}
