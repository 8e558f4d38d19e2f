//! A process that uses the GPU.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, bail, ensure};

/// A process that runs commands.
pub struct Tenant {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Drop for Tenant {
    fn drop(&mut self) {
        // The process may have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Tenant {
    pub(crate) fn spawn(mut command: Command) -> anyhow::Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("no standard output")?);
        Ok(Self {
            child,
            input,
            output,
        })
    }

    /// Its PID, as in the machine's status.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command without waiting.
    pub fn send(&mut self, command: &str) -> anyhow::Result<()> {
        let input = self
            .input
            .as_mut()
            .context("the standard input is closed")?;
        Ok(writeln!(input, "{command}")?)
    }

    /// Returns the next answer.
    pub fn receive(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(
            !line.is_empty(),
            "the tenant ended: {:?}",
            self.child.try_wait()
        );
        Ok(line.trim().to_owned())
    }

    /// Sends a command that must succeed and returns the words after the driver's result.
    pub fn request(&mut self, command: &str) -> anyhow::Result<Vec<String>> {
        self.send(command)?;
        let line = self.receive()?;
        let mut words = line.split_ascii_whitespace().map(String::from);
        if words.next().as_deref() != Some("0") {
            bail!("{command}: {line}");
        }
        Ok(words.collect())
    }

    /// As [`Self::request`], with an answer of numbers.
    pub fn ok(&mut self, command: &str) -> anyhow::Result<Vec<u64>> {
        let words = self.request(command)?;
        let numbers = words.iter().map(|word| word.parse());
        numbers
            .collect::<Result<_, _>>()
            .with_context(|| format!("{command}: {words:?}"))
    }

    /// Returns the number of its launches.
    pub fn launched(&mut self) -> anyhow::Result<u64> {
        let answer = self.ok("count")?;
        answer.first().copied().context("no count")
    }

    /// `kill -9`.
    pub fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

/// Compiles `tenant.c` into a directory.
pub(crate) fn compile(directory: &Path) -> anyhow::Result<PathBuf> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tenant.c");
    let program = directory.join("tenant");
    let status = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .args([&program, Path::new(source)])
        .args(["-ldl", "-lpthread"])
        .status()
        .context("cannot run cc")?;
    ensure!(status.success(), "cannot compile {source}");
    Ok(program)
}
