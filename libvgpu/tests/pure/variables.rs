//! Limits from environment variables: meaning and precedence.

use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;

use drava_vgpu_abi::{ComputePolicy, Cores, Limits, MemoryPolicy, Priority};

use crate::environment::{Environment, ParsedLimits};

const GIB: u64 = 1 << 30;

/// Returns the parsed limits, the outcome, and the invalid variables.
fn read(variables: &[(&str, &str)]) -> (Environment, ParsedLimits, Vec<String>) {
    // SAFETY: all zeroes is a valid value.
    let environment: Environment = unsafe { MaybeUninit::zeroed().assume_init() };
    let variables: Vec<(&str, CString)> = variables
        .iter()
        .map(|(name, value)| (*name, CString::new(*value).unwrap()))
        .collect();
    let value_of = |name: &CStr| {
        let name = name.to_str().unwrap();
        let found = variables.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| value.as_c_str())
    };
    let wrong = RefCell::new(Vec::new());
    let note = |name: &CStr| {
        let name = name.to_str().unwrap().to_owned();
        wrong.borrow_mut().push(name);
    };
    let parsed = environment.parse(value_of, note);
    (environment, parsed, wrong.into_inner())
}

/// The limits of a device.
fn limits_of(device: u32, variables: &[(&str, &str)]) -> Limits {
    let (environment, parsed, wrong) = read(variables);
    assert_eq!(
        (parsed, wrong),
        (ParsedLimits::Limits, vec![]),
        "{variables:?}"
    );
    environment.limits_of(Some(device)).unwrap()
}

#[test]
fn sets_no_limit_without_limit_variables() {
    for variables in [
        &[][..],
        &[("DRAVA_MEMORY_POLICY", "spill"), ("DRAVA_PRIORITY", "5")],
        &[
            ("DRAVA_COMPUTE_POLICY", "balance"),
            ("CUDA_TASK_PRIORITY", "0"),
        ],
        &[("DRAVA_CORES", "100"), ("CUDA_DEVICE_SM_LIMIT", "0")],
    ] {
        let (environment, parsed, wrong) = read(variables);
        assert_eq!(
            (parsed, wrong),
            (ParsedLimits::None, vec![]),
            "{variables:?}"
        );
        assert!(environment.limits_of(Some(0)).is_none());
        assert!(!environment.limits_memory() && !environment.limits_cores());
    }
}

#[test]
fn parses_memory_limits_per_device() {
    for (name, text, bytes) in [
        ("DRAVA_MEMORY_LIMIT", "4Gi", 4 * GIB),
        ("DRAVA_MEMORY_LIMIT", "500M", 500_000_000),
        ("DRAVA_MEMORY_LIMIT", "7", 7),
        ("CUDA_DEVICE_MEMORY_LIMIT", "3g", 3 * GIB),
        ("CUDA_DEVICE_MEMORY_LIMIT", "1024M", GIB),
        ("CUDA_DEVICE_MEMORY_LIMIT", "2k", 2048),
    ] {
        let limits = limits_of(0, &[(name, text)]);
        assert_eq!(limits.memory_limit_bytes, Some(bytes), "{name}={text}");
        assert_eq!(limits.cores, Cores::BEST_EFFORT);
        assert_eq!(limits.compute_policy, ComputePolicy::None);
        assert_eq!(limits.memory_policy, MemoryPolicy::Hard);
        assert_eq!(limits.priority, Priority::DEFAULT);
    }
    let both = [
        ("CUDA_DEVICE_MEMORY_LIMIT", "1g"),
        ("CUDA_DEVICE_MEMORY_LIMIT_1", "2g"),
        ("DRAVA_MEMORY_LIMIT", "3Gi"),
    ];
    assert_eq!(limits_of(0, &both).memory_limit_bytes, Some(3 * GIB));
    assert_eq!(limits_of(1, &both).memory_limit_bytes, Some(2 * GIB));
    assert_eq!(limits_of(99, &both).memory_limit_bytes, Some(3 * GIB));
}

#[test]
fn parses_cores_per_device() {
    let both = [
        ("CUDA_DEVICE_SM_LIMIT", "10"),
        ("CUDA_DEVICE_SM_LIMIT_2", "20"),
        ("DRAVA_CORES", "30%"),
    ];
    let cores = |device| limits_of(device, &both).cores;
    assert_eq!(Some(cores(0)), Cores::new(30), "DRAVA_CORES wins");
    assert_eq!(Some(cores(2)), Cores::new(20));
    let limits = limits_of(0, &both[..1]);
    assert_eq!(Some(limits.cores), Cores::new(10));
    assert_eq!(limits.memory_limit_bytes, None);
    assert_eq!(limits.compute_policy, ComputePolicy::Fixed, "the default");
    let (environment, ..) = read(&both[1..2]);
    assert!(environment.limits_cores() && !environment.limits_memory());
    assert!(environment.limits_of(Some(0)).is_none());
    assert!(environment.limits_of(None).is_none());
}

#[test]
fn parses_policies_by_name_and_alias() {
    for (name, text, policy) in [
        ("DRAVA_COMPUTE_POLICY", "none", ComputePolicy::None),
        ("DRAVA_COMPUTE_POLICY", "balance", ComputePolicy::Balance),
        ("DRAVA_COMPUTE_POLICY", "fixed", ComputePolicy::Fixed),
        (
            "GPU_CORE_UTILIZATION_POLICY",
            "disable",
            ComputePolicy::None,
        ),
        (
            "GPU_CORE_UTILIZATION_POLICY",
            "default",
            ComputePolicy::Balance,
        ),
        ("GPU_CORE_UTILIZATION_POLICY", "force", ComputePolicy::Fixed),
    ] {
        let limits = limits_of(0, &[("DRAVA_CORES", "50"), (name, text)]);
        assert_eq!(limits.compute_policy, policy, "{name}={text}");
    }
    for (name, text, policy) in [
        ("DRAVA_MEMORY_POLICY", "hard", MemoryPolicy::Hard),
        ("DRAVA_MEMORY_POLICY", "spill", MemoryPolicy::Spill),
        ("CUDA_OVERSUBSCRIBE", "true", MemoryPolicy::Spill),
        ("CUDA_OVERSUBSCRIBE", "1", MemoryPolicy::Spill),
        ("CUDA_OVERSUBSCRIBE", "false", MemoryPolicy::Hard),
    ] {
        let limits = limits_of(0, &[("DRAVA_MEMORY_LIMIT", "1"), (name, text)]);
        assert_eq!(limits.memory_policy, policy, "{name}={text}");
    }
    let all = [
        ("DRAVA_CORES", "50"),
        ("DRAVA_COMPUTE_POLICY", "balance"),
        ("GPU_CORE_UTILIZATION_POLICY", "force"),
        ("DRAVA_MEMORY_POLICY", "hard"),
        ("CUDA_OVERSUBSCRIBE", "true"),
        ("DRAVA_PRIORITY", "-7"),
        ("CUDA_TASK_PRIORITY", "0"),
    ];
    let limits = limits_of(0, &all);
    assert_eq!(limits.compute_policy, ComputePolicy::Balance);
    assert_eq!(limits.memory_policy, MemoryPolicy::Hard);
    assert_eq!(Some(limits.priority), Priority::new(-7));
}

#[test]
fn parses_priorities_of_both_kinds() {
    fn priority(name: &str, text: &str) -> Priority {
        limits_of(0, &[("DRAVA_CORES", "50"), (name, text)]).priority
    }
    for value in [-100, -1, 0, 1, 100] {
        let found = priority("DRAVA_PRIORITY", &value.to_string());
        assert_eq!(Some(found), Priority::new(value));
    }
    assert_eq!(priority("CUDA_TASK_PRIORITY", "1"), Priority::DEFAULT);
    let first = priority("CUDA_TASK_PRIORITY", "0");
    assert_eq!(Some(first), Priority::new(1), "0 goes before 1");
}

#[test]
fn reports_invalid_values() {
    for (name, text) in [
        ("DRAVA_MEMORY_LIMIT", "4GiB"),
        ("DRAVA_MEMORY_LIMIT", "-1"),
        ("DRAVA_MEMORY_LIMIT", "99999999999Ti"),
        ("CUDA_DEVICE_MEMORY_LIMIT_15", "1x"),
        ("DRAVA_CORES", "101"),
        ("CUDA_DEVICE_SM_LIMIT_0", "half"),
        ("DRAVA_MEMORY_POLICY", "soft"),
        ("CUDA_OVERSUBSCRIBE", "maybe"),
        ("DRAVA_COMPUTE_POLICY", "fair"),
        ("GPU_CORE_UTILIZATION_POLICY", "always"),
        ("DRAVA_PRIORITY", "101"),
        ("CUDA_TASK_PRIORITY", "2"),
    ] {
        for other in [None, Some(("DRAVA_CORES", "50"))] {
            let other = other.filter(|(other, _)| *other != name);
            let variables: Vec<_> = [(name, text)].into_iter().chain(other).collect();
            let (_, parsed, wrong) = read(&variables);
            assert_eq!(
                (parsed, wrong),
                (ParsedLimits::Invalid, vec![name.to_owned()])
            );
        }
    }
}
