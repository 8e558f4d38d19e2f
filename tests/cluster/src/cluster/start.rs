//! `up`: starts a cluster with a ready node, from an empty directory or from the state of an earlier start.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::{Cluster, Machine, NODE_NAME, Options, end, lock, tail};
use crate::cargo;
use crate::cgroup::Layout;
use crate::component::Component;
use crate::config::{self, BUILD_DIR, PAUSE_IMAGE, Snapshotter, TOOLS_DIR};
use crate::control::{Control, Phase, Request};
use crate::golang::{self, Tools};
use crate::kubeconfig::kubeconfig;
use crate::oci::{Image, Layer};
use crate::pki::{Pki, write_private};
use crate::plan::{Bind, Plan};
use crate::prerequisite::{self, Prerequisite};
use crate::progress::Progress;
use crate::state::StateDir;

/// Time limit for the node to become ready.
const READY_TIMEOUT: Duration = Duration::from_secs(240);
/// Number of exits by itself after which a component counts as failed.
const TOO_MANY_RESTARTS: u32 = 10;

/// Starts the cluster, or its missing components, and returns when its node is ready.
///
/// Builds missing programs and removes the state of an interrupted start. A running cluster is used unchanged; another
/// release or another machine is an error.
pub fn up(options: &Options) -> Result<Cluster> {
    prerequisite::check(&Prerequisite::CLUSTER)?;
    let state = StateDir::new(&options.state)?;
    let _lock = lock(&state)?;
    if Control::connect(&state.control_socket()).is_some() {
        return resume(state, options);
    }
    let tools = golang::build(options.kubernetes)?;
    let build_dir = match &options.programs {
        Some(directory) => directory.clone(),
        None => build_own()?,
    };
    end(&state)?;
    state.clear()?;
    state.create()?;
    let (plan, listener) = prepare(&state, options, &tools, &build_dir)?;
    let step = Progress::step(format!("Start Kubernetes {}", plan.kubernetes));
    let cluster = Cluster { state, plan };
    let launched = launch(&cluster, &build_dir.join("drava-node"), listener)
        .and_then(|launcher| wait(&cluster, launcher, &step))
        .and_then(|()| cluster.load_image(&cluster.pause_archive()));
    if let Err(error) = launched {
        // Logs stay for inspection; processes end.
        end(&cluster.state)?;
        return Err(error);
    }
    step.done();
    Ok(cluster)
}

/// Starts the stopped components of a running cluster.
fn resume(state: StateDir, options: &Options) -> Result<Cluster> {
    let plan = state
        .read_plan()?
        .with_context(|| format!("{} has no plan.json", state.path().display()))?;
    if plan.kubernetes != options.kubernetes.version() {
        bail!(
            "the cluster in {} runs Kubernetes {}, not {}; end it with `cargo xtask cluster down`, or choose another --name",
            state.path().display(),
            plan.kubernetes,
            options.kubernetes.version()
        );
    }
    if plan.machine != machine_file(&options.machine) {
        let file = |machine: &Option<PathBuf>| {
            machine
                .as_ref()
                .map_or("none".into(), |file| file.display().to_string())
        };
        bail!(
            "the cluster in {} runs with the machine {}, not {}; end it with `cargo xtask cluster down`, or choose another --name",
            state.path().display(),
            file(&plan.machine),
            file(&machine_file(&options.machine))
        );
    }
    let cluster = Cluster { state, plan };
    let step = Progress::step(format!(
        "Find Kubernetes {} running",
        cluster.plan.kubernetes
    ));
    for status in cluster.components()? {
        if matches!(status.phase, Phase::Stopped) {
            cluster.control()?.send(Request::Start(status.component))?;
        }
    }
    await_ready(&cluster, &step)?;
    cluster.load_image(&cluster.pause_archive())?;
    step.done();
    Ok(cluster)
}

/// Builds the node's init and the simulated machine, and returns their directory.
fn build_own() -> Result<PathBuf> {
    let built = cargo::build_node()?;
    let node = built.file("drava-node")?;
    node.parent()
        .map(Path::to_owned)
        .context("cargo returned no directory for drava-node")
}

fn machine_file(machine: &Machine) -> Option<PathBuf> {
    match machine {
        Machine::None => None,
        Machine::File(file) => Some(fs::canonicalize(file).unwrap_or_else(|_| file.clone())),
    }
}

/// Writes all files that the node reads, and opens the host's port for the API server.
fn prepare(
    state: &StateDir,
    options: &Options,
    tools: &Tools,
    build_dir: &Path,
) -> Result<(Plan, TcpListener)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .context("open a loopback port for the API server")?;
    let port = listener
        .local_addr()
        .context("read the API server's port")?
        .port();
    if let Machine::File(file) = &options.machine {
        fs::copy(file, state.machine())
            .with_context(|| format!("read the machine {}", file.display()))?;
    }
    credentials(state, port)?;
    configuration(state, tools)?;
    pause_image(tools)?.write(&state.path().join("pause.tar"))?;
    let plan = Plan {
        kubernetes: options.kubernetes.version().to_owned(),
        machine: machine_file(&options.machine),
        api_port: port,
        cgroup: state.cgroup(),
        kubernetes_dir: tools.kubernetes.clone(),
        helm_dir: tools.helm.clone(),
        binds: binds(tools, build_dir),
        processes: Component::ALL
            .into_iter()
            .filter(|component| {
                *component != Component::Simulator || options.machine != Machine::None
            })
            .map(Component::process)
            .collect(),
    };
    state.write_plan(&plan)?;
    Layout::detect()?.create(&plan.cgroup)?;
    Ok((plan, listener))
}

fn credentials(state: &StateDir, port: u16) -> Result<()> {
    let pki = Pki::generate()?;
    pki.write(&state.pki())?;
    let inside = "https://127.0.0.1:443";
    for name in [
        "admin",
        "kube-controller-manager",
        "kube-scheduler",
        "kubelet",
    ] {
        let text = kubeconfig(inside, &pki.authority, pki.identity(name)?).to_string();
        write_private(&state.config().join(format!("{name}.kubeconfig")), &text)?;
    }
    let admin = kubeconfig(
        &format!("https://127.0.0.1:{port}"),
        &pki.authority,
        pki.identity("admin")?,
    );
    write_private(&state.kubeconfig(), &serde_json::to_string_pretty(&admin)?)
}

fn configuration(state: &StateDir, tools: &Tools) -> Result<()> {
    let dir = state.config();
    let cni = dir.join("cni");
    fs::create_dir_all(&cni).with_context(|| format!("create {}", cni.display()))?;
    let runc = if tools.seccomp {
        format!("{TOOLS_DIR}/runc/runc")
    } else {
        eprintln!(
            "  ! libseccomp is missing, so containers run without a seccomp filter (`apt install libseccomp-dev pkg-config`)"
        );
        let script = format!("#!/bin/sh\nexec {BUILD_DIR}/drava-node runc \"$@\"\n");
        let file = dir.join("runc");
        fs::write(&file, script).with_context(|| format!("write {}", file.display()))?;
        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .context("make the runc script executable")?;
        format!("{}/runc", config::CONFIG_DIR)
    };
    for (file, text) in [
        (dir.join("kubelet.json"), config::kubelet().to_string()),
        (
            dir.join("kube-scheduler.json"),
            config::kube_scheduler().to_string(),
        ),
        (cni.join("10-pods.conflist"), config::cni().to_string()),
        (
            dir.join("containerd.toml"),
            config::containerd(snapshotter(state)?, &runc),
        ),
    ] {
        fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
    }
    Ok(())
}

/// Selects the snapshotter: an overlay cannot be stacked on another, which a container's root file system often is.
fn snapshotter(state: &StateDir) -> Result<Snapshotter> {
    /// `OVERLAYFS_SUPER_MAGIC` of linux/magic.h.
    const OVERLAYFS: i64 = 0x794c_7630;
    let kind = rustix::fs::statfs(state.path())
        .with_context(|| {
            format!(
                "read the type of the file system of {}",
                state.path().display()
            )
        })?
        .f_type;
    Ok(if kind == OVERLAYFS {
        Snapshotter::Native
    } else {
        Snapshotter::Overlayfs
    })
}

fn binds(tools: &Tools, build_dir: &Path) -> Vec<Bind> {
    let bind = |source: &Path, target: String| Bind {
        source: source.to_owned(),
        target: target.into(),
    };
    let tools = tools
        .directories()
        .map(|(name, dir)| bind(dir, format!("{TOOLS_DIR}/{name}")));
    tools
        .into_iter()
        .chain([bind(build_dir, BUILD_DIR.to_owned())])
        .collect()
}

fn pause_image(tools: &Tools) -> Result<Image> {
    let mut layer = Layer::default();
    layer.copy("/pause", &tools.pause.join("pause"), 0o755)?;
    Ok(Image {
        name: PAUSE_IMAGE.to_owned(),
        entrypoint: vec!["/pause".into()],
        command: vec![],
        user: "65535:65535".into(),
        layer,
    })
}

fn launch(cluster: &Cluster, program: &Path, listener: TcpListener) -> Result<Child> {
    let log = cluster.state.node_log();
    let output = fs::File::create(&log).with_context(|| format!("create {}", log.display()))?;
    crate::node::launch_command(program, &cluster.state)
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
        .with_context(|| format!("run {}", program.display()))
}

/// Waits until the launched node is ready or has failed.
fn wait(cluster: &Cluster, mut launcher: Child, step: &Progress) -> Result<()> {
    while Control::connect(&cluster.state.control_socket()).is_none() {
        if let Some(status) = launcher.try_wait().context("wait for the node's init")? {
            bail!(
                "the node did not start ({status}):\n{}",
                tail(&cluster.state.node_log())
            );
        }
        if step.elapsed() > READY_TIMEOUT {
            bail!(
                "the node did not start; see its log {}",
                cluster.state.node_log().display()
            );
        }
        step.note("the node's init starts");
        sleep(Duration::from_millis(20));
    }
    // The node outlives this command. Where it does not, this thread collects the launcher's exit status.
    std::thread::spawn(move || launcher.wait());
    await_ready(cluster, step)
}

fn await_ready(cluster: &Cluster, step: &Progress) -> Result<()> {
    loop {
        let components = cluster.components()?;
        let unready = components
            .iter()
            .find(|status| !matches!(status.phase, Phase::Ready { .. }));
        let waiting = match unready {
            Some(status) => format!("{} is {}", status.component, describe_phase(&status.phase)),
            None => match readiness_blocker(cluster) {
                None => return Ok(()),
                Some(lacking) => lacking,
            },
        };
        let hopeless = components.iter().find(|status| {
            status.restarts >= TOO_MANY_RESTARTS && !matches!(status.phase, Phase::Ready { .. })
        });
        if let Some(status) = hopeless {
            let log = cluster.log(status.component);
            bail!(
                "{} exits repeatedly; the last lines of {}:\n{}",
                status.component,
                log.display(),
                tail(&log)
            );
        }
        if step.elapsed() > READY_TIMEOUT {
            bail!(
                "the cluster is not ready after {} s: {waiting}; see the logs in {}",
                READY_TIMEOUT.as_secs(),
                cluster.state.logs().display()
            );
        }
        step.note(waiting);
        sleep(Duration::from_millis(200));
    }
}

fn describe_phase(phase: &Phase) -> String {
    match phase {
        Phase::Waiting { needs } => format!("waiting for {needs}"),
        Phase::Starting { .. } => "starting".into(),
        Phase::Ready { .. } => "ready".into(),
        Phase::Failed { reason } => format!("down ({reason})"),
        Phase::Stopping { .. } => "ending".into(),
        Phase::Stopped => "stopped".into(),
    }
}

/// Returns why no pod can run yet; `None` once the node is ready.
fn readiness_blocker(cluster: &Cluster) -> Option<String> {
    let objects = match cluster.kubectl_output([
        "get",
        &format!("node/{NODE_NAME}"),
        "serviceaccount/default",
        "--output=json",
    ]) {
        Ok(text) => serde_json::from_str(&text).unwrap_or(Value::Null),
        Err(error) => return Some(format!("{error:#}")),
    };
    let Some(node) = objects.pointer("/items/0") else {
        return Some("the API server lists no node".into());
    };
    if node.pointer("/spec/taints").is_some() {
        return Some(format!("node {NODE_NAME} is tainted until it is ready"));
    }
    let conditions = node.pointer("/status/conditions").and_then(Value::as_array);
    let ready =
        conditions.and_then(|all| all.iter().find(|condition| condition["type"] == "Ready"));
    match ready {
        Some(condition) if condition["status"] == "True" => None,
        Some(condition) => Some(format!(
            "node {NODE_NAME} is not ready: {}",
            condition["message"]
        )),
        None => Some(format!("node {NODE_NAME} has no Ready condition")),
    }
}

impl Cluster {
    fn pause_archive(&self) -> PathBuf {
        self.state.path().join("pause.tar")
    }
}
