//! `simulator-machine`: serves a simulated GPU machine, and asks a serving one about itself.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand};
use simulator_machine::control::{self, Answer, Command};
use simulator_machine::description::MachineDescription;
use simulator_machine::kernel::Faults;
use simulator_machine::protocol::{CardEvent, CardIndex, Figure};
use simulator_machine::root::DriverRoot;
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
    /// Play the kernel driver until SIGTERM; prints "ready" when clients can connect.
    Serve {
        /// Machine file.
        #[arg(long)]
        machine: PathBuf,
        /// Directory that becomes the driver root.
        #[arg(long)]
        root: PathBuf,
        /// Directory with the built libsimulator_cuda.so and libsimulator_nvml.so, to be installed there.
        #[arg(long)]
        libs: Option<PathBuf>,
        /// Stop when standard input is closed: for tests, whose death must not leave us running.
        #[arg(long)]
        until_stdin_closes: bool,
    },
    /// Ask or command the daemon of a driver root.
    Ctl {
        /// The daemon's driver root.
        #[arg(long)]
        root: PathBuf,
        #[command(subcommand)]
        command: CtlCommand,
    },
}

#[derive(Subcommand)]
enum CtlCommand {
    /// Print memory and processes of every card as JSON.
    Status,
    /// Raise an Xid on a card, as the driver does for a critical error.
    Xid {
        /// Index of the card.
        #[arg(long)]
        card: u32,
        /// Xid code, such as 79.
        #[arg(long)]
        code: u64,
    },
    /// Reset a card: its MIG instances are gone, and a pending MIG mode takes effect.
    Reset {
        /// Index of the card.
        #[arg(long)]
        card: u32,
    },
    /// Break a card, or heal it: without a fault named it is whole again.
    Break {
        /// Index of the card.
        #[arg(long)]
        card: u32,
        /// It has fallen off the bus.
        #[arg(long)]
        lost: bool,
        /// Every answer about it takes so much longer.
        #[arg(long, default_value_t = 0)]
        delay_milliseconds: u64,
        /// No process can create a context.
        #[arg(long)]
        refuses_contexts: bool,
        /// No GPU or compute instance can be created.
        #[arg(long)]
        refuses_instances: bool,
        /// Figures that NVML does not have: memory, processes, utilization, temperature, power.
        #[arg(long, value_delimiter = ',')]
        unsupported: Vec<Figure>,
    },
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().action {
        Action::Serve {
            machine,
            root,
            libs,
            until_stdin_closes,
        } => serve(&machine, root, libs.as_deref(), until_stdin_closes),
        Action::Ctl { root, command } => ctl(&DriverRoot::new(root), command),
    }
}

fn serve(
    machine: &Path,
    root: PathBuf,
    libs: Option<&Path>,
    until_stdin_closes: bool,
) -> anyhow::Result<()> {
    let description = MachineDescription::read(machine)
        .with_context(|| format!("cannot use {}", machine.display()))?;
    let mut server = Server::start(description, DriverRoot::new(root), libs)?;
    if until_stdin_closes {
        server.stop_when_closed(&std::io::stdin())?;
    }
    // Whoever started us may have gone without reading.
    let _ = writeln!(std::io::stdout(), "ready");
    server.run()?;
    Ok(())
}

fn ctl(root: &DriverRoot, command: CtlCommand) -> anyhow::Result<()> {
    let command = match command {
        CtlCommand::Status => Command::Status,
        CtlCommand::Xid { card, code } => Command::Raise(CardEvent::Xid {
            card: CardIndex(card),
            code,
        }),
        CtlCommand::Reset { card } => Command::Reset {
            card: CardIndex(card),
        },
        CtlCommand::Break {
            card,
            lost,
            delay_milliseconds,
            refuses_contexts,
            refuses_instances,
            unsupported,
        } => Command::Break {
            card: CardIndex(card),
            faults: Faults {
                lost,
                delay: Duration::from_millis(delay_milliseconds),
                refuses_contexts,
                refuses_instances,
                unsupported: unsupported.into_iter().collect(),
            },
        },
    };
    if let Answer::Status(status) = control::send(root, &command)? {
        println!("{}", serde_json::to_string_pretty(&status)?);
    }
    Ok(())
}
