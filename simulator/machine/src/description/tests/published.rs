//! Published values of the bundled GPUs, from `nvidia-smi -q`, `nvidia-smi mig -lgip` and `-lgipp`
//! and from NVIDIA's tables. Detects accidental changes of a machine file.

use std::collections::BTreeMap;

use super::*;

/// Model, MiB as printed by `nvidia-smi`, multiprocessors, compute capability, PCI device.
const GPUS: [(&str, u64, u32, &str, u32); 10] = [
    ("a30", 24_576, 56, "8.0", 0x20b7),
    ("a100-40gb", 40_960, 108, "8.0", 0x20b0),
    ("a100-80gb", 81_920, 108, "8.0", 0x20b2),
    ("h100-80gb", 81_559, 132, "9.0", 0x2330),
    ("h200", 143_771, 132, "9.0", 0x2335),
    ("b200", 183_359, 148, "10.0", 0x2901),
    ("rtx-pro-6000", 97_887, 188, "12.0", 0x2bb5),
    ("t4", 15_360, 40, "7.5", 0x1eb8),
    ("rtx-4090", 24_564, 128, "8.9", 0x2684),
    ("gb10", 122_502, 48, "12.1", 0x2e12),
];

/// By model: profile, id, instances, multiprocessors, MiB, placements as printed by `nvidia-smi`.
const PROFILES: &str = "
a30 1g.6gb 14 4 14 5952 {0,1,2,3}:1
a30 1g.6gb+me 21 1 14 5952 {0,1,2,3}:1
a30 2g.12gb 5 2 28 11968 {0,2}:2
a30 2g.12gb+me 6 1 28 11968 {0,2}:2
a30 4g.24gb 0 1 56 24064 {0}:4
a100-40gb 1g.5gb 19 7 14 4864 {0,1,2,3,4,5,6}:1
a100-40gb 1g.5gb+me 20 1 14 4864 {0,1,2,3,4,5,6}:1
a100-40gb 1g.10gb 15 4 14 9856 {0,2,4,6}:2
a100-40gb 2g.10gb 14 3 28 9856 {0,2,4}:2
a100-40gb 3g.20gb 9 2 42 19968 {0,4}:4
a100-40gb 4g.20gb 5 1 56 19968 {0}:4
a100-40gb 7g.40gb 0 1 98 40192 {0}:8
a100-80gb 1g.10gb 19 7 14 9856 {0,1,2,3,4,5,6}:1
a100-80gb 1g.10gb+me 20 1 14 9856 {0,1,2,3,4,5,6}:1
a100-80gb 1g.20gb 15 4 14 19968 {0,2,4,6}:2
a100-80gb 2g.20gb 14 3 28 19968 {0,2,4}:2
a100-80gb 3g.40gb 9 2 42 40192 {0,4}:4
a100-80gb 4g.40gb 5 1 56 40192 {0}:4
a100-80gb 7g.80gb 0 1 98 80384 {0}:8
h100-80gb 1g.10gb 19 7 16 9984 {0,1,2,3,4,5,6}:1
h100-80gb 1g.10gb+me 20 1 16 9984 {0,1,2,3,4,5,6}:1
h100-80gb 1g.20gb 15 4 26 20096 {0,2,4,6}:2
h100-80gb 2g.20gb 14 3 32 20096 {0,2,4}:2
h100-80gb 3g.40gb 9 2 60 40448 {0,4}:4
h100-80gb 4g.40gb 5 1 64 40448 {0}:4
h100-80gb 7g.80gb 0 1 132 81152 {0}:8
h200 1g.18gb 19 7 16 16384 {0,1,2,3,4,5,6}:1
h200 1g.18gb+me 20 1 16 16384 {0,1,2,3,4,5,6}:1
h200 1g.35gb 15 4 26 33280 {0,2,4,6}:2
h200 2g.35gb 14 3 32 33280 {0,2,4}:2
h200 3g.71gb 9 2 60 71424 {0,4}:4
h200 4g.71gb 5 1 64 71424 {0}:4
h200 7g.141gb 0 1 132 143360 {0}:8
b200 1g.23gb 19 7 18 20992 {0,1,2,3,4,5,6}:1
b200 1g.23gb+me 20 1 18 20992 {0,1,2,3,4,5,6}:1
b200 1g.45gb 15 4 30 42240 {0,2,4,6}:2
b200 2g.45gb 14 3 36 42240 {0,2,4}:2
b200 3g.90gb 9 2 66 85248 {0,4}:4
b200 4g.90gb 5 1 74 85248 {0}:4
b200 7g.180gb 0 1 148 171520 {0}:8
rtx-pro-6000 1g.24gb 14 4 46 24192 {0,3,6,9}:3
rtx-pro-6000 1g.24gb+me 21 1 46 24192 {0,3,6,9}:3
rtx-pro-6000 1g.24gb+gfx 47 4 46 24192 {0,3,6,9}:3
rtx-pro-6000 1g.24gb+me.all 65 1 46 24192 {0,3,6,9}:3
rtx-pro-6000 1g.24gb-me 67 4 46 24192 {0,3,6,9}:3
rtx-pro-6000 2g.48gb 5 2 94 48512 {0,6}:6
rtx-pro-6000 2g.48gb+gfx 35 2 94 48512 {0,6}:6
rtx-pro-6000 2g.48gb+me.all 64 1 94 48512 {0,6}:6
rtx-pro-6000 2g.48gb-me 66 2 94 48512 {0,6}:6
rtx-pro-6000 4g.96gb 0 1 188 97280 {0}:12
rtx-pro-6000 4g.96gb+gfx 32 1 188 97280 {0}:12
";

fn bundled_models() -> BTreeMap<String, GpuModel> {
    BUNDLED
        .iter()
        .flat_map(|(_, text)| MachineDescription::parse(text).unwrap().models)
        .collect()
}

#[test]
fn matches_published_gpu_properties() {
    let models = bundled_models();
    assert_eq!(models.len(), GPUS.len());
    for (name, mib, multiprocessors, capability, device) in GPUS {
        let model = &models[name];
        assert_eq!(model.memory.total_bytes / MIB, mib, "{name}");
        assert_eq!(model.compute.multiprocessors, multiprocessors, "{name}");
        let DottedVersion { major, minor } = model.compute_capability;
        assert_eq!(format!("{major}.{minor}"), capability, "{name}");
        assert_eq!(model.pci_device_id, device << 16 | 0x10de, "{name}");
        assert_eq!(model.memory.reported_by_nvml, name != "gb10", "{name}");
        assert_eq!(
            model.mig.is_some(),
            PROFILES.contains(&format!("\n{name} ")),
            "{name}"
        );
    }
}

#[test]
fn matches_published_mig_profiles() {
    let described: Vec<String> = bundled_models()
        .iter()
        .flat_map(|(name, model)| {
            let profiles = model.mig.iter().flat_map(|mig| &mig.profiles);
            profiles.map(move |profile| {
                let starts: Vec<String> = profile
                    .placements
                    .starts
                    .iter()
                    .map(u32::to_string)
                    .collect();
                format!(
                    "{name} {} {} {} {} {} {{{}}}:{}",
                    profile.name,
                    profile.id,
                    profile.instances,
                    profile.multiprocessors,
                    profile.memory_mib,
                    starts.join(","),
                    profile.placements.size
                )
            })
        })
        .collect();
    let mut published: Vec<&str> = PROFILES.trim().lines().collect();
    let mut described: Vec<&str> = described.iter().map(String::as_str).collect();
    published.sort_unstable();
    described.sort_unstable();
    assert_eq!(described, published);
}

/// Compute and memory slices differ in some profiles: one of three compute slices takes half of the
/// memory.
#[test]
fn matches_profile_slices_with_profile_name() {
    for (name, model) in bundled_models() {
        for profile in model.mig.iter().flat_map(|mig| &mig.profiles) {
            let (slices, _) = profile.name.split_once("g.").unwrap();
            assert_eq!(
                profile.slices.to_string(),
                slices,
                "{name} {}",
                profile.name
            );
        }
    }
}
