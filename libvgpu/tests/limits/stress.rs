//! Stress test: eight processes allocate and free in every way, fork, create contexts, and are killed at random steps.
//! The GPU's physical ledger verifies the accounts, and its high-water mark the limit at every moment: no other process
//! uses the GPU, so the mark of the GPU is that of the share.
//!
//! All random choices follow from one seed, which a failure prints; the interleaving of the processes does not.
//! `DRAVA_STRESS_SEED` and `DRAVA_STRESS_OPERATIONS` select other runs, as `cargo xtask bench memory` does.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use drava_vgpu_abi::Limits;
use drava_vgpu_abi::snapshot::{ShareUsage, Snapshot};
use simulator_machine::control;
use simulator_machine::kernel::GpuStatus;
use simulator_machine::protocol::GpuIndex;

use crate::interposer;
use crate::test_process::{CONTEXT_BYTES, Container, GIB, GPUS, MIB, TestProcess};

const PROCESSES: u64 = 8;
/// Largest allocation, except those that exceed any limit.
const LARGEST_BYTES: u64 = 48 * MIB;
/// Room for a context of each process and a few more, and far less memory than the processes request.
const LIMIT: u64 = (PROCESSES + 3) * CONTEXT_BYTES + GIB;
/// Operations of each process in a round.
const ROUND: u64 = 250;

/// A small random generator, so that a failing run can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Statistics of a run.
#[derive(Default)]
struct Statistics {
    rounds: u64,
    /// Operations of processes that survived their round.
    operations: u64,
    granted: u64,
    denied: u64,
    deaths: u64,
    /// Rounds without deaths.
    exact_rounds: u64,
    /// Largest amount by which living processes exceeded the limit, however short.
    worst_overshoot_bytes: u64,
    /// Largest usage of living processes in the GPU's ledger, however short.
    highest_bytes: u64,
}

struct Stress {
    container: Container,
    seed: u64,
    /// The enabled operations, as `stress.c` names them.
    kinds: &'static str,
    random: Random,
    started: u64,
    processes: Vec<TestProcess>,
    statistics: Statistics,
}

impl Stress {
    fn new(seed: u64, kinds: &'static str) -> Self {
        let container = Container::new();
        let limits = Limits {
            driver_reserve_bytes: CONTEXT_BYTES,
            ..Limits::memory(LIMIT)
        };
        container.add_share("share", GPUS[0], &limits);
        Self {
            container,
            seed,
            kinds,
            random: Random(seed),
            started: 0,
            processes: Vec::new(),
            statistics: Statistics::default(),
        }
    }

    fn start_missing(&mut self) {
        while (self.processes.len() as u64) < PROCESSES {
            self.started += 1;
            // Up to a few rounds, in steps on the region.
            let steps = 300 + self.random.below(8_000);
            let mut command = self.container.command(interposer::stress());
            command
                .args(
                    [self.seed ^ (self.started << 32), LARGEST_BYTES, LIMIT].map(|n| n.to_string()),
                )
                .arg(self.kinds)
                .env("LD_PRELOAD", interposer::library_with_kill_points())
                .env("DRAVA_KILL_AFTER", steps.to_string());
            self.processes.push(TestProcess::spawn(command));
        }
    }

    /// Every fourth round frees everything.
    fn is_draining_round(&self) -> bool {
        self.statistics.rounds % 4 == 3
    }

    /// All processes run `ROUND` operations concurrently, one may be killed at a random moment; keeps the survivors.
    fn round(&mut self) {
        self.start_missing();
        let command = if self.is_draining_round() {
            "drain".to_owned()
        } else {
            format!("go {ROUND}")
        };
        for process in &mut self.processes {
            process.try_send(&command);
        }
        let victim = (self.random.below(4) == 0).then(|| {
            let index = usize::try_from(self.random.below(PROCESSES)).unwrap();
            let delay = Duration::from_micros(self.random.below(20_000));
            (self.processes[index].pid(), delay)
        });
        let processes = &mut self.processes;
        let answers: Vec<Option<String>> = std::thread::scope(|scope| {
            if let Some((pid, delay)) = victim {
                scope.spawn(move || {
                    std::thread::sleep(delay);
                    // SAFETY: a child that was not waited for.
                    unsafe { libc::kill(pid, libc::SIGKILL) };
                });
            }
            processes.iter_mut().map(TestProcess::try_receive).collect()
        });
        let before = std::mem::take(&mut self.processes);
        for (process, answer) in before.into_iter().zip(answers) {
            match answer {
                Some(answer) => {
                    self.note(&answer);
                    self.processes.push(process);
                }
                None => {
                    self.statistics.deaths += 1;
                    process.wait();
                }
            }
        }
    }

    fn note(&mut self, answer: &str) {
        let numbers: Vec<u64> = answer
            .strip_prefix("done ")
            .unwrap_or_else(|| panic!("seed {}: {answer}", self.seed))
            .split(' ')
            .map(|number| number.parse().unwrap())
            .collect();
        self.statistics.operations += numbers[3];
        self.statistics.granted += numbers[0];
        self.statistics.denied += numbers[1];
        assert_eq!(numbers[2], 0, "seed {}: see the errors above", self.seed);
    }

    /// Between rounds the account is within the limit and covers all used memory of the GPU. After everything is freed
    /// they are equal. (Before that, managed memory is only in the account.)
    fn check(&mut self) {
        let mut alive = self.reclaim();
        // A process that is killed while it reclaims leaves memory that the other processes must reclaim.
        while alive.len() < self.processes.len() {
            let is_alive = |process: &TestProcess| {
                let pid = u32::try_from(process.pid()).unwrap();
                alive.contains(&pid)
            };
            self.processes.retain(is_alive);
            alive = self.reclaim();
        }
        // Waits until the children of killed processes have exited.
        let gpu = self
            .container
            .machine
            .wait_for_gpu(0, |gpu| {
                gpu.processes.iter().all(|taken| alive.contains(&taken.pid))
            })
            .unwrap();
        let share = self.account();
        let (seed, round) = (self.seed, self.statistics.rounds);
        assert!(
            share.total_bytes <= LIMIT,
            "seed {seed}, round {round}: account {} bytes, limit {LIMIT}, ledger {}",
            share.total_bytes,
            gpu.used_bytes
        );
        assert!(
            gpu.used_bytes <= share.total_bytes,
            "seed {seed}, round {round}: ledger {} bytes, account {}",
            gpu.used_bytes,
            share.total_bytes
        );
        if self.is_draining_round() {
            assert_eq!(
                share.total_bytes, gpu.used_bytes,
                "seed {seed}, round {round}: account after everything is freed"
            );
        }
        self.check_peak(&gpu);
        self.statistics.rounds += 1;
    }

    /// Checks the ledger's high-water mark of the round. The memory of a killed process stays in the ledger until the GPU's
    /// driver detects its end, and another process may reclaim it before, so the mark may exceed the limit by what ended
    /// processes held. Nothing else is allowed: growth of a pool is reserved in the driver's chunks before the request.
    fn check_peak(&mut self, gpu: &GpuStatus) {
        let (seed, round) = (self.seed, self.statistics.rounds);
        let statistics = &mut self.statistics;
        let living = gpu.peak_bytes.saturating_sub(gpu.freed_at_exit_bytes);
        statistics.highest_bytes = statistics.highest_bytes.max(living);
        let overshoot = living.saturating_sub(LIMIT);
        statistics.worst_overshoot_bytes = statistics.worst_overshoot_bytes.max(overshoot);
        assert!(
            overshoot == 0,
            "seed {seed}, round {round}: {} bytes in the ledger, {} of them of ended processes, limit {LIMIT}",
            gpu.peak_bytes,
            gpu.freed_at_exit_bytes
        );
        statistics.exact_rounds += u64::from(gpu.freed_at_exit_bytes == 0);
        let reset = control::Command::ResetPeak { gpu: GpuIndex(0) };
        self.container.machine.control(&reset).unwrap();
    }

    /// Lets every process reclaim the memory of dead ones; returns the PIDs of the live ones.
    fn reclaim(&mut self) -> BTreeSet<u32> {
        let mut alive = BTreeSet::new();
        for process in &mut self.processes {
            process.try_send("free");
            if let Some(answer) = process.try_receive() {
                assert_eq!(answer, "free");
                alive.insert(u32::try_from(process.pid()).unwrap());
            }
        }
        alive
    }

    fn account(&self) -> ShareUsage {
        let region = std::fs::read(self.container.region("share")).unwrap();
        Snapshot::decode(&region).unwrap().share()
    }

    /// All memory is reclaimed after the last process ends.
    fn end(&mut self) {
        for process in self.processes.drain(..) {
            process.kill();
        }
        self.container.wait_for_ledger_bytes(0);
        let limits = [LIMIT - CONTEXT_BYTES, LIMIT];
        let mut last = self.container.process();
        assert_eq!(last.memory_info(), limits.into(), "seed {}", self.seed);
        let rest = limits[0] / (2 * MIB) * (2 * MIB);
        last.alloc(rest);
        assert_eq!(self.container.ledger_bytes(), CONTEXT_BYTES + rest);
    }
}

/// Default number of operations: some seconds on two cores.
const OPERATIONS: u64 = 50_000;

#[test]
fn holds_limit_and_reclaims_all_memory_under_stress() {
    run("all");
}

#[test]
fn holds_limit_under_pool_stress() {
    run("pools");
}

#[test]
fn holds_limit_at_every_moment_without_pools() {
    run("others");
}

/// Runs many operations of a kind.
fn run(kinds: &'static str) {
    let operations = setting("DRAVA_STRESS_OPERATIONS", OPERATIONS);
    let seed = setting("DRAVA_STRESS_SEED", 0x5eed);
    println!("seed {seed}");
    let started = Instant::now();
    let mut stress = Stress::new(seed, kinds);
    // The last round frees everything.
    while stress.statistics.operations < operations || !stress.statistics.rounds.is_multiple_of(4) {
        stress.round();
        stress.check();
    }
    stress.end();
    let statistics = &stress.statistics;
    let report = serde_json::json!({
        "figure": "stress",
        "kinds": kinds,
        "seed": seed,
        "processes": PROCESSES,
        "operations": statistics.operations,
        "rounds": statistics.rounds,
        "granted": statistics.granted,
        "refused": statistics.denied,
        "deaths": statistics.deaths,
        "limitBytes": LIMIT,
        "highestBytes": statistics.highest_bytes,
        "exactRounds": statistics.exact_rounds,
        "worstOvershootBytes": statistics.worst_overshoot_bytes,
        "seconds": started.elapsed().as_secs(),
    });
    crate::measurements::report(&report);
    // A run without denials and kills proves little.
    assert!(
        statistics.denied > statistics.rounds,
        "seed {seed}: {report}"
    );
    assert!(statistics.deaths > 0, "seed {seed}: {report}");
    // Otherwise the limit was never in danger.
    assert!(
        statistics.highest_bytes > LIMIT / 10 * 9,
        "seed {seed}: {report}"
    );
    // Rounds without deaths have no allowance.
    assert!(statistics.exact_rounds > 0, "seed {seed}: {report}");
}
