//! Loads of modules beside allocations of other threads, processes and shares: each succeeds, and takes what its module needs.

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use super::report::Row;
use super::rows::Rows;
use super::setup::{Preload, Running, Setup, Share, go, limits, start_all};

const MIB: u64 = 1 << 20;

/// What modules without arrays may take of a share, together.
const MODULES: u64 = 16 * MIB;

/// Size of a share in which arrays of [`ARRAY_MIB`] do not fit.
const SMALL_SHARE: u64 = 1 << 30;
const ARRAY_MIB: u64 = 2000;

/// nvcc's option for images that are compressed.
const COMPRESSED: &str = "-fatbin";

/// Output of `gpu-suite loads`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Loaded {
    modules: u64,
    loaded: u64,
    refusal: Option<String>,
    churned: u64,
    churn_refused: u64,
    free_bytes_before: u64,
    free_bytes_after: u64,
    seconds: f64,
}

pub(super) fn rows(setup: &Setup, rows: &mut Rows<'_>) -> Result<()> {
    let memory = (setup.gpu()?.free_bytes / 4).min(8 << 30);
    let share = |preload: Preload| setup.preloaded(preload, &limits(memory, 0)?);
    rows.compare("loads beside a thread that allocates", |preload| {
        let share = share(preload)?;
        beside("a thread that allocates", setup, &[&share, &share][..1])
    })?;
    rows.compare("loads beside a process of the share", |preload| {
        let share = share(preload)?;
        beside(
            "a process of the share that allocates",
            setup,
            &[&share, &share],
        )
    })?;
    rows.compare("loads beside another share", |preload| {
        let shares = [share(preload)?, share(preload)?];
        beside(
            "another share that allocates",
            setup,
            &[&shares[0], &shares[1]],
        )
    })?;
    rows.compare("an array of 2000 MiB", |preload| {
        let share = setup.preloaded(preload, &limits(SMALL_SHARE, 0)?)?;
        denied(setup, &share)
    })
}

/// Processes that load, each beside a thread of its own that allocates and frees.
fn beside(what: &str, setup: &Setup, shares: &[&Share]) -> Result<Vec<Row>> {
    let (modules, churn) = match setup.is_simulated() {
        true => ("60", "1024"),
        false => ("300", "1024"),
    };
    let arguments = ["loads", "--modules", modules, "--churn-mib", churn];
    let commands = shares
        .iter()
        .map(|share| setup.suite(Some(share), &arguments));
    let mut programs = start_all(commands.collect())?;
    Ok(vec![row(what, &load(&mut programs)?)])
}

/// Lets processes load together.
fn load(programs: &mut [Running]) -> Result<Vec<Loaded>> {
    for state in ["measured", "loaded"] {
        go(programs)?;
        for program in &mut *programs {
            let line = program.line()?;
            ensure!(line == state, "expected {state:?}, read {line:?}");
        }
    }
    go(programs)?;
    programs.iter_mut().map(Running::json).collect()
}

fn row(what: &str, processes: &[Loaded]) -> Row {
    let taken = |loaded: &Loaded| loaded.free_bytes_before.abs_diff(loaded.free_bytes_after);
    let details = processes.iter().map(|loaded| {
        format!(
            "{} of {} loads{}, {} MiB {} free, {} of {} allocations refused, in {:.1} s",
            loaded.loaded,
            loaded.modules,
            loaded
                .refusal
                .as_ref()
                .map(|name| format!(" ({name})"))
                .unwrap_or_default(),
            taken(loaded) / MIB,
            match loaded.free_bytes_after > loaded.free_bytes_before {
                true => "more",
                false => "less",
            },
            loaded.churn_refused,
            loaded.churned,
            loaded.seconds,
        )
    });
    Row::checked(
        format!("loads beside {what}"),
        processes.iter().all(|loaded| {
            loaded.loaded == loaded.modules
                && loaded.churn_refused == 0
                && loaded.churned >= loaded.modules
                && taken(loaded) <= MODULES
        }),
        details.collect::<Vec<_>>().join("; "),
    )
}

/// An array that the share has no room for is denied, in each form of image that this machine can make.
fn denied(setup: &Setup, share: &Share) -> Result<Vec<Row>> {
    let images = [
        ("PTX", None),
        ("a cubin", Some("-cubin")),
        ("a compressed fatbin", Some(COMPRESSED)),
    ];
    let row = |(form, option): (&str, Option<&str>)| {
        let title = format!("an array of {ARRAY_MIB} MiB in {form}, in a share of 1 GiB");
        let mut arguments = vec!["loads", "--modules", "1"];
        let (size, path);
        match option {
            None => {
                size = ARRAY_MIB.to_string();
                arguments.extend(["--array-mib", &size]);
            }
            Some(option) => {
                path = match compile(setup, option) {
                    Ok(path) => path,
                    Err(error) => return Ok(Row::not_run(title, format!("{error:#}"))),
                };
                arguments.extend(["--image", &path]);
            }
        }
        let mut programs = start_all(vec![setup.suite(Some(share), &arguments)])?;
        let loaded = load(&mut programs)?.pop().context("no program")?;
        let refusal = loaded.refusal.as_deref().unwrap_or("loaded");
        if option == Some(COMPRESSED) {
            // Sizes in a compressed image are not known before the load: the node agent charges them after it.
            return Ok(Row::measured(title, refusal));
        }
        let is_denied = loaded.loaded == 0 && refusal == "CUDA_ERROR_OUT_OF_MEMORY";
        Ok(Row::checked(title, is_denied, refusal))
    };
    images.into_iter().map(row).collect()
}

/// Compiles a program with such an array; returns the path of its image.
fn compile(setup: &Setup, option: &str) -> Result<String> {
    let source = setup.out.join("array.cu");
    let image = setup
        .out
        .join(format!("array.{}", option.trim_start_matches('-')));
    let text = format!(
        "__device__ char data[{}u << 20];\n\
         extern \"C\" __global__ void fill(int index) {{ data[index] = 1; }}\n",
        ARRAY_MIB
    );
    super::tools::nvcc(&source, &text, &["-arch=native", option], &image)?;
    Ok(image.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::super::report::Outcome;
    use super::{Loaded, MIB, row};

    fn holds(loaded: u64, churned: u64, free_bytes_after: u64) -> bool {
        let loaded = Loaded {
            modules: 300,
            loaded,
            refusal: None,
            churned,
            churn_refused: 0,
            free_bytes_before: 100 * MIB,
            free_bytes_after,
            seconds: 1.0,
        };
        matches!(row("it", &[loaded]).outcome, Outcome::Checked { held, .. } if held)
    }

    #[test]
    fn demands_all_loads_and_bounds_account_in_both_directions() {
        assert!(holds(300, 300, 84 * MIB));
        assert!(holds(300, 300, 116 * MIB));
        assert!(!holds(300, 300, 83 * MIB), "charged for others");
        assert!(!holds(300, 300, 117 * MIB), "credited for others");
        assert!(!holds(299, 300, 100 * MIB), "a load failed");
        assert!(
            !holds(300, 5, 100 * MIB),
            "nothing was allocated beside the loads"
        );
    }
}
