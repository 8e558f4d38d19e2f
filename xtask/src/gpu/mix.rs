//! The account of a process with a mixed load against NVML, throughout.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use drava_nvml::{GpuLibrary as _, GpuUuid, Library, ProcessMemory};
use drava_vgpu_abi::Limits;
use serde::Deserialize;

use super::memory::{DRIVER_ALLOWANCE, context_bytes};
use super::report::Row;
use super::rows::Rows;
use super::setup::{Running, Setup, Share, go, limits, start_all};

const MIB: u64 = 1 << 20;

/// Processes, each with its share and its own random numbers.
const SEEDS: [u64; 2] = [1, 2];

/// Functions whose load is measured alone, for this part of the time of the mixed load.
const KINDS: [&str; 6] = ["plain", "async", "vmm", "array", "globals", "graph"];
const PART: f64 = 20.0;

/// Output of `gpu-suite mix` after a round.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Round {
    used_bytes: u64,
    objects: u64,
    denied: u64,
}

/// What was seen of one process.
#[derive(Default)]
struct Seen {
    rounds: u64,
    denied: u64,
    most_bytes: u64,
    most_objects: u64,
    /// Largest differences between the account and NVML, bytes.
    above: u64,
    below: u64,
}

pub(super) fn rows(setup: &Setup, seconds: f64, rows: &mut Rows<'_>) -> Result<()> {
    let measure = |kind: Option<&str>, seconds: f64| {
        let memory = (setup.gpu()?.free_bytes / 4).min(8 << 30) / MIB * MIB;
        let nvml = setup.nvml()?;
        let limits = Limits {
            driver_reserve_bytes: context_bytes(setup, &nvml)?,
            ..limits(memory, 0)?
        };
        let title = match kind {
            None => format!("account throughout a mixed load of {seconds} s"),
            Some(kind) => format!("account throughout a load of {kind} of {seconds} s"),
        };
        compared(setup, &limits, &nvml, kind, &title, seconds)
    };
    for kind in KINDS {
        rows.run(&format!("account throughout a load of {kind}"), || {
            measure(Some(kind), seconds / PART)
        })?;
    }
    rows.run("account throughout a mixed load", || measure(None, seconds))
}

fn compared(
    setup: &Setup,
    limits: &Limits,
    (nvml, gpu): &(Library, GpuUuid),
    kind: Option<&str>,
    title: &str,
    seconds: f64,
) -> Result<Vec<Row>> {
    let shares: [Share; 2] = [setup.share(limits)?, setup.share(limits)?];
    let commands = shares.iter().zip(SEEDS).map(|(share, seed)| {
        let mut command = setup.suite(Some(share), &["mix", "--seed", &seed.to_string()]);
        if let Some(kind) = kind {
            command.args(["--kind", kind]);
        }
        command
    });
    let mut programs = start_all(commands.collect())?;
    let mut seen = [Seen::default(), Seen::default()];
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    while Instant::now() < end {
        go(&mut programs)?;
        let rounds: Result<Vec<Round>> = programs.iter_mut().map(Running::json).collect();
        // No process works now.
        let listed = nvml.processes(gpu)?;
        for ((round, program), seen) in rounds?.iter().zip(&programs).zip(&mut seen) {
            let own = listed.iter().find(|process| process.pid == program.pid());
            let own = own.context("NVML does not list a process")?;
            let ProcessMemory::Used { bytes } = own.memory else {
                return Ok(vec![Row::not_run(
                    title,
                    "NVML lists processes without their memory",
                )]);
            };
            seen.note(round, bytes);
        }
    }
    for program in programs {
        program.end()?;
    }
    Ok(seen
        .iter()
        .zip(SEEDS)
        .map(|(seen, seed)| seen.row(title, seed))
        .collect())
}

impl Seen {
    fn note(&mut self, round: &Round, nvml: u64) {
        let account = round.used_bytes;
        self.rounds += 1;
        self.denied = round.denied;
        self.most_bytes = self.most_bytes.max(nvml);
        self.most_objects = self.most_objects.max(round.objects);
        self.above = self.above.max(account.saturating_sub(nvml));
        self.below = self.below.max(nvml.saturating_sub(account));
    }

    fn row(&self, title: &str, seed: u64) -> Row {
        Row::checked(
            format!("{title}, process {seed}"),
            self.rounds > 0 && self.above.max(self.below) <= DRIVER_ALLOWANCE,
            format!(
                "at most {} MiB above NVML and {} MiB below, at {} points with up to {} MiB and {} objects; {} requests denied",
                self.above / MIB,
                self.below / MIB,
                self.rounds,
                self.most_bytes / MIB,
                self.most_objects,
                self.denied
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Outcome;
    use super::{DRIVER_ALLOWANCE, Round, Seen};

    #[test]
    fn keeps_largest_difference_in_each_direction() {
        let held = |accounts: &[(u64, u64)]| {
            let mut seen = Seen::default();
            for (used_bytes, nvml) in accounts {
                let round = Round {
                    used_bytes: *used_bytes,
                    objects: 1,
                    denied: 0,
                };
                seen.note(&round, *nvml);
            }
            matches!(seen.row("it", 1).outcome, Outcome::Checked { held, .. } if held)
        };
        let far = 2 * DRIVER_ALLOWANCE;
        assert!(held(&[(far, far), (far + DRIVER_ALLOWANCE, far)]));
        assert!(!held(&[(far + DRIVER_ALLOWANCE + 1, far), (far, far)]));
        assert!(!held(&[(far, far + DRIVER_ALLOWANCE + 1), (far, far)]));
        assert!(!held(&[]), "nothing was compared");
    }
}
