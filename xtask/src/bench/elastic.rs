//! Shares that grow, shrink and lend on a real cluster, and recommendations against later use.

use std::ffi::OsString;

use anyhow::{Context, Result};
use drava_cluster::Profile;
use serde_json::{Value, json};

use super::goals::{self, Goal, Outcome};
use super::measurements::{named, value};
use super::report::Report;
use super::{Args, on_cluster, packing};

/// Trace with the requests of the workloads of the recommendations.
const TRACE: &str = "tests/packing/openb/openb_pod_list_gpushare100.csv.gz";

/// Resizes of the goals.
const RESIZES: u64 = 10_000;

/// Runs the bench.
pub(super) fn run(args: &Args, report: &mut Report) -> Result<()> {
    let fits = fits()?;
    let options = &args.on_cluster;
    let rows = on_cluster::measure(
        "elastic_figures",
        &[
            ("DRAVA_E2E_GROWTHS", options.growths),
            ("DRAVA_E2E_RESIZES", options.resizes),
            ("DRAVA_E2E_GUARANTEES", options.guarantees),
            ("DRAVA_E2E_SEED", options.seed),
        ],
    )?;
    let mut all = goals_of_cluster(&rows)?;
    all.extend(goals_of_recommendations(&fits)?);
    goals::add(report, &on_cluster::described(), all);
    report_growth(&rows, report);
    report_resizes(&rows, report);
    report_sums(&rows, report);
    report_guarantees(&rows, report);
    report_recommendations(&fits, report);
    Ok(())
}

fn report_growth(rows: &[Value], report: &mut Report) {
    report.part(
        "Growth",
        "A share of 3 GiB gains 1 GiB and gives it back, again and again. The first row is the time from the request that creates the \
         companion claim until the program, which asks cuMemGetInfo every 2 ms, sees the new total. The others are the time of the \
         whole command `kubectl drava resize`, its start included.",
    );
    for row in named(rows, "growth") {
        let columns = ["what", "count", "p50Ms", "p99Ms", "maxMs"];
        report.row(columns.map(|name| (name, value(row, name))).into());
    }
}

fn report_resizes(rows: &[Value], report: &mut Report) {
    report.part(
        "Resizes",
        "Two shares of 20 GiB on one H100, beside one of 30 GiB, are resized to 20 to 28 GiB with `kubectl drava resize`, one resize at a \
         time; both together do not fit always, and what is in use is not given back, so some resizes are refused. In each share, four \
         processes allocate and free up to 512 MiB at random, with 10 ms between two calls. During every second resize, one of these processes, the node \
         driver or the controller is killed by SIGKILL at a random time of up to 0.8 s. Samples are taken all the time, of the records \
         of the node driver, the limits pages, the ledger of the simulated machine, the records and the pages again. excesses: samples in \
         which the processes of a share have more memory, contexts included, than both limits. unrecorded: samples with a limit beyond \
         the record. promisedTwice: samples in which the recorded shares exceed the GPU. After each resize: belowGranted counts shares \
         whose limit is not what the command reported, differentSums GPUs of which the records, the limits and the planner, as \
         `kubectl drava top` shows it, have different sums. With each sample, all claims are compared with the published capacity; a \
         difference ends the bench.",
    );
    for row in named(rows, "resizes") {
        let columns = [
            "resizes",
            "granted",
            "refused",
            "kills",
            "allocations",
            "denied",
            "samples",
            "excesses",
            "mostExcessMiB",
            "unrecorded",
            "promisedTwice",
            "belowGranted",
            "differentSums",
        ];
        report.row(columns.map(|name| (name, value(row, name))).into());
    }
}

fn report_sums(rows: &[Value], report: &mut Report) {
    report.part(
        "Sums",
        "What components count as allocated during these resizes, compared with the claims: memory of the GPU by kube-scheduler's \
         allocator (a claim for all that is free fits, one for 1 MiB more does not), by `kubectl drava top` and by the metrics of \
         the leading controller; memory of the namespace by its GpuQuota and by the metrics; claims of the namespace by its \
         ResourceQuota. kube-scheduler's allocator gets the list of the claims at each comparison, right after each resize and when all \
         companions are settled. The others are eventually consistent and do not say which version of the claims they have seen, so \
         they are read until they agree, while no claim changes. atOnce: comparisons whose first answer agreed. longestMs: longest time \
         until another one did, several reads included. different: comparisons that did not agree within 60 s.",
    );
    for row in named(rows, "sums") {
        let columns = ["by", "compared", "atOnce", "longestMs", "different"];
        report.row(columns.map(|name| (name, value(row, name))).into());
    }
}

fn report_guarantees(rows: &[Value], report: &mut Report) {
    report.part(
        "Guarantees",
        "A pod is guaranteed 60 GiB of an H100 and uses all of it with its first call, on an empty GPU and beside three shares of 4 GiB \
         with a limit of 20 GiB. Their programs hold 14 GiB each and give nothing back, so they are killed. prepare… is the time of \
         all calls of kubelet to prepare the claim, without the pauses between them; missed are calls that failed because lent memory was \
         not back after 2 s. start… is the time from the creation of the pod to its first kernel.",
    );
    for row in named(rows, "guarantees") {
        let columns = [
            "beside",
            "claims",
            "calls",
            "missed",
            "prepareP50Ms",
            "prepareMaxMs",
            "startP50Ms",
            "startMaxMs",
        ];
        report.row(columns.map(|name| (name, value(row, name))).into());
    }
}

/// Returns the fit of recommendations by curve, and of all together.
fn fits() -> Result<Vec<Value>> {
    let trace = drava_cluster::workspace_root().join(TRACE);
    let arguments: [OsString; 3] = ["--recommendation".into(), "--pods".into(), trace.into()];
    // No time is measured.
    let mut fits = packing::rows_of(Profile::Dev, &arguments)?;
    let mut all = json!({"curve": "all"});
    for name in COUNTS {
        let sum: u64 = fits.iter().filter_map(|fit| fit[name].as_u64()).sum();
        all[name] = json!(sum);
    }
    fits.push(all);
    Ok(fits)
}

/// Numbers of a fit.
const COUNTS: [&str; 8] = [
    "workloads",
    "requestedBytes",
    "recommendedBytes",
    "peakBytes",
    "hours",
    "hoursAboveRequest",
    "hoursAboveLimit",
    "daysAboveRequest",
];

/// Returns a number of a fit as part of another, percent.
fn percent(fit: &Value, part: &str, whole: &str) -> f64 {
    let number = |name: &str| fit[name].as_f64().unwrap_or(0.0);
    number(part) / number(whole) * 100.0
}

/// Returns the part of the requested memory that is returned, and of the hours within the request, percent.
fn returned_and_sufficient(fit: &Value) -> (f64, f64) {
    (
        100.0 - percent(fit, "recommendedBytes", "requestedBytes"),
        100.0 - percent(fit, "hoursAboveRequest", "hours"),
    )
}

fn report_recommendations(fits: &[Value], report: &mut Report) {
    report.part(
        "Recommendations",
        "Each pod of the trace openb that requests a part of one GPU is a workload of 14 days for each curve. The trace has no usage: the \
         curves are synthetic. The peak is 20% to 90% of the request, at random; each day has up to 10% more or less, and each reading, \
         one in 5 minutes, 3%. daily: 30% to 100% of the peak; weekly: 40% of that at weekends; growing: 2% more of the first day each \
         day; bursts: 20%, and on each day with a probability of a third 100% for an hour; constant: all that is requested. The \
         recommendation after 7 days is compared with the other 7. peakPercent: highest use of the 7 days relative to the request. \
         returnedPercent: part of the requested memory that the recommended requests do not take. enoughPercent: hours whose peak is within the recommended request; \
         enoughByLimitPercent: within the recommended limit.",
    );
    for fit in fits {
        let (returned, enough) = returned_and_sufficient(fit);
        report.row(vec![
            ("curve", value(fit, "curve")),
            ("workloads", value(fit, "workloads")),
            (
                "peakPercent",
                json!(percent(fit, "peakBytes", "requestedBytes")),
            ),
            ("returnedPercent", json!(returned)),
            ("enoughPercent", json!(enough)),
            (
                "enoughByLimitPercent",
                json!(100.0 - percent(fit, "hoursAboveLimit", "hours")),
            ),
        ]);
    }
}

fn goals_of_recommendations(fits: &[Value]) -> Result<Vec<Goal>> {
    let all = fits.last().context("no recommendation")?;
    let (returned, enough) = returned_and_sufficient(all);
    Ok(vec![
        Goal {
            what: "recommendation: part of later hours whose peak is within the recommended request, percent",
            goal: "99",
            figure: json!(enough),
            outcome: Outcome::of(enough >= 99.0),
        },
        Goal {
            what: "recommendation: part of the requested memory that is returned, percent",
            goal: "25",
            figure: json!(returned),
            outcome: Outcome::of(returned >= 25.0),
        },
    ])
}

fn goals_of_cluster(rows: &[Value]) -> Result<Vec<Goal>> {
    let p99 = |what: &str| {
        let mut found = named(rows, "growth").filter(|row| row["what"] == what);
        let row = found.next();
        row.and_then(|row| row["p99Ms"].as_f64())
            .with_context(|| format!("no measurement of {what}"))
    };
    let seen = p99("companion written until the program sees it")?;
    let command = p99("resize that adds")?.max(p99("resize that gives back")?);
    let resizes = named(rows, "resizes").next().context("no resizes")?;
    let number = |name: &str| resizes[name].as_u64().unwrap_or(0);
    let checked = format!(
        "in {} allocations and {} resizes with {} kills",
        number("allocations"),
        number("resizes"),
        number("kills")
    );
    let zero = |what, names: &[&str]| {
        let sum: u64 = names.iter().map(|name| number(name)).sum();
        Goal {
            what,
            goal: "0 in 1,000,000 allocations and 10,000 resizes",
            figure: json!(format!("{sum} {checked}")),
            outcome: Outcome::of_rounds(sum, number("resizes"), RESIZES),
        }
    };
    let beside = named(rows, "guarantees").find(|row| row["beside"] != "no other share");
    let beside = beside.context("no guarantees")?;
    let missed = beside["missed"].as_u64().unwrap_or(0);
    let longest = beside["prepareMaxMs"].as_f64().unwrap_or(f64::MAX);
    Ok(vec![
        Goal {
            what: "growth: companion written until the program sees it, p99, ms",
            goal: "300",
            figure: json!(seen),
            outcome: Outcome::of(seen <= 300.0),
        },
        Goal {
            what: "growth: whole command, p99, ms",
            goal: "1000",
            figure: json!(command),
            outcome: Outcome::of(command <= 1000.0),
        },
        zero(
            "samples with memory beyond the limit in force",
            &["excesses"],
        ),
        zero(
            "resizes that were reported as done while the limit was another",
            &["belowGranted"],
        ),
        zero(
            "samples with a limit beyond the record or records beyond the GPU, and resizes after which records, limits and planner differ",
            &["unrecorded", "promisedTwice", "differentSums"],
        ),
        Goal {
            what: "a guarantee is met while others burst: longest preparation, ms",
            goal: "2000",
            figure: json!(longest),
            outcome: Outcome::of(missed == 0 && longest <= 2000.0),
        },
        same_sum(
            "the same sum by kube-scheduler's allocator at every comparison",
            rows,
            |by| by == KUBE_SCHEDULER,
        ),
        same_sum(
            "the same sum by top, ResourceQuota, GpuQuota and /metrics, once they have seen the claims",
            rows,
            |by| by != KUBE_SCHEDULER,
        ),
    ])
}

/// Name of the component that is compared with each list of claims.
const KUBE_SCHEDULER: &str = "kube-scheduler's allocator";

fn same_sum(what: &'static str, rows: &[Value], is_meant: impl Fn(&str) -> bool) -> Goal {
    let meant = named(rows, "sums").filter(|row| row["by"].as_str().is_some_and(&is_meant));
    let meant: Vec<&Value> = meant.collect();
    let sum = |name: &str| -> u64 { meant.iter().filter_map(|row| row[name].as_u64()).sum() };
    let (compared, different) = (sum("compared"), sum("different"));
    if compared == 0 {
        return Goal {
            what,
            goal: "always",
            figure: Value::Null,
            outcome: Outcome::NotMeasured,
        };
    }
    Goal {
        what,
        goal: "always",
        figure: json!(format!("{different} differences in {compared} comparisons")),
        outcome: Outcome::of(different == 0),
    }
}
