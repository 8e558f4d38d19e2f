//! An agent in virtual time, and processes that write usage regions as libvgpu does.

use std::fs::{File, OpenOptions};
use std::mem::offset_of;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use drava_dra_driver::agent::Agent;
use drava_dra_driver::agent::node::nvml_observer::{BusyProcesses, Observation, ObservedProcess};
use drava_dra_driver::node::process::ProcessInfo;
use drava_nvml::GpuUuid;
use drava_vgpu_abi::ledger::Owner;
use drava_vgpu_abi::region::{Header, REGION_ABI_VERSION, REGION_MAGIC, SLOTS_OFFSET, Slot};
use drava_vgpu_abi::{ComputePolicy, Cores, Limits};
use gpu_tenants::{TestBed, library};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use simulator_machine::description::H200X8;

use crate::node::{GIB, TestNode};

pub(crate) const SECOND_US: u64 = 1_000_000;
pub(crate) const STEP_US: u64 = 100_000;

/// An agent with a virtual clock and scripted NVML observations.
pub(crate) struct VirtualClockAgent {
    pub(crate) agent: Agent,
    pub(crate) node: TestNode,
    pub(crate) gpus: Vec<GpuUuid>,
    pub(crate) listed: Vec<(GpuUuid, ObservedProcess)>,
    pub(crate) now_us: u64,
    observed_us: u64,
}

impl VirtualClockAgent {
    /// Creates a node with eight GPUs and one claim per entry of `cores` on each GPU.
    pub(crate) fn new(cores: &[u32]) -> Self {
        let node =
            TestNode::on(TestBed::with_machine(library::shipped().unwrap(), H200X8).unwrap());
        let machine = node.test_bed.machine().status().unwrap();
        let claims = machine
            .gpus
            .iter()
            .flat_map(|gpu| cores.iter().map(move |cores| (gpu, *cores)));
        for (number, (gpu, cores)) in (0..).zip(claims) {
            let limits = Limits {
                cores: Cores::new(cores).unwrap(),
                compute_policy: ComputePolicy::Balance,
                ..Limits::memory(GIB)
            };
            node.prepare_on(&gpu.uuid, number, &limits);
        }
        Self::on(node)
    }

    /// Creates an agent on `node`.
    pub(crate) fn on(node: TestNode) -> Self {
        let machine = node.test_bed.machine().status().unwrap();
        let mut config = node.config();
        config.open = Arc::new(|| Err("the test provides the observations".to_owned()));
        Self {
            agent: Agent::new(config),
            node,
            gpus: machine
                .gpus
                .iter()
                .map(|gpu| GpuUuid::new(gpu.uuid.clone()))
                .collect(),
            listed: Vec::new(),
            now_us: 1000 * SECOND_US,
            observed_us: 0,
        }
    }

    /// Runs the agent for `duration_us` and returns the number of region reads.
    pub(crate) fn run(&mut self, duration_us: u64) -> u64 {
        let (before, end_us) = (self.agent.reads(), self.now_us + duration_us);
        while self.now_us < end_us {
            if self.now_us >= self.observed_us + SECOND_US {
                self.observed_us = self.now_us;
                for gpu in &self.gpus {
                    let on_gpu = self.listed.iter().filter(|(on, _)| on == gpu);
                    let observation = Observation {
                        gpu: gpu.clone(),
                        requested_us: self.now_us,
                        is_extra: false,
                        is_complete: true,
                        ending: Vec::new(),
                        processes: Some(on_gpu.map(|(_, listed)| listed.clone()).collect()),
                        busy: BusyProcesses::NotRead,
                    };
                    assert_eq!(self.agent.scan(self.now_us, &observation), []);
                }
            }
            assert_eq!(self.agent.poll(self.now_us), []);
            self.now_us = self.agent.next_us(self.now_us).min(end_us);
        }
        self.agent.reads() - before
    }
}

/// Takes the lock of a slot, which the process in it holds while it lives: until `region` is closed.
pub(crate) fn lock_slot(region: &File, slot: usize) {
    let range = libc::flock {
        l_type: libc::F_WRLCK.try_into().unwrap(),
        l_whence: libc::SEEK_SET.try_into().unwrap(),
        l_start: (SLOTS_OFFSET + slot * size_of::<Slot>())
            .try_into()
            .unwrap(),
        l_len: size_of::<Slot>().try_into().unwrap(),
        l_pid: 0,
    };
    fcntl(region, FcntlArg::F_OFD_SETLK(&range)).unwrap();
}

/// Writes a usage region as libvgpu does for one process.
pub(crate) struct FakeProcess {
    region: File,
    pid: u32,
}

impl FakeProcess {
    pub(crate) fn new(node: &TestNode, number: u32) -> Self {
        Self::at(&node.region(number))
    }

    pub(crate) fn at(region: &Path) -> Self {
        let region = OpenOptions::new().write(true).open(region).unwrap();
        lock_slot(&region, 0);
        let process = Self { region, pid: 7 };
        for (offset, value) in [
            (offset_of!(Header, magic), REGION_MAGIC),
            (offset_of!(Header, abi_version), REGION_ABI_VERSION),
            (offset_of!(Header, slots_in_use), 1),
            (SLOTS_OFFSET + offset_of!(Slot, pid), u64::from(process.pid)),
            (SLOTS_OFFSET + offset_of!(Slot, start_time), 1),
            (SLOTS_OFFSET + offset_of!(Slot, pid_namespace), 1),
            (SLOTS_OFFSET + offset_of!(Slot, state), 0x101),
        ] {
            process.write(offset, value);
        }
        process
    }

    pub(crate) fn write(&self, offset: usize, value: u64) {
        self.region
            .write_all_at(&value.to_ne_bytes(), offset as u64)
            .unwrap();
    }

    /// Notifies the agent as libvgpu does: by the times of the file.
    pub(crate) fn notify_agent(&self) {
        let now = std::time::SystemTime::now();
        let times = std::fs::FileTimes::new()
            .set_accessed(now)
            .set_modified(now);
        self.region.set_times(times).unwrap();
    }

    /// Frees the slot, as after a killed process.
    pub(crate) fn exit(&self) {
        self.write(SLOTS_OFFSET + offset_of!(Slot, state), 0x100);
    }

    /// Records a total GPU time of `gpu_time_us` and demand for more at `now_us`.
    pub(crate) fn record_usage(&self, now_us: u64, gpu_time_us: u64) {
        self.write(offset_of!(Header, last_demand_us), now_us);
        self.write(SLOTS_OFFSET + offset_of!(Slot, gpu_time_us), gpu_time_us);
        self.write(SLOTS_OFFSET + offset_of!(Slot, throttled_us), now_us);
    }

    /// Charges memory, of which `exported_bytes` may be open in other processes.
    pub(crate) fn charge(&self, bytes: u64, exported_bytes: u64) {
        self.write(offset_of!(Header, total), bytes);
        self.write(SLOTS_OFFSET + offset_of!(Slot, used_bytes), bytes);
        self.write(
            SLOTS_OFFSET + offset_of!(Slot, exported_bytes),
            exported_bytes,
        );
    }

    /// Ends the process, and leaves the lock of its slot to `command`, as to a forked child.
    pub(crate) fn leave_lock_to(self, command: &mut Command) {
        command.stdin(self.region);
    }

    /// Returns the entry of the process in NVML's list.
    pub(crate) fn listed(&self, number: u32) -> ObservedProcess {
        ObservedProcess {
            pid: 100_000 + number,
            used_bytes: Some(0),
            info: ProcessInfo {
                owner: Owner {
                    pid: self.pid,
                    start_time: 1,
                    pid_namespace: 1,
                },
                name: "fake".to_owned(),
                shares: vec![TestNode::mounted(number)],
            },
        }
    }
}
