//! Model test: random claims, crashes, reboots, profile changes, foreign MIG instances and reallocations on a simulated
//! machine. The allocator of the test is hostile: it allocates without regard to what is free.
//!
//! Invariants after each step: the records of a GPU fit the GPU, a running container keeps its record and its limits page,
//! no foreign instance changes, and every other instance belongs to a record. At the end nothing remains.
//!
//! `DRAVA_MODEL_SEED` repeats a run. A run ends after [`STEPS`] steps or [`LIMIT`].

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use drava_api::node_profile::{Mode, NodeSettings};
use drava_dra_driver::prepare::record::Loaded;
use drava_dra_driver::prepare::{Access, Prepared};

use super::*;
use crate::fixture::Allocated::{Share, Whole};
use crate::node::page_of;

const STEPS: usize = 300;
const LIMIT: Duration = Duration::from_secs(60);

/// Number of claims.
const CLAIMS: u32 = 12;

/// Xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap() % bound
    }

    fn of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }
}

/// A container of a claim with a share.
struct Container {
    process: PathBuf,
    devices: Vec<Prepared>,
    page: Vec<u8>,
}

struct Model {
    node: PartitionedNode,
    random: Random,
    boot: u32,
    containers: BTreeMap<u32, Container>,
    foreign: BTreeMap<usize, Vec<GpuInstance>>,
    allocated: BTreeMap<u32, Vec<Allocated>>,
    log: Vec<String>,
}

impl Model {
    fn boot_id(&self) -> String {
        format!("7c1d2f0e-0000-4000-8000-{:012}", self.boot)
    }

    fn results(&mut self) -> Vec<Allocated> {
        let result = |random: &mut Random| {
            let gpu = u32::try_from(random.below(2)).unwrap();
            match random.below(8) {
                0 => Whole(gpu),
                1..=4 => Share(
                    gpu,
                    random.of(&["8Gi", "8Gi", "30Gi", "70Gi"]),
                    random.of(&["0", "10", "30", "60"]),
                ),
                _ => {
                    let placements: [(&str, u32); 5] = [
                        ("1g.10gb", 0),
                        ("1g.10gb", 6),
                        ("2g.20gb", 2),
                        ("3g.40gb", 4),
                        ("7g.80gb", 0),
                    ];
                    let (profile, start) = random.of(&placements);
                    Partition(gpu, profile, start)
                }
            }
        };
        let count = if self.random.below(4) == 0 { 2 } else { 1 };
        (0..count).map(|_| result(&mut self.random)).collect()
    }

    /// Takes over what a scan of the node driver finds.
    fn scan(&mut self) {
        let own = self.own_instances();
        let gpus: Vec<GpuUuid> = (0..2).map(|gpu| self.node.gpu(gpu).uuid.clone()).collect();
        self.node.inventory.nvml = self.node.library.inventory().unwrap();
        self.node.inventory.foreign_instances.clear();
        for (index, gpu) in gpus.into_iter().enumerate() {
            let mut foreign = self.node.instances(index);
            foreign.retain(|one| !own.contains(&(index, one.profile_id, one.placement)));
            self.node.inventory.foreign_instances.insert(gpu, foreign);
        }
    }

    fn records(&self) -> Vec<(u32, Vec<Prepared>)> {
        let store = self.node.node.applier(self.node.effects(&self.boot_id()));
        let store = store.store();
        let load = |number| match store.load(&claim_ref(number).uid).unwrap() {
            Loaded::Present(record) => Some((number, record.devices)),
            Loaded::Absent => None,
            other => panic!("claim {number}: {other:?}"),
        };
        (1..=CLAIMS).filter_map(load).collect()
    }

    /// Returns the instances of records of this boot: GPU, profile, placement.
    fn own_instances(&self) -> BTreeSet<(usize, u32, Placement)> {
        let boot = self.boot_id();
        let records = self.records();
        let devices = records.iter().flat_map(|(_, devices)| devices);
        let own = devices.filter_map(|device| {
            let partition = device.partition().filter(|one| one.boot_id == boot)?;
            let gpu = usize::try_from(device.gpu.minor).unwrap();
            Some((gpu, partition.profile_id, partition.placement()))
        });
        own.collect()
    }

    fn step(&mut self) {
        let number = 1 + u32::try_from(self.random.below(CLAIMS as usize)).unwrap();
        match self.random.below(18) {
            0..=4 => self.prepare(number, None),
            5 => {
                let crash = self.random.below(6);
                self.prepare(number, Some(crash));
            }
            6 | 7 => self.start(number),
            8..=11 => {
                let held: Vec<u32> = self.records().into_iter().map(|(held, _)| held).collect();
                let held = if held.is_empty() {
                    number
                } else {
                    self.random.of(&held)
                };
                self.unprepare(held, None);
            }
            12 => {
                let crash = self.random.below(5);
                self.unprepare(number, Some(crash));
            }
            13 | 14 => self.change_profile(),
            15 => self.change_foreign(),
            _ if self.random.below(3) == 0 => self.reboot(),
            _ => self.scan(),
        }
    }

    /// Prepares a claim with a random allocation, so that an allocated claim is allocated again.
    fn prepare(&mut self, number: u32, crash: Option<usize>) {
        // Kubelet repeats prepare of a claim.
        let is_repeated = self.random.below(3) == 0;
        let results = match self.allocated.get(&number).filter(|_| is_repeated) {
            Some(allocated) => allocated.clone(),
            None => self.results(),
        };
        self.allocated.insert(number, results.clone());
        let effects = self.node.effects(&self.boot_id());
        let prepared = match crash {
            Some(after) => {
                let effects = CrashingEffects::after(after, effects);
                self.node.prepare_with(effects, number, &results)
            }
            None => self.node.prepare_with(effects, number, &results),
        };
        let outcome = match &prepared {
            Ok(_) => "prepared".to_owned(),
            Err(error) => drava_api::error::describe(error),
        };
        self.log
            .push(format!("prepare {number} (crash {crash:?}): {outcome}"));
    }

    /// Starts a container of a claim whose first device is a share.
    fn start(&mut self, number: u32) {
        let records = self.records();
        let Some((_, devices)) = records.into_iter().find(|(one, _)| *one == number) else {
            return;
        };
        let is_share = devices.first().and_then(Prepared::share).is_some();
        // An interrupted claim has no page; kubelet starts no container of it.
        if let Ok(page) = std::fs::read(page_of(&self.node.node, number))
            && is_share
            && !self.containers.contains_key(&number)
        {
            self.log.push(format!("start {number}"));
            let process = self.node.node.start_container(1000 + number, number);
            let container = Container {
                process,
                devices,
                page,
            };
            self.containers.insert(number, container);
        }
    }

    /// Ends the container of a claim and unprepares it, as kubelet does.
    fn unprepare(&mut self, number: u32, crash: Option<usize>) {
        if let Some(container) = self.containers.remove(&number) {
            std::fs::remove_dir_all(container.process).unwrap();
        }
        let effects = self.node.effects(&self.boot_id());
        let claim = claim_ref(number);
        let unprepared = match crash {
            Some(after) => {
                let applier = self
                    .node
                    .node
                    .applier(CrashingEffects::after(after, effects));
                applier.unprepare(&claim)
            }
            None => self.node.node.applier(effects).unprepare(&claim),
        };
        self.log.push(format!(
            "unprepare {number} (crash {crash:?}): {}",
            unprepared.is_ok()
        ));
        if crash.is_none() {
            unprepared.unwrap();
        }
    }

    fn change_profile(&mut self) {
        let modes = [
            Mode::Auto,
            Mode::Dynamic,
            Mode::Dynamic,
            Mode::Mig,
            Mode::Vgpu,
        ];
        let gpu = self.random.below(2);
        let mode = self.random.of(&modes);
        self.log
            .push(format!("mode {} of GPU {gpu}", mode.as_str()));
        self.set_mode(gpu, mode);
    }

    fn set_mode(&mut self, gpu: usize, mode: Mode) {
        let uuid = self.node.gpu(gpu).uuid.to_string();
        let settings = self
            .node
            .inventory
            .settings
            .get_or_insert_with(NodeSettings::default);
        settings.gpus.entry(uuid).or_default().mode = mode;
    }

    /// Creates or destroys an instance as an administrator.
    fn change_foreign(&mut self) {
        let gpu = self.random.below(2);
        let uuid = self.node.gpu(gpu).uuid.clone();
        let present = self.foreign.entry(gpu).or_default();
        if let Some(instance) = present.pop() {
            self.log
                .push(format!("destroy the foreign instance of GPU {gpu}"));
            self.node.library.destroy_mig(&uuid, instance.id).unwrap();
            return;
        }
        let start = u32::try_from(self.random.below(7)).unwrap();
        let own = self.own_instances();
        // An administrator does not use slices of a claim that is being prepared again after a crash.
        if own.iter().any(|(on, _, placement)| {
            *on == gpu && (placement.start..placement.start + placement.size).contains(&start)
        }) {
            return;
        }
        let placement = Placement { start, size: 1 };
        if let Ok(created) = self.node.library.create_mig(&uuid, 19, placement) {
            self.log
                .push(format!("foreign instance at {start} of GPU {gpu}"));
            self.foreign.entry(gpu).or_default().push(created);
        }
    }

    fn reboot(&mut self) {
        self.log.push("reboot".to_owned());
        for (_, container) in std::mem::take(&mut self.containers) {
            std::fs::remove_dir_all(container.process).unwrap();
        }
        self.foreign.clear();
        for gpu in [GpuIndex(0), GpuIndex(1)] {
            self.node.machine.control(&Command::Reset { gpu }).unwrap();
        }
        self.node.node.tmpfs.reboot();
        self.boot += 1;
        self.scan();
    }

    fn check(&self) {
        let records = self.records();
        for gpu in 0..2 {
            self.check_gpu(gpu, &records);
        }
        for (number, container) in &self.containers {
            let record = records.iter().find(|(one, _)| one == number);
            let (_, devices) =
                record.unwrap_or_else(|| panic!("claim {number} runs without a record"));
            assert_eq!(devices, &container.devices, "claim {number} runs");
            let page = std::fs::read(page_of(&self.node.node, *number)).unwrap();
            assert_eq!(page, container.page, "claim {number} runs");
        }
    }

    /// Checks that the claims of a GPU fit, by rules that do not use the code under test.
    fn check_gpu(&self, index: usize, records: &[(u32, Vec<Prepared>)]) {
        let boot = self.boot_id();
        let uuid = self.node.gpu(index).uuid.as_str();
        let devices = records.iter().flat_map(|(_, devices)| devices);
        let devices: Vec<_> = devices.filter(|device| device.gpu.uuid == uuid).collect();
        let whole = devices
            .iter()
            .filter(|device| device.access == Access::Whole)
            .count();
        let shares: Vec<_> = devices.iter().filter_map(|device| device.share()).collect();
        // A partition of an earlier boot holds its slices until the claim is prepared or unprepared.
        let partitions: Vec<_> = devices
            .iter()
            .filter_map(|device| device.partition())
            .collect();
        let kinds = [
            whole,
            usize::from(!shares.is_empty()),
            usize::from(!partitions.is_empty()),
        ];
        assert!(
            kinds.iter().sum::<usize>() <= 1,
            "GPU {index} is used in several ways: {devices:#?}"
        );
        let memory: u64 = shares.iter().map(|share| share.memory_bytes).sum();
        let cores: u64 = shares.iter().map(|share| share.cores).sum();
        assert!(
            memory <= 80 << 30 && cores <= 100,
            "GPU {index}: {shares:?}"
        );
        let mut used = BTreeSet::new();
        for partition in &partitions {
            for slice in partition.start..partition.start + partition.size {
                assert!(
                    used.insert(slice),
                    "GPU {index}: two claims have slice {slice}"
                );
            }
        }
        let mut instances = self.node.instances(index);
        let foreign = self.foreign.get(&index).map_or(&[][..], Vec::as_slice);
        for one in foreign {
            assert!(
                instances.contains(one),
                "the foreign instance {one:?} is gone"
            );
        }
        instances.retain(|instance| !foreign.contains(instance));
        for instance in instances {
            assert!(
                partitions
                    .iter()
                    .any(|one| one.boot_id == boot && one.is_geometry_of(&instance)),
                "GPU {index}: instance {instance:?} belongs to no record"
            );
        }
    }
}

/// `eprintln!` would be hidden for a test that passes.
fn report(line: &str) {
    std::io::stderr()
        .write_all(format!("{line}\n").as_bytes())
        .unwrap();
}

#[test]
fn keeps_invariants_in_random_histories() {
    if lacks_device_files() {
        return;
    }
    let seed = std::env::var("DRAVA_MODEL_SEED").ok();
    let seed = seed.map_or_else(
        || u64::from(std::process::id()) << 20 | 0x5eed,
        |seed| seed.parse().unwrap(),
    );
    report(&format!("DRAVA_MODEL_SEED={seed}"));
    let node = PartitionedNode::of(Machine::start(H100X2).unwrap());
    let mut model = Model {
        node,
        random: Random(seed),
        boot: 0,
        containers: BTreeMap::new(),
        foreign: BTreeMap::new(),
        allocated: BTreeMap::new(),
        log: Vec::new(),
    };
    for gpu in 0..2 {
        model.set_mode(gpu, Mode::Dynamic);
    }
    let start = Instant::now();
    let mut steps = 0;
    while steps < STEPS && start.elapsed() < LIMIT {
        steps += 1;
        model.step();
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.check()));
        if checked.is_err() {
            let last = model.log.len().saturating_sub(15);
            panic!(
                "seed {seed}, step {steps}:\n{}",
                model.log[last..].join("\n")
            );
        }
    }
    let prepared = model
        .log
        .iter()
        .filter(|line| line.ends_with(": prepared"))
        .count();
    report(&format!("{steps} steps, {prepared} claims prepared"));
    assert!(
        prepared >= steps / 30,
        "too few claims fit: {prepared} of {steps} steps"
    );

    for number in 1..=CLAIMS {
        model.unprepare(number, None);
    }
    model.check();
    assert_eq!(model.node.node.claim_state(), (Vec::new(), BTreeSet::new()));
}
