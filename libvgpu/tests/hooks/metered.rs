//! Hooks that meter: a launch through each function is counted once.

use std::collections::BTreeSet;

use drava_vgpu_abi::{ComputePolicy, Cores, Limits};
use gpu_tenants::slow_memory;
use simulator_machine::testing::Machine;

use crate::test_process::{Container, GPUS, TestProcess};
use crate::{base, classes, hooks_of, start};

/// Metered functions that launch nothing themselves; the tests in this file name them.
const NOT_LAUNCHING: [&str; 22] = [
    "cuGraphInstantiate",
    "cuGraphInstantiate_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphInstantiateWithParams",
    "cuGraphExecDestroy",
    // They invalidate the known cost of a graph.
    "cuGraphExecKernelNodeSetParams",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphExecNodeSetParams",
    "cuGraphExecMemcpyNodeSetParams",
    "cuGraphExecMemsetNodeSetParams",
    "cuGraphExecChildGraphNodeSetParams",
    "cuGraphNodeSetEnabled",
    "cuGraphExecUpdate",
    "cuGraphExecUpdate_v2",
    "cuStreamBeginCapture",
    "cuStreamBeginCapture_v2",
    "cuStreamBeginCaptureToGraph",
    "cuStreamEndCapture",
    "cuStreamDestroy",
    "cuStreamDestroy_v2",
    // In 64-bit processes the driver rejects these functions.
    "cuMemcpyDtoD",
    "cuMemcpyDtoDAsync",
];

/// A container with metering and ample GPU time, and a process that is ready to launch.
fn metered(container: Container) -> (Container, TestProcess) {
    let limits = Limits {
        memory_limit_bytes: None,
        cores: Cores::new(90).unwrap(),
        compute_policy: ComputePolicy::Fixed,
        ..Limits::memory(0)
    };
    container.add_share("share", GPUS[0], &limits);
    let mut process = start(&container);
    process.ok("prepare");
    (container, process)
}

/// A process whose launches are counted.
///
/// A thread reports its launches when it requests more time, which is seldom. So the counter launches ever new kinds
/// until one of them requests time. That launch and the previous request are counted the next time.
struct Counter {
    container: Container,
    process: TestProcess,
    counted: u64,
}

impl Counter {
    fn new() -> Self {
        Self::on(Container::new())
    }

    fn on(container: Container) -> Self {
        let (container, process) = metered(container);
        let mut counter = Self {
            container,
            process,
            counted: 0,
        };
        counter.of(&[]);
        counter
    }

    fn in_region(&self) -> u64 {
        self.container.processes_of("share")[0].launches
    }

    fn gpu_time_us(&self) -> u64 {
        self.container.processes_of("share")[0].gpu_time_us
    }

    /// Returns the number of counted launches of commands, which must succeed.
    fn of(&mut self, commands: &[&str]) -> u64 {
        for command in commands {
            assert_eq!(self.process.query(command)[0], 0, "{command}");
        }
        let before = self.in_region();
        let mut launches = 0;
        while self.in_region() == before {
            assert!(launches < 10_000, "no request for more time");
            self.process.ok("flush");
            launches += 1;
        }
        let counted = self.in_region();
        let sum = counted - self.counted;
        self.counted = counted;
        // The previous request substitutes for the current one.
        sum.saturating_sub(launches)
    }
}

#[test]
fn covers_every_launching_function() {
    let (_container, mut process) = metered(Container::new());
    let answer = process.request("rows");
    let rows: BTreeSet<&str> = answer.split(' ').skip(1).collect();
    let classes = classes();
    let hooks = hooks_of("Cuda");
    let expected: BTreeSet<&str> = hooks
        .iter()
        .map(String::as_str)
        .filter(|name| {
            classes
                .get(base(name))
                .is_some_and(|class| class == "metered")
        })
        .filter(|name| !NOT_LAUNCHING.contains(&base(name)))
        .collect();
    assert_eq!(rows, expected);
}

#[test]
fn counts_each_launch_once_by_every_function() {
    let mut counter = Counter::new();
    let rows = counter.process.request("rows");
    for name in rows.split(' ').skip(1) {
        assert_eq!(counter.of(&[&format!("row {name}")]), 1, "{name}");
    }
    assert_eq!(counter.of(&[]), 0);
}

#[test]
fn counts_no_captured_launch() {
    let mut counter = Counter::new();
    for suffix in ["", "_ptsz"] {
        for begin in [
            "cuStreamBeginCapture",
            "cuStreamBeginCapture_v2",
            "cuStreamBeginCaptureToGraph",
        ] {
            let capture = format!("capture {begin}{suffix} cuStreamEndCapture{suffix}");
            assert_eq!(counter.of(&[&capture]), 0, "{begin}{suffix}");
            // Launches after the capture count again.
            assert_eq!(counter.of(&["row cuLaunchKernel"]), 1, "{begin}{suffix}");
        }
    }
}

#[test]
fn ends_capture_when_its_stream_is_destroyed() {
    let mut counter = Counter::new();
    for destroy in ["cuStreamDestroy", "cuStreamDestroy_v2"] {
        counter.of(&[&format!("destroystream {destroy}")]);
        assert_eq!(counter.of(&["row cuLaunchKernel"]), 1, "{destroy}");
    }
}

/// A graph with a known short duration is seldom sampled, so a change of its cost would be learned late.
#[test]
fn relearns_graph_cost_after_every_kind_of_change() {
    const MS: u64 = 100;
    let changes = [
        "cuGraphExecUpdate",
        "cuGraphExecUpdate_v2",
        "cuGraphExecKernelNodeSetParams",
        "cuGraphExecKernelNodeSetParams_v2",
        "cuGraphExecNodeSetParams",
        "cuGraphExecMemcpyNodeSetParams",
        "cuGraphExecMemsetNodeSetParams",
        "cuGraphExecChildGraphNodeSetParams",
        "cuGraphNodeSetEnabled",
    ];
    let machine = Machine::start(&slow_memory().unwrap()).unwrap();
    let mut counter = Counter::on(Container::on(machine));
    for change in changes {
        counter.of(&[&format!("learntimed {change} {}", MS * 1_000_000)]);
        counter.of(&[&format!("changetimed {change} {}", MS * 1_000_000)]);
        let before = counter.gpu_time_us();
        counter.of(&["launchtimed", "launchtimed"]);
        // A measurement is learned with the next request for time and shown with the one after.
        counter.of(&[]);
        counter.of(&[]);
        let counted = counter.gpu_time_us() - before;
        assert!(
            counted > 2 * MS * 1000 * 9 / 10,
            "{change}: {counted} µs counted for two launches of {MS} ms"
        );
    }
}
