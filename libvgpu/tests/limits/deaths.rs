//! Deaths at any moment: what the dead held is there for the living, and the limit holds all the while.

use std::os::fd::AsRawFd;

use drava_vgpu_abi::Limits;

use crate::interposer;
use crate::subject::{CARDS, CONTEXT_BYTES, Container, GIB, MIB, Subject};

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

const PROCESSES: u64 = 6;

/// A process that takes and returns at random until it dies after `steps` steps on the region.
fn churning(container: &Container, seed: u64, steps: u64) -> Subject {
    let mut process = container.start_with("dlsym", |command| {
        command
            .env("LD_PRELOAD", interposer::library_with_kill_points())
            .env("DRAVA_KILL_AFTER", steps.to_string());
    });
    process.init(0);
    process.ok(&format!("churn {seed} {}", 40 * MIB));
    process
}

/// What the machine says that processes hold which are alive after it said so. The memory of the dead is not
/// counted: it may have been taken by others before the machine noticed the death.
fn taken_by_the_living(container: &Container) -> u64 {
    let card = container.machine.card(0).unwrap();
    let region = std::fs::File::options()
        .read(true)
        .write(true)
        .open(container.region("share"))
        .unwrap();
    let processes = container.processes_of("share");
    card.processes
        .iter()
        .filter(|taken| {
            processes.iter().any(|process| {
                process.owner.pid == taken.pid && is_locked(&region, process.slot.offset())
            })
        })
        .map(|taken| taken.used_bytes)
        .sum()
}

/// Whether a process holds the lock of the slot at that offset.
fn is_locked(region: &std::fs::File, offset: usize) -> bool {
    // SAFETY: all zeroes is a `struct flock`.
    let mut range = unsafe { std::mem::zeroed::<libc::flock>() };
    range.l_type = libc::F_WRLCK.try_into().unwrap();
    range.l_start = offset.try_into().unwrap();
    range.l_len = 1;
    // SAFETY: fcntl reads and writes one `struct flock`.
    let result = unsafe { libc::fcntl(region.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) };
    assert_eq!(result, 0);
    i32::from(range.l_type) != libc::F_UNLCK
}

/// How many processes die in the storm; more for a long run.
fn rounds() -> u64 {
    std::env::var("DRAVA_STORM_ROUNDS").map_or(40, |rounds| rounds.parse().unwrap())
}

#[test]
fn under_a_storm_of_deaths_the_limit_holds_and_nothing_leaks() {
    let limit = 256 * MIB;
    let container = Container::with_memory(limit);
    let mut random = Random(7);
    // Past the steps of finding a slot, into the middle of an allocation, a release or a rebuild.
    let mut start = |seed| churning(&container, seed, 200 + random.below(800));
    let mut processes: Vec<Subject> = (0..PROCESSES).map(&mut start).collect();
    for round in 0..rounds() {
        // Small requests share blocks, so each context may have one block that is not full.
        let most = limit + PROCESSES * (CONTEXT_BYTES + 2 * MIB);
        let taken = taken_by_the_living(&container);
        assert!(
            taken <= most,
            "round {round}: {taken} bytes are taken, {most} are allowed"
        );
        processes.remove(0).wait();
        processes.push(start(100 + round));
    }
    for process in processes {
        process.kill();
    }
    container.wait_until_taken(0);
    let mut last = container.process();
    assert_eq!(last.memory_info(), (limit, limit));
    last.alloc(limit);
    assert_eq!(container.taken(), limit + CONTEXT_BYTES);
}

#[test]
fn random_work_of_many_processes_ends_with_nothing_taken() {
    let limit = GIB / 2;
    let container = Container::with_memory(limit);
    let mut processes: Vec<Subject> = (0..4).map(|_| container.process()).collect();
    for (seed, process) in processes.iter_mut().enumerate() {
        process.send(&format!("churn {seed} {} 600", 40 * MIB));
        assert_eq!(process.hear(), "0");
    }
    for process in &mut processes {
        assert_eq!(process.hear(), "0");
    }
    for process in &mut processes {
        assert_eq!(process.memory_info(), (limit, limit));
    }
    assert_eq!(container.taken(), 4 * CONTEXT_BYTES);
}

/// What a mortal process does, one step on the region after the other.
const LIFE: [&str; 9] = [
    "init 0",
    "alloc 67108864",
    "alloc 33554432",
    "free 1",
    "meminfo",
    "alloc 134217728",
    "pitch 100000 100",
    "free 2",
    "releaseprimary 0",
];

#[test]
fn a_death_after_any_single_step_costs_nobody_anything() {
    let limit = 256 * MIB;
    let container = Container::new();
    let limits = Limits {
        driver_reserve_bytes: MIB,
        ..Limits::memory(limit)
    };
    container.add_share("share", CARDS[0], &limits);
    let mut survivor = container.process();
    survivor.alloc(100 * MIB);
    let left = limit - 101 * MIB;
    for steps in 1.. {
        let mut mortal = container.start_with("dlsym", |command| {
            command
                .env("LD_PRELOAD", interposer::library_with_kill_points())
                .env("DRAVA_KILL_AFTER", steps.to_string());
        });
        let has_survived = LIFE.iter().all(|command| mortal.try_say(command).is_some());
        mortal.kill();
        container.wait_until_taken(100 * MIB + CONTEXT_BYTES);
        assert_eq!(survivor.memory_info().0, left, "after step {steps}");
        let rest = survivor.alloc(left / (2 * MIB) * (2 * MIB));
        survivor.refused(&format!("alloc {}", 2 * MIB));
        survivor.ok(&format!("free {rest}"));
        if has_survived {
            assert!(steps > 50, "only {steps} steps were taken");
            break;
        }
    }
}
