//! `up`: starts a cluster with ready nodes, from an empty directory or from the state of an earlier start.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::{Cluster, Machine, Node, Options, end, is_running, lock, tail};
use crate::cargo;
use crate::cgroup::Layout;
use crate::component::Component;
use crate::config::{self, BUILD_DIR, NodeIndex, PAUSE_IMAGE, Snapshotter, TOOLS_DIR};
use crate::control::{ComponentStatus, Phase, Request};
use crate::golang::{self, Tools};
use crate::kubeconfig::kubeconfig;
use crate::oci::{Image, Layer};
use crate::pki::{KUBELET, Pki, write_private};
use crate::plan::{Bind, NodePlan, Plan};
use crate::prerequisite::{self, Prerequisite};
use crate::progress::Progress;
use crate::state::{NodeDir, StateDir};

/// Time limit for the nodes to become ready.
const READY_TIMEOUT: Duration = Duration::from_secs(240);
/// Number of exits by itself after which a component counts as failed.
const TOO_MANY_RESTARTS: u32 = 10;

/// Starts the cluster, or its missing components, and returns when its nodes are ready.
///
/// Builds missing programs and removes the state of an interrupted start. A running cluster is used unchanged; another
/// release or other machines are an error.
pub fn up(options: &Options) -> Result<Cluster> {
    prerequisite::check(&Prerequisite::CLUSTER)?;
    let state = StateDir::new(&options.state)?;
    let _lock = lock(&state)?;
    if let Some(plan) = state.read_plan()?
        && is_running(&state, &plan)
    {
        return resume(state, plan, options);
    }
    let tools = golang::build(options.kubernetes)?;
    let build_dir = match &options.programs {
        Some(directory) => directory.clone(),
        None => build_own()?,
    };
    end(&state)?;
    state.clear()?;
    state.mark()?;
    let (plan, listener) = prepare(&state, options, &tools, &build_dir)?;
    let step = Progress::step(format!("Start Kubernetes {}", plan.kubernetes));
    let cluster = Cluster { state, plan };
    let launched = launch(&cluster, &build_dir.join("drava-node"), listener, &step)
        .and_then(|()| await_ready(&cluster, &step))
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
fn resume(state: StateDir, plan: Plan, options: &Options) -> Result<Cluster> {
    if plan.kubernetes != options.kubernetes.version() {
        bail!(
            "the cluster in {} runs Kubernetes {}, not {}; end it with `cargo xtask cluster down`, or choose another --name",
            state.path().display(),
            plan.kubernetes,
            options.kubernetes.version()
        );
    }
    let running: Vec<_> = plan.nodes.iter().map(|node| node.machine.clone()).collect();
    let wanted: Vec<_> = options.nodes.iter().map(machine_file).collect();
    if running != wanted {
        bail!(
            "the cluster in {} runs with the machines {}, not {}; end it with `cargo xtask cluster down`, or choose another --name",
            state.path().display(),
            list_machines(&running),
            list_machines(&wanted)
        );
    }
    let cluster = Cluster { state, plan };
    let step = Progress::step(format!(
        "Find Kubernetes {} running",
        cluster.plan.kubernetes
    ));
    for node in cluster.nodes() {
        for status in node.components()? {
            if matches!(status.phase, Phase::Stopped) {
                node.control()?.send(Request::Start(status.component))?;
            }
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

fn list_machines(machines: &[Option<PathBuf>]) -> String {
    let names: Vec<_> = machines
        .iter()
        .map(|machine| match machine {
            Some(file) => file.display().to_string(),
            None => "none".to_owned(),
        })
        .collect();
    names.join(", ")
}

/// Writes all files that the nodes read, and opens the host's port for the API server.
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
    if !tools.seccomp {
        eprintln!(
            "  ! libseccomp is missing, so containers run without a seccomp filter (`apt install libseccomp-dev pkg-config`)"
        );
    }
    let pki = Pki::generate()?;
    let mut nodes = vec![];
    for (index, machine) in NodeIndex::all(options.nodes.len())?
        .into_iter()
        .zip(&options.nodes)
    {
        nodes.push(prepare_node(state, index, machine, options, tools, &pki)?);
    }
    let admin = kubeconfig(
        &format!("https://127.0.0.1:{port}"),
        &pki.authority,
        pki.control_plane.get("admin")?,
    );
    write_private(&state.kubeconfig(), &serde_json::to_string_pretty(&admin)?)?;
    pause_image(tools)?.write(&state.path().join("pause.tar"))?;
    let plan = Plan {
        kubernetes: options.kubernetes.version().to_owned(),
        api_port: port,
        cgroup: state.cgroup(),
        kubernetes_dir: tools.kubernetes.clone(),
        helm_dir: tools.helm.clone(),
        binds: binds(tools, build_dir),
        nodes,
    };
    state.write_plan(&plan)?;
    let names: Vec<_> = plan.nodes.iter().map(|node| node.index.name()).collect();
    Layout::detect()?.create(&plan.cgroup, &names)?;
    Ok((plan, listener))
}

fn prepare_node(
    state: &StateDir,
    node: NodeIndex,
    machine: &Machine,
    options: &Options,
    tools: &Tools,
    pki: &Pki,
) -> Result<NodePlan> {
    let dir = state.node(&node.name());
    dir.create()?;
    if let Machine::File(file) = machine {
        fs::copy(file, dir.machine())
            .with_context(|| format!("read the machine {}", file.display()))?;
    }
    credentials(&dir, node, pki)?;
    configuration(&dir, node, options, tools)?;
    let runs = |component: &Component| {
        component.runs_on(node) && (*component != Component::Simulator || *machine != Machine::None)
    };
    Ok(NodePlan {
        index: node,
        machine: machine_file(machine),
        processes: Component::ALL
            .into_iter()
            .filter(runs)
            .map(|component| component.process(node, options.pod_groups))
            .collect(),
    })
}

fn credentials(dir: &NodeDir, node: NodeIndex, pki: &Pki) -> Result<()> {
    let own = pki.write_node(node, &dir.pki())?;
    let server = format!("https://{}:443", NodeIndex::CONTROL_PLANE.address());
    let mut identities = vec![own.get(KUBELET)?];
    if node == NodeIndex::CONTROL_PLANE {
        for name in ["admin", "kube-controller-manager", "kube-scheduler"] {
            identities.push(pki.control_plane.get(name)?);
        }
    }
    for identity in identities {
        let text = kubeconfig(&server, &pki.authority, identity).to_string();
        let file = dir.config().join(format!("{}.kubeconfig", identity.name));
        write_private(&file, &text)?;
    }
    Ok(())
}

fn configuration(state: &NodeDir, node: NodeIndex, options: &Options, tools: &Tools) -> Result<()> {
    let dir = state.config();
    let cni = dir.join("cni");
    fs::create_dir_all(&cni).with_context(|| format!("create {}", cni.display()))?;
    let runc = if tools.seccomp {
        format!("{TOOLS_DIR}/runc/runc")
    } else {
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
            config::kube_scheduler(options.scheduler_qps).to_string(),
        ),
        (cni.join("10-pods.conflist"), config::cni(node).to_string()),
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
fn snapshotter(state: &NodeDir) -> Result<Snapshotter> {
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
        labels: BTreeMap::new(),
        layer,
    })
}

/// Starts the inits of all nodes, the control plane's first: the other nodes connect to its network.
fn launch(cluster: &Cluster, program: &Path, listener: TcpListener, step: &Progress) -> Result<()> {
    let mut listener = Some(OwnedFd::from(listener));
    for plan in &cluster.plan.nodes {
        let input = match listener.take() {
            Some(listener) => listener,
            None => network_namespace(&cluster.control_plane())?.into(),
        };
        let node = Node::new(&cluster.state, plan);
        let log = node.dir().init_log();
        let output = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let launcher = crate::node::launch_command(program, &cluster.state, &cluster.plan, plan)
            .stdin(Stdio::from(input))
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("run {}", program.display()))?;
        await_init(&node, launcher, step)?;
    }
    Ok(())
}

fn network_namespace(node: &Node) -> Result<File> {
    let path = format!("/proc/{}/ns/net", node.control()?.init.as_raw_pid());
    File::open(&path).with_context(|| format!("open {path}"))
}

/// Waits until the launched node's init answers or has failed.
fn await_init(node: &Node, mut launcher: Child, step: &Progress) -> Result<()> {
    let (name, log) = (node.name(), node.dir().init_log());
    while !node.is_running() {
        if let Some(status) = launcher.try_wait().context("wait for the node's init")? {
            bail!("{name} did not start ({status}):\n{}", tail(&log));
        }
        if step.elapsed() > READY_TIMEOUT {
            bail!("{name} did not start; its log is {}", log.display());
        }
        step.note(format!("the init of {name} starts"));
        sleep(Duration::from_millis(20));
    }
    // The node outlives this command. Where it does not, this thread collects the launcher's exit status.
    std::thread::spawn(move || launcher.wait());
    Ok(())
}

fn await_ready(cluster: &Cluster, step: &Progress) -> Result<()> {
    loop {
        let mut unready: Option<(Node, ComponentStatus)> = None;
        for node in cluster.nodes() {
            let components = node.components()?;
            let mut failing = components.into_iter().filter(|status| !status.is_ready());
            if let Some(status) = failing.clone().find(|s| s.restarts >= TOO_MANY_RESTARTS) {
                let log = node.log(status.component);
                bail!(
                    "{} exits repeatedly; the last lines of {}:\n{}",
                    status.component,
                    log.display(),
                    tail(&log)
                );
            }
            unready = unready.or(failing.next().map(|status| (node, status)));
        }
        let waiting = match unready {
            Some((node, status)) => format!(
                "{} of {} is {}",
                status.component,
                node.name(),
                describe_phase(&status.phase)
            ),
            None => match readiness_blocker(cluster) {
                None => return Ok(()),
                Some(lacking) => lacking,
            },
        };
        if step.elapsed() > READY_TIMEOUT {
            bail!(
                "the cluster is not ready after {} s: {waiting}; `cargo xtask cluster logs` prints its logs",
                READY_TIMEOUT.as_secs(),
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

/// Returns why some node cannot run pods yet; `None` once all nodes are ready.
fn readiness_blocker(cluster: &Cluster) -> Option<String> {
    let names: Vec<_> = cluster.nodes().iter().map(Node::name).collect();
    let objects = names.iter().map(|name| format!("node/{name}"));
    let objects: Vec<_> = objects
        .chain(["serviceaccount/default".to_owned()])
        .collect();
    let args = ["get", "--output=json"].into_iter();
    let objects: Value =
        match cluster.kubectl_output(args.chain(objects.iter().map(String::as_str))) {
            Ok(text) => serde_json::from_str(&text).unwrap_or(Value::Null),
            Err(error) => return Some(format!("{error:#}")),
        };
    let Some(listed) = objects["items"].as_array() else {
        return Some("the API server lists no nodes".to_owned());
    };
    names.iter().find_map(|name| {
        let node = listed
            .iter()
            .find(|node| node["metadata"]["name"] == **name);
        node_blocker(name, node.unwrap_or(&Value::Null))
    })
}

fn node_blocker(name: &str, node: &Value) -> Option<String> {
    if node.pointer("/spec/taints").is_some() {
        return Some(format!("node {name} is tainted until it is ready"));
    }
    let conditions = node.pointer("/status/conditions").and_then(Value::as_array);
    let ready =
        conditions.and_then(|all| all.iter().find(|condition| condition["type"] == "Ready"));
    match ready {
        Some(condition) if condition["status"] == "True" => None,
        Some(condition) => Some(format!(
            "node {name} is not ready: {}",
            condition["message"]
        )),
        None => Some(format!("node {name} has no Ready condition")),
    }
}

impl Cluster {
    fn pause_archive(&self) -> PathBuf {
        self.state.path().join("pause.tar")
    }
}
