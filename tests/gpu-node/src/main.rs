//! `gpu-node` runs the node agent for shares of one GPU.
//!
//! It prints one JSON object per line: the shares at its start, and what the agent found at the end of stdin. A line
//! `SHARE PID` of stdin says that a process is in the container of a share, and a line `grow SHARE BYTES` that a companion adds
//! memory. A line `SHARE suspend` or `SHARE resume` does that, and prints what it took, or why it failed.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, anyhow};
use clap::Parser;
use drava_api::config::Enforcement;
use drava_dra_driver::agent::{Agent, Config};
use drava_dra_driver::node::claim::ClaimRef;
use drava_dra_driver::prepare::Grant;
use drava_dra_driver::suspend::checkpoint;
use drava_vgpu_abi::{ComputePolicy, Cores, Limits, paths};
use gpu_node::suspender::Suspender;
use gpu_node::{Node, claim_uid, share_id};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// Run the node agent for shares of one GPU until stdin closes
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Empty directory for the files of the node
    #[arg(long)]
    directory: PathBuf,
    /// Root directory of the NVIDIA driver
    #[arg(long, default_value = "/")]
    driver_root: PathBuf,
    /// UUID of the GPU
    #[arg(long)]
    gpu: String,
    /// Memory of each share, in bytes
    #[arg(long)]
    memory_bytes: u64,
    /// What the first share may use, also of what the second one does not use of its guarantee, in bytes
    #[arg(long, requires = "allocatable_bytes")]
    limit_bytes: Option<u64>,
    /// What the shares can get together, in bytes
    #[arg(long)]
    allocatable_bytes: Option<u64>,
    /// Guaranteed percent of each share
    #[arg(long, value_delimiter = ',')]
    cores: Vec<u32>,
}

fn main() -> ExitCode {
    // Calls of libcuda's checkpoints are made by processes of this program.
    if let Some(code) = checkpoint::run(std::env::args_os()) {
        return code;
    }
    if let Some(code) = gpu_node::mps::run(std::env::args_os) {
        return code;
    }
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu-node: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let node = Node::create(&arguments.directory)?;
    let mut shares = Vec::new();
    for (number, cores) in (1..).zip(&arguments.cores) {
        shares.push(prepare(&node, arguments, number, *cores)?);
    }
    if let Some(limit_bytes) = arguments.limit_bytes {
        node.change_record(1, |share| {
            share.limit_bytes = Some(limit_bytes);
            share.bursts_idle = true;
        })?;
        node.change_record(2, |share| share.lends_idle = true)?;
    }
    println!("{}", json!({ "shares": shares }));

    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let found = Arc::new(Mutex::new(Vec::new()));
    let findings = Arc::clone(&found);
    let allocatable_bytes = arguments.allocatable_bytes;
    let agent = Agent::new(Config {
        allocatable: Arc::new(move |_| allocatable_bytes),
        ..node.config(&arguments.driver_root)
    });
    let agent = std::thread::spawn(move || {
        agent.run(&stopped, |finding| {
            let text = format!("{}: {:?}", finding.claim, finding.kind);
            let mut findings = findings.lock().unwrap_or_else(PoisonError::into_inner);
            findings.push(text);
        });
    });
    let added = follow_input(&node, &arguments.driver_root);
    stop.cancel();
    agent.join().map_err(|_| anyhow!("the agent panicked"))?;
    added?;
    let found = found.lock().unwrap_or_else(PoisonError::into_inner);
    println!("{}", json!({ "findings": *found }));
    Ok(())
}

/// Adds the processes and the memory, and suspends and resumes the shares, that stdin names, until it closes.
fn follow_input(node: &Node, driver_root: &Path) -> Result<()> {
    let nvml = drava_nvml::find(driver_root).map_err(|error| anyhow!("{error}"))?;
    let libcuda = nvml.with_file_name("libcuda.so.1");
    let mut suspender = Suspender::new(node, driver_root, libcuda, std::env::current_exe()?);
    for line in std::io::stdin().lines() {
        let line = line?;
        if let Some(growth) = line.strip_prefix("grow ") {
            grow(node, growth)?;
            continue;
        }
        let expected = || format!("{line:?} is not a share and a PID, suspend or resume");
        let (share, what) = line.split_once(' ').with_context(expected)?;
        let share: u32 = share.parse().ok().with_context(expected)?;
        let moved = match what.trim() {
            "suspend" => suspender.follow(share, true),
            "resume" => suspender.follow(share, false),
            pid => {
                node.add_process(pid.parse().ok().with_context(expected)?, share)?;
                continue;
            }
        };
        match moved {
            Ok(moved) => println!("{}", json!({ "moved": moved })),
            Err(error) => println!("{}", json!({ "failed": format!("{error:#}") })),
        }
    }
    Ok(())
}

/// Records a companion of a share.
fn grow(node: &Node, growth: &str) -> Result<()> {
    let (share, bytes) = growth
        .split_once(' ')
        .with_context(|| format!("{growth:?} is not a share and bytes"))?;
    let (share, memory_bytes): (u32, u64) = (share.parse()?, bytes.trim().parse()?);
    let claim = ClaimRef {
        namespace: "default".to_owned(),
        name: "more".to_owned(),
        uid: claim_uid(1000 + share)?,
    };
    node.change_record(share, |share| {
        share.grants.push(Grant {
            claim: claim.clone(),
            memory_bytes,
            cores: 0,
            slots: 1,
            is_ending: false,
        });
    })
}

fn prepare(node: &Node, arguments: &Arguments, number: u32, cores: u32) -> Result<Value> {
    let limits = Limits {
        cores: Cores::new(cores).context("cores above 100")?,
        compute_policy: ComputePolicy::Balance,
        can_suspend: true,
        ..Limits::memory(arguments.memory_bytes)
    };
    let shares = [(arguments.gpu.as_str(), number)];
    node.prepare(number, &shares, &limits, Enforcement::Report)?;
    let usage = node.layout().usage(&claim_uid(number)?, &share_id(number)?);
    Ok(json!({ "container": node.container(number), "region": usage.join(paths::REGION_FILE) }))
}
