//! Shares whose memory changes while their programs run: growth, and unused guarantees that are lent and taken back.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use super::node::{Memory, Node};
use super::report::Row;
use super::rows::Rows;
use super::setup::{Running, Setup};

/// Longest time until a program sees the growth of its share.
const GOAL_GROWTH: Duration = Duration::from_millis(300);

/// Longest time until a share has what it has lent, and what libcuda needs for an allocation.
const GOAL_GUARANTEE: Duration = Duration::from_millis(2500);

/// Time after which an effect counts as missing.
const PATIENCE: Duration = Duration::from_secs(60);

/// Answer of `gpu-suite elastic`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    total_bytes: u64,
    error: Option<String>,
    took_us: u64,
}

pub(super) fn rows(setup: &Setup, rows: &mut Rows<'_>) -> Result<()> {
    rows.run("growth", || Ok(vec![growth(setup)?]))?;
    rows.run("lent memory", || lent(setup))
}

fn ask(program: &mut Running, bytes: u64) -> Result<Answer> {
    program.send(&bytes.to_string())?;
    program.json()
}

/// Waits until the program sees this total, and returns the time.
fn total_is(program: &mut Running, bytes: u64) -> Result<Duration> {
    let begun = Instant::now();
    loop {
        let total = ask(program, 0)?.total_bytes;
        if total == bytes {
            return Ok(begun.elapsed());
        }
        if begun.elapsed() > PATIENCE {
            bail!("the program sees {total} bytes instead of {bytes}");
        }
        sleep(Duration::from_millis(1));
    }
}

fn start(setup: &Setup, node: &mut Node) -> Result<Vec<Running>> {
    let shares = node.shares.iter();
    let programs = shares.map(|share| Running::start(setup.suite(Some(share), &["elastic"])));
    let mut programs: Vec<Running> = programs.collect::<Result<_>>()?;
    let pids: Vec<u32> = programs.iter().map(Running::pid).collect();
    node.add_tenants(&pids)?;
    // Their contexts are made.
    for program in &mut programs {
        ask(program, 0)?;
    }
    Ok(programs)
}

fn growth(setup: &Setup) -> Result<Row> {
    let part = setup.gpu()?.free_bytes / 8 / MIB * MIB;
    let mut node = Node::with_memory(setup, [50, 50], &Memory::plain(part))?;
    let mut programs = start(setup, &mut node)?;
    node.grow(1, part)?;
    let grown = programs.first_mut().context("no program")?;
    let time = total_is(grown, 2 * part)?;
    let taken = ask(grown, part + part / 4)?;
    for program in programs {
        program.end()?;
    }
    node.end()?;
    let is_taken = taken.error.is_none();
    Ok(Row::checked(
        "growth is seen and usable without a restart",
        is_taken && time <= GOAL_GROWTH,
        format!(
            "after {} ms; allocation beyond the former limit: {}",
            time.as_millis(),
            taken.error.as_deref().unwrap_or("granted")
        ),
    ))
}

const MIB: u64 = 1 << 20;

/// The first share uses what the second one does not, and the second one needs it.
fn lent(setup: &Setup) -> Result<Vec<Row>> {
    let part = setup.gpu()?.free_bytes / 4 / MIB * MIB;
    let memory = Memory {
        share_bytes: part,
        limit_bytes: part + part / 2,
        allocatable_bytes: 2 * part,
    };
    let mut node = Node::with_memory(setup, [50, 50], &memory)?;
    let mut programs = start(setup, &mut node)?;
    let [borrower, lender] = programs.as_mut_slice() else {
        bail!("no two programs");
    };
    let lent = total_is(borrower, memory.limit_bytes)?;
    let sees_guarantee = ask(lender, 0)?.total_bytes == part;
    let borrowed = ask(borrower, part + part / 4)?;
    let needed = ask(lender, part / 4 * 3)?;
    let mut programs = programs.into_iter();
    // It holds lent memory, so it was killed.
    let is_killed = programs
        .next()
        .is_some_and(|borrower| borrower.end().is_err());
    for program in programs {
        program.end()?;
    }
    node.end()?;
    let took = Duration::from_micros(needed.took_us);
    Ok(vec![
        Row::checked(
            "lent memory is used, and its owner sees its guarantee",
            borrowed.error.is_none() && sees_guarantee,
            format!("lent after {:.1} s", lent.as_secs_f64()),
        ),
        Row::checked(
            "lent memory is back when its owner allocates",
            needed.error.is_none() && is_killed && took <= GOAL_GUARANTEE,
            format!(
                "{}, after {} ms",
                needed.error.as_deref().unwrap_or("granted"),
                took.as_millis()
            ),
        ),
    ])
}
