//! Programs that take memory as they are told, also past `libvgpu.so`: `escape.c`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

/// A process that is ended with this.
pub(crate) struct Escape {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Escape {
    /// Starts it; what it says first is to be heard.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Held apart: waiting for a child closes its input, at which it would end.
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            input,
            output,
        }
    }

    /// The driver's result of a line of `escape.c`.
    pub(crate) fn say(&mut self, line: &str) -> i32 {
        writeln!(self.input, "{line}").unwrap();
        self.hear()
    }

    /// The driver's next result.
    pub(crate) fn hear(&mut self) -> i32 {
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

    /// Waits until it was killed, and says by which signal.
    pub(crate) fn signal(&mut self) -> Option<i32> {
        std::os::unix::process::ExitStatusExt::signal(&self.child.wait().unwrap())
    }
}

impl Drop for Escape {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `escape.c`, compiled on the first call.
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
