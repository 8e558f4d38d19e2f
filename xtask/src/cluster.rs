//! `cargo xtask cluster`: manual control of the Kubernetes of the tests.

use std::io::{IsTerminal as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::Subcommand;
use drava_cluster::{
    Cluster, Component, DEFAULT_NAME, Kubernetes, Machine, Node, Options, Phase, attach, down, up,
};

/// Command line of `cargo xtask cluster`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Name of the cluster, whose state is in `target/cluster/<name>`.
    #[arg(long, global = true, default_value = DEFAULT_NAME)]
    name: String,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Start the cluster, or its missing components.
    Up {
        /// Minor release of Kubernetes: 1.36 or 1.37.
        #[arg(long, default_value_t)]
        kubernetes: Kubernetes,
        /// File that describes a node's simulated GPUs, or `none`; repeat for several nodes [default: two H100].
        #[arg(long = "machine", value_name = "FILE", value_parser = machine)]
        machines: Vec<Machine>,
        /// Turn the PodGroup API of Kubernetes on (1.37).
        #[arg(long)]
        pod_groups: bool,
    },
    /// Stop the cluster and remove all its files.
    Down,
    /// Print the state of the components.
    Status {
        /// Form of the output.
        #[arg(long, short, value_enum, default_value_t)]
        output: Output,
    },
    /// Print the logs of components.
    Logs {
        /// One of simulator-machine, etcd, containerd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet [default: all].
        component: Option<Component>,
        /// Only the logs of this node, such as node-1.
        #[arg(long, value_name = "NAME")]
        node: Option<String>,
        /// Follow the logs.
        #[arg(long, short)]
        follow: bool,
    },
    /// Print the path of the kubeconfig.
    Kubeconfig,
    /// Run kubectl against the cluster.
    Kubectl {
        /// Arguments of kubectl.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run Helm against the cluster.
    Helm {
        /// Arguments of Helm.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run a program inside a node, such as `sh`.
    Exec {
        /// Name of the node.
        #[arg(long, value_name = "NAME", default_value = "node-0")]
        node: String,
        /// The program and its arguments.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Load images onto all nodes.
    Load {
        /// OCI archives, such as those of `cargo xtask image`.
        #[arg(required = true)]
        archives: Vec<PathBuf>,
    },
    /// Restart a component.
    Restart {
        /// Name of the node.
        #[arg(long, value_name = "NAME", default_value = "node-0")]
        node: String,
        /// Which one.
        component: Component,
    },
}

#[derive(Clone, Copy, Default, clap::ValueEnum)]
enum Output {
    #[default]
    Text,
    Json,
}

/// Reads `--machine`.
fn machine(text: &str) -> Result<Machine> {
    if text == "none" {
        return Ok(Machine::None);
    }
    let file = PathBuf::from(text);
    if !file.is_file() {
        bail!("{text} is neither a file nor `none`");
    }
    Ok(Machine::File(file))
}

/// Runs the task.
pub(crate) fn run(args: Args) -> Result<()> {
    let mut options = Options::named(&args.name);
    let running = || attach(&options.state);
    match args.action {
        Action::Up {
            kubernetes,
            machines,
            pod_groups,
        } => {
            options.kubernetes = kubernetes;
            options.pod_groups = pod_groups;
            if !machines.is_empty() {
                options.nodes = machines;
            }
            let cluster = up(&options)?;
            println!("export KUBECONFIG={}", cluster.kubeconfig().display());
            Ok(())
        }
        Action::Down => {
            let was_there = down(&options.state)?;
            println!(
                "{}",
                if was_there {
                    "cluster removed"
                } else {
                    "no cluster"
                }
            );
            Ok(())
        }
        Action::Status { output } => status(&running()?, output),
        Action::Logs {
            component,
            node,
            follow,
        } => {
            let cluster = running()?;
            let nodes = match node {
                Some(name) => vec![cluster.node(&name)?],
                None => cluster.nodes(),
            };
            logs(&nodes, component, follow)
        }
        Action::Kubeconfig => {
            println!("{}", running()?.kubeconfig().display());
            Ok(())
        }
        Action::Kubectl { args } => become_program(running()?.kubectl().args(args)),
        Action::Helm { args } => become_program(running()?.helm().args(args)),
        Action::Exec { node, command } => {
            let (program, args) = command.split_first().context("no program")?;
            become_program(running()?.node(&node)?.command(program)?.args(args))
        }
        Action::Load { archives } => {
            let cluster = running()?;
            archives
                .iter()
                .try_for_each(|archive| cluster.load_image(archive))
        }
        Action::Restart { node, component } => running()?.node(&node)?.restart(component),
    }
}

fn status(cluster: &Cluster, output: Output) -> Result<()> {
    let status = cluster.status()?;
    let mut out = std::io::stdout().lock();
    match output {
        Output::Json => writeln!(out, "{}", serde_json::to_string_pretty(&status)?)?,
        Output::Text => {
            writeln!(
                out,
                "Kubernetes {} in {}",
                status.kubernetes,
                status.state.display()
            )?;
            for node in &status.nodes {
                writeln!(out, "{}", node.name)?;
                for component in &node.components {
                    let restarts = match component.restarts {
                        0 => String::new(),
                        1 => ", restarted once".into(),
                        more => format!(", restarted {more} times"),
                    };
                    writeln!(
                        out,
                        "  {:24} {}{restarts}",
                        component.component,
                        phase(&component.phase)
                    )?;
                }
            }
            writeln!(out, "export KUBECONFIG={}", status.kubeconfig.display())?;
        }
    }
    if !status.ready {
        bail!(
            "not every component is ready; `cargo xtask cluster logs <component>` prints its log"
        );
    }
    Ok(())
}

fn phase(phase: &Phase) -> String {
    match phase {
        Phase::Waiting { needs } => format!("waiting for {needs}"),
        Phase::Starting { pid } => format!("starting (process {pid})"),
        Phase::Ready { pid } => format!("ready (process {pid})"),
        Phase::Failed { reason } => format!("down: {reason}"),
        Phase::Stopping { pid } => format!("stopping (process {pid})"),
        Phase::Stopped => "stopped".into(),
    }
}

/// Prints log files with tail(1), which can follow several.
fn logs(nodes: &[Node], component: Option<Component>, follow: bool) -> Result<()> {
    let components = component.map_or(Component::ALL.to_vec(), |component| vec![component]);
    let files: Vec<PathBuf> = nodes
        .iter()
        .flat_map(|node| components.iter().map(|component| node.log(*component)))
        .filter(|log| log.exists())
        .collect();
    if files.is_empty() {
        bail!("no such component has a log on these nodes");
    }
    let mut tail = Command::new("tail");
    tail.arg("--lines=+1")
        .args(follow.then_some("--follow"))
        .args(files);
    become_program(&mut tail)
}

/// Replaces this process, so that signals, terminal and exit status are those of the program.
fn become_program(command: &mut Command) -> Result<()> {
    // The program may redraw the terminal.
    if std::io::stdout().is_terminal() {
        std::io::stdout().flush()?;
    }
    let error = command.exec();
    Err(error).with_context(|| format!("cannot run {}", command.get_program().display()))
}
