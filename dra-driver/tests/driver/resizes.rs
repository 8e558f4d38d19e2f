//! Shares that grow and shrink at the same time, while programs with `libvgpu.so` allocate, and SIGKILL ends programs and node drivers at
//! random times: the shipped node driver as a process, on the simulated machine.
//!
//! The test is the controller: it allocates a companion if the claims of the GPU leave room for it, and releases it when the node driver
//! reports so. It remembers nothing, so its end at any moment changes nothing.
//!
//! Invariants, which are checked by all shares at each step and all the time in between, against the ledger of the machine, the limits
//! pages, the records and the claims:
//! - no share has more memory than is recorded, contexts included; beyond its limit in force it has only what was admitted before that was
//!   lowered, and that is given back to no other share;
//! - no limit is beyond its record, no record beyond the claims of the share, and the claims of a GPU fit it;
//! - no limit is below what was reported as granted;
//! - what was reported as released is neither recorded nor in force nor in use.
//!
//! The usual run has [`ROUNDS`] resizes; `DRAVA_RESIZE_ROUNDS=10000` has more, and `DRAVA_RESIZE_SEED` repeats the choices of a run.

use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use drava_dra_driver::node::claim::ShareId;
use drava_dra_driver::node::limits_page::Page;
use drava_dra_driver::prepare::record::{Loaded, RecordStore};
use serde_json::{Value, json};
use simulator_machine::testing::poll;

use crate::fixture::Allocated::Share;
use crate::fixture::{claim, claim_ref, share_id};
use crate::limits_killed::{Random, number, report};
use crate::live_node::{ALLOCATABLE_MIB, LiveNode, Program};
use crate::namespace::in_mount_namespace;
use crate::node::lacks_device_files;

const TEST: &str = "resizes::no_byte_is_promised_twice_while_shares_are_resized";

/// Resizes of the usual run.
const ROUNDS: usize = 120;

/// Base claims of each GPU, and programs of each.
const SHARES: u32 = 4;
const PROGRAMS: usize = 2;

/// Memory of a base claim, and most that a companion adds, GiB: not all shares of a GPU can have that at once.
const BASE: &str = "12Gi";
const BASE_GIB: u64 = 12;
const MOST_GIB: usize = 12;

/// Companions that a share has at once.
const COMPANIONS: usize = 2;

/// Number of the first companion.
const FIRST_COMPANION: u32 = 1000;

/// Every fourth resize has a kill.
const KILL_EVERY: usize = 4;

/// Latest kill after the begin of a resize.
const LATEST_KILL_MS: usize = 600;

const GIB: u64 = 1 << 30;

/// A base claim with its programs.
struct Base {
    number: u32,
    gpu: u32,
    /// Memory that was reported as granted and is not given back, bytes.
    promised: AtomicU64,
    programs: Mutex<Vec<Program>>,
}

/// What happened, to see that the run was not empty.
#[derive(Default)]
struct Counts {
    resizes: AtomicUsize,
    /// Companions that the GPU had no room for.
    full: AtomicUsize,
    /// Companions that ended before they were granted.
    withdrawn: AtomicUsize,
    program_kills: AtomicUsize,
    driver_kills: AtomicUsize,
    checks: AtomicUsize,
    /// Checks of a share that used more than its limit: what was admitted before the limit was lowered.
    late: AtomicUsize,
    allocated: AtomicU64,
    denied: AtomicU64,
}

struct World {
    live: LiveNode,
    bases: Vec<Base>,
    /// Held while the test decides as the controller.
    controller: Mutex<()>,
    next_companion: AtomicU32,
    next_program: AtomicU32,
    rounds: usize,
    has_ended: AtomicBool,
    counts: Counts,
}

/// Limit, record and use of a share, read in an order that allows to compare them.
struct Seen {
    /// Before and after the ledger was read, bytes.
    limits: [u64; 2],
    held: [u64; 2],
    used: u64,
    grants: BTreeSet<String>,
}

impl World {
    async fn start(rounds: usize) -> Self {
        let live = LiveNode::start().await;
        let mut bases = Vec::new();
        for gpu in 0..2 {
            for index in 1..=SHARES {
                let number = gpu * SHARES + index;
                live.api.put_claim(&claim(number, &[Share(gpu, BASE, "0")]));
                live.prepare(number).await;
                bases.push(Base {
                    number,
                    gpu,
                    promised: AtomicU64::new(BASE_GIB * GIB),
                    programs: Mutex::default(),
                });
            }
        }
        let world = Self {
            live,
            bases,
            controller: Mutex::default(),
            next_companion: AtomicU32::new(FIRST_COMPANION),
            next_program: AtomicU32::new(0),
            rounds,
            has_ended: AtomicBool::new(false),
            counts: Counts::default(),
        };
        for base in &world.bases {
            for _ in 0..PROGRAMS {
                let program = world.start_program(base);
                base.programs().push(program);
            }
        }
        world
    }

    fn start_program(&self, base: &Base) -> Program {
        let seed = self.next_program.fetch_add(1, Ordering::Relaxed) + 1;
        let seed = format!("--seed={seed}");
        let churn = [
            "churn",
            "--largest-mib",
            "1024",
            "--held",
            "40",
            "--pause-us",
            "3000",
            &seed,
        ];
        self.live.start_program(base.number, base.gpu, &churn)
    }

    /// Ends a program with SIGKILL and starts another one.
    fn kill_program(&self, base: &Base, random: &mut Random) {
        self.replace_program(base, random.below(PROGRAMS));
        self.counts.program_kills.fetch_add(1, Ordering::Relaxed);
    }

    fn replace_program(&self, base: &Base, index: usize) {
        let started = self.start_program(base);
        let ended = std::mem::replace(&mut base.programs()[index], started);
        self.end_program(ended);
    }

    /// Starts programs again that had no room for their context: the others of the share used all of its limit.
    fn restart_programs(&self, base: &Base) {
        for index in 0..PROGRAMS {
            let ended = base.programs()[index].process.try_wait().unwrap();
            if ended.is_some() {
                self.replace_program(base, index);
            }
        }
    }

    fn end_program(&self, mut program: Program) {
        let ended = program.process.try_wait().unwrap();
        let output = program.output.clone();
        drop(program);
        let text = fs::read_to_string(&output).unwrap();
        let had_no_room = text.contains("cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY");
        assert!(ended.is_none() || had_no_room, "a program ended: {text}");
        // The last line may be incomplete.
        let mut lines = text.lines().rev();
        let last = lines.find_map(|line| serde_json::from_str::<Value>(line).ok());
        if let Some(last) = last {
            let count = |name: &str| last[name].as_u64().unwrap();
            let (allocated, denied) = (&self.counts.allocated, &self.counts.denied);
            allocated.fetch_add(count("allocated"), Ordering::Relaxed);
            denied.fetch_add(count("denied"), Ordering::Relaxed);
        }
        fs::remove_file(output).unwrap();
    }

    /// Returns the claims of a share by UID: bytes.
    fn claims_of(&self, base: &Base) -> Vec<(String, u64)> {
        let label = claim_ref(base.number).uid;
        let claims = self.live.api.claims().into_iter().filter(|claim| {
            let metadata = &claim["metadata"];
            metadata["uid"] == label.as_str()
                || metadata["labels"]["gpu.drava.dev/companion-of"] == label.as_str()
        });
        let amount = |claim: &Value| {
            let result = &claim["status"]["allocation"]["devices"]["results"][0];
            let memory = result["consumedCapacity"]["memory"].as_str().unwrap();
            memory.strip_suffix("Gi").unwrap().parse::<u64>().unwrap() * GIB
        };
        claims
            .map(|claim| {
                (
                    claim["metadata"]["uid"].as_str().unwrap().to_owned(),
                    amount(&claim),
                )
            })
            .collect()
    }

    /// Reads a share.
    fn read(&self, base: &Base) -> Seen {
        let uid = claim_ref(base.number).uid;
        let share = ShareId::parse(&share_id(base.number, 0)).unwrap();
        let layout = self.live.node.layout();
        let limit = || {
            let page = Page::open(&layout.limits(&uid, &share)).unwrap();
            page.limits().memory_limit_bytes.unwrap()
        };
        let record = || match RecordStore::new(layout.claims()).load(&uid).unwrap() {
            Loaded::Present(record) => record.devices[0].share().unwrap().clone(),
            other => panic!("the record is {other:?}"),
        };
        let pids: Vec<u32> = base.programs().iter().map(|one| one.process.id()).collect();
        let record_before = record();
        let limit_before = limit();
        let gpu = self
            .live
            .machine
            .gpu(usize::try_from(base.gpu).unwrap())
            .unwrap();
        let limit_after = limit();
        let record_after = record();
        let of_share = gpu.processes.iter().filter(|one| pids.contains(&one.pid));
        Seen {
            limits: [limit_before, limit_after],
            held: [
                record_before.held().memory_bytes,
                record_after.held().memory_bytes,
            ],
            used: of_share.map(|one| one.used_bytes).sum(),
            grants: record_after
                .grants
                .iter()
                .map(|grant| grant.claim.uid.to_string())
                .collect(),
        }
    }

    /// Checks the invariants of a share, and returns what it is.
    fn check(&self, base: &Base) -> Seen {
        let promised_before = base.promised.load(Ordering::SeqCst);
        let claims_before = self.claims_of(base);
        let seen = self.read(base);
        let claims_after = self.claims_of(base);
        let promised = promised_before.min(base.promised.load(Ordering::SeqCst));
        let name = format!("claim-{}", base.number);
        let limit = seen.limits.into_iter().max().unwrap();
        let held = seen.held.into_iter().max().unwrap();
        assert!(
            seen.used <= held,
            "{name} uses {} bytes, recorded are {held}",
            seen.used
        );
        if seen.used > limit {
            self.counts.late.fetch_add(1, Ordering::Relaxed);
        }
        let least = seen.limits.into_iter().min().unwrap();
        assert!(
            least <= held,
            "{name} has a limit of {least} bytes, recorded are {held}"
        );
        assert!(
            limit >= promised,
            "{name} has a limit of {limit} bytes, granted are {promised}"
        );
        // A claim that exists at the time of the record is in one of both lists.
        let claims: BTreeSet<(String, u64)> =
            claims_before.into_iter().chain(claims_after).collect();
        for grant in &seen.grants {
            let is_known = claims.iter().any(|(uid, _)| uid == grant);
            assert!(
                is_known,
                "{name} has memory of claim {grant}, which was released"
            );
        }
        let claimed: u64 = claims.iter().map(|(_, bytes)| bytes).sum();
        let recorded = seen.held[1];
        assert!(
            recorded <= claimed,
            "{name} has {recorded} bytes recorded and {claimed} claimed"
        );
        self.counts.checks.fetch_add(1, Ordering::Relaxed);
        seen
    }

    /// Checks all shares until the resizes are done.
    fn observe(&self) {
        let _guard = EndsOnPanic(&self.has_ended);
        while !self.has_ended.load(Ordering::Relaxed) {
            for gpu in 0..2 {
                let of_gpu = self.bases.iter().filter(|base| base.gpu == gpu);
                for base in of_gpu {
                    self.check(base);
                    self.restart_programs(base);
                }
                let controller = self.controller.lock().unwrap();
                let claimed = self.claimed(gpu);
                drop(controller);
                assert!(
                    claimed <= ALLOCATABLE_MIB << 20,
                    "{claimed} bytes are claimed"
                );
            }
        }
    }

    /// Returns what all claims of a GPU have, bytes.
    fn claimed(&self, gpu: u32) -> u64 {
        let of_gpu = self.bases.iter().filter(|base| base.gpu == gpu);
        let claims = of_gpu.flat_map(|base| self.claims_of(base));
        claims.map(|(_, bytes)| bytes).sum()
    }

    /// Allocates a companion, as the controller does. Returns its number, if it fits.
    fn allocate(&self, base: &Base, gib: u64) -> Option<u32> {
        let _controller = self.controller.lock().unwrap();
        if self.claimed(base.gpu) + gib * GIB > ALLOCATABLE_MIB << 20 {
            self.counts.full.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let number = self.next_companion.fetch_add(1, Ordering::Relaxed);
        let companion = companion_of(base.number, base.gpu, number, gib);
        self.live.api.put_claim_json(&companion);
        Some(number)
    }

    /// Returns the reason of a companion's condition.
    fn granted(&self, number: u32) -> Option<String> {
        let condition = self
            .live
            .api
            .condition(&format!("claim-{number}"), "Granted")?;
        Some(condition["reason"].as_str()?.to_owned())
    }

    fn await_reason(&self, number: u32, reason: &str) {
        let mut last = None;
        let has_reason = || {
            last = self.granted(number);
            Ok((last.as_deref() == Some(reason)).then_some(()))
        };
        if let Err(error) = poll(has_reason) {
            panic!("claim-{number} has {last:?} instead of {reason}: {error}");
        }
    }

    /// Resizes a share until all rounds are done, and gives all back.
    fn resize(&self, base: &Base, mut random: Random) {
        let _guard = EndsOnPanic(&self.has_ended);
        let mut companions: Vec<(u32, u64)> = Vec::new();
        std::thread::scope(|scope| {
            while let Some(rest) = self.rest(&companions) {
                let kill = (rest == Rest::Resizes && random.below(KILL_EVERY) == 0).then(|| {
                    let random = Random(random.next());
                    scope.spawn(|| self.kill(base, random))
                });
                self.resize_once(base, rest, &mut companions, &mut random);
                if let Some(kill) = kill {
                    kill.join().unwrap();
                }
            }
        });
        let seen = self.check(base);
        let expected = BASE_GIB * GIB;
        assert_eq!((seen.limits, seen.held), ([expected; 2], [expected; 2]));
    }

    /// Returns what a share with these companions has still to do.
    fn rest(&self, companions: &[(u32, u64)]) -> Option<Rest> {
        let is_done = self.has_ended.load(Ordering::Relaxed)
            || self.counts.resizes.load(Ordering::Relaxed) >= self.rounds;
        match (is_done, companions.is_empty()) {
            (false, _) => Some(Rest::Resizes),
            (true, false) => Some(Rest::GivesBack),
            (true, true) => None,
        }
    }

    fn resize_once(
        &self,
        base: &Base,
        rest: Rest,
        companions: &mut Vec<(u32, u64)>,
        random: &mut Random,
    ) {
        let grows = match companions.len() {
            0 => true,
            COMPANIONS => false,
            _ => rest == Rest::Resizes && random.below(2) == 0,
        };
        if !grows {
            let (number, gib) = companions.swap_remove(random.below(companions.len()));
            self.give_back(base, number, gib);
        } else {
            let gib = u64::try_from(1 + random.below(MOST_GIB)).unwrap();
            let Some(number) = self.allocate(base, gib) else {
                return std::thread::sleep(Duration::from_millis(20));
            };
            if random.below(8) == 0 {
                self.counts.withdrawn.fetch_add(1, Ordering::Relaxed);
                self.give_back(base, number, 0);
            } else {
                self.grow(base, number, gib);
                companions.push((number, gib));
            }
        }
        let before = self.counts.resizes.fetch_add(1, Ordering::Relaxed);
        if before % 1000 == 999 {
            report(&format!("{} resizes", before + 1));
        }
    }

    /// Waits until a companion is granted.
    fn grow(&self, base: &Base, number: u32, gib: u64) {
        self.await_reason(number, "Granted");
        base.promised.fetch_add(gib * GIB, Ordering::SeqCst);
        self.check(base);
    }

    /// Deletes a companion that adds `gib`, and releases it when the node driver says so.
    fn give_back(&self, base: &Base, number: u32, gib: u64) {
        base.promised.fetch_sub(gib * GIB, Ordering::SeqCst);
        let name = format!("claim-{number}");
        self.live.api.edit_claim(&name, |claim| {
            claim["metadata"]["deletionTimestamp"] = json!("2026-11-29T00:00:00Z");
        });
        self.await_reason(number, "Released");
        let seen = self.check(base);
        let uid = claim_ref(number).uid;
        assert!(
            !seen.grants.contains(uid.as_str()),
            "{name} is recorded after its release"
        );
        // The share has no other companion that changes.
        let left = self
            .claims_of(base)
            .into_iter()
            .filter(|(of, _)| *of != uid.as_str());
        let left: u64 = left.map(|(_, bytes)| bytes).sum();
        let most = seen.limits.into_iter().max().unwrap().max(seen.used);
        assert!(
            most <= left,
            "claim-{} has {most} of {left} bytes",
            base.number
        );
        let _controller = self.controller.lock().unwrap();
        self.live.api.remove_claim(&name);
    }

    /// Ends something at a random time.
    fn kill(&self, base: &Base, mut random: Random) {
        let delay = u64::try_from(random.below(LATEST_KILL_MS)).unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        match random.below(2) {
            0 => {
                let is_killed = self.live.kill_driver(|| {});
                let kills = &self.counts.driver_kills;
                kills.fetch_add(usize::from(is_killed), Ordering::Relaxed);
            }
            _ => self.kill_program(base, &mut random),
        }
    }
}

/// What is left to do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rest {
    Resizes,
    GivesBack,
}

/// Ends the run when its thread panics.
struct EndsOnPanic<'a>(&'a AtomicBool);

impl Drop for EndsOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// Returns a companion that adds `gib` to the share of a base claim on a GPU.
fn companion_of(base: u32, gpu: u32, number: u32, gib: u64) -> Value {
    let companion = claim(number, &[Share(gpu, "1Gi", "0")]);
    let mut companion = serde_json::to_value(&companion).unwrap();
    companion["metadata"]["labels"] =
        json!({"gpu.drava.dev/companion-of": claim_ref(base).uid.as_str()});
    let result = &mut companion["status"]["allocation"]["devices"]["results"][0];
    result["consumedCapacity"]["memory"] = json!(format!("{gib}Gi"));
    companion
}

impl Base {
    fn programs(&self) -> MutexGuard<'_, Vec<Program>> {
        self.programs.lock().unwrap()
    }
}

#[test]
fn no_byte_is_promised_twice_while_shares_are_resized() {
    if lacks_device_files() {
        return;
    }
    in_mount_namespace(TEST, || {
        let seed = number("DRAVA_RESIZE_SEED");
        let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 0x5eed);
        let rounds = number("DRAVA_RESIZE_ROUNDS").map_or(ROUNDS, |all| all.try_into().unwrap());
        report(&format!("DRAVA_RESIZE_SEED={seed}"));
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let world = runtime.block_on(World::start(rounds));
        run(&world, Random(seed));
    });
}

fn run(world: &World, mut random: Random) {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| world.observe());
        let resized = world.bases.iter().map(|base| {
            let random = Random(random.next());
            scope.spawn(|| world.resize(base, random))
        });
        let resized: Vec<_> = resized.collect();
        let failed = resized
            .into_iter()
            .filter_map(|one| one.join().err())
            .count();
        world.has_ended.store(true, Ordering::Relaxed);
        assert_eq!(failed, 0, "shares that failed");
    });
    for base in &world.bases {
        let programs = std::mem::take(&mut *base.programs());
        programs.into_iter().for_each(|one| world.end_program(one));
    }
    let counts = &world.counts;
    let of = |count: &AtomicUsize| count.load(Ordering::Relaxed);
    let (allocated, denied) = (&counts.allocated, &counts.denied);
    report(&format!(
        "{} resizes in {:?}: {} withdrawn, {} without room; kills: {} programs, {} drivers; {} allocations, {} denied; {} checks, {} of them beyond the limit",
        of(&counts.resizes),
        begun.elapsed(),
        of(&counts.withdrawn),
        of(&counts.full),
        of(&counts.program_kills),
        of(&counts.driver_kills),
        allocated.load(Ordering::Relaxed),
        denied.load(Ordering::Relaxed),
        of(&counts.checks),
        of(&counts.late),
    ));
    for count in [
        &counts.full,
        &counts.withdrawn,
        &counts.program_kills,
        &counts.driver_kills,
    ] {
        assert!(of(count) > 0, "an empty run");
    }
    for count in [allocated, denied] {
        assert!(count.load(Ordering::Relaxed) > 0, "an empty run");
    }
}

/// No report is written while the API server refuses those of the status. SIGKILL ends the node driver after the record and before the
/// report, of a grant and of its end.
#[test]
fn next_driver_reports_grant_that_killed_one_recorded() {
    if lacks_device_files() {
        return;
    }
    in_mount_namespace(
        "resizes::next_driver_reports_grant_that_killed_one_recorded",
        || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let live = runtime.block_on(LiveNode::start());
            let (base, companion, beside, beyond) = (1, FIRST_COMPANION, 2, 3);
            for (number, memory) in [(base, "40Gi"), (beside, "8Gi"), (beyond, "20Gi")] {
                live.api.put_claim(&claim(number, &[Share(0, memory, "0")]));
            }
            live.prepare_now(base);
            let layout = live.node.layout();
            let held_gib = || {
                let store = RecordStore::new(layout.claims());
                match store.load(&claim_ref(base).uid).unwrap() {
                    Loaded::Present(record) => {
                        record.devices[0].share().unwrap().held().memory_bytes / GIB
                    }
                    other => panic!("the record is {other:?}"),
                }
            };
            let limit_gib = || {
                let share = ShareId::parse(&share_id(base, 0)).unwrap();
                let page = Page::open(&layout.limits(&claim_ref(base).uid, &share)).unwrap();
                page.limits().memory_limit_bytes.unwrap() / GIB
            };
            let name = format!("claim-{companion}");
            let reason = || {
                let condition = live.api.condition(&name, "Granted")?;
                Some(condition["reason"].as_str()?.to_owned())
            };
            let kill_after_record = |gib: u64, expected: &str| {
                let before = reason();
                poll(|| Ok((held_gib() == gib).then_some(()))).unwrap();
                assert!(live.kill_driver(|| {
                    assert_eq!(reason(), before, "the report came before the kill");
                    assert_eq!(held_gib(), gib);
                    live.api.fail_statuses(0);
                }));
                poll(|| Ok((reason().as_deref() == Some(expected)).then_some(()))).unwrap();
                assert_eq!((held_gib(), limit_gib()), (gib, gib));
            };

            live.api.fail_statuses(usize::MAX);
            let granted = companion_of(base, 0, companion, 30);
            live.api.put_claim_json(&granted);
            kill_after_record(70, "Granted");
            // Of 78 GiB, 8 are free.
            live.prepare_now(beside);
            let error = live.prepare_error_now(beyond);
            assert!(error.contains("memory"), "{error}");

            live.api.fail_statuses(usize::MAX);
            live.api.edit_claim(&name, |claim| {
                claim["metadata"]["deletionTimestamp"] = json!("2026-11-29T00:00:00Z");
            });
            kill_after_record(40, "Released");
            live.api.remove_claim(&name);
            live.prepare_now(beyond);
        },
    );
}
