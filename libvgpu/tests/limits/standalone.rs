//! Limits from environment variables.

use std::os::unix::fs::MetadataExt;

use std::os::unix::process::CommandExt;

use crate::test_process::{CONTEXT_BYTES, Container, ESTIMATE, GIB, MIB, TestProcess};

fn start(container: &Container, variables: &[(&str, &str)]) -> TestProcess {
    container.start_with("dlsym", |command| {
        // A separate process group, as a shell creates for each command line.
        command.process_group(0).envs(variables.iter().copied());
    })
}

#[test]
fn limits_each_gpu_by_variable() {
    let container = Container::new();
    for (name, value, limit) in [
        ("DRAVA_MEMORY_LIMIT", "4Gi", 4 * GIB),
        ("DRAVA_MEMORY_LIMIT", "2G", 2_000_000_000),
        ("DRAVA_MEMORY_LIMIT", "1073741824", GIB),
        ("CUDA_DEVICE_MEMORY_LIMIT", "768m", 768 * MIB),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "3g", 3 * GIB),
    ] {
        let mut process = start(&container, &[(name, value)]);
        process.init(0);
        assert_eq!(process.memory_info().1, limit, "{name}={value}");
        process.denied(&format!("alloc {}", limit + 1));
    }
}

#[test]
fn applies_precedence_of_variables() {
    let container = Container::new();
    let all = ("CUDA_DEVICE_MEMORY_LIMIT", "3g");
    for (variables, limit) in [
        // drava's variables over HAMi's, those of one GPU over those of all GPUs.
        (&[all, ("DRAVA_MEMORY_LIMIT", "2Gi")][..], 2 * GIB),
        (&[("CUDA_DEVICE_MEMORY_LIMIT_0", "1g"), all], GIB),
        (&[("CUDA_DEVICE_MEMORY_LIMIT_1", "1g"), all], 3 * GIB),
    ] {
        let mut process = start(&container, variables);
        process.init(0);
        assert_eq!(process.memory_info().1, limit, "{variables:?}");
    }
}

#[test]
fn limits_only_the_gpu_named_by_variable() {
    let container = Container::new();
    let mut process = start(&container, &[("CUDA_DEVICE_MEMORY_LIMIT_1", "1g")]);
    process.init(0);
    process.alloc(2 * GIB);
    process.init(1);
    process.denied(&format!("alloc {}", 2 * GIB));
}

#[test]
fn treats_zero_as_no_limit_and_denies_invalid_values() {
    let container = Container::new();
    let mut process = start(&container, &[("CUDA_DEVICE_MEMORY_LIMIT", "0")]);
    process.init(0);
    process.alloc(2 * GIB);
    for nonsense in ["4Gb", "-1", "lots", "99999999999999999999"] {
        let mut process = start(&container, &[("DRAVA_MEMORY_LIMIT", nonsense)]);
        process.denied("init 0");
    }
}

#[test]
fn shares_limit_within_a_job_only() {
    let container = Container::new();
    let job = format!("test-{}", std::process::id());
    let of_job = [("DRAVA_MEMORY_LIMIT", "2Gi"), ("DRAVA_JOB", &job)];
    let mut first = start(&container, &of_job);
    first.init(0);
    let mut second = start(&container, &of_job);
    second.init(0);
    first.alloc(2 * GIB - 2 * ESTIMATE);
    second.denied("alloc 1");
    let mut other_job = start(&container, &[("DRAVA_MEMORY_LIMIT", "2Gi")]);
    other_job.init(0);
    other_job.alloc(GIB);
    first.kill();
    assert_eq!(second.memory_info().0, 2 * GIB - ESTIMATE);
}

/// No limits page tells the cost of a context, so it is estimated, whatever other processes do.
#[test]
fn charges_contexts_of_every_process() {
    let container = Container::new();
    let job = format!("contexts-{}", std::process::id());
    let of_job = [("DRAVA_MEMORY_LIMIT", "4Gi"), ("DRAVA_JOB", &job)];
    let mut first = start(&container, &of_job);
    let mut second = start(&container, &of_job);
    first.init(0);
    assert_eq!(first.memory_info().0, 4 * GIB - ESTIMATE);
    second.init(0);
    let context = second.ok("context 0")[0];
    assert_eq!(first.memory_info().0, 4 * GIB - 3 * ESTIMATE);
    second.ok(&format!("destroy {context}"));
    second.ok("init 0");
    let filled = first.fill(64 * MIB) + second.fill(2 * MIB);
    assert_eq!(filled, 4 * GIB - 2 * ESTIMATE);
    let unused = 2 * (ESTIMATE - CONTEXT_BYTES);
    assert_eq!(container.ledger_bytes(), 4 * GIB - unused);
}

#[test]
fn removes_regions_of_ended_jobs() {
    let container = Container::new();
    let job = format!("ended-{}", std::process::id());
    let limit = ("DRAVA_MEMORY_LIMIT", "1Gi");
    let mut process = start(&container, &[limit, ("DRAVA_JOB", &job)]);
    process.init(0);
    let names = || {
        let entries = std::fs::read_dir("/dev/shm").unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.contains(&job))
    };
    let files = || names().count();
    assert_eq!(files(), 1);
    let path = format!("/dev/shm/{}", names().next().unwrap());
    let mode = std::fs::metadata(path).unwrap().mode();
    assert_eq!(mode & 0o777, 0o600, "accessible only to its user");
    process.kill();
    start(&container, &[limit]).init(0);
    assert_eq!(files(), 0);
}

#[test]
fn selects_policies_by_name() {
    let container = Container::new();
    for spill in [
        ("DRAVA_MEMORY_POLICY", "spill"),
        ("CUDA_OVERSUBSCRIBE", "true"),
    ] {
        let mut process = start(&container, &[("DRAVA_MEMORY_LIMIT", "1Gi"), spill]);
        process.init(0);
        process.alloc(GIB - ESTIMATE);
        process.alloc(GIB);
        assert_eq!(process.memory_info().0, 0);
    }
    for hard in [
        ("DRAVA_MEMORY_POLICY", "hard"),
        ("CUDA_OVERSUBSCRIBE", "false"),
        ("DRAVA_COMPUTE_POLICY", "balance"),
        ("GPU_CORE_UTILIZATION_POLICY", "force"),
        ("DRAVA_PRIORITY", "-5"),
        ("CUDA_TASK_PRIORITY", "0"),
    ] {
        let mut process = start(&container, &[("DRAVA_MEMORY_LIMIT", "1Gi"), hard]);
        process.init(0);
        process.alloc(GIB - ESTIMATE);
        process.denied("alloc 1");
    }
    for nonsense in [
        ("DRAVA_MEMORY_POLICY", "soft"),
        ("CUDA_OVERSUBSCRIBE", "maybe"),
        ("DRAVA_COMPUTE_POLICY", "fair"),
        ("GPU_CORE_UTILIZATION_POLICY", "always"),
        ("DRAVA_PRIORITY", "101"),
        ("CUDA_TASK_PRIORITY", "high"),
        ("DRAVA_CORES", "101"),
    ] {
        let mut process = start(&container, &[nonsense]);
        process.denied("init 0");
    }
}

/// Launches go through the library only if they are metered.
#[test]
fn meters_only_with_limited_cores() {
    let container = Container::new();
    for (variables, is_metered) in [
        (&[("DRAVA_CORES", "30")][..], true),
        (&[("CUDA_DEVICE_SM_LIMIT", "30")], true),
        (&[("CUDA_DEVICE_SM_LIMIT_0", "30")], true),
        (&[("DRAVA_CORES", "100")], false),
        (&[("DRAVA_CORES", "0")], false),
        (&[("DRAVA_MEMORY_LIMIT", "1Gi")], false),
    ] {
        let mut process = start(&container, variables);
        let library = process.request("lookup cuLaunchKernel");
        assert_eq!(library.contains("libvgpu"), is_metered, "{variables:?}");
    }
}
