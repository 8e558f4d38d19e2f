//! Runs a stage's commands, keeps their output in a log, and counts tests.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::AddAssign;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

/// What a stage found. A check that is not a test run counts as one.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
}

impl Count {
    /// ` (12 passed, 1 failed)`, or nothing for a single check.
    pub(crate) fn describe(self) -> String {
        if self.passed + self.failed + self.skipped <= 1 {
            String::new()
        } else {
            format!(
                " ({} passed, {} failed, {} skipped)",
                self.passed, self.failed, self.skipped
            )
        }
    }

    /// Reads libtest's closing line: `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
    fn from_libtest(line: &str) -> Option<Self> {
        let (_, figures) = line.strip_prefix("test result: ")?.split_once(". ")?;
        let mut count = Self::default();
        for part in figures.split("; ") {
            let (number, word) = part.split_once(' ')?;
            match word {
                "passed" => count.passed = number.parse().ok()?,
                "failed" => count.failed = number.parse().ok()?,
                "ignored" => count.skipped = number.parse().ok()?,
                _ => {}
            }
        }
        Some(count)
    }
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// Output of one stage.
pub(crate) struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Starts `target/test-logs/<stage>.log` anew.
    pub(crate) fn create(stage: &str) -> Result<Self> {
        let dir = drava_cluster::workspace_root().join("target/test-logs");
        std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let path = dir.join(format!("{stage}.log"));
        let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self { path, file })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Prints the end of the log, for a failed stage.
    pub(crate) fn print(&self) -> Result<()> {
        const LAST_LINES: usize = 400;
        let mut text = Vec::new();
        File::open(&self.path)?.read_to_end(&mut text)?;
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        for line in lines.iter().skip(lines.len().saturating_sub(LAST_LINES)) {
            eprintln!("    | {line}");
        }
        Ok(())
    }

    /// Adds a line to the log.
    pub(crate) fn note(&mut self, line: &str) -> Result<()> {
        writeln!(self.file, "{line}").with_context(|| format!("write {}", self.path.display()))
    }

    /// Runs a command that is one check.
    pub(crate) fn check(&mut self, command: Command) -> Result<Count> {
        let (success, _) = self.execute(command)?;
        Ok(Count {
            passed: usize::from(success),
            failed: usize::from(!success),
            skipped: 0,
        })
    }

    /// Runs a command that prints libtest's closing lines. One that fails without a failed test counts as failed.
    pub(crate) fn tests(&mut self, command: Command) -> Result<Count> {
        let (success, mut count) = self.execute(command)?;
        if !success && count.failed == 0 {
            count.failed = 1;
        }
        Ok(count)
    }

    fn execute(&mut self, mut command: Command) -> Result<(bool, Count)> {
        let described = format!("{command:?}");
        let (reader, writer) = std::io::pipe()?;
        command
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer);
        writeln!(self.file, "$ {described}")?;
        let mut child = command
            .spawn()
            .with_context(|| format!("run {described}"))?;
        // `command` holds the write end of the pipe; without it the reader sees the end.
        drop(command);
        let mut count = Count::default();
        for line in BufReader::new(reader).split(b'\n') {
            let line = line?;
            self.file.write_all(&line)?;
            self.file.write_all(b"\n")?;
            if let Some(part) = std::str::from_utf8(&line)
                .ok()
                .and_then(Count::from_libtest)
            {
                count += part;
            }
        }
        Ok((child.wait()?.success(), count))
    }
}

/// The cargo that runs us.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(args)
        .current_dir(drava_cluster::workspace_root());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_counted() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 4 filtered out; finished in 0.10s";
        assert_eq!(
            Count::from_libtest(line),
            Some(Count {
                passed: 12,
                failed: 3,
                skipped: 1
            })
        );
        assert_eq!(Count::from_libtest("test result_of_something ... ok"), None);
    }

    #[test]
    fn a_failing_command_without_a_failed_test_counts() {
        let mut log = Log::create("self-test").unwrap();
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "echo 'test result: ok. 2 passed; 0 failed; 0 ignored'; exit 3",
        ]);
        assert_eq!(
            log.tests(command).unwrap(),
            Count {
                passed: 2,
                failed: 1,
                skipped: 0
            }
        );
    }
}
