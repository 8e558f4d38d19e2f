//! The file of `--times`: start and duration of each task.

use std::fs;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result};
use serde::Serialize;

use super::Report;

/// Times of a run, as JSON.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Times {
    seconds: f64,
    cores: usize,
    tasks: Vec<TaskTime>,
}

/// Time of a task, as JSON.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct TaskTime {
    name: &'static str,
    started_s: f64,
    seconds: f64,
}

/// Writes the times of `reports` to a file. `seconds` is the duration of the whole run.
pub(super) fn write(path: &Path, reports: &[Report], seconds: f64) -> Result<()> {
    let times = Times {
        seconds,
        cores: thread::available_parallelism().map_or(1, usize::from),
        tasks: reports
            .iter()
            .map(|report| TaskTime {
                name: report.name,
                started_s: report.started_s,
                seconds: report.seconds,
            })
            .collect(),
    };
    fs::write(path, serde_json::to_string_pretty(&times)? + "\n")
        .with_context(|| format!("write {}", path.display()))
}
