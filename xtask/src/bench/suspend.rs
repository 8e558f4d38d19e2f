//! Suspension against eviction, and rounds in which programs are killed, on a real cluster.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::Args;
use super::goals::{self, Goal, Outcome};
use super::measurements::{named, value};
use super::on_cluster;
use super::report::Report;

/// Rounds of the goals.
const ROUNDS: u64 = 1000;

/// Runs the bench.
pub(super) fn run(args: &Args, report: &mut Report) -> Result<()> {
    let options = &args.on_cluster;
    let rows = on_cluster::measure(
        "suspend_figures",
        &[
            ("DRAVA_E2E_COMPARED", options.comparisons),
            ("DRAVA_E2E_ROUNDS", options.kill_rounds),
            ("DRAVA_E2E_IDLE", options.idle_rounds),
            ("DRAVA_E2E_SEED", options.seed),
        ],
    )?;
    goals::add(report, &on_cluster::described(), goals_of(&rows)?);
    report.part(
        "Pod of high priority",
        "A pod of low priority has 50 GiB of an H100, of which its program uses 47; a pod of high priority needs as much of the same \
         GPU. The time is that from the request that creates this pod to the end of its first kernel. The variants are measured in \
         turn. Evicted pods have the default grace period of 30 s.",
    );
    for row in named(&rows, "preemption") {
        let columns = ["way", "count", "p50Ms", "p99Ms", "maxMs"];
        report.row(columns.map(|name| (name, value(row, name))).into());
    }
    report.part(
        "Idle share",
        "A program with 47 GiB, of which 64 MiB have known bytes, launches nothing for a minute, so its share is suspended; another \
         program uses as much of the same GPU and ends. Then the first one launches a kernel, and its bytes are compared. seen: from \
         that call to the condition Demanded at a client that watches the claim. back: from that call to the end of its kernel.",
    );
    for row in named(&rows, "idle") {
        let columns = ["what", "count", "p50Ms", "p99Ms", "maxMs"];
        report.row(columns.map(|name| (name, value(row, name))).into());
    }
    report.part(
        "Kills",
        "A program with 47 GiB, of which 64 MiB have known bytes, is suspended for a pod of high priority that uses as much, and \
         resumed when that pod is deleted. At a random time of up to 2.5 s after the creation or the deletion of that pod, a program \
         is killed by SIGKILL. amid: rounds in which the program stood still at the kill, not counted for the killed program. otherBytes: rounds after which the bytes differ (of the killed program: of its successor). \
         wrongRestarts: rounds after which the container has not the expected restarts. evicted: rounds in which the pod of low \
         priority was evicted instead, as after a minute without an answer of the node. lockedTooLong: rounds in which the program \
         stood still for more than 2 s while its claim was not suspended, counted from the kill, and if the node driver was killed, \
         from the start of its successor, because no other component can unlock; longestFromKillMs is counted from the kill. After each step, the claims are compared with the published capacity; a share with \
         two claims or a GPU with more claims than room ends the bench. Both programs do not fit the GPU together, and the simulated \
         machine denies what does not fit.",
    );
    for row in named(&rows, "rounds") {
        let columns = [
            "killed",
            "rounds",
            "amid",
            "otherBytes",
            "wrongRestarts",
            "evicted",
            "lockedTooLong",
            "longestLockedMs",
            "longestFromKillMs",
            "highStartsP50Ms",
            "highStartsMaxMs",
        ];
        report.row(columns.map(|name| (name, value(row, name))).into());
    }
    Ok(())
}

fn goals_of(rows: &[Value]) -> Result<Vec<Goal>> {
    let p50 = |way: &str| {
        let mut found = named(rows, "preemption").filter(|row| row["way"] == way);
        found
            .next()
            .and_then(|row| row["p50Ms"].as_f64())
            .with_context(|| format!("no measurement of {way}"))
    };
    let suspension = p50("suspension")?;
    let ratio = suspension / p50("eviction, program ignores SIGTERM")?;
    let ready = suspension / p50("eviction, program ends at SIGTERM")?;
    let idle = |what: &str| {
        let mut found = named(rows, "idle").filter(|row| row["what"] == what);
        found
            .next()
            .and_then(|row| row["maxMs"].as_f64())
            .with_context(|| format!("no measurement of {what}"))
    };
    let (seen, back) = (idle("seen")?, idle("back")?);
    let sum = |name: &str| -> u64 {
        named(rows, "rounds")
            .filter_map(|row| row[name].as_u64())
            .sum()
    };
    let rounds = sum("rounds");
    let of_rounds = |name: &str| json!(format!("{} in {rounds} rounds", sum(name)));
    let zero = |what, name: &str| Goal {
        what,
        goal: "0 in 1,000",
        figure: of_rounds(name),
        outcome: Outcome::of_rounds(sum(name), rounds, ROUNDS),
    };
    Ok(vec![
        Goal {
            what: "creation of the pod of high priority to its first kernel, relative to an eviction that takes the default grace period",
            goal: "1/3",
            figure: json!(ratio),
            outcome: Outcome::of(ratio <= 1.0 / 3.0),
        },
        Goal {
            what: "the same, relative to an eviction whose program ends at SIGTERM",
            goal: "1/3",
            figure: json!(ready),
            outcome: Outcome::of(ready <= 1.0 / 3.0),
        },
        zero("other bytes in GPU memory", "otherBytes"),
        zero("restarts of programs that were not killed", "wrongRestarts"),
        zero("evicted although it could be suspended", "evicted"),
        zero("locked for more than 2 s after a failure", "lockedTooLong"),
        Goal {
            what: "GPUs with more claims than room, shares with two claims",
            goal: "0 in 1,000",
            figure: json!(format!("0 in {rounds} rounds")),
            // A difference ends the bench.
            outcome: Outcome::of_rounds(0, rounds, ROUNDS),
        },
        Goal {
            what: "idle share: first call to the condition Demanded, slowest, ms",
            goal: "100",
            figure: json!(seen),
            outcome: Outcome::of(seen <= 100.0),
        },
        Goal {
            what: "idle share: first call to the end of its kernel, slowest, ms; nothing is copied on the simulated machine",
            goal: "1,000 + copy",
            figure: json!(back),
            outcome: Outcome::of(back <= 1000.0),
        },
        Goal {
            what: "PyTorch on an H100 or H200",
            goal: "loss equal to the last digit, 4 GB/s",
            figure: Value::Null,
            outcome: Outcome::NotMeasured,
        },
    ])
}
