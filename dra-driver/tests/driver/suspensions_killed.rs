//! Shares that are suspended for others and resumed, several at the same time, while SIGKILL ends node drivers and programs at random
//! times: the shipped node driver as a process, `libvgpu.so` in programs with known bytes, on the simulated machine.
//!
//! The test is the controller and kubelet: in each round it intends the suspension of a share of low priority, gives its memory to a claim
//! of high priority, ends that, and withdraws the intent. A controller remembers nothing, so one that is killed repeats its step, is late
//! with the next one, or takes another one that the claims allow.
//!
//! Invariants:
//! - The bytes of a program are the same after each suspension, and no program ends that the test has not killed.
//! - While a claim of high priority has the memory, the share of low priority is recorded as suspended, and its programs have none.
//! - A program that stands still while its claim is not suspended goes on within 2 s, counted from the start of the next node driver if that
//!   was killed. On a busy host a call may take that long by itself, so only a measurement (`DRAVA_SUSPEND_ROUNDS`) fails for it.
//!
//! The usual run has [`ROUNDS`] rounds; `DRAVA_SUSPEND_ROUNDS=1000` has more, and `DRAVA_SUSPEND_SEED` repeats the choices of a run.

use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use drava_dra_driver::node::claim::ShareId;
use drava_dra_driver::node::limits_page::Page;
use drava_dra_driver::prepare::Phase;
use drava_dra_driver::prepare::record::{Loaded, RecordStore};
use serde_json::{Value, json};
use simulator_machine::testing::poll;

use crate::fixture::Allocated::Share;
use crate::fixture::{claim, claim_ref, claim_with, config, share_id};
use crate::limits_killed::{Random, number, report};
use crate::live_node::{ALLOCATABLE_MIB, LiveNode, Program};
use crate::namespace::in_mount_namespace;
use crate::node::lacks_device_files;

const TEST: &str = "suspensions_killed::suspended_shares_survive_kills";

/// Rounds of the usual run.
const ROUNDS: usize = 12;

/// Shares of low priority of each GPU. The GPU has room for no other.
const PAIRS: u32 = 3;

/// Memory of each claim.
const MEMORY: &str = "24Gi";
const MEMORY_MIB: u64 = 24 << 10;

/// A program with known bytes, and with more memory than the others leave it. It reports pauses of 100 ms.
const TRAIN: [&str; 9] = [
    "train",
    "--mib",
    "4",
    "--unwritten-mib",
    "22000",
    "--step-ms",
    "20",
    "--pause-ms",
    "100",
];

/// Number of the first claim of high priority.
const FIRST_HIGH: u32 = 1000;

/// Latest kill after the begin of a half of a round.
const LATEST_KILL_MS: u64 = 1500;

/// Most that a program may stand still without being suspended.
const MOST_LOCKED_US: u64 = 2_000_000;

/// What SIGKILL ends in a round, in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    /// While the share is being suspended.
    Driver,
    /// While the share is being suspended.
    Low,
    /// Beside its first kernels.
    High,
    /// It repeats the calls to the node driver.
    Kubelet,
    /// While the share is being resumed.
    DriverAtResume,
    /// While the share is being resumed.
    LowAtResume,
}

const VICTIMS: [Victim; 6] = [
    Victim::Driver,
    Victim::LowAtResume,
    Victim::High,
    Victim::Kubelet,
    Victim::DriverAtResume,
    Victim::Low,
];

/// What the controller does in a round, in turn. One that is killed is followed by another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Controller {
    Steady,
    /// The next one repeats each write.
    Repeats,
    /// The next one comes late.
    IsLate,
    /// The next one finds that the pod of high priority was deleted, and later that there is another one.
    Withdraws,
}

const CONTROLLERS: [Controller; 5] = [
    Controller::Steady,
    Controller::Withdraws,
    Controller::Repeats,
    Controller::Steady,
    Controller::IsLate,
];

/// A program of a claim.
struct Running {
    number: u32,
    program: Program,
}

type Slot = Mutex<Option<Running>>;

/// A share of low priority, and the claims of high priority that get its memory.
struct Pair {
    number: u32,
    gpu: u32,
    low: Slot,
    high: Slot,
    /// Odd while a claim of high priority has the memory.
    owner: AtomicU32,
    /// When the claim began to be suspended and when that ended, µs since the epoch.
    changes: Mutex<Vec<(u64, bool)>>,
    locked: Mutex<Locked>,
}

/// How long programs stood still without being suspended.
#[derive(Default)]
struct Locked {
    /// End of the last pause that was noted, µs since the epoch.
    noted_us: u64,
    longest_us: u64,
    too_long: Vec<String>,
}

/// What happened, to see that the run was not empty.
#[derive(Default)]
struct Counts {
    begun: AtomicUsize,
    rounds: AtomicUsize,
    controller_kills: AtomicUsize,
    driver_kills: AtomicUsize,
    low_kills: AtomicUsize,
    high_kills: AtomicUsize,
    kubelet_kills: AtomicUsize,
    /// Kills of the node driver or the program while the share was not running.
    amid: AtomicUsize,
    /// Suspensions that the node driver undid and tried again.
    retried: AtomicUsize,
    checks: AtomicUsize,
    compared: AtomicUsize,
    most_used: AtomicU64,
}

struct World {
    live: LiveNode,
    pairs: Vec<Pair>,
    /// Held while the test decides as the controller.
    controller: Mutex<()>,
    next_high: AtomicU32,
    /// When node drivers were killed, and when the next one was started, µs since the epoch.
    drivers: Mutex<Vec<(u64, u64)>>,
    rounds: usize,
    has_ended: AtomicBool,
    counts: Counts,
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

fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    now.as_micros().try_into().unwrap()
}

fn sleep_up_to(random: &mut Random, milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(random.next() % milliseconds));
}

fn count(counter: &AtomicUsize) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn name_of(number: u32) -> String {
    format!("claim-{number}")
}

/// Returns what a program has printed of this kind.
fn events(slot: &Slot, kind: &str) -> Vec<Value> {
    let running = slot.lock().unwrap();
    let Some(running) = &*running else {
        return Vec::new();
    };
    let text = fs::read_to_string(&running.program.output).unwrap();
    // The last line may be incomplete.
    let lines = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|event| event["event"] == kind).collect()
}

fn at_us(event: &Value) -> u64 {
    event["atUs"].as_u64().unwrap()
}

/// Returns the parts of a pause in which the claim was not suspended.
fn locked_parts(changes: &[(u64, bool)], from: u64, until: u64) -> Vec<(u64, u64)> {
    let (mut parts, mut begun) = (Vec::new(), Some(from));
    for &(at, is_suspended) in changes {
        let at = at.clamp(from, until);
        match is_suspended {
            true => parts.extend(begun.take().map(|begun| (begun, at))),
            false => begun = Some(at),
        }
    }
    parts.extend(begun.map(|begun| (begun, until)));
    parts
}

impl World {
    async fn start(rounds: usize) -> Self {
        let live = LiveNode::start().await;
        let allowed = config("FromClass", &json!({"suspend": {"allowed": true}}));
        let mut pairs = Vec::new();
        for gpu in 0..2 {
            for index in 1..=PAIRS {
                let number = gpu * PAIRS + index;
                let low = claim_with(number, &[Share(gpu, MEMORY, "0")], &allowed);
                live.api.put_claim(&low);
                live.prepare(number).await;
                let program = live.start_program(number, gpu, &TRAIN);
                pairs.push(Pair {
                    number,
                    gpu,
                    low: Mutex::new(Some(Running { number, program })),
                    high: Mutex::default(),
                    owner: AtomicU32::new(0),
                    changes: Mutex::default(),
                    locked: Mutex::default(),
                });
            }
        }
        Self {
            live,
            pairs,
            controller: Mutex::default(),
            next_high: AtomicU32::new(FIRST_HIGH),
            drivers: Mutex::default(),
            rounds,
            has_ended: AtomicBool::new(false),
            counts: Counts::default(),
        }
    }

    /// Returns the reason of the node driver's answer, and whether it says that the share is suspended.
    fn answer(&self, pair: &Pair) -> Option<(String, bool)> {
        let condition = self
            .live
            .api
            .condition(&name_of(pair.number), "Suspended")?;
        let reason = condition["reason"].as_str().unwrap().to_owned();
        Some((reason, condition["status"] == "True"))
    }

    fn is_suspended(&self, pair: &Pair) -> bool {
        self.answer(pair)
            .is_some_and(|(_, is_suspended)| is_suspended)
    }

    /// Writes or removes the label, as the controller does.
    fn intend(&self, pair: &Pair, is_intended: bool) {
        self.live.api.edit_claim(&name_of(pair.number), |claim| {
            claim["metadata"]["labels"] = match is_intended {
                true => json!({"gpu.drava.dev/suspend": "true"}),
                false => json!({}),
            };
        });
    }

    /// Takes a step of the controller, and that of the one that follows if it is killed.
    fn step(&self, controller: Controller, random: &mut Random, step: impl Fn()) {
        match controller {
            Controller::Steady | Controller::Withdraws => step(),
            Controller::Repeats => {
                step();
                sleep_up_to(random, 300);
                step();
                count(&self.counts.controller_kills);
            }
            Controller::IsLate => {
                sleep_up_to(random, 600);
                step();
                count(&self.counts.controller_kills);
            }
        }
    }

    fn poll<T>(&self, what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
        let found = poll(|| {
            anyhow::ensure!(
                !self.has_ended.load(Ordering::Relaxed),
                "another check failed"
            );
            Ok(condition())
        });
        found.unwrap_or_else(|error| panic!("{what}: {error}"))
    }

    fn await_suspended(&self, pair: &Pair) {
        let mut has_failed = false;
        self.poll(&format!("claim-{} is suspended", pair.number), || {
            let (reason, is_suspended) = self.answer(pair)?;
            if reason == "SuspendFailed" && !std::mem::replace(&mut has_failed, true) {
                count(&self.counts.retried);
            }
            is_suspended.then_some(())
        });
    }

    /// Waits until the controller may intend another suspension: an intent before would meet the answer to the one before.
    fn await_running(&self, pair: &Pair) {
        self.poll(&format!("claim-{} is resumed", pair.number), || {
            // A share whose suspension has not begun has no answer to take back.
            let answer = self.answer(pair);
            answer
                .is_none_or(|(reason, _)| reason == "Resumed")
                .then_some(())
        });
    }

    /// Waits for an event of the program in the slot, which may be replaced meanwhile.
    fn await_event(&self, slot: &Slot, kind: &str, since_us: u64) {
        self.poll(kind, || {
            let all = events(slot, kind);
            all.iter()
                .any(|event| at_us(event) > since_us)
                .then_some(())
        });
    }

    /// Waits until the program has compared its bytes after that time.
    fn has_same_bytes(&self, slot: &Slot, since_us: u64) {
        self.await_event(slot, "checked", since_us);
        for event in events(slot, "checked") {
            assert_eq!(event["wrongBlocks"], 0, "other bytes: {event}");
            assert!(event["bytes"].as_u64().unwrap() > 0);
        }
        count(&self.counts.compared);
    }

    /// Allocates a claim of high priority, as the controller does: a suspended share counts with nothing. Returns its number.
    fn allocate(&self, pair: &Pair) -> u32 {
        let _controller = self.controller.lock().unwrap();
        let of_gpu = self.pairs.iter().filter(|one| one.gpu == pair.gpu);
        let counted = of_gpu.map(|one| {
            let claim = self.live.api.claim(&name_of(one.number));
            let is_intended = claim["metadata"]["labels"]["gpu.drava.dev/suspend"] == "true";
            let has_low = !is_intended || !self.is_suspended(one);
            let has_high = one.owner.load(Ordering::SeqCst) % 2 == 1;
            u64::from(has_low) + u64::from(has_high)
        });
        let counted = counted.sum::<u64>() * MEMORY_MIB;
        assert!(
            counted + MEMORY_MIB <= ALLOCATABLE_MIB,
            "{counted} MiB of GPU {} are claimed",
            pair.gpu
        );
        let high = self.next_high.fetch_add(1, Ordering::Relaxed);
        let high_claim = claim(high, &[Share(pair.gpu, MEMORY, "0")]);
        self.live.api.put_claim(&high_claim);
        pair.owner.fetch_add(1, Ordering::SeqCst);
        high
    }

    /// Ends a claim of high priority with its pod.
    fn release(&self, pair: &Pair, high: u32, victim: Victim) {
        let ended = pair.high.lock().unwrap().take();
        drop(ended);
        self.live.unprepare_now(high);
        if victim == Victim::Kubelet {
            self.live.unprepare_now(high);
            count(&self.counts.kubelet_kills);
        }
        let _controller = self.controller.lock().unwrap();
        self.live.api.remove_claim(&name_of(high));
    }

    /// Low runs, high gets its memory, low goes on.
    fn round(&self, pair: &Pair, random: &mut Random) {
        let index = self.counts.begun.fetch_add(1, Ordering::Relaxed);
        let victim = VICTIMS[index % VICTIMS.len()];
        let controller = CONTROLLERS[index % CONTROLLERS.len()];
        let delay = Duration::from_millis(random.next() % LATEST_KILL_MS);
        let kill = || {
            std::thread::sleep(delay);
            match victim {
                Victim::Driver | Victim::DriverAtResume => self.kill_driver(pair),
                Victim::Low | Victim::LowAtResume => self.kill_low(pair),
                Victim::High | Victim::Kubelet => {}
            }
        };
        let is_at_resume = matches!(victim, Victim::DriverAtResume | Victim::LowAtResume);
        let high = std::thread::scope(|scope| {
            let _killed = (!is_at_resume).then(|| scope.spawn(kill));
            self.step(controller, random, || self.intend(pair, true));
            if controller == Controller::Withdraws {
                sleep_up_to(random, 1200);
                self.intend(pair, false);
                self.await_running(pair);
                self.intend(pair, true);
                count(&self.counts.controller_kills);
            }
            self.await_suspended(pair);
            let high = self.allocate(pair);
            let calls = if victim == Victim::Kubelet { 2 } else { 1 };
            (0..calls).for_each(|_| self.live.prepare_now(high));
            self.start_program(&pair.high, high, pair.gpu);
            self.await_event(&pair.high, "started", 0);
            if victim == Victim::High {
                sleep_up_to(random, 300);
                self.start_program(&pair.high, high, pair.gpu);
                count(&self.counts.high_kills);
            }
            self.has_same_bytes(&pair.high, 0);
            high
        });
        std::thread::scope(|scope| {
            let _killed = is_at_resume.then(|| scope.spawn(kill));
            self.release(pair, high, victim);
            // From here on the share counts again.
            pair.owner.fetch_add(1, Ordering::SeqCst);
            self.step(controller, random, || self.intend(pair, false));
            self.await_running(pair);
        });
        self.has_same_bytes(&pair.low, now_us());
        self.note_pauses(pair);
        let done = self.counts.rounds.fetch_add(1, Ordering::Relaxed) + 1;
        if done.is_multiple_of(100) {
            report(&format!("{done} rounds"));
        }
    }

    /// Starts a program. One that is in the slot is ended with SIGKILL before.
    fn start_program(&self, slot: &Slot, number: u32, gpu: u32) {
        let mut slot = slot.lock().unwrap();
        drop(slot.take());
        let program = self.live.start_program(number, gpu, &TRAIN);
        *slot = Some(Running { number, program });
    }

    /// Kills the program of low priority, whose container restarts.
    fn kill_low(&self, pair: &Pair) {
        self.note_pauses(pair);
        self.note_phase(pair);
        self.start_program(&pair.low, pair.number, pair.gpu);
        count(&self.counts.low_kills);
    }

    fn kill_driver(&self, pair: &Pair) {
        let killed = now_us();
        self.note_phase(pair);
        let is_killed = self.live.kill_driver(|| {
            let started = now_us();
            self.drivers.lock().unwrap().push((killed, started));
        });
        let kills = &self.counts.driver_kills;
        kills.fetch_add(usize::from(is_killed), Ordering::Relaxed);
    }

    /// Counts kills while the share is not running.
    fn note_phase(&self, pair: &Pair) {
        if !matches!(self.phase(pair), None | Some(Phase::Running)) {
            count(&self.counts.amid);
        }
    }

    fn phase(&self, pair: &Pair) -> Option<Phase> {
        let store = RecordStore::new(self.live.node.layout().claims());
        match store.load(&claim_ref(pair.number).uid).unwrap() {
            Loaded::Present(record) => {
                let suspension = record.devices[0].share().unwrap().suspension.as_ref();
                suspension.map(|recorded| recorded.phase)
            }
            other => panic!("the record is {other:?}"),
        }
    }

    /// Checks that the memory of a pair has one owner, and that its programs run.
    fn check(&self, pair: &Pair) {
        let before = pair.owner.load(Ordering::SeqCst);
        let phase = self.phase(pair);
        let uid = claim_ref(pair.number).uid;
        let share = ShareId::parse(&share_id(pair.number, 0)).unwrap();
        let page = Page::open(&self.live.node.layout().limits(&uid, &share)).unwrap();
        let makes_wait = page.is_suspended();
        let mut low_bytes = 0;
        let index = usize::try_from(pair.gpu).unwrap();
        for slot in [&pair.low, &pair.high] {
            let mut running = slot.lock().unwrap();
            let gpu = self.live.machine.gpu(index).unwrap();
            assert!(gpu.peak_bytes <= gpu.total_bytes - gpu.reserved_bytes);
            let most_used = &self.counts.most_used;
            most_used.fetch_max(gpu.peak_bytes, Ordering::Relaxed);
            let Some(Running { number, program }) = &mut *running else {
                continue;
            };
            if let Some(status) = program.process.try_wait().unwrap() {
                let text = fs::read_to_string(&program.output).unwrap();
                panic!("the program of claim-{number} ended, {status}: {text}");
            }
            if *number == pair.number {
                let pid = program.process.id();
                let mut processes = gpu.processes.iter();
                let low = processes.find(|process| process.pid == pid);
                low_bytes = low.map_or(0, |low| low.used_bytes);
            }
        }
        if before % 2 == 1 && before == pair.owner.load(Ordering::SeqCst) {
            let name = name_of(pair.number);
            assert_eq!(phase, Some(Phase::Suspended), "the record of {name}");
            assert!(makes_wait, "new processes of {name} do not wait");
            assert_eq!(low_bytes, 0, "memory of {name} has two owners");
        }
        count(&self.counts.checks);
    }

    /// Checks all pairs until the rounds are done.
    fn observe(&self) {
        let _guard = EndsOnPanic(&self.has_ended);
        while !self.has_ended.load(Ordering::Relaxed) {
            for pair in &self.pairs {
                self.check(pair);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Notes when claims are suspended.
    fn watch(&self) {
        let _guard = EndsOnPanic(&self.has_ended);
        while !self.has_ended.load(Ordering::Relaxed) {
            for pair in &self.pairs {
                let is_suspended = self.is_suspended(pair);
                let mut changes = pair.changes.lock().unwrap();
                if changes.last().is_some_and(|(_, last)| *last) != is_suspended {
                    changes.push((now_us(), is_suspended));
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Notes how long the program of low priority stood still without being suspended.
    fn note_pauses(&self, pair: &Pair) {
        let drivers = self.drivers.lock().unwrap();
        let changes = pair.changes.lock().unwrap();
        let mut locked = pair.locked.lock().unwrap();
        for pause in events(&pair.low, "pause") {
            let (from, until) = (pause["fromUs"].as_u64().unwrap(), at_us(&pause));
            if until <= locked.noted_us {
                continue;
            }
            locked.noted_us = until;
            for (begun, until) in locked_parts(&changes, from, until) {
                // Without the node driver no component can unlock.
                let killed = drivers.iter().filter(|(killed, _)| *killed < until);
                let back = killed.map(|(_, started)| *started).max().unwrap_or(0);
                let length = until.saturating_sub(begun.max(back));
                locked.longest_us = locked.longest_us.max(length);
                if length > MOST_LOCKED_US {
                    let line = format!("claim-{}: {length} µs since {begun}", pair.number);
                    locked.too_long.push(line);
                }
            }
        }
    }

    fn run_rounds(&self, pair: &Pair, mut random: Random) {
        let _guard = EndsOnPanic(&self.has_ended);
        self.await_event(&pair.low, "started", 0);
        while self.counts.begun.load(Ordering::Relaxed) < self.rounds {
            self.round(pair, &mut random);
        }
    }
}

#[test]
fn names_locked_parts_of_pause() {
    let changes = [(130, true), (170, false), (400, true)];
    assert_eq!(
        locked_parts(&changes[..2], 100, 200),
        [(100, 130), (170, 200)]
    );
    let length = |(begun, until): (u64, u64)| until - begun;
    let within = locked_parts(&changes[..2], 140, 160);
    assert_eq!(within.into_iter().map(length).sum::<u64>(), 0);
    let after = locked_parts(&changes, 200, 300);
    assert_eq!(after.into_iter().map(length).sum::<u64>(), 100);
}

#[test]
fn suspended_shares_survive_kills() {
    if lacks_device_files() {
        return;
    }
    in_mount_namespace(TEST, || {
        let seed = number("DRAVA_SUSPEND_SEED");
        let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 0x5eed);
        let measured = number("DRAVA_SUSPEND_ROUNDS");
        let rounds = measured.map_or(ROUNDS, |all| all.try_into().unwrap());
        report(&format!("DRAVA_SUSPEND_SEED={seed}"));
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let world = runtime.block_on(World::start(rounds));
        run(&world, Random(seed), measured.is_some());
    });
}

fn run(world: &World, mut random: Random, is_measurement: bool) {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| world.observe());
        scope.spawn(|| world.watch());
        let pairs = world.pairs.iter().map(|pair| {
            let random = Random(random.next());
            scope.spawn(|| world.run_rounds(pair, random))
        });
        let pairs: Vec<_> = pairs.collect();
        let failed = pairs.into_iter().filter_map(|one| one.join().err()).count();
        world.has_ended.store(true, Ordering::Relaxed);
        assert_eq!(failed, 0, "shares that failed");
    });
    let killed = world.live.api.events().into_iter();
    let killed = killed.filter(|(reason, _)| reason == "RestoreFailed");
    assert_eq!(
        killed.collect::<Vec<_>>(),
        [],
        "the node driver killed programs"
    );
    let counts = &world.counts;
    let of = |count: &AtomicUsize| count.load(Ordering::Relaxed);
    let locked: Vec<_> = world
        .pairs
        .iter()
        .map(|pair| pair.locked.lock().unwrap())
        .collect();
    let longest = locked.iter().map(|locked| locked.longest_us).max();
    let too_long: Vec<&String> = locked.iter().flat_map(|locked| &locked.too_long).collect();
    report(&format!(
        "{} rounds in {:?}: kills: {} drivers, {} programs of low and {} of high priority, {} kubelets, {} controllers; {} of drivers and low programs \
         while the share was not running; {} suspensions tried again; bytes compared {} times; {} checks; at most {} MiB of a GPU used; \
         locked without being suspended for {:?} at most, {} times too long",
        of(&counts.rounds),
        begun.elapsed(),
        of(&counts.driver_kills),
        of(&counts.low_kills),
        of(&counts.high_kills),
        of(&counts.kubelet_kills),
        of(&counts.controller_kills),
        of(&counts.amid),
        of(&counts.retried),
        of(&counts.compared),
        of(&counts.checks),
        counts.most_used.load(Ordering::Relaxed) >> 20,
        Duration::from_micros(longest.unwrap_or(0)),
        too_long.len(),
    ));
    for count in [
        &counts.driver_kills,
        &counts.low_kills,
        &counts.high_kills,
        &counts.kubelet_kills,
        &counts.controller_kills,
        &counts.checks,
    ] {
        assert!(of(count) > 0, "an empty run");
    }
    assert!(longest > Some(0), "no pause was seen");
    if is_measurement {
        assert!(too_long.is_empty(), "{too_long:#?}");
    }
}
