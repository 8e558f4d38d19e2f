//! Clients of MPS servers in real processes.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use anyhow::Context as _;
use serde_json::Value;
use simulator_machine::description::{H100X2, T4};
use simulator_machine::kernel::GpuStatus;
use simulator_machine::testing::{Machine, MpsDaemon, poll, skips_without_root};

const MS: u64 = 1_000_000;
const HALF: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50";
/// Kernels that would fill the GPU, until killed.
const LAUNCH: [&str; 9] = [
    "launch",
    "--ms",
    "20",
    "--seconds",
    "600",
    "--blocks",
    "100000",
    "--in-flight",
    "4",
];
/// One kernel that does not end.
const STUCK: [&str; 5] = ["launch", "--ms", "600000", "--blocks", "8"];

/// A client process that is killed when the test ends.
struct Client(Option<Child>);

impl Client {
    fn start(command: &mut Command, arguments: &[&str]) -> anyhow::Result<Self> {
        let command = command.args(arguments).args(["--output", "json"]);
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(Self(Some(child)))
    }

    fn pid(&self) -> u32 {
        self.0.as_ref().map_or(0, Child::id)
    }

    fn has_ended(&mut self) -> anyhow::Result<bool> {
        let child = self.0.as_mut().context("no child")?;
        Ok(child.try_wait()?.is_some())
    }

    fn kill(&mut self) -> anyhow::Result<()> {
        let child = self.0.as_mut().context("no child")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Waits for its end.
    fn end(mut self) -> anyhow::Result<Output> {
        let child = self.0.take().context("no child")?;
        Ok(child.wait_with_output()?)
    }

    /// Waits for its end with an error of CUDA, and returns the message.
    fn failure(self) -> anyhow::Result<String> {
        let output = self.end()?;
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        Ok(String::from_utf8(output.stderr)?)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The command of a client with settings such as [`HALF`].
fn client(machine: &Machine, daemon: &MpsDaemon, settings: &[&str]) -> anyhow::Result<Command> {
    let mut command = machine.program("cuda-probe")?;
    daemon.serve(&mut command);
    for (variable, value) in settings.iter().filter_map(|one| one.split_once('=')) {
        command.env(variable, value);
    }
    Ok(command)
}

fn start(machine: &Machine, daemon: &MpsDaemon, arguments: &[&str]) -> anyhow::Result<Client> {
    Client::start(&mut client(machine, daemon, &[])?, arguments)
}

fn multiprocessors(command: &mut Command) -> anyhow::Result<Vec<u64>> {
    let output = command.args(["info", "--output", "json"]).output()?;
    let info: Value =
        serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))?;
    let devices = info["devices"].as_array().into_iter().flatten();
    Ok(devices
        .filter_map(|device| device["multiprocessors"].as_u64())
        .collect())
}

fn kernels_of(gpu: &GpuStatus, pid: u32) -> u64 {
    let mut processes = gpu.processes.iter();
    let found = processes.find(|process| process.pid == pid);
    found.map_or(0, |process| process.kernels)
}

fn has_context(gpu: &GpuStatus, pid: u32) -> bool {
    gpu.processes.iter().any(|process| process.pid == pid)
}

fn wait_for_context(machine: &Machine, client: &Client) -> anyhow::Result<()> {
    machine.wait_for_gpu(0, |gpu| has_context(gpu, client.pid()))?;
    Ok(())
}

/// Lets two processes launch kernels, and returns their busy time together as percentage of that of the GPU.
fn overlap(machine: &Machine, commands: [&mut Command; 2]) -> anyhow::Result<u64> {
    let [first, second] = commands.map(|command| Client::start(command, &LAUNCH));
    let clients = [first?, second?];
    let reached = |gpu: &GpuStatus, kernels| {
        let mut counts = clients.iter().map(|client| kernels_of(gpu, client.pid()));
        counts.all(|count| count >= kernels)
    };
    let busy = |gpu: &GpuStatus| {
        let processes = gpu.processes.iter().map(|process| process.busy_nanos);
        (processes.sum::<u64>(), gpu.busy_nanos)
    };
    let (together, all) = busy(&machine.wait_for_gpu(0, |gpu| reached(gpu, 2))?);
    let (later_together, later_all) = busy(&machine.wait_for_gpu(0, |gpu| reached(gpu, 20))?);
    Ok((later_together - together) * 100 / (later_all - all))
}

#[test]
fn runs_two_clients_with_half_a_gpu_side_by_side() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let daemon = machine.start_mps(&[])?;
    let mut commands = [
        client(&machine, &daemon, &[HALF])?,
        client(&machine, &daemon, &[HALF])?,
    ];
    let overlap = overlap(&machine, commands.each_mut())?;
    assert!((150..=200).contains(&overlap), "{overlap}%");
    Ok(())
}

#[test]
fn alternates_processes_without_daemon() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let mut daemon = machine.start_mps(&[])?;
    daemon.process().kill()?;
    daemon.process().wait()?;
    // The pipe directory is still there, and the setting has no effect.
    assert!(daemon.pipe_directory().join("control").exists());
    let command = || client(&machine, &daemon, &[HALF]);
    assert_eq!(multiprocessors(&mut command()?)?, [132, 132]);
    let overlap = overlap(&machine, [command()?, command()?].each_mut())?;
    assert!((95..=105).contains(&overlap), "{overlap}%");
    Ok(())
}

#[test]
fn takes_turns_with_processes_outside() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let daemon = machine.start_mps(&[])?;
    let mut outside = machine.program("cuda-probe")?;
    outside.env("CUDA_MPS_PIPE_DIRECTORY", machine.root().join("none"));
    let mut inside = client(&machine, &daemon, &[HALF])?;
    let overlap = overlap(&machine, [&mut outside, &mut inside])?;
    assert!((95..=105).contains(&overlap), "{overlap}%");
    Ok(())
}

#[test]
fn client_alone_has_its_part_only() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let daemon = machine.start_mps(&[])?;
    let mut busy = 0;
    for (setting, expected) in [
        ("", 40),
        (HALF, 80),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25", 40 * 132 / 34),
    ] {
        let mut command = client(&machine, &daemon, &[setting])?;
        let launch = ["launch", "--ms", "40", "--blocks", "100000"];
        let output = Client::start(&mut command, &launch)?.end()?;
        assert!(output.status.success(), "{output:?}");
        let now = machine.gpu(0)?.busy_nanos;
        assert_eq!((now - busy) / MS, expected, "{setting}");
        busy = now;
    }
    Ok(())
}

#[test]
fn shows_gpus_and_multiprocessors_of_the_client() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let second = machine.gpu(1)?.uuid;
    let daemon = machine.start_mps(&[&format!("CUDA_VISIBLE_DEVICES={second}")])?;
    let shown = |settings: &[&str]| multiprocessors(&mut client(&machine, &daemon, settings)?);
    assert_eq!(shown(&[])?, [132]);
    assert_eq!(shown(&[HALF])?, [66]);
    assert_eq!(shown(&[&format!("CUDA_VISIBLE_DEVICES={second}")])?, [132]);
    assert!(shown(&["CUDA_VISIBLE_DEVICES=1"]).is_err());
    Ok(())
}

#[test]
fn daemon_limits_later_servers_and_later_clients() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let daemon = machine.start_mps(&["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50"])?;
    let shown = |settings: &[&str]| multiprocessors(&mut client(&machine, &daemon, settings)?);
    let whole = ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"];
    assert_eq!(
        daemon.command("get_default_active_thread_percentage")?,
        "50.0"
    );
    assert_eq!(shown(&whole)?, [66, 66]);
    // The server exists.
    assert_eq!(
        daemon.command("set_default_active_thread_percentage 25")?,
        "25.0"
    );
    assert_eq!(shown(&whole)?, [66, 66]);
    let server = daemon.server()?;
    assert_eq!(
        daemon.command(&format!("get_active_thread_percentage {server}"))?,
        "50.0"
    );
    assert_eq!(
        daemon.command(&format!("set_active_thread_percentage {server} 10"))?,
        "10.0"
    );
    assert_eq!(shown(&whole)?, [14, 14]);
    daemon.command(&format!("shutdown_server {server}"))?;
    poll(|| Ok(daemon.command("get_server_list")?.is_empty().then_some(())))?;
    assert_eq!(shown(&whole)?, [34, 34]);
    Ok(())
}

#[test]
fn fault_reaches_neighbour_and_no_process_outside() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let daemon = machine.start_mps(&[])?;
    let mut outside = machine.program("cuda-probe")?;
    outside.env("CUDA_MPS_PIPE_DIRECTORY", machine.root().join("none"));
    let outside = Client::start(&mut outside, &LAUNCH)?;
    let neighbour = start(&machine, &daemon, &LAUNCH)?;
    let mut idle = start(&machine, &daemon, &["alloc", "--mib", "1", "--hold", "600"])?;
    wait_for_context(&machine, &idle)?;
    machine.wait_for_gpu(0, |gpu| kernels_of(gpu, neighbour.pid()) > 0)?;
    assert_eq!(daemon.status()?, "ACTIVE");
    let server = daemon.server()?;

    let mut faulty = start(&machine, &daemon, &["fault", "--hold", "600"])?;
    let message = neighbour.failure()?;
    assert!(message.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{message}");
    let kernels = kernels_of(&machine.gpu(0)?, outside.pid());
    machine.wait_for_gpu(0, |gpu| kernels_of(gpu, outside.pid()) > kernels + 2)?;

    // Until all that failed are gone.
    let refused = || anyhow::Ok(start(&machine, &daemon, &["info"])?.failure()?);
    for failed in [&mut faulty, &mut idle] {
        assert_eq!(daemon.status()?, "FAULT");
        let message = refused()?;
        assert!(
            message.contains("CUDA_ERROR_MPS_SERVER_NOT_READY"),
            "{message}"
        );
        failed.kill()?;
        let pid = failed.pid();
        machine.wait_for_gpu(0, |gpu| !has_context(gpu, pid))?;
    }
    assert_eq!(daemon.status()?, "ACTIVE");
    assert_eq!(daemon.server()?, server);
    let again = start(&machine, &daemon, &["alloc", "--mib", "1"])?.end()?;
    assert!(again.status.success(), "{again:?}");
    Ok(())
}

#[test]
fn killed_client_with_kernel_in_flight_fails_neighbour() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let daemon = machine.start_mps(&[])?;
    let mut idle = start(&machine, &daemon, &["alloc", "--mib", "1", "--hold", "600"])?;
    let neighbour = start(&machine, &daemon, &LAUNCH)?;
    wait_for_context(&machine, &idle)?;
    machine.wait_for_gpu(0, |gpu| kernels_of(gpu, neighbour.pid()) > 0)?;
    // An idle client disturbs nothing.
    idle.kill()?;
    let kernels = kernels_of(&machine.gpu(0)?, neighbour.pid());
    machine.wait_for_gpu(0, |gpu| kernels_of(gpu, neighbour.pid()) > kernels + 2)?;

    let busy = machine.gpu(0)?.busy_nanos;
    let mut stuck = start(&machine, &daemon, &STUCK)?;
    wait_for_context(&machine, &stuck)?;
    machine.wait_for_gpu(0, |gpu| {
        let mut processes = gpu.processes.iter();
        gpu.busy_nanos > busy
            && processes.any(|process| process.pid == stuck.pid() && process.busy_nanos > 0)
    })?;
    stuck.kill()?;
    let message = neighbour.failure()?;
    assert!(message.contains("CUDA_ERROR_LAUNCH_FAILED"), "{message}");
    Ok(())
}

#[test]
fn terminated_client_disturbs_nothing() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let daemon = machine.start_mps(&[])?;
    let neighbour = start(&machine, &daemon, &LAUNCH)?;
    let stuck = start(&machine, &daemon, &STUCK)?;
    let pid = stuck.pid();
    machine.wait_for_gpu(0, |gpu| {
        let mut processes = gpu.processes.iter();
        processes.any(|process| process.pid == pid && process.busy_nanos > 0)
    })?;
    let server = daemon.server()?;
    let clients = daemon.command(&format!("get_client_list {server}"))?;
    assert!(
        clients.lines().any(|line| line == pid.to_string()),
        "{clients}"
    );
    let table = daemon.command("ps")?;
    assert!(table.contains("cuda-probe"), "{table}");
    assert_eq!(
        daemon.command(&format!("terminate_client {server} {pid}"))?,
        "0"
    );
    let message = stuck.failure()?;
    assert!(
        message.contains("CUDA_ERROR_MPS_CLIENT_TERMINATED"),
        "{message}"
    );
    let kernels = kernels_of(&machine.gpu(0)?, neighbour.pid());
    machine.wait_for_gpu(0, |gpu| kernels_of(gpu, neighbour.pid()) > kernels + 2)?;
    assert_eq!(daemon.status()?, "ACTIVE");
    let unknown = daemon.command(&format!("terminate_client {server} {pid}"))?;
    assert!(unknown.contains("Cannot find client"), "{unknown}");
    Ok(())
}

#[test]
fn clients_fail_when_their_server_dies() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let daemon = machine.start_mps(&[])?;
    let client = start(&machine, &daemon, &LAUNCH)?;
    machine.wait_for_gpu(0, |gpu| kernels_of(gpu, client.pid()) > 0)?;
    let server = daemon.server()?;
    let left = shared_memory(&daemon)?;
    assert!(left.exists());
    Command::new("kill")
        .args(["-9", &server.to_string()])
        .status()?;
    let message = client.failure()?;
    assert!(message.contains("CUDA_ERROR_MPS_RPC_FAILURE"), "{message}");
    // The daemon starts another one.
    let again = start(&machine, &daemon, &["alloc", "--mib", "1"])?.end()?;
    assert!(again.status.success(), "{again:?}");
    assert_ne!(daemon.server()?, server);
    assert!(!left.exists());
    Ok(())
}

#[test]
fn server_outlives_its_daemon_with_its_clients() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let mut daemon = machine.start_mps(&[])?;
    let client = start(&machine, &daemon, &LAUNCH)?;
    machine.wait_for_gpu(0, |gpu| kernels_of(gpu, client.pid()) > 0)?;
    let server = daemon.server()?;
    daemon.process().kill()?;
    daemon.process().wait()?;
    let done = kernels_of(&machine.gpu(0)?, client.pid());
    machine.wait_for_gpu(0, |gpu| {
        let mut processes = gpu.processes.iter();
        processes.any(|process| process.pid == server) && kernels_of(gpu, client.pid()) > done + 5
    })?;
    let killed = Command::new("kill")
        .args(["-9", &server.to_string()])
        .status();
    assert!(killed?.success());
    let message = client.failure()?;
    assert!(message.contains("CUDA_ERROR_MPS_RPC_FAILURE"), "{message}");
    let shell = daemon.shell("get_server_list")?;
    assert_eq!(shell.status.code(), Some(1));
    let message = String::from_utf8(shell.stderr)?;
    assert!(
        message.contains("Cannot find MPS control daemon process"),
        "{message}"
    );
    machine.wait_for_gpu(0, |gpu| gpu.processes.is_empty())?;
    Ok(())
}

/// The file in shared memory of the server that started first.
fn shared_memory(daemon: &MpsDaemon) -> anyhow::Result<PathBuf> {
    let log = poll(|| {
        let log = daemon.log("server.log").ok();
        Ok(log.filter(|log| log.contains("has started")))
    })?;
    let mut lines = log.lines();
    let region = lines.find_map(|line| line.split_once("memory region "));
    let (_, name) = region.context("no shared memory in the log")?;
    Ok(Path::new("/dev/shm").join(name))
}

#[test]
fn server_is_replaced_after_a_restart_of_the_machine() -> anyhow::Result<()> {
    let mut machine = Machine::start(T4)?;
    let daemon = machine.start_mps(&[])?;
    let allocate = |machine: &Machine| {
        let output = start(machine, &daemon, &["alloc", "--mib", "1"])?.end()?;
        anyhow::ensure!(output.status.success(), "{output:?}");
        daemon.server()
    };
    let server = allocate(&machine)?;
    assert_eq!(allocate(&machine)?, server);
    machine.restart()?;
    assert_ne!(allocate(&machine)?, server);
    Ok(())
}

#[test]
fn client_needs_the_shared_memory_of_its_server() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let daemon = machine.start_mps(&[])?;
    daemon.command("start_server -uid 0")?;
    // As in a container with a /dev/shm of its own.
    std::fs::remove_file(shared_memory(&daemon)?)?;
    let message = start(&machine, &daemon, &["info"])?.failure()?;
    assert!(
        message.contains("CUDA_ERROR_MPS_CONNECTION_FAILED"),
        "{message}"
    );
    Ok(())
}

#[test]
fn quit_waits_for_clients() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let mut daemon = machine.start_mps(&[])?;
    let mut client = start(&machine, &daemon, &["alloc", "--mib", "1", "--hold", "600"])?;
    wait_for_context(&machine, &client)?;
    std::thread::scope(|scope| {
        let quit = scope.spawn(|| daemon.shell("quit"));
        // It takes no client from now on.
        poll(|| {
            let message = match start(&machine, &daemon, &["info"])?.end()? {
                output if output.status.success() => return Ok(None),
                output => String::from_utf8(output.stderr)?,
            };
            assert!(
                message.contains("CUDA_ERROR_MPS_SERVER_NOT_READY"),
                "{message}"
            );
            Ok(Some(()))
        })?;
        assert!(!client.has_ended()?);
        assert!(!quit.is_finished());
        client.kill()?;
        let quit = quit.join().map_err(|_| anyhow::anyhow!("panic"))??;
        assert!(quit.status.success(), "{quit:?}");
        anyhow::Ok(())
    })?;
    assert!(daemon.process().wait()?.success());
    assert!(!daemon.pipe_directory().join("control").exists());
    Ok(())
}

#[test]
fn quit_with_timeout_ends_servers_with_clients() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let mut daemon = machine.start_mps(&[])?;
    let client = start(&machine, &daemon, &LAUNCH)?;
    machine.wait_for_gpu(0, |gpu| kernels_of(gpu, client.pid()) > 0)?;
    daemon.command("quit -t 0")?;
    let message = client.failure()?;
    assert!(message.contains("CUDA_ERROR_MPS_RPC_FAILURE"), "{message}");
    assert!(daemon.process().wait()?.success());
    Ok(())
}

#[test]
fn shutdown_of_a_server_waits_for_clients_unless_forced() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let daemon = machine.start_mps(&[])?;
    let client = start(&machine, &daemon, &LAUNCH)?;
    machine.wait_for_gpu(0, |gpu| kernels_of(gpu, client.pid()) > 0)?;
    let server = daemon.server()?;
    daemon.command(&format!("shutdown_server {server}"))?;
    let message = start(&machine, &daemon, &["info"])?.failure()?;
    assert!(
        message.contains("CUDA_ERROR_MPS_SERVER_NOT_READY"),
        "{message}"
    );
    let kernels = kernels_of(&machine.gpu(0)?, client.pid());
    machine.wait_for_gpu(0, |gpu| kernels_of(gpu, client.pid()) > kernels + 2)?;
    daemon.command(&format!("shutdown_server {server} -f"))?;
    let message = client.failure()?;
    assert!(message.contains("CUDA_ERROR_MPS_RPC_FAILURE"), "{message}");
    assert_eq!(daemon.command("get_server_list")?, "");
    Ok(())
}

/// The client of a user other than root; its program is where that user finds it.
fn client_of_user(machine: &Machine, daemon: &MpsDaemon) -> anyhow::Result<Command> {
    const USER: u32 = 1000;
    let open = |path: &Path| std::fs::set_permissions(path, PermissionsExt::from_mode(0o755));
    let directory = machine.root().parent().context("no directory")?;
    open(directory)?;
    let program = directory.join("probe");
    let original = machine.program("cuda-probe")?;
    std::fs::copy(original.get_program(), &program)?;
    let mut command = machine.command(program);
    daemon.serve(&mut command).uid(USER);
    Ok(command)
}

#[test]
fn clients_of_another_user_wait() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let machine = Machine::start(T4)?;
    let daemon = machine.start_mps(&[])?;
    let mut command = client_of_user(&machine, &daemon)?;
    let mut first = Client::start(&mut command, &["alloc", "--mib", "1", "--hold", "600"])?;
    wait_for_context(&machine, &first)?;
    let mut second = start(&machine, &daemon, &["alloc", "--mib", "1"])?;
    poll(|| {
        Ok(daemon
            .log("control.log")?
            .contains("from user 0")
            .then_some(()))
    })?;
    assert!(!second.has_ended()?);
    let server = daemon.server()?;
    assert_eq!(
        daemon.command(&format!("get_client_list {server}"))?,
        first.pid().to_string()
    );
    first.kill()?;
    let output = second.end()?;
    assert!(output.status.success(), "{output:?}");
    assert_ne!(daemon.server()?, server);
    Ok(())
}

#[test]
fn one_server_serves_all_users_with_the_option() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let machine = Machine::start(T4)?;
    let daemon = machine.start_mps(&["-multiuser-server"])?;
    let mut command = client_of_user(&machine, &daemon)?;
    let first = Client::start(&mut command, &["alloc", "--mib", "1", "--hold", "600"])?;
    wait_for_context(&machine, &first)?;
    let server = daemon.server()?;
    let output = start(&machine, &daemon, &["alloc", "--mib", "1"])?.end()?;
    assert!(output.status.success(), "{output:?}");
    assert_eq!(daemon.server()?, server);
    Ok(())
}
