//! `kubectl drava`: who holds which GPU, and why a pod waits.
//!
//! Reads the cluster with the user's own permissions and asks the same allocator as the controller.

use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Parser, Subcommand, ValueEnum};
use drava_allocator::placement::Policies;
use drava_api::config::PlacementPolicy;
use drava_api::error::describe;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

mod explain;
mod snapshot;
mod table;
mod top;

/// Look into the GPU sharing of drava.
///
/// Reads ResourceSlices, ResourceClaims, nodes and pods with your own permissions; it changes nothing.
#[derive(Debug, Parser)]
#[command(name = "kubectl-drava", bin_name = "kubectl drava", version)]
struct Cli {
    #[command(flatten)]
    connection: Connection,

    /// Form of the output.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct Connection {
    /// Kubeconfig file; by default $KUBECONFIG or ~/.kube/config.
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<std::path::PathBuf>,

    /// Context of the kubeconfig; by default its current one.
    #[arg(long, global = true)]
    context: Option<String>,

    /// Namespace of the pod; by default that of the context.
    #[arg(short, long, global = true)]
    namespace: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Columns for people.
    Table,
    /// One JSON document.
    Json,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show every card: what of its memory, cores and slots is allocated, and to which claims and pods.
    ///
    /// Figures are what is allocated (guaranteed to claims), not what programs use at the moment.
    #[command(
        after_help = "Example:\n  kubectl drava top\n  kubectl drava top -o json | jq '.cards[] | select(.mode == \"free\")'"
    )]
    Top,

    /// Explain why something is as it is.
    #[command(subcommand)]
    Explain(Explain),

    /// Print the version of this command.
    Version,
}

#[derive(Debug, Subcommand)]
enum Explain {
    /// Why does a pod wait? Shows for every node and card what stands in the way.
    ///
    /// Runs the controller's own allocator on the state of the cluster as it is now. With -o json the reasons are
    /// stable codes.
    #[command(after_help = "Example:\n  kubectl drava explain pod trainer-0 -n research")]
    Pod {
        /// Name of the pod.
        name: String,

        /// Policy between nodes with which the controller runs.
        #[arg(long, default_value = "binpack", value_parser = parse_policy)]
        node_policy: PlacementPolicy,

        /// Policy between the cards of a node with which the controller runs.
        #[arg(long, default_value = "binpack", value_parser = parse_policy)]
        gpu_policy: PlacementPolicy,
    },
}

fn parse_policy(text: &str) -> Result<PlacementPolicy, String> {
    text.parse()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Cli::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", describe(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

async fn run(cli: Cli) -> anyhow::Result<()> {
    let text = match cli.command {
        Command::Version => match cli.output {
            Output::Table => format!("kubectl-drava {}\n", env!("CARGO_PKG_VERSION")),
            Output::Json => json(&serde_json::json!({"version": env!("CARGO_PKG_VERSION")}))?,
        },
        Command::Top => {
            let (client, _) = connect(&cli.connection).await?;
            let snapshot = snapshot::take(&client).await?;
            let cards = top::cards(&snapshot);
            match cli.output {
                Output::Table => top::text(&cards, &top::problems(&snapshot)),
                Output::Json => json(
                    &serde_json::json!({"cards": cards, "problems": top::problems(&snapshot)}),
                )?,
            }
        }
        Command::Explain(Explain::Pod {
            name,
            node_policy,
            gpu_policy,
        }) => {
            let (client, namespace) = connect(&cli.connection).await?;
            let snapshot = snapshot::take(&client).await?;
            let policies = Policies {
                node: node_policy,
                gpu: gpu_policy,
            };
            let report = explain::pod(&snapshot, &namespace, &name, policies)?;
            match cli.output {
                Output::Table => report.text(),
                Output::Json => json(&report)?,
            }
        }
    };
    print(&text)
}

/// Writes to standard output; a reader that has seen enough (`| head`) is no error.
fn print(text: &str) -> anyhow::Result<()> {
    use std::io::Write;
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write the output")
        }
        _ => Ok(()),
    }
}

fn json(value: &impl serde::Serialize) -> anyhow::Result<String> {
    let mut text = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    text.push('\n');
    Ok(text)
}

/// A client, and the namespace that the user means.
async fn connect(connection: &Connection) -> anyhow::Result<(Client, String)> {
    let options = KubeConfigOptions {
        context: connection.context.clone(),
        ..KubeConfigOptions::default()
    };
    let config = match &connection.kubeconfig {
        Some(file) => {
            let kubeconfig = Kubeconfig::read_from(file)
                .with_context(|| format!("cannot read the kubeconfig {}", file.display()))?;
            Config::from_custom_kubeconfig(kubeconfig, &options).await
        }
        None => Config::from_kubeconfig(&options).await,
    }
    .context("cannot use the kubeconfig; set $KUBECONFIG or give --kubeconfig and --context")?;
    let namespace = connection
        .namespace
        .clone()
        .unwrap_or_else(|| config.default_namespace.clone());
    let client = Client::try_from(config).context("cannot make a client from the kubeconfig")?;
    Ok((client, namespace))
}
