mod published;

use super::*;

#[test]
fn parses_bundled_machines() {
    let machine = MachineDescription::parse(H100X2).unwrap();
    assert_eq!(machine.gpus.len(), 2);
    let model = machine.model(&machine.gpus[0]);
    assert_eq!(model.memory.total_bytes / MIB, 81559);
    assert_eq!(model.mig.as_ref().unwrap().max_devices(), 7);
    let t4 = MachineDescription::parse(T4).unwrap();
    assert_eq!(t4.model(&t4.gpus[0]).mig, None);
}

/// Profiles × placements of every bundled model, against published values.
#[test]
fn matches_published_placements() {
    let published = [
        ("a30", 4, 13),
        ("a100-40gb", 8, 25),
        ("a100-80gb", 8, 25),
        ("h100-80gb", 8, 25),
        ("h200", 8, 25),
        ("b200", 8, 25),
        ("rtx-pro-6000", 12, 30),
    ];
    let mut seen = 0;
    for (name, text) in BUNDLED {
        let machine =
            MachineDescription::parse(text).unwrap_or_else(|error| panic!("{name}: {error}"));
        for (model, properties) in &machine.models {
            let Some(mig) = &properties.mig else { continue };
            let (_, axis, count) = published.iter().find(|(name, _, _)| name == model).unwrap();
            let placements: usize = mig
                .profiles
                .iter()
                .map(|profile| profile.placements.starts.len())
                .sum();
            assert_eq!((mig.memory_slices, placements), (*axis, *count), "{model}");
            let largest = mig
                .profiles
                .iter()
                .map(|profile| profile.memory_mib)
                .max()
                .unwrap();
            assert!(largest * MIB < properties.memory.total_bytes, "{model}");
            seen += 1;
        }
    }
    assert_eq!(seen, published.len());
}

#[test]
fn rejects_unknown_fields_by_name() {
    let text = T4.replace("ecc: true", "ecc: true\n    eccc: true");
    let error = MachineDescription::parse(&text).unwrap_err().to_string();
    assert!(error.contains("eccc"), "{error}");
}

#[test]
fn rejects_inconsistencies_with_their_location() {
    let cases = [
        (
            T4.replace("- model: t4", "- model: t5"),
            "gpus[0].model: unknown model \"t5\"",
        ),
        (
            T4.replace("reservedBytes: 464519168", "reservedBytes: 16106127360"),
            "must be less than",
        ),
        (T4.replace("GPU-2b8e5d14-", "2b8e5d14-"), "gpus[0].uuid"),
        (
            H100X2.replace("0000:9d:00.0", "0000:1b:00.0"),
            "gpus[1].busId",
        ),
        (
            H100X2.replace("starts: [0, 4], size: 4", "starts: [0, 5], size: 4"),
            "3g.40gb: placements",
        ),
        (
            H100X2.replace("id: 20, slices", "id: 19, slices"),
            "1g.10gb+me: duplicate id 19",
        ),
        (T4.replace("\"7.5\"", "\"7\""), "must have the form"),
        (
            T4.replace("numaNode: 0", "numaNode: 0\n  migEnabled: true"),
            "gpus[0].migEnabled: model \"t4\" has no MIG",
        ),
    ];
    for (text, expected) in cases {
        let error = MachineDescription::parse(&text).unwrap_err().to_string();
        assert!(error.contains(expected), "{error} lacks {expected}");
    }
}

#[test]
fn parses_bus_ids_of_every_length() {
    let bus_id = BusId {
        domain: 0,
        bus: 0x9d,
        device: 0,
    };
    for text in ["0000:9d:00.0", "00000000:9D:00.0", "9d:00.0"] {
        assert_eq!(BusId::parse(text), Some(bus_id), "{text}");
    }
    for text in [
        "",
        "9d",
        "0000:9d:00.1",
        "0000:9d:20.0",
        "1:2:3:4.0",
        "zz:00.0",
    ] {
        assert_eq!(BusId::parse(text), None, "{text}");
    }
    assert_eq!(bus_id.to_string(), "00000000:9D:00.0");
    assert_eq!(bus_id.short(), "0000:9d:00.0");
}

#[test]
fn only_drivers_since_615_have_memory_limits() {
    let b200 = MachineDescription::parse(B200X8).unwrap();
    assert!(b200.has_memory_limits());
    assert!(
        !MachineDescription::parse(H100X2)
            .unwrap()
            .has_memory_limits()
    );
    let older = B200X8.replace("driverVersion: \"615.71\"", "driverVersion: \"610.9\"");
    let error = MachineDescription::parse(&older).unwrap_err().to_string();
    assert!(
        error.contains("memoryLimits.backend: driver 610.9"),
        "{error}"
    );
}
