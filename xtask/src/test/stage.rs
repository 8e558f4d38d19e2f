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

/// A test that proved nothing, and why: ignored, or one that says that something is missing here.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Skip {
    test: String,
    reason: String,
}

impl Skip {
    /// Reads libtest's `test NAME ... ignored, REASON`.
    fn from_libtest(line: &str) -> Option<Self> {
        let (test, outcome) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
        let reason = outcome.strip_prefix(", ").unwrap_or("without a reason");
        Some(Self::new(test, reason))
    }

    /// Reads `skipped: NAME: REASON`, which a test writes that ends without having checked what it should. It writes to
    /// the process's standard error and not with `eprintln!`, which is hidden for tests that pass.
    fn from_test(line: &str) -> Option<Self> {
        let (_, skip) = line.split_once("skipped: ")?;
        let (test, reason) = skip.split_once(": ")?;
        Some(Self::new(test, reason))
    }

    fn new(test: &str, reason: &str) -> Self {
        Self {
            test: test.to_owned(),
            reason: reason.to_owned(),
        }
    }
}

impl std::fmt::Display for Skip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.test, self.reason)
    }
}

/// Output of one stage.
pub(crate) struct Log {
    path: PathBuf,
    file: File,
    skips: Vec<Skip>,
}

impl Log {
    /// Starts `target/test-logs/<stage>.log` anew.
    pub(crate) fn create(stage: &str) -> Result<Self> {
        let dir = drava_cluster::workspace_root().join("target/test-logs");
        std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let path = dir.join(format!("{stage}.log"));
        let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self {
            path,
            file,
            skips: Vec::new(),
        })
    }

    /// What was skipped so far.
    pub(crate) fn skips(&self) -> &[Skip] {
        &self.skips
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
        let mut unproved = 0;
        for line in BufReader::new(reader).split(b'\n') {
            let line = line?;
            self.file.write_all(&line)?;
            self.file.write_all(b"\n")?;
            let Ok(line) = std::str::from_utf8(&line) else {
                continue;
            };
            if let Some(part) = Count::from_libtest(line) {
                count += part;
            }
            if let Some(skip) = Skip::from_libtest(line) {
                self.skips.push(skip);
            } else if let Some(skip) = Skip::from_test(line) {
                unproved += 1;
                self.skips.push(skip);
            }
        }
        // libtest takes them for passed.
        count.passed = count.passed.saturating_sub(unproved);
        count.skipped += unproved;
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
    fn what_is_skipped_is_counted_and_says_why() {
        let mut log = Log::create("self-test-of-skips").unwrap();
        let mut command = Command::new("sh");
        let said = "test a::b ... ignored, takes minutes
            test c ... skipped: d::e: there is no Go
            test d::e ... ok
            test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured";
        let said: Vec<&str> = said.lines().map(str::trim).collect();
        command.args(["-c", r#"printf '%s\n' "$0""#, &said.join("\n")]);
        assert_eq!(
            log.tests(command).unwrap(),
            Count {
                passed: 2,
                failed: 0,
                skipped: 2
            }
        );
        assert_eq!(
            log.skips(),
            [
                Skip::new("a::b", "takes minutes"),
                Skip::new("d::e", "there is no Go")
            ]
        );
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
