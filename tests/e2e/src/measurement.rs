//! Measurements of `cargo xtask bench suspend` and `elastic`: how long they are, and where they go.
//!
//! The same tests run with each `cargo xtask test`, with few rounds: they check what must hold, and report times, which depend on
//! the machine.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow};
use drava_cluster::http;
use serde_json::{Value, json};

use crate::TestCluster;

/// Variable with the file of a bench.
const FILE_VARIABLE: &str = "DRAVA_FIGURES";

/// Returns the number in this variable, or what is given.
///
/// # Errors
/// When it is no number.
pub fn option<T: FromStr>(variable: &str, default: T) -> Result<T> {
    match std::env::var(variable) {
        Ok(text) => text
            .parse()
            .map_err(|_| anyhow!("{variable}={text} is no number")),
        Err(_) => Ok(default),
    }
}

/// Returns whether a bench runs the test: it counts what a test would fail for.
#[must_use]
pub fn is_bench() -> bool {
    std::env::var_os(FILE_VARIABLE).is_some()
}

/// Prints a measurement, and appends it to the file of `DRAVA_FIGURES`, if set.
///
/// # Errors
/// When the file cannot be written.
pub fn report(figure: &str, mut row: Value) -> Result<()> {
    row["figure"] = json!(figure);
    eprintln!("{row}");
    if let Some(file) = std::env::var_os(FILE_VARIABLE) {
        let mut file = File::options().append(true).create(true).open(&file)?;
        writeln!(file, "{row}")?;
    }
    Ok(())
}

/// Returns the time since the epoch, µs.
///
/// # Errors
/// When the clock is before 1970.
pub fn now_us() -> Result<u64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    Ok(u64::try_from(now.as_micros())?)
}

/// Median, 99th percentile and maximum of times, as fields of a measurement in milliseconds.
#[must_use]
pub fn percentiles(times_us: &[u64]) -> Value {
    let mut sorted = times_us.to_vec();
    sorted.sort_unstable();
    let at = |percent: usize| {
        let rank = (sorted.len() * percent).div_ceil(100).max(1) - 1;
        let time = sorted.get(rank).copied();
        time.map(|time| Duration::from_micros(time).as_secs_f64() * 1000.0)
    };
    json!({"count": sorted.len(), "p50Ms": at(50), "p99Ms": at(99), "maxMs": at(100)})
}

/// `kubectl proxy`: requests without the start of a program. Ends with the value.
pub struct ApiProxy {
    child: Child,
    host: String,
}

impl ApiProxy {
    /// Starts it on a free port of loopback.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(cluster: &TestCluster) -> Result<Self> {
        let mut command: Command = cluster.kubernetes().kubectl();
        command
            .args(["proxy", "--port=0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = command.spawn().context("start kubectl proxy")?;
        let output = child.stdout.take().context("a pipe")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        // "Starting to serve on 127.0.0.1:PORT"
        let host = line.trim().rsplit(' ').next().unwrap_or_default();
        Ok(Self {
            child,
            host: host.to_owned(),
        })
    }

    /// Creates an object, and returns the time before the request, µs since the epoch.
    ///
    /// # Errors
    /// When the API server rejects it.
    pub fn create(&self, path: &str, object: &Value) -> Result<u64> {
        let body = object.to_string();
        let before = now_us()?;
        http::post(&self.host, path, &body)?;
        Ok(before)
    }
}

impl Drop for ApiProxy {
    fn drop(&mut self) {
        // It has no state, and ends with this process at the latest.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A generator of Marsaglia (xorshift) for the order of random steps.
pub struct Random(u64);

impl Random {
    /// Returns the generator of this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns a number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_percentiles_of_times() {
        let times: Vec<u64> = (1..=200).rev().map(|time| time * 1000).collect();
        assert_eq!(
            percentiles(&times),
            json!({"count": 200, "p50Ms": 100.0, "p99Ms": 198.0, "maxMs": 200.0})
        );
        assert_eq!(percentiles(&[3000])["p50Ms"], 3.0);
        assert!(percentiles(&[])["maxMs"].is_null());
    }
}
