//! Deaths after every single step: what the dead held is there for the living. Deaths at any moment: `storm.rs`.

use drava_vgpu_abi::Limits;

use crate::interposer;
use crate::subject::{CARDS, CONTEXT_BYTES, Container, MIB};

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
