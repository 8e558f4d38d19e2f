//! Requests that cannot be translated, each with its field and reason.

use super::*;

#[test]
fn refuses_with_field_and_reason() {
    let gpu = "spec.containers[0].resources.limits";
    for (limits, annotations, message) in [
        (
            json!({"nvidia.com/gpu": "0.5"}),
            json!({}),
            format!("{gpu}[nvidia.com/gpu]: 0.5 is not a whole number; use one, such as 1"),
        ),
        (
            json!({"nvidia.com/gpu": -1}),
            json!({}),
            format!("{gpu}[nvidia.com/gpu]: -1 is not a whole number; use one, such as 1"),
        ),
        (
            json!({"nvidia.com/gpu": 33}),
            json!({}),
            format!(
                "{gpu}[nvidia.com/gpu]: the pod requests 33 GPUs, a claim has at most 32 devices; use several pods"
            ),
        ),
        (
            json!({"nvidia.com/gpu": 1, "volcano.sh/vgpu-number": 1}),
            json!({}),
            format!(
                "{gpu}[volcano.sh/vgpu-number]: the container also requests nvidia.com/gpu; use the resources of one device plugin per container"
            ),
        ),
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 101}),
            json!({}),
            format!("{gpu}[nvidia.com/gpumem-percentage]: 101% is more than a GPU; use 1 to 100"),
        ),
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": "9Ei"}),
            json!({}),
            format!(
                "{gpu}[nvidia.com/gpumem]: 9Ei is more memory than a GPU has, because the resource counts in MiB; request less"
            ),
        ),
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": "16Gi"}),
            json!({}),
            format!(
                "{gpu}[nvidia.com/gpumem]: 16Gi is more memory than a GPU has, because the resource counts in MiB; use 16384"
            ),
        ),
        (
            json!({"nvidia.com/mig-1g.10gb": 1, "nvidia.com/mig-1g.20gb": 2}),
            json!({}),
            format!(
                "{gpu}[nvidia.com/mig-1g.20gb]: the container also requests nvidia.com/mig-1g.10gb; CUDA uses one MIG partition per process, request each profile in a container of its own"
            ),
        ),
        (
            json!({"nvidia.com/gpu.shared": 1}),
            json!({}),
            format!(
                "{gpu}[nvidia.com/gpu.shared]: a GPU shared by time-slicing has no amount of memory; request an amount, such as nvidia.com/gpumem"
            ),
        ),
        (
            json!({"nvidia.com/gpu": 1}),
            json!({"volcano.sh/vgpu-mode": "mps"}),
            "metadata.annotations[volcano.sh/vgpu-mode]: mode \"mps\" has no equivalent; use hami-core or mig, or remove the annotation"
                .to_owned(),
        ),
        (
            json!({"volcano.sh/vgpu-number": 1}),
            json!({"volcano.sh/vgpu-mode": "mig"}),
            format!(
                "{gpu}[volcano.sh/vgpu-number]: mode mig needs an amount of memory to select a partition; add volcano.sh/vgpu-memory in MiB"
            ),
        ),
        (
            json!({"nvidia.com/gpu": 1}),
            json!({"volcano.sh/vgpu-mode": "mig", "nvidia.com/vgpu-mode": "hami-core"}),
            "metadata.annotations[nvidia.com/vgpu-mode]: \"hami-core\" contradicts the annotation volcano.sh/vgpu-mode; remove one of them"
                .to_owned(),
        ),
        (
            json!({"nvidia.com/gpu": 1}),
            json!({"nvidia.com/use-gpuuuid": "MIG-1"}),
            "metadata.annotations[nvidia.com/use-gpuuuid]: \"MIG-1\" is not the UUID of a GPU; MIG partitions are created on demand, name the UUID of the GPU or a profile"
                .to_owned(),
        ),
        (
            json!({"nvidia.com/gpu": 1}),
            json!({"hami.io/gpu-scheduler-policy": "mutex"}),
            "metadata.annotations[hami.io/gpu-scheduler-policy]: policy \"mutex\" has no equivalent; use binpack or spread, or remove the annotation"
                .to_owned(),
        ),
        (
            json!({"nvidia.com/gpu": 1}),
            json!({"nvidia.com/numa-bind": "yes"}),
            "metadata.annotations[nvidia.com/numa-bind]: \"yes\" is not a boolean; use true or false"
                .to_owned(),
        ),
        (
            json!({"nvidia.com/gpu": 1}),
            json!({"nvidia.com/use-gputype": "x".repeat(11_000)}),
            "metadata.annotations[nvidia.com/use-gputype]: the list is too long for a selector of 10240 bytes; use fewer values"
                .to_owned(),
        ),
    ] {
        let text = refused(&annotated(limits.clone(), annotations.clone()));
        assert!(text.starts_with(&message), "{text}\n{message}");
    }
}

#[test]
fn reports_all_refusals_of_a_pod() {
    let text = refused(&annotated(
        json!({"nvidia.com/gpu": "x"}),
        json!({"volcano.sh/vgpu-mode": "mps"}),
    ));
    assert_eq!(text.matches("; use").count(), 2, "{text}");
}

#[test]
fn no_suffix_of_memory_becomes_a_whole_gpu() {
    for (text, amount) in [
        ("16Gi", "16384"),
        ("16G", "15259"),
        ("16000M", "15259"),
        ("16384Mi", "16384"),
        ("16000000Ki", "15625"),
        ("17179869184", "16384"),
    ] {
        let refusal = refused(&annotated(
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": text}),
            json!({}),
        ));
        assert!(
            refusal.contains(&format!("{text} is more memory"))
                && refusal.ends_with(&format!("use {amount}")),
            "{refusal}"
        );
    }
}
