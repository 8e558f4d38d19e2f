//! Outcome of a program that ran in a container.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Outcome of a program in a container.
#[derive(Debug)]
pub struct ProgramOutput {
    /// Exit code.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl ProgramOutput {
    /// Returns the standard output of a successful program.
    ///
    /// # Errors
    /// When the program failed.
    pub fn success(self) -> Result<String> {
        ensure!(
            self.code == 0,
            "exit code {}: {}{}",
            self.code,
            self.stdout,
            self.stderr
        );
        Ok(self.stdout)
    }

    /// Returns the output of a successful program as JSON.
    ///
    /// # Errors
    /// When the program failed or its output is not JSON.
    pub fn json(self) -> Result<Value> {
        let text = self.success()?;
        serde_json::from_str(&text).with_context(|| format!("read {text:?}"))
    }
}
