//! A machine, the shares of one container on it, and test processes under their limits.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

use drava_vgpu_abi::snapshot::{ProcessUsage, Snapshot};
use drava_vgpu_abi::{IdText, Limits, LimitsSpec, encode, paths};
use simulator_machine::description::H100X2;
use simulator_machine::testing::{Machine, poll};

use crate::interposer;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

pub(crate) const OUT_OF_MEMORY: i64 = 2;

/// UUIDs of the two GPUs of the default machine.
pub(crate) const GPUS: [&str; 2] = [
    "GPU-5f1c8a20-0b7e-4d39-9a64-1e0d6c9b7a01",
    "GPU-c3d94b76-62fa-4a18-8c05-7b9e21f4d502",
];

/// Memory of a context, as in the machine's description.
pub(crate) const CONTEXT_BYTES: u64 = 545_259_520;

/// Estimate for a context without a limits page: 4 MiB for each of 132 multiprocessors.
pub(crate) const ESTIMATE: u64 = 132 * 4 * MIB;

/// A machine and one container on it.
pub(crate) struct Container {
    pub(crate) machine: Machine,
    run: tempfile::TempDir,
}

impl Container {
    /// A container without shares.
    pub(crate) fn new() -> Self {
        Self::on(Machine::start(H100X2).unwrap())
    }

    /// A container without shares on a given machine.
    pub(crate) fn on(machine: Machine) -> Self {
        let run = tempfile::tempdir().unwrap();
        Self { machine, run }
    }

    /// A container with one share of the first GPU.
    pub(crate) fn with_memory(limit_bytes: u64) -> Self {
        let container = Self::new();
        container.add_share("share", GPUS[0], &Limits::memory(limit_bytes));
        container
    }

    /// The directory that a real container sees as `/run/drava`.
    pub(crate) fn run_dir(&self) -> &Path {
        self.run.path()
    }

    pub(crate) fn page(&self, share: &str) -> PathBuf {
        let share = self.run.path().join(share);
        share.join(paths::LIMITS_DIR).join(paths::PAGE_FILE)
    }

    pub(crate) fn region(&self, share: &str) -> PathBuf {
        let share = self.run.path().join(share);
        share.join(paths::USAGE_DIR).join(paths::REGION_FILE)
    }

    /// Another container on the same machine, with a share of the first GPU.
    pub(crate) fn tenant(&self, limit_bytes: u64) -> tempfile::TempDir {
        let run = tempfile::tempdir().unwrap();
        let share = run.path().join("tenant");
        let spec = LimitsSpec {
            claim_uid: IdText::new("tenant").unwrap(),
            share_id: IdText::new("tenant").unwrap(),
            device_uuid: GPUS[0].parse().unwrap(),
            limits: Limits::memory(limit_bytes),
        };
        for directory in [paths::LIMITS_DIR, paths::USAGE_DIR] {
            std::fs::create_dir_all(share.join(directory)).unwrap();
        }
        let page = share.join(paths::LIMITS_DIR).join(paths::PAGE_FILE);
        std::fs::write(page, encode(&spec)).unwrap();
        run
    }

    /// A process of a [`Self::tenant`], with a context on the first GPU.
    pub(crate) fn process_of(&self, tenant: &tempfile::TempDir) -> TestProcess {
        let mut process = self.start_with("dlsym", |command| {
            command.env("DRAVA_RUN_DIR", tenant.path());
        });
        process.init(0);
        process
    }

    /// Writes the files of a share as the node driver does.
    pub(crate) fn add_share(&self, share: &str, gpu: &str, limits: &Limits) {
        let spec = LimitsSpec {
            claim_uid: IdText::new("claim").unwrap(),
            share_id: IdText::new(share).unwrap(),
            device_uuid: gpu.parse().unwrap(),
            limits: *limits,
        };
        for file in [self.page(share), self.region(share)] {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        }
        std::fs::write(self.page(share), encode(&spec)).unwrap();
    }

    /// A process that resolves driver functions by `route`.
    pub(crate) fn start(&self, route: &str) -> TestProcess {
        self.start_with(route, |_| {})
    }

    pub(crate) fn start_with(&self, route: &str, change: impl FnOnce(&mut Command)) -> TestProcess {
        let mut command = self.command(interposer::test_process());
        command.arg(route);
        change(&mut command);
        TestProcess::spawn(command)
    }

    /// A program in the container.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.machine.command(program);
        command
            .env("LD_PRELOAD", interposer::library())
            .env("DRAVA_RUN_DIR", self.run.path());
        command
    }

    /// A process with a context on the first GPU.
    pub(crate) fn process(&self) -> TestProcess {
        let mut process = self.start("dlsym");
        process.init(0);
        process
    }

    /// A process outside of the container, without limits, with a context on the first GPU.
    pub(crate) fn unlimited_process(&self) -> TestProcess {
        let mut command = self.machine.command(interposer::test_process());
        command.arg("dlsym");
        let mut process = TestProcess::spawn(command);
        process.init(0);
        process
    }

    /// The processes in the region of a share.
    pub(crate) fn processes_of(&self, share: &str) -> Vec<ProcessUsage> {
        let region = std::fs::read(self.region(share)).unwrap();
        Snapshot::decode(&region).unwrap().processes().collect()
    }

    /// Used memory in the first GPU's ledger.
    pub(crate) fn ledger_bytes(&self) -> u64 {
        self.machine.gpu(0).unwrap().used_bytes
    }

    /// Waits until the first GPU's ledger shows this usage.
    pub(crate) fn wait_for_ledger_bytes(&self, bytes: u64) {
        wait_until(
            || self.ledger_bytes() == bytes,
            || {
                format!(
                    "the ledger has {} bytes instead of {bytes}",
                    self.ledger_bytes()
                )
            },
        );
    }
}

/// Waits for a condition that another process fulfills.
pub(crate) fn wait_until(mut condition: impl FnMut() -> bool, otherwise: impl Fn() -> String) {
    let holds = poll(|| Ok(condition().then_some(())));
    assert!(holds.is_ok(), "{}", otherwise());
}

/// A process that runs commands.
pub(crate) struct TestProcess {
    child: Child,
    /// `None` after its standard input was closed.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// Kills the process, so that a failing test leaves none behind.
impl Drop for TestProcess {
    fn drop(&mut self) {
        // The process may have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An object of the process, such as an allocation, a stream or a handle.
pub(crate) type ObjectId = i64;

impl TestProcess {
    /// Starts a program that answers each line with one line.
    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            input,
            output,
        }
    }

    /// Sends a command and returns its answer.
    pub(crate) fn request(&mut self, command: &str) -> String {
        self.send(command);
        self.receive()
    }

    /// Sends a command without waiting.
    pub(crate) fn send(&mut self, command: &str) {
        writeln!(self.input.as_mut().unwrap(), "{command}").unwrap();
    }

    /// Returns the next answer.
    pub(crate) fn receive(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert!(
            !line.is_empty(),
            "the test process ended: {:?}",
            self.child.try_wait()
        );
        line.trim().to_owned()
    }

    /// As [`Self::request`], but the process may end before it answers.
    pub(crate) fn try_request(&mut self, command: &str) -> Option<String> {
        // The pipe of an ended process is broken.
        writeln!(self.input.as_mut()?, "{command}").ok()?;
        let mut line = String::new();
        let length = self.output.read_line(&mut line).ok()?;
        (length > 0).then(|| line.trim().to_owned())
    }

    /// As [`Self::receive`], but the process may end before it answers.
    pub(crate) fn try_receive(&mut self) -> Option<String> {
        let mut line = String::new();
        let length = self.output.read_line(&mut line).ok()?;
        (length > 0).then(|| line.trim().to_owned())
    }

    /// As [`Self::send`], but the process may have ended.
    pub(crate) fn try_send(&mut self, command: &str) {
        // The pipe of an ended process is broken.
        let _ = self
            .input
            .as_mut()
            .map(|input| writeln!(input, "{command}"));
    }

    /// Sends a command and returns the numbers of its answer, the driver's result first.
    pub(crate) fn query(&mut self, command: &str) -> Vec<i64> {
        numbers(&self.request(command))
    }

    /// As [`Self::query`], for a command that must succeed.
    pub(crate) fn ok(&mut self, command: &str) -> Vec<i64> {
        let answer = self.query(command);
        assert_eq!(answer[0], 0, "{command}");
        answer[1..].to_vec()
    }

    /// As [`Self::query`], for a command that must be denied for lack of memory.
    pub(crate) fn denied(&mut self, command: &str) {
        assert_eq!(self.query(command)[0], OUT_OF_MEMORY, "{command}");
    }

    /// Creates a context on a GPU.
    pub(crate) fn init(&mut self, device: u32) -> ObjectId {
        self.ok(&format!("init {device}"))[0]
    }

    /// Allocates plain memory, which must succeed.
    pub(crate) fn alloc(&mut self, bytes: u64) -> ObjectId {
        self.ok(&format!("alloc {bytes}"))[0]
    }

    /// Allocates plain memory in steps until denied, and returns the sum.
    pub(crate) fn fill(&mut self, step: u64) -> u64 {
        let mut filled = 0;
        loop {
            let answer = self.query(&format!("alloc {step}"));
            if answer[0] != 0 {
                assert_eq!(answer[0], OUT_OF_MEMORY);
                return filled;
            }
            filled += step;
        }
    }

    /// Free and total memory as the process sees them.
    pub(crate) fn memory_info(&mut self) -> (u64, u64) {
        let answer = self.ok("meminfo");
        (answer[0].cast_unsigned(), answer[1].cast_unsigned())
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// `kill -9`.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until the process has ended.
    pub(crate) fn wait(mut self) {
        self.child.wait().unwrap();
    }

    /// Closes the standard input and waits for the exit.
    pub(crate) fn end(mut self) -> ExitStatus {
        self.input = None;
        self.child.wait().unwrap()
    }
}

fn numbers(line: &str) -> Vec<i64> {
    line.split_ascii_whitespace()
        .map(|word| {
            word.parse::<i64>()
                .or_else(|_| word.parse::<u64>().map(u64::cast_signed))
                .unwrap_or_else(|_| panic!("no number in the answer {line:?}"))
        })
        .collect()
}
