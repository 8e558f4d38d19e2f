//! Reads what test programs print: counts, skipped tests, and failing tests with their output. Pure.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::ops::AddAssign;

/// Lines of output that are kept of one failing test.
const KEPT_LINES: usize = 200;

/// Numbers of tests. A check that is not a test program counts as one test.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
}

impl Count {
    /// Reads libtest's closing line: `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
    fn from_libtest(line: &str) -> Option<Self> {
        let (_, numbers) = line.strip_prefix("test result: ")?.split_once(". ")?;
        let mut count = Self::default();
        for part in numbers.split("; ") {
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

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            passed,
            failed,
            skipped,
        } = self;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// A test that checked nothing: an ignored test, or a test that reports what this machine lacks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Skip {
    test: String,
    reason: String,
}

impl Skip {
    pub(crate) fn new(test: &str, reason: &str) -> Self {
        Self {
            test: test.to_owned(),
            reason: reason.to_owned(),
        }
    }

    /// Reads libtest's `test NAME ... ignored, REASON`.
    fn from_libtest(line: &str) -> Option<Self> {
        let (test, outcome) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
        let reason = outcome.strip_prefix(", ").unwrap_or("without a reason");
        Some(Self::new(test, reason))
    }

    /// Reads `skipped: NAME: REASON`, which a test writes to the process's standard error: libtest hides the output of
    /// `eprintln!` for tests that pass.
    fn from_test(line: &str) -> Option<Self> {
        let (_, skip) = line.split_once("skipped: ")?;
        let (test, reason) = skip.split_once(": ")?;
        Some(Self::new(test, reason))
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.test, self.reason)
    }
}

/// A failing test and the end of its output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) test: String,
    pub(crate) output: Vec<String>,
}

impl Failure {
    /// The line that says why: a compiler's first error, the message of the first panic, or the first cause of the error that the
    /// test returned.
    pub(crate) fn cause(&self) -> Option<&str> {
        let lines = || self.output.iter().map(|line| line.trim());
        let mut rest = lines();
        let first = rest.find(|line| line.starts_with("error") || line.contains(" panicked at "));
        match first {
            Some(first) if first.starts_with("error") => return Some(first),
            Some(_) => return rest.find(|line| !line.is_empty()),
            None => {}
        }
        let mut causes = lines().skip_while(|line| *line != "Caused by:").skip(1);
        causes
            .find(|line| !line.is_empty())
            .or_else(|| lines().find(|line| line.starts_with("Error: ")))
    }

    /// The output without the stack of the error that the test returned, which ends in the test itself.
    pub(crate) fn story(&self) -> impl Iterator<Item = &str> {
        let lines = self.output.iter().map(String::as_str);
        lines.take_while(|line| line.trim() != "Stack backtrace:")
    }
}

/// What a run of a program found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) count: Count,
    pub(crate) skips: Vec<Skip>,
    pub(crate) failures: Vec<Failure>,
}

impl AddAssign for Outcome {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.skips.extend(other.skips);
        self.failures.extend(other.failures);
    }
}

/// The last lines of a text.
#[derive(Debug, Default)]
pub(crate) struct Tail(VecDeque<String>);

impl Tail {
    fn push(&mut self, line: &str) {
        if self.0.len() == KEPT_LINES {
            self.0.pop_front();
        }
        self.0.push_back(line.to_owned());
    }

    fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.0).into()
    }
}

/// A test that libtest has started and not finished.
#[derive(Debug)]
struct Running {
    test: String,
    output: Tail,
}

/// Reader of one program's output.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    unfinished: Vec<u8>,
    last: Tail,
    count: Count,
    /// Tests since the last closing line.
    passed: usize,
    failed: BTreeSet<String>,
    unproved: usize,
    skips: Vec<Skip>,
    failures: Vec<Failure>,
    /// With one test thread: the test that runs, and its output where libtest captures none.
    running: Option<Running>,
    /// Tests that libtest reports as slow.
    slow: BTreeSet<String>,
    /// The captured output that is being read.
    section: Option<Running>,
}

impl Reader {
    /// Reads a piece of output.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.unfinished.extend_from_slice(bytes);
        while let Some(end) = self.unfinished.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.unfinished.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line).into_owned();
            self.line(line.trim_end_matches(['\n', '\r']));
        }
        // With one test thread, the name precedes the test.
        if let Some(test) = std::str::from_utf8(&self.unfinished)
            .ok()
            .and_then(|text| text.strip_prefix("test ")?.strip_suffix(" ... "))
        {
            self.running = Some(Running {
                test: test.to_owned(),
                output: Tail::default(),
            });
        }
    }

    fn line(&mut self, line: &str) {
        self.last.push(line);
        if let Some(count) = Count::from_libtest(line) {
            self.count += count;
            self.passed = 0;
            self.failed.clear();
            self.end_section();
            self.running = None;
        } else if let Some(skip) = Skip::from_libtest(line) {
            self.skips.push(skip);
            self.running = None;
        } else if let Some(skip) = Skip::from_test(line) {
            self.unproved += 1;
            self.skips.push(skip);
        } else if let Some(test) = line
            .strip_prefix("test ")
            .and_then(|line| Some(line.split_once(" has been running for over ")?.0))
        {
            self.slow.insert(test.to_owned());
        } else if let Some(header) = section_header(line) {
            self.end_section();
            self.section = Some(Running {
                test: header.to_owned(),
                output: Tail::default(),
            });
        } else if line == "failures:" || line == "successes:" {
            self.end_section();
        } else if let Some((test, result)) = line
            .strip_prefix("test ")
            .and_then(|line| line.split_once(" ... "))
            && self.section.is_none()
        {
            match result {
                "ok" | "FAILED" => self.finish(test.to_owned(), result == "ok", vec![]),
                // The test's own output follows its name.
                _ => {
                    let mut output = Tail::default();
                    output.push(result);
                    self.running = Some(Running {
                        test: test.to_owned(),
                        output,
                    });
                }
            }
        } else if let Some(section) = &mut self.section {
            section.output.push(line);
        } else if let Some(running) = &mut self.running {
            if line == "ok" {
                let test = std::mem::take(&mut running.test);
                self.finish(test, true, vec![]);
            } else if is_failed(line) {
                let test = std::mem::take(&mut running.test);
                let output = running.output.take();
                self.finish(test, false, output);
            } else {
                running.output.push(line);
            }
        }
    }

    fn finish(&mut self, test: String, passed: bool, output: Vec<String>) {
        self.slow.remove(&test);
        self.running = None;
        if passed {
            self.passed += 1;
        } else {
            self.failed.insert(test.clone());
            self.failures.push(Failure { test, output });
        }
    }

    fn end_section(&mut self) {
        let Some(mut section) = self.section.take() else {
            return;
        };
        let output = section.output.take();
        match self
            .failures
            .iter_mut()
            .find(|failure| failure.test == section.test)
        {
            Some(failure) => failure.output.extend(output),
            None => self.failures.push(Failure {
                test: section.test,
                output,
            }),
        }
    }

    /// The outcome of a program that ended by itself.
    pub(crate) fn exited(mut self, program: &str, success: bool) -> Outcome {
        self.finish_input();
        let mut outcome = self.outcome();
        if !success && outcome.count.failed == 0 {
            // Crashed, or is no test program.
            outcome.count.failed += 1;
            let test = self.running.take().map(|running| running.test);
            outcome.failures.push(Failure {
                test: test.unwrap_or_else(|| program.to_owned()),
                output: self.last.take(),
            });
        }
        outcome
    }

    /// The outcome of a program that was killed because of `reason`; the tests that ran then fail.
    pub(crate) fn killed(mut self, program: &str, reason: &str) -> Outcome {
        self.finish_input();
        let mut outcome = self.outcome();
        let mut hung = std::mem::take(&mut self.slow);
        let mut output = self.last.take();
        if let Some(mut running) = self.running.take() {
            hung.insert(running.test);
            let own = running.output.take();
            if !own.is_empty() {
                output = own;
            }
        }
        if hung.is_empty() {
            hung.insert(program.to_owned());
        }
        output.push(reason.to_owned());
        outcome.count.failed += hung.len();
        let failures = hung.into_iter().map(|test| Failure {
            test,
            output: output.clone(),
        });
        outcome.failures.extend(failures);
        outcome
    }

    fn finish_input(&mut self) {
        if !self.unfinished.is_empty() {
            let rest = std::mem::take(&mut self.unfinished);
            self.line(&String::from_utf8_lossy(&rest));
        }
        self.end_section();
    }

    fn outcome(&mut self) -> Outcome {
        let mut count = self.count;
        count.passed += self.passed;
        count.failed += self.failed.len();
        // libtest counts a test that reports a skip as passed.
        count.passed = count.passed.saturating_sub(self.unproved);
        count.skipped += self.unproved;
        Outcome {
            count,
            skips: std::mem::take(&mut self.skips),
            failures: std::mem::take(&mut self.failures),
        }
    }
}

/// The test in `---- NAME stdout ----`.
fn section_header(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

/// Whether a line is the result of a failing test, perhaps behind output without a line end.
fn is_failed(line: &str) -> bool {
    line.strip_suffix("FAILED")
        .is_some_and(|before| !before.ends_with(|c: char| c.is_alphanumeric() || c == ' '))
}

#[cfg(test)]
mod tests;
