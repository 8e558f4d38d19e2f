use std::collections::BTreeSet;

use clap::Parser;

use super::*;
use crate::node::options::{Options, UnhealthyEffect};

/// Answer of an NVIDIA driver that reports recovery actions.
const ANSWER: Observation = Observation::Answer(Answer {
    action: Sensor::Value(RecoveryAction::None),
    fabric: Sensor::Absent,
    fabric_health: Sensor::Absent,
    memory_repair: Sensor::Absent,
    energy_millijoules: Sensor::Absent,
});

/// A GPU under a clock that only tests advance.
struct Gpu {
    state: GpuState,
    rules: Rules,
    now: Instant,
}

impl Gpu {
    fn new() -> Self {
        Self::recorded([])
    }

    fn recorded<const N: usize>(faults: [(Scope, Fault); N]) -> Self {
        let now = Instant::now();
        Self {
            state: GpuState::new(faults, now),
            rules: Rules::default(),
            now,
        }
    }

    fn observe(&mut self, observation: &Observation) {
        self.state.observe(observation, &self.rules, self.now);
        self.state.expire(&self.rules, self.now);
    }

    fn xid(&mut self, number: u64) {
        self.observe(&Observation::Event(EventKind::Xid(number), Scope::Gpu));
    }

    fn action(&mut self, action: RecoveryAction) {
        self.observe(&Observation::Answer(Answer {
            action: Sensor::Value(action),
            ..Answer::default()
        }));
    }

    /// Answers with this counter of energy, mJ.
    fn energy(&mut self, millijoules: u64) {
        self.observe(&Observation::Answer(Answer {
            energy_millijoules: Sensor::Value(millijoules),
            ..Answer::default()
        }));
    }

    /// Answers every 5 s for this time, without the values that only newer NVIDIA drivers have.
    fn old_driver_for(&mut self, seconds: u64) {
        self.repeat_for(seconds, &Observation::Answer(Answer::default()));
    }

    /// Answers every 5 s for this time with this state of the fabric.
    fn fabric_for(&mut self, seconds: u64, fabric: FabricState) {
        let answer = Answer {
            fabric: Sensor::Value(fabric),
            ..Answer::default()
        };
        self.repeat_for(seconds, &Observation::Answer(answer));
    }

    /// Answers every 5 s for this time.
    fn answer_for(&mut self, seconds: u64) {
        self.repeat_for(seconds, &ANSWER);
    }

    /// Repeats an observation every 5 s for this time.
    fn repeat_for(&mut self, seconds: u64, observation: &Observation) {
        for _ in 0..seconds / 5 {
            self.silent_for(5);
            self.observe(observation);
        }
    }

    fn silent_for(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.state.expire(&self.rules, self.now);
    }

    fn health(&self) -> GpuHealth {
        self.state.health(&self.rules, self.now)
    }

    fn fault(&self) -> Option<String> {
        self.health().gpu.map(Fault::value)
    }
}

fn value(value: &str) -> Option<String> {
    Some(value.to_owned())
}

#[test]
fn ignores_errors_of_applications() {
    let mut gpu = Gpu::new();
    for xid in [13, 31, 43, 45, 63, 154] {
        gpu.xid(xid);
        assert!(gpu.health().is_healthy(), "{xid}");
    }
    gpu.observe(&Observation::Event(EventKind::MigConfigChange, Scope::Gpu));
    assert!(gpu.health().is_healthy());
}

#[test]
fn recovers_after_window_without_fatal_event() {
    let mut gpu = Gpu::new();
    gpu.xid(48);
    gpu.answer_for(300);
    // A later error restarts the window; the first remains the cause.
    gpu.xid(95);
    gpu.answer_for(595);
    assert_eq!(gpu.fault(), value("xid-48"));
    gpu.answer_for(5);
    assert_eq!(gpu.fault(), None);
}

#[test]
fn does_not_recover_without_answers() {
    let mut gpu = Gpu::new();
    gpu.xid(119);
    gpu.silent_for(3600);
    assert_eq!(gpu.fault(), value("not-responding"));
    gpu.observe(&ANSWER);
    assert_eq!(gpu.fault(), value("xid-119"), "a hung GPU was not reset");
    gpu.answer_for(595);
    assert_eq!(gpu.fault(), value("xid-119"));
    gpu.answer_for(5);
    assert_eq!(gpu.fault(), None);
}

#[test]
fn recovers_when_lost_gpu_returns() {
    let mut gpu = Gpu::new();
    gpu.xid(79);
    assert_eq!(gpu.fault(), value("xid-79"));
    gpu.observe(&Observation::Refusal(Status::GpuLost));
    assert_eq!(gpu.fault(), value("lost"));
    gpu.silent_for(3600);
    assert_eq!(gpu.fault(), value("lost"));
    gpu.observe(&ANSWER);
    assert_eq!(gpu.fault(), None);
}

#[test]
fn follows_recovery_action_of_nvidia_driver() {
    let mut gpu = Gpu::new();
    gpu.action(RecoveryAction::None);
    gpu.xid(95);
    gpu.action(RecoveryAction::GpuReset);
    assert_eq!(gpu.fault(), value("xid-95"));
    for _ in 0..1000 {
        gpu.silent_for(5);
        gpu.action(RecoveryAction::GpuReset);
    }
    assert_eq!(gpu.fault(), value("xid-95"), "no recovery by time alone");
    gpu.action(RecoveryAction::None);
    assert_eq!(gpu.fault(), None);

    gpu.action(RecoveryAction::NodeReboot);
    assert_eq!(gpu.fault(), value("needs-node-reboot"));
    gpu.observe(&Observation::Event(
        EventKind::RecoveryAction(RecoveryAction::None),
        Scope::Gpu,
    ));
    assert_eq!(gpu.fault(), None);
    gpu.observe(&Observation::Refusal(Status::ResetRequired));
    assert_eq!(gpu.fault(), value("needs-gpu-reset"));
}

#[test]
fn marks_silent_gpu_after_limit() {
    let mut gpu = Gpu::new();
    gpu.silent_for(30);
    assert_eq!(gpu.fault(), None);
    gpu.silent_for(1);
    assert_eq!(gpu.fault(), value("not-responding"));
    gpu.observe(&Observation::Refusal(Status::NotSupported));
    assert_eq!(gpu.fault(), None, "a missing feature is an answer");
    gpu.observe(&Observation::Missing);
    assert_eq!(gpu.fault(), value("lost"));
    gpu.observe(&Observation::Refusal(Status::NotSupported));
    assert_eq!(gpu.fault(), None, "also after a loss");
    gpu.silent_for(20);
    gpu.state.interrupt(gpu.now);
    gpu.silent_for(20);
    assert_eq!(gpu.fault(), None, "NVML as a whole was not available");
    gpu.xid(48);
    gpu.answer_for(400);
    gpu.observe(&Observation::Refusal(Status::DriverNotLoaded));
    gpu.answer_for(595);
    assert_eq!(gpu.fault(), value("xid-48"), "the window starts again");
    gpu.answer_for(5);
    assert_eq!(gpu.fault(), None);
}

#[test]
fn needs_reset_where_driver_reports_no_recovery_action() {
    for xid in [48, 62, 95, 119] {
        let mut gpu = Gpu::new();
        gpu.xid(xid);
        gpu.old_driver_for(7200);
        assert_eq!(
            gpu.fault(),
            value(&format!("xid-{xid}")),
            "time is no reset"
        );
        // Also of another instance of the driver.
        let mut gpu = Gpu::recorded([(Scope::Gpu, Fault::Xid(xid))]);
        gpu.old_driver_for(7200);
        assert_eq!(gpu.fault(), value(&format!("xid-{xid}")));
        // Its counter of energy begins again with a reset.
        for energy in [7_000_000, 7_100_000, 7_100_000] {
            gpu.energy(energy);
            gpu.observe(&Observation::Refusal(Status::DriverNotLoaded));
            assert_eq!(gpu.fault(), value(&format!("xid-{xid}")), "not yet reset");
        }
        gpu.energy(100_000);
        assert_eq!(gpu.fault(), None);
    }
    let mut gpu = Gpu::new();
    gpu.rules.xids.fatal = BTreeSet::from([31]);
    gpu.xid(31);
    gpu.old_driver_for(605);
    assert_eq!(gpu.fault(), None, "NVIDIA requires no reset after this XID");
    gpu.observe(&Observation::Event(EventKind::DoubleBitEcc, Scope::Gpu));
    gpu.old_driver_for(7200);
    assert_eq!(gpu.fault(), value("ecc-double-bit"));
    gpu.observe(&Observation::Missing);
    gpu.old_driver_for(5);
    assert_eq!(gpu.fault(), None);
}

#[test]
fn waits_two_minutes_for_fabric() {
    for fabric in [
        FabricState::NotStarted,
        FabricState::InProgress,
        FabricState::Failed(999),
    ] {
        let mut gpu = Gpu::new();
        gpu.fabric_for(120, fabric);
        assert_eq!(gpu.fault(), None, "the node has just booted");
        gpu.fabric_for(5, fabric);
        assert_eq!(gpu.fault(), value("fabric-not-ready"));
        gpu.fabric_for(3600, fabric);
        assert_eq!(gpu.fault(), value("fabric-not-ready"));
        gpu.fabric_for(5, FabricState::Completed);
        assert_eq!(gpu.fault(), None);
    }
    // Without NVSwitch, alone, and before Hopper NVML reports no fabric.
    let mut gpu = Gpu::new();
    gpu.old_driver_for(3600);
    assert_eq!(gpu.fault(), None);
}

#[test]
fn reports_memory_repairs() {
    let answer = |is_pending, has_failed| {
        Observation::Answer(Answer {
            memory_repair: Sensor::Value(MemoryRepair {
                is_pending,
                has_failed,
            }),
            ..Answer::default()
        })
    };
    let mut gpu = Gpu::new();
    gpu.observe(&answer(true, false));
    assert!(gpu.health().is_healthy());
    let pending = BTreeSet::from([Degradation::MemoryRepairPending]);
    assert_eq!(gpu.health().degradations, pending);
    // At the first answer after a start of the driver too.
    gpu.observe(&answer(false, true));
    assert_eq!(gpu.fault(), value("memory-repair-failed"));
    assert!(gpu.health().degradations.is_empty());
}

#[test]
fn unhealthy_fabric_degrades_gpu() {
    let answer = |fabric_health| {
        Observation::Answer(Answer {
            fabric: Sensor::Value(FabricState::Completed),
            fabric_health,
            ..Answer::default()
        })
    };
    let health = |mask| Sensor::Value(FabricHealth { mask, summary: 0 });
    let mut gpu = Gpu::new();
    gpu.observe(&answer(health(16)));
    assert!(gpu.health().is_healthy());
    let route = BTreeSet::from([Degradation::Fabric(FabricDefect::RouteUnhealthy)]);
    assert_eq!(gpu.health().degradations, route);
    gpu.observe(&answer(Sensor::Failed(Status::Timeout)));
    assert_eq!(
        gpu.health().degradations,
        route,
        "a failed query withdraws nothing"
    );
    gpu.observe(&answer(health(32)));
    assert!(gpu.health().degradations.is_empty());
}

#[test]
fn failed_query_withdraws_nothing() {
    let silent = Observation::Answer(Answer {
        action: Sensor::Failed(Status::Timeout),
        fabric: Sensor::Failed(Status::Timeout),
        fabric_health: Sensor::Failed(Status::Timeout),
        memory_repair: Sensor::Failed(Status::Timeout),
        energy_millijoules: Sensor::Failed(Status::Timeout),
    });
    let mut gpu = Gpu::new();
    gpu.xid(95);
    gpu.action(RecoveryAction::GpuReset);
    gpu.observe(&silent);
    gpu.action(RecoveryAction::GpuReset);
    assert_eq!(gpu.fault(), value("xid-95"), "the action was not withdrawn");
    gpu.action(RecoveryAction::None);
    gpu.xid(95);
    gpu.repeat_for(7200, &silent);
    assert_eq!(gpu.fault(), value("xid-95"), "an action may be requested");

    let mut gpu = Gpu::new();
    gpu.fabric_for(60, FabricState::NotStarted);
    gpu.repeat_for(65, &silent);
    assert_eq!(gpu.fault(), value("fabric-not-ready"));

    let mut gpu = Gpu::new();
    gpu.observe(&Observation::Answer(Answer {
        memory_repair: Sensor::Value(MemoryRepair {
            is_pending: true,
            has_failed: true,
        }),
        ..Answer::default()
    }));
    gpu.observe(&silent);
    assert_eq!(gpu.fault(), value("memory-repair-failed"));
    gpu.observe(&Observation::Missing);
    gpu.observe(&silent);
    assert_eq!(gpu.fault(), None, "the GPU was gone and answers");
}

#[test]
fn unknown_xid_leaves_gpu_healthy() {
    let mut gpu = Gpu::new();
    gpu.xid(173);
    assert!(gpu.health().is_healthy());
    let unknown = BTreeSet::from([Degradation::UnknownXid(173)]);
    assert_eq!(gpu.health().degradations, unknown);
    gpu.answer_for(605);
    assert!(gpu.health().degradations.is_empty());
}

#[test]
fn keeps_recorded_fault_for_a_window() {
    let mut gpu = Gpu::recorded([(Scope::Gpu, Fault::Xid(79))]);
    assert_eq!(gpu.fault(), value("xid-79"));
    let recorded: Vec<_> = gpu.state.recorded().collect();
    assert_eq!(recorded, [(Scope::Gpu, Fault::Xid(79))]);
    gpu.answer_for(595);
    assert_eq!(gpu.fault(), value("xid-79"));
    gpu.answer_for(5);
    assert!(gpu.health().is_healthy() && gpu.state.recorded().next().is_none());
}

#[test]
fn confines_fault_of_instance_to_its_slices() {
    let slices = |start, size| Placement { start, size };
    let mut gpu = Gpu::new();
    let scope = Scope::Slices(slices(2, 2));
    gpu.observe(&Observation::Event(EventKind::Xid(95), scope));
    let health = gpu.health();
    assert_eq!(health.gpu, None);
    let of = |start, size| health.of_device(Some(slices(start, size)));
    for (start, size) in [(2, 2), (3, 1), (0, 4), (0, 8)] {
        assert_eq!(of(start, size), Some(Fault::Xid(95)), "{start}+{size}");
    }
    for (start, size) in [(0, 2), (4, 4), (1, 1)] {
        assert_eq!(of(start, size), None, "{start}+{size}");
    }
    assert_eq!(health.of_device(None), Some(Fault::Xid(95)), "the whole");
    // A GPU that left the bus takes its instances along.
    gpu.observe(&Observation::Event(EventKind::Xid(79), scope));
    assert_eq!(
        gpu.health().of_device(Some(slices(4, 4))),
        Some(Fault::Xid(79))
    );
}

#[test]
fn applies_overrides_of_xid_classes() {
    let mut gpu = Gpu::new();
    gpu.rules.xids = XidPolicy {
        ignored: BTreeSet::from([79]),
        fatal: BTreeSet::from([31]),
    };
    gpu.xid(79);
    assert_eq!(gpu.fault(), None);
    gpu.xid(31);
    assert_eq!(gpu.fault(), value("xid-31"));
}

#[test]
fn values_are_valid_taint_values() {
    let faults = [
        Fault::Lost,
        Fault::NotResponding,
        Fault::Xid(u64::MAX),
        Fault::DoubleBitEcc,
        Fault::Unavailable,
        Fault::FabricNotReady,
        Fault::MemoryRepairFailed,
        Fault::GpuReset,
        Fault::NodeReboot,
        Fault::DrainP2p,
        Fault::DrainAndReset,
        Fault::OtherAction(u64::MAX),
    ];
    for fault in faults {
        let value = fault.value();
        let is_valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        assert!(value.len() <= 63 && value.chars().all(is_valid), "{value}");
    }
}

#[test]
fn parses_rules_of_health() {
    let parse = |options: &[&str]| {
        let all = ["drava-dra-driver", "--node-name", "a"].iter();
        Options::try_parse_from(all.chain(options)).map(|options| options.health)
    };
    let default = parse(&[]).unwrap();
    assert_eq!(Rules::from(&default), Rules::default());
    assert_eq!(default.unhealthy_effect, UnhealthyEffect::NoSchedule);
    let set = parse(&[
        "--xid-ignore=74,119",
        "--xid-fatal=31",
        "--health-recovery-window=90s",
        "--unhealthy-effect=NoExecute",
    ]);
    let set = set.unwrap();
    assert_eq!(set.unhealthy_effect.as_str(), "NoExecute");
    let rules = Rules::from(&set);
    assert_eq!(rules.recovery_window, Duration::from_secs(90));
    assert!(rules.xids.class(31).is_fatal() && !rules.xids.class(74).is_fatal());
    for bad in ["10", "m", "1d", "-1s", "99999999999999999999s"] {
        let option = format!("--health-recovery-window={bad}");
        let error = parse(&[&option]).unwrap_err();
        assert!(
            error.to_string().contains("90s, 10m or 1h"),
            "{bad:?}: {error}"
        );
    }
}
