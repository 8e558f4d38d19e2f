//! Runs the programs of a stage with a time limit, and keeps their output in a log.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use drava_cluster::process::{self, End, Limit};

use super::libtest::{Failure, Outcome, Reader};

/// Limit of a check such as rustfmt or clippy, and of a build.
const CHECK: Limit = Limit::BUILD;
/// Limit of a program with tests. libtest prints a line for each test.
pub(crate) const TESTS: Limit =
    Limit::total(Duration::from_secs(30 * 60)).silence(Duration::from_secs(5 * 60));

/// The log of a stage or of one program of the stage.
pub(crate) struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Creates `target/test-logs/<name>.log`, empty.
    pub(crate) fn create(name: &str) -> Result<Self> {
        let path = drava_cluster::target_dir().join(format!("test-logs/{name}.log"));
        let directory = path.parent().context("a log without a directory")?;
        std::fs::create_dir_all(directory)
            .with_context(|| format!("create {}", directory.display()))?;
        let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self { path, file })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file, for the output of a program.
    pub(crate) fn file(&self) -> Result<File> {
        self.file
            .try_clone()
            .with_context(|| format!("open {}", self.path.display()))
    }

    /// Adds a line.
    pub(crate) fn note(&mut self, line: &str) -> Result<()> {
        writeln!(self.file, "{line}").with_context(|| format!("write {}", self.path.display()))
    }

    /// Runs a program that is one check.
    pub(crate) fn check(&mut self, command: Command) -> Result<Outcome> {
        let mut outcome = self.tests(command, CHECK)?;
        if outcome.count.failed == 0 {
            outcome.count.passed = 1;
        }
        Ok(outcome)
    }

    /// Runs a program that prints libtest's lines. A program that fails without a failing test counts as one.
    pub(crate) fn tests(&mut self, mut command: Command, limit: Limit) -> Result<Outcome> {
        writeln!(self.file, "$ {command:?}")?;
        let mut reader = Reader::default();
        let name = describe(&command);
        let Self { path, file } = self;
        let end = process::run_merged(&mut command, limit, |bytes| {
            reader.feed(bytes);
            file.write_all(bytes)
                .with_context(|| format!("write {}", path.display()))
        })?;
        Ok(match end {
            End::Exited(status) => {
                if !status.success() {
                    writeln!(self.file, "{status}")?;
                }
                reader.exited(&name, status.success())
            }
            End::Killed { overrun, processes } => {
                let reason = format!("{overrun}; processes:\n{}", processes.join("\n"));
                writeln!(self.file, "{reason}")?;
                reader.killed(&name, &reason)
            }
        })
    }
}

impl Outcome {
    /// The outcome of a check without a program.
    pub(crate) fn of_check(name: &str, result: Result<()>) -> Self {
        let mut outcome = Self::default();
        match result {
            Ok(()) => outcome.count.passed = 1,
            Err(error) => {
                outcome.count.failed = 1;
                outcome.failures.push(Failure {
                    test: name.to_owned(),
                    output: format!("{error:#}").lines().map(str::to_owned).collect(),
                });
            }
        }
        outcome
    }
}

/// Program and first arguments, without directories: the name of a program in the list of failures.
fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let program = program.file_name().unwrap_or(command.get_program());
    let arguments = command.get_args().take(2);
    let words = std::iter::once(program).chain(arguments);
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}

/// The cargo that runs this program.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = drava_cluster::cargo_command();
    command.args(args);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn logs_and_counts_output() {
        let mut log = Log::create("self-test/tests").unwrap();
        let script = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored'; exit 3";
        let outcome = log.tests(shell(script), TESTS).unwrap();
        assert_eq!(outcome.count.to_string(), "2 passed, 1 failed, 0 skipped");
        let text = std::fs::read_to_string(log.path()).unwrap();
        assert!(
            text.contains("2 passed") && text.contains("exit status: 3"),
            "{text}"
        );
    }

    #[test]
    fn counts_check_as_one() {
        let mut log = Log::create("self-test/check").unwrap();
        let outcome = log.check(shell("exit 0")).unwrap();
        assert_eq!(outcome.count.to_string(), "1 passed, 0 failed, 0 skipped");
        let outcome = log.check(shell("echo reason; exit 1")).unwrap();
        assert_eq!(outcome.count.to_string(), "0 passed, 1 failed, 0 skipped");
        assert_eq!(outcome.failures[0].output, ["reason"]);
    }

    #[test]
    fn fails_hung_test_with_its_log() {
        let mut log = Log::create("self-test/hung").unwrap();
        let limit = TESTS.silence(Duration::from_millis(200));
        let script = "printf 'test a ... '; echo waits; sleep 1000";
        let outcome = log.tests(shell(script), limit).unwrap();
        let failure = &outcome.failures[0];
        assert_eq!(failure.test, "a");
        assert_eq!(failure.output[0], "waits");
        assert!(failure.output[1].contains("without output"), "{failure:?}");
        let text = std::fs::read_to_string(log.path()).unwrap();
        assert!(text.contains("sleep 1000"), "{text}");
    }
}
