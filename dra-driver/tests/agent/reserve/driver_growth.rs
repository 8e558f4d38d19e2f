//! Memory beyond a limit by libcuda itself, measured: programs run under the estimate with which the driver prepares
//! shares, on every machine.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use drava_api::config::Enforcement;
use drava_dra_driver::agent::Agent;
use drava_dra_driver::gpus::capacity::driver_reserve_bytes;
use drava_vgpu_abi::Limits;
use gpu_node::Node;
use gpu_tenants::library;
use serde_json::json;
use simulator_machine::description::{BUNDLED, MachineDescription};
use simulator_machine::testing::Machine;
use tokio_util::sync::CancellationToken;

use crate::escape::Escape;
use crate::measurements::report;
use crate::node::{GIB, MIB};

/// Memory beyond a limit that libcuda may take for itself (`docs/results/README.md`).
const MOST_BYTES: u64 = 64 * MIB;

/// A program, a loader of its data, and a monitor.
const PROCESSES: usize = 3;

/// Calls of each process before the share is full: heap and stacks above their defaults, the first kernels, and one whose
/// local memory is the stack.
const START: [&str; 5] = [
    "limit 2 67108864",
    "limit 0 2048",
    "kernel noop",
    "kernel noop",
    "kernel local_2048",
];

/// Modules that each process loads lazily in the full share: those of an optimizer, of checkpoints and of an evaluation.
const LATER: usize = 8;

pub(super) const OUT_OF_MEMORY: i32 = 2;

/// Returns the program of `driver_growth.c`, compiled on the first call.
pub(super) fn program() -> &'static PathBuf {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("driver_growth");
        let source = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/agent/reserve/driver_growth.c"
        );
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"]);
        let status = cc.arg(&program).arg(source).arg("-ldl").status();
        assert!(status.unwrap().success());
        program
    })
}

/// Fills a share and lets libcuda allocate more. Returns the overshoot at its peak.
fn overshoot_bytes(name: &str, yaml: &str) -> u64 {
    let machine = Machine::start(yaml).unwrap();
    let switches = MachineDescription::parse(yaml).unwrap().nvswitches;
    let _fabric_manager = switches.map(|_| machine.start_fabric_manager().unwrap());
    let root = tempfile::tempdir().unwrap();
    let node = Node::create(root.path()).unwrap();
    let mut config = node.config(machine.root());
    let inventory = (config.open)().unwrap().inventory().unwrap();
    let gpu = &inventory.gpus[0];
    let estimate = driver_reserve_bytes(gpu);
    config.estimate = Arc::new(move |_| Some(estimate));
    let limit = 8 * GIB;
    let limits = Limits {
        driver_reserve_bytes: estimate,
        ..Limits::memory(limit)
    };
    let share = [(gpu.uuid.as_str(), 1)];
    node.prepare(1, &share, &limits, Enforcement::Report)
        .unwrap();
    let mut processes = [(); PROCESSES].map(|()| {
        let mut command = machine.command(program());
        command
            .env("LD_PRELOAD", library::shipped().unwrap())
            .env("DRAVA_RUN_DIR", node.container(1));
        let mut process = Escape::start(&mut command);
        node.add_process(process.pid(), 1).unwrap();
        assert_eq!(process.read_result(), 0, "{name}");
        process
    });
    let stop = CancellationToken::new();
    std::thread::scope(|scope| {
        let stopped = stop.clone();
        scope.spawn(move || Agent::new(config).run(&stopped, |_| {}));
        let _stop = stop.drop_guard();
        for process in &mut processes {
            for call in START {
                assert_eq!(process.send(call), 0, "{name}: {call}");
            }
        }
        for step in [64 * MIB, 2 * MIB] {
            let result = processes[0].send(&format!("fill {step}"));
            assert_eq!(result, OUT_OF_MEMORY, "{name}");
        }
        for process in &mut processes {
            for _ in 0..LATER {
                assert_eq!(process.send("kernel noop"), 0, "{name}");
            }
        }
        let overshoot = machine.gpu(0).unwrap().peak_bytes.saturating_sub(limit);
        report(&json!({
            "figure": "driverOvershoot", "machine": name, "contexts": PROCESSES,
            "estimateBytes": estimate, "overshootBytes": overshoot,
        }));
        overshoot
    })
}

#[test]
fn exceeds_limit_by_driver_within_allowance_on_every_machine() {
    for (name, yaml) in BUNDLED {
        let machine = MachineDescription::parse(yaml).unwrap();
        // A GPU without memory of its own has no shares.
        if machine
            .models
            .values()
            .any(|model| !model.memory.reported_by_nvml)
        {
            continue;
        }
        let overshoot = overshoot_bytes(name, yaml);
        assert!(overshoot <= MOST_BYTES, "{name}: {overshoot} bytes");
    }
}
