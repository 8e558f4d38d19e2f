//! Nodes, pools, devices, and the claims that have devices.

use serde_json::{Map, Value, json};

use super::Mix;
use crate::random::Random;

/// Key of the driver's own taint, with which its devices are published in managed mode.
const MANAGED: &str = "gpu.drava.dev/managed";

/// Amounts of memory, GiB, of shares.
pub(super) const SHARE_GIB: [u64; 6] = [1, 2, 4, 6, 8, 16];
/// Percents of GPU time of shares.
pub(super) const SHARE_CORES: [u64; 5] = [0, 10, 30, 50, 100];

/// Cluster under construction.
pub(super) struct Generator<'a> {
    pub(super) random: &'a mut Random,
    mix: Mix,
    nodes: Vec<Value>,
    slices: Vec<Value>,
    allocated: Vec<Value>,
    gpus: u64,
    shares: u64,
}

/// One GPU: its devices, its counter set, and the results of claims that have it.
struct Gpu {
    devices: Vec<Value>,
    counters: Option<Value>,
    results: Vec<Value>,
}

impl<'a> Generator<'a> {
    pub(super) fn new(random: &'a mut Random, mix: Mix) -> Self {
        Self {
            random,
            mix,
            nodes: vec![],
            slices: vec![],
            allocated: vec![],
            gpus: 0,
            shares: 0,
        }
    }

    pub(super) fn into_parts(self) -> (Vec<Value>, Vec<Value>, Vec<Value>) {
        (self.nodes, self.slices, self.allocated)
    }

    pub(super) fn add_node(&mut self, name: &str) {
        self.nodes.push(json!({
            "metadata": {"name": name},
            "status": {
                "allocatable": {"pods": "110"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }));
        let pools = self.random.between(1, self.mix.pools);
        for pool in 0..pools {
            self.add_pool(name, &format!("{name}/gpus{pool}"));
        }
    }

    fn add_pool(&mut self, node: &str, pool: &str) {
        let gpus: Vec<Gpu> = (0..self.random.between(1, self.mix.gpus))
            .map(|index| self.gpu(pool, index))
            .collect();
        let mut devices: Vec<Value> = vec![];
        let mut counters: Vec<Value> = vec![];
        for gpu in gpus {
            devices.extend(gpu.devices);
            counters.extend(gpu.counters);
            for result in gpu.results {
                self.add_allocated(&result);
            }
        }
        // The node driver withdrew an allocated device.
        if self.random.chance(self.mix.broken_pools / 8) {
            self.add_allocated(&json!({
                "request": "r",
                "driver": "gpu.drava.dev",
                "pool": pool,
                "device": "withdrawn",
            }));
        }
        let mut contents: Vec<Value> = vec![];
        if !counters.is_empty() {
            contents.push(json!({"sharedCounters": counters}));
        }
        let split = self.random.chance(self.mix.split_slices) && devices.len() > 1;
        let half = if split { devices.len() / 2 } else { 0 };
        let rest = devices.split_off(half);
        if split {
            contents.push(json!({"devices": devices}));
        }
        contents.push(json!({"devices": rest}));
        self.add_slices(node, pool, contents);
    }

    /// Adds the slices of a pool, possibly with a defect.
    fn add_slices(&mut self, node: &str, pool: &str, mut contents: Vec<Value>) {
        let generation = self.random.between(2, 3);
        let mut count = contents.len();
        if self.random.chance(self.mix.broken_pools) {
            match self.random.between(0, 4) {
                // Incomplete.
                0 => count += 1,
                1 if contents.len() > 1 => {
                    let removed = self.random.between(0, contents.len() as u64 - 1);
                    contents.remove(usize::try_from(removed).unwrap_or_default());
                }
                // A device is in two slices.
                2 => {
                    let last = contents.last().cloned().unwrap_or_default();
                    contents.push(json!({"devices": [last["devices"][0]]}));
                    count += 1;
                }
                // A device consumes a counter that does not exist.
                3 => {
                    if let Some(device) = contents
                        .last_mut()
                        .and_then(|slice| slice["devices"].get_mut(0))
                    {
                        device["consumesCounters"] = json!([
                            {"counterSet": "absent", "counters": {"gpu": {"value": "1"}}},
                        ]);
                    }
                }
                // Slices of an older generation remain; valid.
                _ => {
                    let old = contents.last().cloned().unwrap_or_default();
                    self.add_slice(node, pool, generation - 1, 1, &old);
                }
            }
        }
        for content in contents {
            self.add_slice(node, pool, generation, count, &content);
        }
    }

    fn add_slice(
        &mut self,
        node: &str,
        pool: &str,
        generation: u64,
        count: usize,
        content: &Value,
    ) {
        let mut spec = json!({
            "driver": "gpu.drava.dev",
            "nodeName": node,
            "pool": {"name": pool, "generation": generation, "resourceSliceCount": count},
        });
        if let (Some(spec), Some(content)) = (spec.as_object_mut(), content.as_object()) {
            spec.extend(content.clone());
        }
        let name = format!("s{:03}-{node}", self.slices.len());
        self.slices
            .push(json!({"metadata": {"name": name, "resourceVersion": "1"}, "spec": spec}));
    }

    fn add_allocated(&mut self, result: &Value) {
        let name = format!("held-{}", self.allocated.len());
        self.allocated.push(json!({
            "metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": "1"},
            "spec": {"devices": {"requests": [
                {"name": "r", "exactly": {"deviceClassName": "any"}},
            ]}},
            "status": {"allocation": {"devices": {"results": [result]}}},
        }));
    }

    fn gpu(&mut self, pool: &str, index: u64) -> Gpu {
        let gib = self.random.choose(&[8, 16, 16, 24]);
        let is_partitioned = self.random.chance(self.mix.partitions);
        let is_coupled = is_partitioned || self.random.chance(85);
        // Room for two devices beside each other.
        let gpus = if is_partitioned || self.random.chance(80) {
            "1"
        } else {
            "2"
        };
        let set = format!("gpu-{index}");
        self.gpus += 1;
        let uuid = format!("GPU-{}", self.gpus);
        let attributes = |random: &mut Random, kind: &str, profile: &str| {
            let mut attributes = json!({
                "type": {"string": kind},
                "uuid": {"string": uuid},
                "profile": {"string": profile},
                "index": {"int": index},
                "productName": {"string": if gib > 16 { "NVIDIA H100" } else { "Tesla T4" }},
                "driverVersion": {"version": if index == 0 { "580.65.6" } else { "570.0.1" }},
                "resource.kubernetes.io/numaNode": {"int": index / 2},
                "resource.kubernetes.io/pcieRoot": {"string": format!("pci{}", index / 2)},
                "oversubscribed": {"bool": index == 1},
            });
            if random.chance(8)
                && let Some(attributes) = attributes.as_object_mut()
            {
                attributes.remove("resource.kubernetes.io/numaNode");
            }
            attributes
        };
        let slices = if is_partitioned { 4 } else { 1 };
        let counter = |slice: u64| {
            if is_partitioned {
                format!("memory-slice-{slice}")
            } else {
                "gpu".to_owned()
            }
        };
        let consumes = |from: u64, length: u64, engines: u64| {
            let mut counters: Map<String, Value> = (from..from + length)
                .map(|slice| (counter(slice), json!({"value": "1"})))
                .collect();
            if is_partitioned {
                counters.insert("engines".to_owned(), json!({"value": engines.to_string()}));
            }
            json!([{"counterSet": set, "counters": counters}])
        };
        let all = consumes(0, slices, 3);
        let memory = format!("{gib}Gi");
        let mut whole = json!({
            "name": set,
            "attributes": attributes(self.random, "gpu", "none"),
            "capacity": {self.mix.memory: {"value": memory}, "cores": {"value": "100"}},
        });
        let (memory_policy, cores_policy, slots) = self.policies(gib);
        let mut shared = json!({
            "name": format!("{set}-vgpu"),
            "allowMultipleAllocations": true,
            "attributes": attributes(self.random, "vgpu", "none"),
            "capacity": {
                self.mix.memory: {"value": memory, "requestPolicy": memory_policy},
                "cores": {"value": "100", "requestPolicy": cores_policy},
                "slots": {"value": slots.to_string(), "requestPolicy": {"default": "1", "validRange": {"min": "1", "step": "1"}}},
            },
        });
        if is_coupled {
            whole["consumesCounters"] = all.clone();
            shared["consumesCounters"] = all;
        }
        let mut devices = vec![whole, shared];
        if is_partitioned {
            for (profile, start, length) in [
                ("1g", 0, 1),
                ("1g", 1, 1),
                ("1g", 2, 1),
                ("1g", 3, 1),
                ("2g", 0, 2),
                ("2g", 2, 2),
            ] {
                devices.push(json!({
                    "name": format!("{set}-mig-{profile}-{start}"),
                    "attributes": attributes(self.random, self.mix.partition_type, profile),
                    "capacity": {
                        self.mix.memory: {"value": format!("{}Gi", gib / 4 * length)},
                        "cores": {"value": (25 * length).to_string()},
                    },
                    "consumesCounters": consumes(start, length, length),
                }));
            }
        }
        for device in &mut devices {
            self.taint(device);
        }
        let is_independent = !is_coupled || gpus == "2";
        let results = self.results(pool, &devices, gib, is_independent);
        let mut counters = Map::new();
        for slice in 0..slices {
            counters.insert(counter(slice), json!({"value": gpus}));
        }
        if is_partitioned {
            counters.insert("engines".to_owned(), json!({"value": "3"}));
        }
        Gpu {
            devices,
            counters: is_coupled.then(|| json!({"name": set, "counters": counters})),
            results,
        }
    }

    /// Request policies of memory and cores, and the number of slots.
    fn policies(&mut self, gib: u64) -> (Value, Value, u64) {
        let memory = format!("{gib}Gi");
        if !self.random.chance(self.mix.odd_policies) {
            return (
                json!({"default": memory, "validRange": {"min": "1Mi", "max": memory, "step": "1Mi"}}),
                json!({"default": "0", "validRange": {"min": "0", "max": "100", "step": "1"}}),
                10,
            );
        }
        let memory_policy = match self.random.between(0, 5) {
            0 => {
                json!({"default": "1Gi", "validRange": {"min": "1Gi", "max": memory, "step": "3Gi"}})
            }
            1 => json!({"default": "2Gi", "validRange": {"min": "512Mi", "step": "512Mi"}}),
            2 => json!({"default": "4Gi", "validRange": {"min": "2Gi", "max": "6Gi"}}),
            3 => json!({"default": "2Gi", "validValues": ["2Gi", "4Gi", "8Gi"]}),
            4 => json!({"default": "1Gi", "validValues": ["1Gi", "5Gi"]}),
            _ => Value::Null,
        };
        let cores_policy = match self.random.between(0, 3) {
            0 => json!({"default": "20", "validRange": {"min": "20", "max": "80", "step": "20"}}),
            1 => json!({"default": "10", "validValues": ["10", "25", "50"]}),
            2 => json!({"default": "0", "validRange": {"min": "0"}}),
            _ => json!({"default": "5", "validRange": {"min": "5", "max": "95", "step": "15"}}),
        };
        (memory_policy, cores_policy, self.random.between(1, 4))
    }

    fn taint(&mut self, device: &mut Value) {
        let mut taints = vec![];
        if self.random.chance(self.mix.taints) {
            let (key, effect, value) = (
                self.random
                    .choose(&["gpu.drava.dev/unhealthy", "example.com/reserved"]),
                self.random.choose(&["NoSchedule", "NoExecute", "None"]),
                self.random.choose(&["", "a", "b"]),
            );
            taints.push(json!({"key": key, "value": value, "effect": effect}));
        }
        if self.random.chance(20) {
            taints.push(json!({"key": MANAGED, "value": "true", "effect": "NoSchedule"}));
        }
        if !taints.is_empty() {
            device["taints"] = json!(taints);
        }
    }

    /// Results of claims that have devices of one GPU; never more than fits.
    fn results(
        &mut self,
        pool: &str,
        devices: &[Value],
        gib: u64,
        is_independent: bool,
    ) -> Vec<Value> {
        let result = |device: &Value| {
            json!({
                "request": "r",
                "driver": "gpu.drava.dev",
                "pool": pool,
                "device": device["name"],
            })
        };
        if self.random.chance(self.mix.idle) {
            return vec![];
        }
        let mut results = vec![];
        match (devices, self.random.between(0, 3)) {
            ([whole, ..], 0) => results.push(result(whole)),
            ([_, _, partitions @ ..], 1) if !partitions.is_empty() => {
                // 1g partitions are at slices 0 to 3, then 2g at 0 and 2.
                let layouts: [&[usize]; 5] = [&[0], &[1, 3], &[4], &[4, 2], &[0, 2]];
                for index in self.random.choose(&layouts) {
                    results.extend(partitions.get(*index).map(result));
                }
            }
            ([_, shared, ..], _) => {
                // A multi-allocatable device that was allocated as a whole before it became shareable.
                if self.random.chance(4) {
                    return vec![result(shared)];
                }
                let slots = shared["capacity"]["slots"]["value"]
                    .as_str()
                    .and_then(|slots| slots.parse().ok())
                    .unwrap_or(1);
                let (mut memory, mut cores) = (gib, 100);
                for _ in 0..self.random.between(1, 3).min(slots) {
                    let share_gib = self.random.choose(&SHARE_GIB).min(memory);
                    let share_cores = self.random.choose(&SHARE_CORES).min(cores);
                    memory -= share_gib;
                    cores -= share_cores;
                    self.shares += 1;
                    let mut share = result(shared);
                    share["shareID"] =
                        json!(format!("00000000-0000-0000-0000-{:012}", self.shares));
                    share["consumedCapacity"] = json!({
                        self.mix.memory: format!("{share_gib}Gi"),
                        "cores": share_cores.to_string(),
                        "slots": "1",
                    });
                    results.push(share);
                }
            }
            _ => {}
        }
        if is_independent
            && self.random.chance(30)
            && let Some(whole) = devices.first()
            && results
                .iter()
                .all(|result| result["device"] != whole["name"])
        {
            results.push(result(whole));
        }
        for result in &mut results {
            if self.random.chance(self.mix.admin / 6) {
                result["adminAccess"] = json!(true);
            }
        }
        results
    }
}

/// Devices on which expressions are evaluated.
#[must_use]
pub fn devices(random: &mut Random) -> Vec<Value> {
    let mix = Mix {
        partitions: 50,
        ..Mix::default()
    };
    Generator::new(random, mix).gpu("pool", 0).devices
}
