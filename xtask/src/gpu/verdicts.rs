//! Rows of programs that are judged by their exit or their memory.

use std::process::Command;

use drava_cluster::process::{self, Limit};
use serde::Deserialize;

use super::report::Row;
use super::setup::json;

/// Output of a program that allocates all memory that it gets.
#[derive(Debug, Deserialize)]
struct Filled {
    total: u64,
    free: u64,
    taken: u64,
}

/// Runs a program that allocates all memory that it gets, and prints [`Filled`].
pub(super) fn allocator(title: &str, command: Command, limit: u64) -> Row {
    match json::<Filled>(command) {
        Ok(Filled { total, free, taken }) => Row::checked(
            title,
            total <= limit && taken <= free && taken >= free / 10 * 9,
            format!("took {} of {} MiB", taken >> 20, free >> 20),
        ),
        Err(error) => Row::checked(title, false, format!("{error:#}")),
    }
}

/// Runs a program that exits with 0.
pub(super) fn succeeds(title: &str, mut command: Command) -> Row {
    match process::output(&mut command, Limit::REQUEST) {
        Err(error) => Row::checked(title, false, format!("{error:#}")),
        Ok(output) if output.status.success() => Row::checked(title, true, "succeeded"),
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr);
            let last = text.trim().lines().next_back().unwrap_or("no message");
            Row::checked(title, false, format!("{}: {last}", output.status))
        }
    }
}
