//! Decoding of untrusted pages and regions: inputs in `corpus/`, each with its expected result, and random mutations of
//! them.
//!
//! `DRAVA_FUZZ_CASES=10000000 cargo test --release -p drava-vgpu-abi --test corpus` runs that many mutations instead of
//! [`CASES`], others for each `DRAVA_FUZZ_SEED`. An input that fails is printed in the corpus format: as a file in
//! `corpus/`, with its expected result, it is part of every run.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

#[path = "corpus/mutation.rs"]
mod mutation;
#[path = "corpus/seed.rs"]
mod seed;

use std::panic::{AssertUnwindSafe, catch_unwind};

use drava_vgpu_abi::ledger::MAX_BYTES;
use drava_vgpu_abi::snapshot::Snapshot;
use drava_vgpu_abi::{Limits, LimitsPage, PAGE_SIZE, REGION_SIZE, decode, encode, update};

use mutation::Mutator;
use seed::{Kind, Seed};

/// Mutated inputs of an ordinary run, half of them pages and half of them regions.
const CASES: u64 = 20_000;

/// The decoded form of the bytes.
fn meaning(kind: Kind, bytes: &[u8]) -> String {
    let meaning = match kind {
        Kind::Page => decode(bytes)
            .map(describe)
            .map_err(|error| format!("{error:?}")),
        Kind::Region => Snapshot::decode(bytes)
            .map(|snapshot| counted(&snapshot))
            .map_err(|error| format!("{error:?}")),
    };
    meaning.unwrap_or_else(|error| error)
}

fn describe(page: LimitsPage) -> String {
    let LimitsPage { spec, generation } = page;
    let limits = spec.limits;
    format!(
        "generation {generation}; {} {} {}; limit {:?} reserve {} excess {}; cores {} {:?} priority {} rate {:?}; {:?} {:?}",
        spec.claim_uid,
        spec.share_id,
        spec.device_uuid,
        limits.memory_limit_bytes,
        limits.driver_reserve_bytes,
        limits.driver_excess_bytes,
        limits.cores.percent(),
        limits.compute_policy,
        limits.priority.value(),
        limits.rate_us_per_s,
        limits.memory_policy,
        limits.broken_region,
    )
}

fn counted(snapshot: &Snapshot<'_>) -> String {
    let share = snapshot.share();
    let mut text = format!("total {} credit {}", share.total_bytes, share.credit_us);
    for process in snapshot.processes() {
        let (slot, pid, used) = (process.slot.get(), process.owner.pid, process.used_bytes);
        text += &format!("; slot {slot} pid {pid} used {used}");
    }
    text
}

/// Checks the properties that hold for any bytes.
fn check(kind: Kind, bytes: &[u8]) {
    match kind {
        Kind::Page => check_page(bytes),
        Kind::Region => check_region(bytes),
    }
}

fn check_page(bytes: &[u8]) {
    let Ok(page) = decode(bytes) else {
        let result = update(bytes, &Limits::memory(1));
        assert!(result.is_err(), "an unreadable page is not updated");
        return;
    };
    assert!(bytes.len() >= PAGE_SIZE && bytes.starts_with(b"DRAVALIM"));
    // The decoded limits are some that the driver could have written.
    let written = decode(&encode(&page.spec)).unwrap();
    assert_eq!(written.spec, page.spec);
    let mut bytes = bytes.to_vec();
    let limits = Limits::memory(4096);
    for write in update(&bytes, &limits).unwrap() {
        let at = usize::try_from(write.offset()).unwrap();
        bytes[at..at + write.bytes().len()].copy_from_slice(write.bytes());
    }
    // No page reaches that many updates.
    if page.generation < u64::MAX {
        let updated = decode(&bytes).unwrap();
        assert_eq!(updated.spec.limits, limits);
        assert_eq!(updated.generation, page.generation + 1);
    }
}

fn check_region(bytes: &[u8]) {
    let Ok(snapshot) = Snapshot::decode(bytes) else {
        return;
    };
    assert!(bytes.len() >= REGION_SIZE);
    assert!(snapshot.share().total_bytes <= MAX_BYTES);
    let slots: Vec<usize> = snapshot.processes().map(|one| one.slot.get()).collect();
    let owned: Vec<usize> = (0..1024)
        .filter(|slot| bytes[4096 + 256 * slot] == 1)
        .collect();
    assert_eq!(slots, owned);
}

#[test]
fn decodes_corpus_inputs_as_documented() {
    let seeds = Seed::all();
    assert!(seeds.len() > 40, "{} inputs", seeds.len());
    let mut wrong = Vec::new();
    for seed in &seeds {
        let found = meaning(seed.kind, &seed.bytes);
        if found != seed.meaning {
            wrong.push(format!(
                "{}\n  means {found}\n  not   {}",
                seed.name, seed.meaning
            ));
        }
        check(seed.kind, &seed.bytes);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn preserves_guarantees_on_mutated_inputs() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse().unwrap());
    let cases: u64 = number("DRAVA_FUZZ_CASES").unwrap_or(CASES);
    let begin: u64 = number("DRAVA_FUZZ_SEED").unwrap_or(1);
    let seeds = Seed::all();
    for kind in [Kind::Page, Kind::Region] {
        let seeds: Vec<&Seed> = seeds.iter().filter(|seed| seed.kind == kind).collect();
        let mut mutator = Mutator::new(begin);
        let mut bytes = Vec::new();
        for case in 0..cases / 2 {
            let changed = mutator.change_one_of(&seeds, &mut bytes);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(kind, &bytes))) {
                eprintln!(
                    "case {case} of DRAVA_FUZZ_SEED={begin}, like {}:",
                    changed.name
                );
                eprintln!("{}", changed.difference(&bytes));
                std::panic::resume_unwind(panic);
            }
        }
    }
}
