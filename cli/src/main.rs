//! `kubectl drava`: GPU allocations, why a pod is pending, and maintenance of GPUs.
//!
//! It reads the cluster with the user's permissions and runs the controller's allocator. Only [`cordon`], [`resize`]
//! and [`suspend`] write.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand};
use connection::{Connection, connect};
use drava_api::error::describe;
use drava_compatibility::Settings;
use drava_explanation::{explain, snapshot};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use measured::Meter;
use output::Output;

mod connection;
mod console;
mod cordon;
mod cost;
mod decision;
mod doctor;
mod dump;
mod gangs;
mod installation;
mod job;
mod kueue;
mod measured;
mod migrate;
mod natural;
mod node;
mod output;
mod pod;
mod prometheus;
mod quota;
mod recommend;
mod resize;
mod simulate;
mod suspend;
mod tenant;
mod top;
mod watch;
mod workload;

/// Inspect GPU allocations of drava.
///
/// `top` lists the GPUs with their allocations. `explain pod` shows for each node and GPU why a pod is pending, or why the
/// node and the GPUs of an allocated pod were selected.
///
/// The command reads ResourceSlices, ResourceClaims, DeviceClasses, GpuQuotas, nodes and pods of all namespaces with your
/// permissions.
/// `cordon`, `drain` and `uncordon` write DeviceTaintRules, `resize` writes ResourceClaims, and `suspend` and `resume`
/// their annotations; the other commands change nothing.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-drava",
    bin_name = "kubectl drava",
    version,
    after_help = "Examples:\n  kubectl drava top\n  kubectl drava explain pod trainer-0 -n research"
)]
struct Cli {
    #[command(flatten)]
    connection: Connection,

    /// Output format.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the allocated memory, cores and slots of each GPU, with the claims and pods.
    ///
    /// The amounts are allocations (guarantees to claims); `--usage` adds what the claims use at the moment. The memory of a
    /// shared GPU is what shares can have of it. CORES is percent of GPU time; SLOTS is the number of shares. MODE is free, whole,
    /// shared or partitioned. `-o wide` has one line for each claim. With -n, the GPUs of the claims of that namespace.
    #[command(
        after_help = "Example:\n  kubectl drava top\n  kubectl drava top --watch\n  kubectl drava top --usage -o wide\n  kubectl drava top -o json | jq '.gpus[] | select(.mode == \"free\")'"
    )]
    Top(top::Options),

    /// Serve a page with nodes and their GPUs, tenants, the queue and quotas, on loopback.
    ///
    /// Prints the address of the page, and serves it until Ctrl-C. The page is updated when the cluster changes, and cannot
    /// change anything. It shows what your permissions allow, and names what they hide. Nothing runs in the cluster.
    #[command(
        after_help = "Examples:\n  kubectl drava console\n  kubectl drava dump > cluster.json; kubectl drava console --dump cluster.json"
    )]
    Console(console::Options),

    /// Explain an allocation decision.
    #[command(subcommand)]
    Explain(Explain),

    /// Show where pods of a manifest would run, without creating them.
    ///
    /// The pods are decided one after the other, each beside those before it, by the controller's allocator on the current
    /// state of the cluster. For a pod that does not fit, the command shows the reason and what would have to change. A gang
    /// starts as a whole or not at all. The queue of pending pods is not considered, and no pod of lower priority is suspended or
    /// evicted: a note says where that may be. The exit code is 1 if a pod does not fit, or requests GPUs with the resources of another
    /// system, which `migrate` translates.
    #[command(
        after_help = "Examples:\n  kubectl drava simulate -f trainer.yaml\n  kubectl drava simulate -f trainer.yaml --replicas 100    # how many fit\n  kubectl drava dump > cluster.json; kubectl drava simulate --dump cluster.json -f trainer.yaml"
    )]
    Simulate(simulate::Options),

    /// Print the state of the cluster as JSON, for `simulate`, `console` and bug reports.
    ///
    /// Contains nodes, ResourceSlices, DeviceClasses, GpuQuotas, labels of namespaces, claims, claim templates and pods, with
    /// names and requests, without container images, commands and environment variables.
    #[command(
        after_help = "Examples:\n  kubectl drava dump > cluster.json\n  kubectl drava dump --support > drava.json    # for a bug report"
    )]
    Dump {
        /// Print what a maintainer needs to understand a fault instead: nodes, ResourceSlices, claims, the workloads and
        /// events of drava, and the findings of the doctor. Contains no Secret, no ConfigMap and no pod of a tenant.
        #[arg(long)]
        support: bool,
    },

    /// Show the gangs: how many pods each needs, how many exist, run and wait.
    ///
    /// A gang is the pods of a namespace with the same annotation gpu.drava.dev/gang. Without -n, those of all namespaces.
    #[command(after_help = "Example:\n  kubectl drava gangs -n research")]
    Gangs,
    /// Show what the namespaces use of their GpuQuotas.
    ///
    /// CORES is percent of the GPU time of one GPU. SUSPENDED is the part of the usage that suspended shares have. BORROWED is the
    /// usage beyond the guarantee, which pods within their own guarantee take back.
    #[command(
        after_help = "Examples:\n  kubectl drava quota\n  kubectl drava quota team-a -o yaml"
    )]
    Quota {
        /// Name of a quota; default: all.
        name: Option<String>,
    },

    /// Show what namespaces, workloads or claims have requested, used and left idle, with prices.
    ///
    /// GPU HOURS are those that the claims guarantee: 0.3 an hour for a share with 30 cores. USED is the GPU time of the
    /// programs; IDLE is what of the requested time was not used. A share without guarantee costs its memory only. The amounts
    /// are those of Prometheus, so they reach back as far as its data. --workloads has a line for each Deployment, Job and so on of
    /// the pods in the cluster; claims of pods that are gone count where their names tell the workload, and are in line `-` otherwise.
    #[command(
        after_help = "Examples:\n  kubectl drava cost --prometheus monitoring/prometheus-operated:9090 --since 30d\n  kubectl drava cost --prometheus http://localhost:9090 --workloads -n research\n  kubectl drava cost --prometheus http://localhost:9090 --claims -n research -o json"
    )]
    Cost(cost::Options),

    /// Recommend memory and cores for workloads, by what their shares have used.
    ///
    /// PEAK is the highest memory of a share; the recommendation is 15% more, or 20% more than a limit at which allocations were
    /// denied. The amounts are those that the controller has written in GpuShareRecommendations: request and limit, and how long the
    /// shares were observed. With --prometheus they are those of Prometheus; USED is then the GPU time that a share exceeds in 5% of
    /// the time instead of a tenth, and claims of pods that are gone count where their names tell the workload. Nothing is changed: a
    /// recommendation is for the next ResourceClaimTemplate, or for `kubectl drava resize`. -o wide and json have the change of the
    /// manifest.
    #[command(
        after_help = "Examples:\n  kubectl drava recommend -n research\n  kubectl drava recommend --prometheus monitoring/prometheus-operated:9090 --since 2w\n  kubectl drava recommend --prometheus http://localhost:9090 -n research -o json"
    )]
    Recommend(recommend::Options),

    /// Grow or shrink the share of a running pod, without a restart.
    ///
    /// The amounts are totals. What the share gains is a companion claim, owned by the pod; it counts against quotas as every
    /// claim, and goes with the pod. The share shrinks by deleting companions, never below its own claim, as soon as its programs
    /// use little enough memory. Needs the permission to create and delete ResourceClaims in the namespace, and
    /// scheduling.mode=managed.
    #[command(
        after_help = "Examples:\n  kubectl drava resize trainer-0 --memory 12Gi -n research\n  kubectl drava resize pod/trainer-0 --cores 40 --dry-run"
    )]
    Resize(resize::Options),

    /// Suspend the share of a running pod: its programs stand still, and others get its GPU memory and GPU time.
    ///
    /// The memory goes to host memory, which counts in the memory limit of the container. The command sets an annotation of the
    /// claim; the controller decides, and the node driver acts. The share stays suspended until `kubectl drava resume`. The config
    /// of the claim or its class must say `suspend: {allowed: true}`. Needs the permission to patch ResourceClaims in the
    /// namespace, and scheduling.mode=managed.
    #[command(
        after_help = "Examples:\n  kubectl drava suspend trainer-0 -n research\n  kubectl drava suspend pod/trainer-0 --timeout 0"
    )]
    Suspend(suspend::Options),

    /// Resume the share of a pod that `kubectl drava suspend` has suspended.
    ///
    /// Its programs go on as soon as its memory and GPU time are free on its GPU.
    #[command(after_help = "Examples:\n  kubectl drava resume trainer-0 -n research")]
    Resume(suspend::Options),

    /// Exclude the GPUs of a node, or one GPU, from allocation.
    ///
    /// Claims that are allocated keep their devices, and their pods run on. The command writes DeviceTaintRules with the
    /// taint gpu.drava.dev/cordoned:NoSchedule; `kubectl get devicetaintrules` lists them.
    #[command(
        after_help = "Examples:\n  kubectl drava cordon node-a\n  kubectl drava cordon node-a/gpu-3 --dry-run"
    )]
    Cordon(cordon::Options),

    /// Exclude GPUs from allocation, evict the pods that use them, and wait for their end.
    ///
    /// The taint gpu.drava.dev/cordoned:NoExecute makes Kubernetes delete the pods; PodDisruptionBudgets do not apply.
    /// Controllers such as Deployments create the pods again, on other GPUs. Use it before a driver upgrade or a GPU reset.
    #[command(
        after_help = "Example, a GPU reset:\n  kubectl drava drain node-a/gpu-3\n  nvidia-smi --gpu-reset -i 3    # on the node\n  kubectl drava uncordon node-a/gpu-3"
    )]
    Drain(cordon::DrainOptions),

    /// Allow allocation again: remove the rules of cordon and drain for this node or GPU.
    ///
    /// `uncordon NODE` keeps the rules of single GPUs of the node, which were cordoned by name.
    #[command(after_help = "Example:\n  kubectl drava uncordon node-a/gpu-3")]
    Uncordon(cordon::Options),

    /// Show the allocations of one node.
    #[command(after_help = "Example:\n  kubectl drava node gpu-node-1 --classic")]
    Node {
        /// Name of the node.
        name: String,

        /// Show the amounts as the extended resources of device plugins: vgpu-number, vgpu-memory in MiB, vgpu-cores in
        /// percent of a GPU, and nvidia.com/gpu.
        #[arg(long)]
        classic: bool,
    },

    /// Find faults of the installation, each with its fix.
    ///
    /// Reads nodes, pods, ResourceSlices, leases, events, admission policies and webhooks with your permissions, and asks for
    /// the permissions of drava's service accounts. Prints "no problems found" for a healthy cluster; the exit code is 1 with
    /// findings. With -o json each finding has a stable code.
    #[command(after_help = format!("Faults:\n{}", doctor::fault_table()))]
    Doctor,

    /// Translate manifests for HAMi, Volcano's vGPU or NVIDIA's device plugin.
    ///
    /// Writes all objects as YAML to standard output and a report to standard error. Objects without GPUs are written
    /// unchanged, and so are objects that cannot be translated: the report names them, and the exit code is 3. No cluster is
    /// needed. Comments of the manifests are lost.
    #[command(
        after_help = "Examples:\n  kubectl drava migrate -f jobs.yaml -f quota.yaml > new.yaml\n  kubectl get deployments -n research -o yaml | kubectl drava migrate -f -"
    )]
    Migrate(Migrate),

    /// Print a script that completes kubectl-drava in a shell.
    #[command(after_help = "Example:\n  source <(kubectl drava completion bash)")]
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },

    /// Write the manual pages of all commands.
    #[command(after_help = "Example:\n  kubectl drava man ~/.local/share/man/man1")]
    Man {
        /// Directory of the pages, which is created.
        directory: std::path::PathBuf,
    },

    /// Print the version of this command.
    Version,
}

#[derive(Debug, Args)]
struct Migrate {
    /// Manifests in YAML or JSON, or directories of them; - is standard input. Repeatable.
    #[arg(short, long, required = true, value_name = "FILE")]
    filename: Vec<std::path::PathBuf>,

    /// Settings of the translation in YAML, such as other resource names; default: names of HAMi and Volcano.
    #[arg(long, value_name = "FILE")]
    settings: Option<std::path::PathBuf>,

    /// Write the resource names of the ConfigMaps of device plugins as values of the drava chart, for `helm upgrade -f`.
    #[arg(long, value_name = "FILE")]
    values: Option<std::path::PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Explain {
    /// Show for each node and GPU why a pod is pending, or why the node and the GPUs of an allocated pod were selected.
    ///
    /// For a pending pod, the command runs the controller's allocator on the current state of the cluster. With -o json the
    /// reasons are stable codes. For an allocated pod, it shows the reason that the controller recorded with the allocation.
    #[command(
        aliases = ["pods", "po"],
        after_help = "Example:\n  kubectl drava explain pod trainer-0 -n research"
    )]
    Pod {
        /// Name of the pod.
        #[arg(value_parser = pod::object_name)]
        name: String,

        #[command(flatten)]
        decision: decision::DecisionOptions,
    },

    /// Show why a suspended job does not start, as far as Kueue says it, or which of its pods wait.
    #[command(
        aliases = ["jobs"],
        after_help = "Example:\n  kubectl drava explain job trainer -n research"
    )]
    Job {
        /// Name of the job.
        #[arg(value_parser = pod::object_name)]
        name: String,
    },

    /// Show the devices of an allocated claim, with the reason for them, or why the pods that use the claim are pending.
    #[command(
        aliases = ["claims", "resourceclaim", "resourceclaims"],
        after_help = "Example:\n  kubectl drava explain claim trainer-gpu -n research"
    )]
    Claim {
        /// Name of the claim.
        #[arg(value_parser = pod::object_name)]
        name: String,

        #[command(flatten)]
        decision: decision::DecisionOptions,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match Box::pin(run(Cli::parse_from(split_kind(std::env::args_os())))).await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {}", describe(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// Splits `explain pod/NAME` into `explain pod NAME`, as kubectl accepts both, also after options.
fn split_kind(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    const KINDS: [&str; 9] = [
        "pod",
        "pods",
        "po",
        "job",
        "jobs",
        "claim",
        "claims",
        "resourceclaim",
        "resourceclaims",
    ];
    let mut split: Vec<OsString> = Vec::new();
    let mut is_explain = false;
    let mut is_value = false;
    for argument in arguments {
        let is_option = argument.to_str().is_some_and(|text| text.starts_with('-'));
        let is_value = std::mem::replace(&mut is_value, is_option);
        let parts = argument.to_str().and_then(|text| text.split_once('/'));
        match parts {
            Some((kind, name)) if is_explain && KINDS.contains(&kind) => {
                split.extend([kind.into(), name.into()]);
                is_explain = false;
            }
            _ => {
                is_explain |= argument == "explain" && !is_value;
                split.push(argument);
            }
        }
    }
    split
}

async fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    // Before anything is changed.
    anyhow::ensure!(
        cli.output != Output::Opencost || matches!(cli.command, Command::Cost(_)),
        "-o opencost is a format of `kubectl drava cost` only"
    );
    let text = match cli.command {
        Command::Version => {
            let version = serde_json::json!({"version": env!("CARGO_PKG_VERSION")});
            let text = || format!("kubectl-drava {}\n", env!("CARGO_PKG_VERSION"));
            cli.output.format(&version, text)?
        }
        Command::Completion { shell } => completion(shell)?,
        Command::Man { directory } => {
            write_manual(&directory)?;
            String::new()
        }
        Command::Migrate(options) => return migrate(&options),
        Command::Dump { support: true } => {
            let (client, _) = connect(&cli.connection).await?;
            let dump = dump::for_support(&doctor::fetch::fetch(&client).await?);
            cli.output.document(&dump)?
        }
        Command::Doctor => return doctor(&cli.connection, cli.output).await,
        Command::Node { name, classic } => {
            let (client, _) = connect(&cli.connection).await?;
            let snapshot = snapshot::take(&client).await?;
            let gpus = node::gpus(&snapshot, &name)?;
            if classic {
                let resources = node::classic(&gpus);
                cli.output.format(&resources, || resources.text())?
            } else {
                let document = serde_json::json!({"gpus": gpus});
                cli.output.format(&document, || {
                    top::text(&gpus, &[], cli.output == Output::Wide)
                })?
            }
        }
        Command::Top(options) => {
            let (client, own) = connect(&cli.connection).await?;
            let namespace = cli.connection.namespace.as_deref();
            let mut meter = options.usage.then(|| Meter::new(client.clone()));
            let update = async || match Box::pin(snapshot::take(&client)).await {
                Ok(snapshot) => {
                    tenant::note_left_out(&snapshot.left_out);
                    let mut gpus = top::gpus(&snapshot);
                    if let Some(meter) = &mut meter
                        && let Some(gap) = meter.add_to(&mut gpus, namespace).await
                    {
                        eprintln!("note: {gap}");
                    }
                    top_text(&snapshot, gpus, namespace, cli.output)
                }
                Err(error) => {
                    let plural = tenant::limit(error)?;
                    let gpus = tenant::gpus(&client, &own).await?;
                    tenant::note(&plural, "only the claims of your namespace are shown");
                    if options.usage {
                        eprintln!("note: what claims use is read for the whole cluster only");
                    }
                    let problems: [&str; 0] = [];
                    let document = serde_json::json!({"gpus": gpus, "problems": problems});
                    cli.output
                        .format(&document, || tenant::gpus_text(&own, &gpus))
                }
            };
            options.watch.run(update).await?;
            String::new()
        }
        Command::Console(options) => {
            let is_default = cli.output == Output::Table;
            anyhow::ensure!(is_default, "console serves a page; it has no output format");
            return console(&cli.connection, options).await;
        }
        Command::Resize(options) => {
            let (client, namespace) = connect(&cli.connection).await?;
            let report = resize::run(&client, &namespace, &options).await?;
            cli.output.format(&report, || report.text())?
        }
        Command::Suspend(options) => {
            let (client, namespace) = connect(&cli.connection).await?;
            let report = suspend::run(&client, &namespace, &options, true).await?;
            cli.output.format(&report, || report.text())?
        }
        Command::Resume(options) => {
            let (client, namespace) = connect(&cli.connection).await?;
            let report = suspend::run(&client, &namespace, &options, false).await?;
            cli.output.format(&report, || report.text())?
        }
        Command::Quota { name } => {
            let (client, _) = connect(&cli.connection).await?;
            let snapshot = snapshot::take(&client).await?;
            let namespace = cli.connection.namespace.as_deref();
            let quotas = quota::reports(&snapshot, name.as_deref(), namespace)?;
            let document = serde_json::json!({"quotas": quotas});
            cli.output.format(&document, || quota::text(&quotas))?
        }
        Command::Gangs => {
            let (client, own) = connect(&cli.connection).await?;
            let listed = snapshot::list::<Pod>(&client, &ListParams::default()).await;
            let (mut pods, limit) = match listed {
                Ok(pods) => (pods, None),
                Err(error) => {
                    let plural = tenant::limit(error)?;
                    (tenant::list(&client, &own).await?, Some(plural))
                }
            };
            if let Some(namespace) = &cli.connection.namespace {
                pods.retain(|pod: &Pod| pod.metadata.namespace.as_ref() == Some(namespace));
            }
            let groups = gangs::groups(&client, &own).await?;
            if let Some(note) = groups.note(limit.as_deref()) {
                eprintln!("note: {note}");
            }
            let gangs = gangs::gangs(&pods, &groups.minimums, Timestamp::now());
            let document = serde_json::json!({"gangs": gangs});
            cli.output.format(&document, || gangs::text(&gangs))?
        }
        Command::Cost(options) => {
            let report = Box::pin(cost::run(&cli.connection, &options)).await?;
            if cli.output == Output::Opencost {
                cli.output.document(&report.opencost(Timestamp::now())?)?
            } else {
                cli.output.format(&report, || report.text())?
            }
        }
        Command::Recommend(options) => {
            let report = Box::pin(recommend::run(&cli.connection, &options)).await?;
            let is_wide = cli.output == Output::Wide;
            cli.output.format(&report, || report.text(is_wide))?
        }
        Command::Cordon(options) => {
            let (client, _) = connect(&cli.connection).await?;
            changed(&cordon::cordon(&client, &options).await?, cli.output)?
        }
        Command::Drain(options) => {
            let (client, _) = connect(&cli.connection).await?;
            changed(&cordon::drain(&client, &options).await?, cli.output)?
        }
        Command::Uncordon(options) => {
            let (client, _) = connect(&cli.connection).await?;
            changed(&cordon::uncordon(&client, &options).await?, cli.output)?
        }
        Command::Explain(Explain::Job { name }) => {
            let (client, namespace) = connect(&cli.connection).await?;
            let report = job::explain(&client, &namespace, &name).await?;
            cli.output.format(&report, || report.text())?
        }
        Command::Explain(Explain::Claim { name, decision }) => {
            let (client, namespace) = connect(&cli.connection).await?;
            match Box::pin(snapshot::take(&client)).await {
                Ok(mut snapshot) => {
                    tenant::note_left_out(&snapshot.left_out);
                    let settings = decision.settings(snapshot.settings.as_ref());
                    let report =
                        explain::claim::explain(&mut snapshot, &namespace, &name, &settings)?;
                    cli.output.format(&report, || report.text())?
                }
                Err(error) => {
                    let plural = tenant::limit(error)?;
                    tenant::refuse_options(&plural, &decision)?;
                    let (report, source) =
                        tenant::explain_claim(&client, &namespace, &name).await?;
                    tenant::note(&plural, source);
                    cli.output.format(&report, || report.text())?
                }
            }
        }
        Command::Explain(Explain::Pod { name, decision }) => {
            let (client, namespace) = connect(&cli.connection).await?;
            let mut report = match Box::pin(snapshot::take(&client)).await {
                Ok(mut snapshot) => {
                    tenant::note_left_out(&snapshot.left_out);
                    let settings = decision.settings(snapshot.settings.as_ref());
                    explain::pod_with_changes(&mut snapshot, &namespace, &name, &settings)?
                }
                Err(error) => {
                    let plural = tenant::limit(error)?;
                    tenant::refuse_options(&plural, &decision)?;
                    let (report, source) = tenant::explain_pod(&client, &namespace, &name).await?;
                    tenant::note(&plural, source);
                    report
                }
            };
            kueue::complete(&client, &namespace, &name, &mut report).await;
            cli.output.format(&report, || report.text())?
        }
        Command::Simulate(options) => {
            return simulate::run(&cli.connection, &options, cli.output).await;
        }
        Command::Dump { support: false } => {
            let (client, _) = connect(&cli.connection).await?;
            let objects = snapshot::fetch_for_new_pods(&client).await?.trimmed();
            cli.output.document(&objects)?
        }
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn top_text(
    snapshot: &snapshot::Snapshot,
    mut gpus: Vec<top::Gpu>,
    namespace: Option<&str>,
    output: Output,
) -> anyhow::Result<String> {
    let has_gpus = !gpus.is_empty();
    if let Some(namespace) = namespace {
        gpus.retain(|gpu| gpu.claims.iter().any(|claim| claim.namespace == namespace));
    }
    let problems = top::problems(snapshot);
    let document = serde_json::json!({"gpus": gpus, "problems": problems});
    output.format(&document, || match namespace {
        Some(namespace) if has_gpus && gpus.is_empty() => {
            tenant::without_claims(namespace) + &top::warnings(&problems)
        }
        _ => top::text(&gpus, &problems, output == Output::Wide),
    })
}

/// Name of the program, by which kubectl finds its plugin.
const PROGRAM: &str = "kubectl-drava";

fn completion(shell: clap_complete::Shell) -> anyhow::Result<String> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), PROGRAM, &mut script);
    String::from_utf8(script).context("cannot write the completion script")
}

fn write_manual(directory: &std::path::Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(Cli::command().bin_name(PROGRAM), directory))
        .with_context(|| format!("cannot write manual pages to {}", directory.display()))
}

/// Prints the faults of the cluster; the exit code is 1 if there are any.
async fn doctor(connection: &Connection, output: Output) -> anyhow::Result<ExitCode> {
    let (client, _) = connect(connection).await?;
    let diagnosis = doctor::diagnose(&doctor::fetch::fetch(&client).await?);
    output::print(&output.format(&diagnosis, || diagnosis.text())?)?;
    Ok(if diagnosis.is_healthy() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Serves the console until Ctrl-C.
async fn console(connection: &Connection, options: console::Options) -> anyhow::Result<ExitCode> {
    let source = match options.dump() {
        Some(file) => console::Source::Dump(Box::new(dump::read(file)?)),
        None => {
            let (client, namespace) = connect(connection).await?;
            console::Source::Cluster {
                client,
                context: connection.context_name(),
                namespace,
            }
        }
    };
    console::run(source, options).await?;
    Ok(ExitCode::SUCCESS)
}

/// Exit code of `migrate` when an object cannot be translated.
const REFUSED: u8 = 3;

fn migrate(options: &Migrate) -> anyhow::Result<ExitCode> {
    let settings = match &options.settings {
        Some(file) => migrate::manifest::read_settings(file)?,
        None => Settings::default(),
    };
    let mut objects = Vec::new();
    for file in &options.filename {
        objects.extend(migrate::manifest::read(file)?);
    }
    let migration = migrate::run(objects, &settings);
    if let Some(file) = &options.values {
        let values = migration.values.as_ref().context(
            "cannot write values: no ConfigMap with device-config.yaml is among the manifests; add it with -f",
        )?;
        let text = migrate::manifest::format(std::slice::from_ref(values))?;
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    output::print(&migrate::manifest::format(&migration.objects)?)?;
    eprint!("{}", migration.report_text());
    Ok(if migration.is_refused() {
        ExitCode::from(REFUSED)
    } else {
        ExitCode::SUCCESS
    })
}

/// Formats the report of a change.
fn changed(report: &cordon::Report, output: Output) -> anyhow::Result<String> {
    output.format(report, || report.text())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_kind_and_name_wherever_they_are() {
        let split = |line: &str| {
            let split = split_kind(line.split(' ').map(OsString::from));
            split.join(&OsString::from(" "))
        };
        for (line, expected) in [
            ("explain pod/p -n a", "explain pod p -n a"),
            ("explain -n a pod/p", "explain -n a pod p"),
            ("-n a explain claim/c", "-n a explain claim c"),
            (
                "explain --kubeconfig x/y pod/pod/p",
                "explain --kubeconfig x/y pod pod/p",
            ),
            ("suspend pod/p", "suspend pod/p"),
            ("suspend -n explain pod/p", "suspend -n explain pod/p"),
        ] {
            assert_eq!(split(line), expected, "{line}");
        }
    }
}
