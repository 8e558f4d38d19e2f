//! `cargo xtask gpu` on the simulated GPU, and without a GPU.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::Command;

use serde_json::Value;

#[test]
fn guarantees_hold_on_simulated_gpu() {
    let out = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args([
            "gpu",
            "--simulated",
            "--only",
            "loads,account,entry-points,memory,events,programs",
            "--out",
        ])
        .arg(out.path())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stdout}\n{stderr}");

    let report = read(out.path(), "gpu.json");
    let rows = rows(&report);
    let checked = rows
        .iter()
        .filter(|row| row["outcome"] == "checked")
        .count();
    assert!(checked >= 60, "only {checked} checks: {report:#}");
    for (what, unexpected) in [
        ("entry points replaced under a limit", "0"),
        (
            "functions that the libraries export",
            "0 of libcuda, 0 of NVML",
        ),
    ] {
        assert_ne!(named(&rows, what)["value"], unexpected, "{report:#}");
    }
    // Each kind of handle recurs, and each allocating function has several pointers.
    for kind in [
        "memory handle",
        "device pointer",
        "array",
        "pool",
        "stream",
        "event",
        "context",
        "graph",
    ] {
        let row = named(&rows, &format!("{kind}: account after its values recur"));
        assert_eq!(row["outcome"], "checked", "{row}");
    }
    for function in [
        "cuMemAlloc",
        "cuMemCreate",
        "cuMemAllocManaged",
        "cuMemAllocAsync",
    ] {
        let row = named(
            &rows,
            &format!("{function}: each pointer moves the account"),
        );
        assert!(number(row) >= 30.0, "{row}");
    }
    for part in [
        "Entry points",
        "Memory, by allocation path",
        "Short kernels",
        "Programs",
    ] {
        assert_eq!(named(&rows, part)["outcome"], "measured");
    }
    for what in [
        "loads beside a thread that allocates",
        "loads beside a process of the share that allocates",
        "loads beside another share that allocates",
        "an array of 2000 MiB in PTX, in a share of 1 GiB",
        "captures beside nvml-memory of another thread",
        "captures beside first-launch of its own thread",
        "a library beside a kernel that waits on another GPU",
        "account throughout a mixed load of 2 s, process 1",
        "account throughout a mixed load of 2 s, process 2",
    ] {
        let row = named(&rows, what);
        assert_eq!(row["held"], true, "{row}");
    }
    // What this machine lacks is reported with a reason.
    for what in [
        "PyTorch, expandable segments",
        "PyTorch, forked data loaders",
        "compute-sanitizer",
        "MPS",
    ] {
        let row = rows
            .iter()
            .find(|row| row["what"].as_str().unwrap().contains(what));
        let row = row.unwrap_or_else(|| panic!("no row for {what}: {report:#}"));
        assert!(
            row["detail"].is_string() || row["reason"].is_string(),
            "{row}"
        );
    }
    let memory = read(out.path(), "nvml-memory.json");
    let paths = memory.as_array().unwrap();
    assert!(paths.len() >= 16, "{memory:#}");
    for path in paths {
        let bytes = |name: &str| path[name].as_u64().unwrap();
        assert!(
            bytes("processBytes") > 0 && bytes("accountBytes") > 0,
            "{path}"
        );
        assert!(bytes("usedBytes") > bytes("usedBytesBefore"), "{path}");
    }
    assert!(out.path().join("gpu.md").exists() && out.path().join("entry-points.json").exists());
}

fn read(out: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(out.join(name)).unwrap()).unwrap()
}

/// Returns the row of a title.
fn named<'a>(rows: &[&'a Value], what: &str) -> &'a Value {
    let row = rows.iter().find(|row| row["what"] == what);
    row.unwrap_or_else(|| panic!("no row {what}: {rows:#?}"))
}

/// Returns the number at the start of a row's detail.
fn number(row: &Value) -> f64 {
    let detail = row["detail"].as_str().unwrap();
    let digits = |letter: char| !letter.is_ascii_digit() && letter != '.';
    detail.split(digits).next().unwrap().parse().unwrap()
}

fn rows(report: &Value) -> Vec<&Value> {
    let parts = report["results"].as_array().unwrap().iter();
    parts
        .flat_map(|part| part["rows"].as_array().unwrap())
        .collect()
}

/// Runs a part of the suite, with its options, and returns the directory of its report. The goals of shares are for longer
/// measurements on an idle host, so each test states what must hold here.
fn measured(part: &[&str]) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["gpu", "--simulated", "--only"])
        .args(part)
        .arg("--out")
        .arg(out.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let is_measured = output.status.success() || stderr.contains("does not hold");
    assert!(is_measured, "{stderr}");
    out
}

/// Length of a measurement of [`limits_gpu_time_on_simulated_gpu`].
const SECONDS: f64 = 0.4;

/// Most that a share gets in such a measurement, percent: beside its rate the credit of 50 ms at that rate, and, of
/// what it queued, a batch of 20 ms that began before the measurement and one launch of up to 30 ms. A loaded host
/// delays launches, so there is no lower bound but that the share gets GPU time.
fn most(cores: f64) -> f64 {
    cores + (0.05 * cores + 100.0 * (0.02 + 0.03)) / SECONDS
}

#[test]
fn limits_gpu_time_on_simulated_gpu() {
    let seconds = SECONDS.to_string();
    let options = ["--launches", "500", "--stop-seconds", "2"];
    let out = measured(&[&["launches,compute", "--seconds", &seconds], &options[..]].concat());
    let report = read(out.path(), "gpu.json");
    let rows = rows(&report);
    let alone = rows.iter().filter_map(|row| {
        let (cores, _) = row["what"].as_str()?.split_once("% alone, ")?;
        Some((cores.parse::<f64>().unwrap(), *row))
    });
    let alone: Vec<_> = alone.collect();
    assert_eq!(alone.len(), 20, "{report:#}");
    for (cores, row) in alone {
        let got = number(row);
        assert!(
            got > 0.0 && got <= most(cores),
            "at most {}: {row}",
            most(cores)
        );
    }
    for [left, right] in [[30, 70], [10, 90], [50, 50]] {
        let row = named(&rows, &format!("{left}:{right}, division"));
        assert!(
            number(row) <= most(left.into()),
            "at most {}: {row}",
            most(left.into())
        );
        assert!(number(named(&rows, &format!("{left}:{right}, sum"))) > 0.0);
    }
    for what in [
        "a kernel that waits for launches of one process, without credit",
        "a kernel that waits for launches of two processes, without credit",
        "a stop of 2 s",
    ] {
        let row = named(&rows, what);
        assert_eq!(row["held"], true, "{row}");
    }
    let costs = rows.iter().filter(|row| {
        row["value"]
            .as_str()
            .is_some_and(|cost| cost.contains("p99.9"))
    });
    assert_eq!(costs.count(), 8, "{report:#}");
}

/// Most that a tenant may get of the GPU, on average of several cases. Without the agent, two tenants get half each,
/// and one alone gets all: a tenant is nearer to its guarantee than to the next of these. A loaded host delays one
/// tenant's launches for tenths of a second, in which the other one borrows its time, so a single case proves less.
fn most_on_average(guarantee: f64) -> f64 {
    let unlimited = if guarantee < 0.5 { 0.5 } else { 1.0 };
    f64::midpoint(guarantee, unlimited)
}

/// Everything is measured, the agent finds no violation, and no tenant gets much more than its guarantee. That none
/// gets less is no part of it: in such short times on a busy machine that proves nothing. Launches are counted in
/// advance, by guesses at first, so that an account may stand still for some tenths of a second.
#[test]
fn measures_tenants_with_agent() {
    let out = measured(&["agent", "--seconds", "1.5"]);
    let report = read(out.path(), "gpu.json");
    let samples = read(out.path(), "nvml-utilization.json");
    let (rows, samples) = (rows(&report), samples.as_array().unwrap());
    for split in ["30:70", "10:90", "42:58"] {
        let mut got: [Vec<f64>; 2] = Default::default();
        let random = "100, 1000, 10000 µs against 200, 5000 µs at random";
        for kernels in ["5 µs", "1000 µs", "20000 µs", random] {
            let case = format!("balance, {split}, kernels of {kernels}");
            for what in ["division", "sum"] {
                let what = format!("{case}, {what}");
                let row = rows.iter().find(|row| row["what"] == what.as_str());
                let row = row.unwrap_or_else(|| panic!("no row {what}: {report:#}"));
                let detail = row["detail"].as_str().unwrap();
                assert!(!detail.contains("no time"), "{row}");
            }
            let raw = samples.iter().find(|raw| raw["case"] == case.as_str());
            let raw = raw.unwrap_or_else(|| panic!("no samples of {case}"));
            assert!(!raw["usedBytes"].as_array().unwrap().is_empty(), "{raw:#}");
            assert_eq!(raw["findings"], Value::Array(Vec::new()), "{case}");
            for (number, tenant) in raw["tenants"].as_array().unwrap().iter().enumerate() {
                // The host launches kernels of 5 µs too slowly to fill a share.
                if kernels != "5 µs" {
                    got[number].push(tenant["share"].as_f64().unwrap());
                }
                assert!(tenant["accountUs"].as_u64().unwrap() > 0, "{raw:#}");
                let samples = raw["utilization"].as_array().unwrap();
                let has_samples = samples.iter().any(|sample| sample["pid"] == tenant["pid"]);
                assert!(has_samples, "{raw:#}");
            }
        }
        for (percent, got) in split.split(':').zip(got) {
            let most = most_on_average(percent.parse::<f64>().unwrap() / 100.0);
            assert_eq!(got.len(), 3, "three kinds of kernels");
            let mean = got.iter().sum::<f64>() / 3.0;
            assert!(
                mean <= most,
                "{percent}% of {split} gets {got:?}, at most {most}"
            );
        }
    }
}

/// Whether this process may start a daemon of MPS for all users.
fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt as _;

    std::fs::metadata("/proc/self").unwrap().uid() == 0
}

/// Limits and faults hold in any case. The load of a host delays launches, so the throughput of tenants is only counted, but for
/// that of kernels that the machine makes longer: with half of the multiprocessors, those that fill a GPU take twice as long.
#[test]
fn measures_spatial_shares() {
    let out = measured(&["spatial", "--seconds", "0.5"]);
    let report = read(out.path(), "gpu.json");
    let rows = rows(&report);
    let of = |start: &str| {
        let found = rows.iter().find(|row| {
            let what = row["what"].as_str().unwrap();
            what.starts_with(start)
        });
        *found.unwrap_or_else(|| panic!("no row {start}: {report:#}"))
    };
    let paths = [
        "plain", "pitch", "managed", "async", "pool", "vmm", "array", "mipmap", "globals", "graph",
    ];
    let limits = paths.map(|path| format!("{path} with MPS"));
    let filled = "a tenant that fills the GPU beside an idle one";
    let held = [
        "multiprocessors of a client",
        "multiprocessors of a client of the node driver's own daemon",
        "a fault of a client of MPS reaches the other client",
        "a fault of a client of MPS does not reach a program outside",
        "a fault of a client of MPS, then a new client",
    ];
    if !is_root() {
        for row in rows.iter().filter(|row| row["outcome"] == "notRun") {
            assert!(row["reason"].as_str().unwrap().contains("root"), "{row}");
        }
        assert_eq!(of(filled)["outcome"], "notRun");
        return;
    }
    for start in held
        .iter()
        .copied()
        .chain(limits.iter().map(String::as_str))
    {
        assert_eq!(of(start)["held"], true, "{}", of(start));
    }
    for load in [8, 4, 2] {
        for what in ["throughput of both", "time of a token"] {
            let row = of(&format!(
                "kernels for 1/{load} of the multiprocessors, {what}"
            ));
            assert_eq!(row["outcome"], "checked", "{row}");
        }
    }
    assert!(number(of(filled)) > 1.0, "{}", of(filled));
}

/// A library of this process that limits nothing.
fn inert_library() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut files = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5));
    files
        .find(|file| file.contains("libc.so"))
        .unwrap()
        .to_owned()
}

#[test]
fn shows_another_library_in_its_own_column_and_runs_named_rows() {
    let out = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["gpu", "--simulated", "--launches", "200"])
        .args(["--only", "plain: ,stack: account,a launch"])
        .args(["--peer", &inert_library(), "--out"])
        .arg(out.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    // What the other library does not hold is no failure of the run.
    assert!(output.status.success(), "{stderr}");
    let report = read(out.path(), "gpu.json");
    let rows = rows(&report);
    let titles: Vec<&str> = rows
        .iter()
        .map(|row| row["what"].as_str().unwrap())
        .collect();
    let measured = |title: &&&str| !title.starts_with("these parts");
    let starts = ["plain: ", "stack: account", "a launch"];
    for title in titles.iter().filter(measured) {
        let is_part = report["results"].as_array().unwrap().iter();
        let mut is_part = is_part.map(|part| part["title"].as_str().unwrap());
        let is_named = starts.iter().any(|start| title.starts_with(start));
        assert!(is_named || is_part.any(|part| part == *title), "{titles:?}");
    }
    let limit = rows
        .iter()
        .find(|row| row["what"].as_str().unwrap().starts_with("plain: limit"));
    let limit = limit.unwrap();
    assert_eq!(
        (&limit["held"], &limit["peer"]["held"]),
        (&true.into(), &false.into()),
        "{limit}"
    );
    let account = named(&rows, "plain: account against NVML");
    assert_eq!(account["peer"]["outcome"], "checked", "{account}");
    let other = "a launch, the other library, memory limited only (median of 3 processes in turn)";
    assert_eq!(named(&rows, other)["outcome"], "measured");
    let page = std::fs::read_to_string(out.path().join("gpu.md")).unwrap();
    assert!(
        page.contains("| What | Result | | Other library | |"),
        "{page}"
    );
}

#[test]
fn refuses_unknown_row_and_missing_library() {
    let refusal = |arguments: &[&str]| {
        let out = tempfile::tempdir().unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
            .args(["gpu", "--simulated", "--out"])
            .arg(out.path())
            .args(arguments)
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let unknown = refusal(&["--only", "plane"]);
    assert!(
        unknown.contains("no part is named \"plane\" and no row begins with it; the parts are loads, account, launches"),
        "{unknown}"
    );
    let missing = refusal(&["--only", "events", "--peer", "/nonexistent/libvgpu.so"]);
    let texts = [
        "--peer /nonexistent/libvgpu.so",
        "No such file or directory",
    ];
    assert!(texts.iter().all(|text| missing.contains(text)), "{missing}");
}

#[test]
fn reports_missing_gpu_and_writes_no_report() {
    let out = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["gpu", "--out"])
        .arg(out.path())
        // A driver shows no GPU then.
        .env("CUDA_VISIBLE_DEVICES", "-1")
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.starts_with("no GPU that CUDA can use"), "{stdout}");
    assert!(stdout.contains("--simulated"), "{stdout}");
    assert!(!out.path().join("gpu.json").exists() && !out.path().join("gpu.md").exists());
}

#[test]
fn names_missing_packaged_program() {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["gpu", "--simulated", "--programs"])
        .arg(directory.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{stderr}");
    let suite = directory.path().join("gpu-suite");
    assert!(
        stderr.contains(&format!("{} is missing", suite.display())),
        "{stderr}"
    );
    assert!(stderr.contains("--package"), "{stderr}");
}
