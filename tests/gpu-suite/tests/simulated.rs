//! The load of `gpu-suite work`, and its faults, on the simulated GPU.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;
use simulator_machine::description::H100X2;
use simulator_machine::testing::Machine;

const KERNEL_US: u32 = 1000;

fn suite(machine: &Machine, arguments: &[&str]) -> Command {
    let mut command = machine.command(env!("CARGO_BIN_EXE_gpu-suite"));
    command.args(arguments);
    command
}

/// Runs kernels of [`KERNEL_US`] and returns the result, with the busy time of the GPU, µs.
fn work(machine: &Machine, mut command: Command, options: &[&str]) -> (Value, u64) {
    let busy = || machine.gpu(0).unwrap().busy_nanos / 1000;
    let before = busy();
    let us = KERNEL_US.to_string();
    command.args(["--kernel", "spin", "--seconds", "0.1", "--kernel-us", &us]);
    let output = command.args(options).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let done = serde_json::from_slice(&output.stdout).unwrap();
    (done, busy() - before)
}

#[test]
fn awaits_kernels_of_a_token_together() {
    let machine = Machine::start(H100X2).unwrap();
    for awaited in [1_u32, 7] {
        let count = awaited.to_string();
        let options = ["--way", "sync", "--awaited", &count];
        let (done, busy_us) = work(&machine, suite(&machine, &["work"]), &options);
        // One kernel loads the module; whole tokens follow.
        let kernels = busy_us / u64::from(KERNEL_US) - 1;
        assert!(
            kernels > 0 && kernels.is_multiple_of(awaited.into()),
            "{kernels}"
        );
        let token = f64::from(awaited * KERNEL_US);
        assert!(done["batchP50Us"].as_f64().unwrap() >= token, "{done}");
    }
}

#[test]
fn kernel_has_its_number_of_blocks() {
    let machine = Machine::start(H100X2).unwrap();
    let daemon = machine.start_mps(&[]).unwrap();
    // With a quarter of the multiprocessors, a kernel that would fill the GPU takes longer.
    let stretch = |options: &[&str]| {
        let mut command = suite(&machine, &["work"]);
        daemon.serve(&mut command);
        command.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25");
        let options = [&["--way", "sync"], options].concat();
        let (done, busy_us) = work(&machine, command, &options);
        let counted = done["share"].as_f64().unwrap() * done["seconds"].as_f64().unwrap();
        // Two kernels run before the count.
        let alone_us = counted.mul_add(1e6, 2.0 * f64::from(KERNEL_US));
        f64::from(u32::try_from(busy_us).unwrap()) / alone_us
    };
    for options in [&[][..], &["--blocks", "16"]] {
        let stretch = stretch(options);
        assert!((stretch - 1.0).abs() < 0.01, "{options:?}: {stretch}");
    }
    let stretch = stretch(&["--blocks", "100000"]);
    assert!(stretch > 3.5, "{stretch}");
}

/// A program that exchanges lines with the test, and is killed with it.
struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    fn start(mut command: Command) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut program = Self {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        };
        assert_eq!(program.line(), "ready");
        program
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Sends a line, and returns the answer.
    fn tell(&mut self) -> String {
        writeln!(self.input, "go").unwrap();
        self.line()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn fault_stops_launches_of_the_same_server_only() {
    let machine = Machine::start(H100X2).unwrap();
    let daemon = machine.start_mps(&[]).unwrap();
    let launches = ["fault", "--role", "launches", "--seconds", "600"];
    let mut inside = suite(&machine, &launches);
    daemon.serve(&mut inside);
    let mut faulty = suite(&machine, &["fault", "--role", "causes"]);
    daemon.serve(&mut faulty);
    let mut inside = Program::start(inside);
    let mut outside = Program::start(suite(&machine, &launches));
    let mut faulty = Program::start(faulty);
    assert_eq!([inside.tell(), outside.tell()], ["running"; 2]);
    let error = |line: &str| serde_json::from_str::<Value>(line).unwrap()["error"].clone();
    assert_eq!(error(&faulty.tell()), "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!(error(&inside.line()), "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!(error(&outside.tell()), Value::Null);
}
