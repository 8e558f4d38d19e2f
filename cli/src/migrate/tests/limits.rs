//! Limits of tenants: each becomes a GpuQuota of its namespace, or is refused.

use drava_api::quota::GpuQuota;

use super::*;

fn specs(migration: &Migration) -> Vec<Value> {
    let quotas = migration
        .objects
        .iter()
        .filter(|object| object["kind"] == "GpuQuota");
    quotas
        .map(|quota| {
            serde_json::from_value::<GpuQuota>(quota.clone()).expect("a quota");
            quota["spec"].clone()
        })
        .collect()
}

fn resource_quota(hard: &str) -> String {
    format!(
        "apiVersion: v1\nkind: ResourceQuota\nmetadata: {{name: q, namespace: team-a}}\nspec: {{hard: {{{hard}}}}}\n"
    )
}

fn limit_range(limits: &str) -> String {
    format!(
        "apiVersion: v1\nkind: LimitRange\nmetadata: {{name: l, namespace: team-a}}\nspec: {{limits: [{limits}]}}\n"
    )
}

#[test]
fn resource_quota_becomes_gpu_quota() {
    let migration = migrated(&resource_quota(
        "requests.nvidia.com/gpu: 8, limits.nvidia.com/gpumem: 40960, nvidia.com/gpucores: 400, limits.cpu: 8",
    ));
    assert_eq!(
        specs(&migration),
        [json!({
            "namespaces": ["team-a"], "limit": {"devices": 8, "memory": "40960Mi", "cores": 400},
        })]
    );
    // Other limits stay.
    assert_eq!(
        migration.objects[1]["spec"]["hard"],
        json!({"limits.cpu": 8})
    );
    assert!(!migration.is_refused(), "{}", migration.report_text());
    assert_eq!(migration.findings.len(), 4);
}

#[test]
fn smaller_of_two_limits_holds() {
    let migration = migrated(&resource_quota(
        "requests.volcano.sh/vgpu-number: 4, limits.nvidia.com/gpu: 2",
    ));
    assert_eq!(specs(&migration)[0]["limit"], json!({"devices": 2}));
    assert_eq!(migration.objects.len(), 1, "an empty quota limits nothing");
}

#[test]
fn limit_of_partitions_has_its_own_quota() {
    let migration = migrated(&resource_quota("requests.nvidia.com/mig-1g.5gb: 3"));
    assert_eq!(
        specs(&migration),
        [json!({
            "namespaces": ["team-a"], "deviceSelector": {"types": ["mig"]}, "limit": {"devices": 3},
        })]
    );
}

#[test]
fn partitions_count_against_their_own_limit_only() {
    let migration = migrated(&resource_quota(
        "requests.nvidia.com/gpu: 2, requests.nvidia.com/mig-1g.5gb: 0",
    ));
    assert_eq!(
        specs(&migration),
        [
            json!({
                "namespaces": ["team-a"], "deviceSelector": {"types": ["gpu", "vgpu"]}, "limit": {"devices": 2},
            }),
            json!({
                "namespaces": ["team-a"], "deviceSelector": {"types": ["mig"]}, "limit": {"devices": 0},
            }),
        ]
    );
}

#[test]
fn quotas_of_two_namespaces_have_two_names() {
    let quota = |namespace: &str, name: &str| {
        format!(
            "apiVersion: v1\nkind: ResourceQuota\nmetadata: {{name: {name}, namespace: {namespace}}}\nspec: {{hard: {{nvidia.com/gpu: 1}}}}\n"
        )
    };
    let migration = migrated(&format!("{}---\n{}", quota("a", "b-c"), quota("a-b", "c")));
    assert_eq!(kinds(&migration), ["GpuQuota a.b-c", "GpuQuota a-b.c"]);
}

#[test]
fn refuses_quota_that_would_lose_a_limit() {
    for (hard, extra, text) in [
        (
            "nvidia.com/gpumem-percentage: 50",
            "",
            "no limit of percentages",
        ),
        ("requests.nvidia.com/gpu: half", "", "no whole number"),
        (
            "requests.nvidia.com/gpu: 1",
            "  scopes: [BestEffort]\n",
            "spec.scopes: a GpuQuota has no scopes",
        ),
    ] {
        let yaml = format!(
            "apiVersion: v1\nkind: ResourceQuota\nmetadata: {{name: q, namespace: team-a}}\nspec:\n  hard: {{{hard}}}\n{extra}"
        );
        let migration = migrated(&yaml);
        assert!(migration.is_refused(), "{yaml}");
        assert_eq!(migration.objects, manifest::parse(&yaml).expect("YAML"));
        assert!(
            migration.report_text().contains(text),
            "{}",
            migration.report_text()
        );
    }
}

#[test]
fn limit_range_becomes_maximum_of_claims() {
    let migration = migrated(&limit_range(
        "{type: Container, max: {nvidia.com/gpu: 2, nvidia.com/gpumem: 3000, cpu: 4}, default: {nvidia.com/gpumem: 1000}}, \
         {type: Pod, max: {nvidia.com/gpucores: 150}}",
    ));
    assert_eq!(
        specs(&migration),
        [json!({
            "namespaces": ["team-a"],
            "claim": {
                "max": {"devices": 2, "memory": "6000Mi", "cores": 150}, "default": {"memory": "1000Mi"},
            },
        })]
    );
    assert_eq!(
        migration.objects[1]["spec"]["limits"],
        json!([{"type": "Container", "max": {"cpu": 4}}])
    );
    assert!(!migration.is_refused(), "{}", migration.report_text());
}

#[test]
fn refuses_range_that_would_lose_a_limit() {
    for limits in [
        "{type: Container, min: {nvidia.com/gpu: 1}}",
        "{type: Container, max: {nvidia.com/gpumem-percentage: 50}}",
        "{type: Container, maxLimitRequestRatio: {nvidia.com/gpu: 1}}",
    ] {
        let yaml = limit_range(limits);
        let migration = migrated(&yaml);
        assert!(migration.is_refused(), "{yaml}");
        assert_eq!(migration.objects, manifest::parse(&yaml).expect("YAML"));
    }
}
