//! Controls `escape.c`, a program that allocates GPU memory on command, with or without `libvgpu.so`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

/// A process that is killed on drop.
pub(crate) struct Escape {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Escape {
    /// Starts the process. The first result is the result of the allocation of its arguments.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Taken out, because waiting for a child closes its input, which ends the program.
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            input,
            output,
        }
    }

    /// Sends a command and returns the result of libcuda.
    pub(crate) fn send(&mut self, line: &str) -> i32 {
        writeln!(self.input, "{line}").unwrap();
        self.read_result()
    }

    /// Returns the next result of libcuda.
    pub(crate) fn read_result(&mut self) -> i32 {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().parse().unwrap()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for the exit and returns the signal.
    pub(crate) fn exit_signal(&mut self) -> Option<i32> {
        std::os::unix::process::ExitStatusExt::signal(&self.child.wait().unwrap())
    }
}

impl Drop for Escape {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the program of `escape.c`, compiled on the first call.
pub(crate) fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("escape");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/agent/escape.c");
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"]);
        assert!(
            cc.args([&program, &source])
                .arg("-ldl")
                .status()
                .unwrap()
                .success()
        );
        program
    })
}
