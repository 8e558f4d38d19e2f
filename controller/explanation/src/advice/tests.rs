use serde_json::{Value, json};

use super::*;
use crate::fixture::{object, snapshot};

/// Shares of H100s of 80480 MiB.
const SHARES: Shares = Shares {
    largest_bytes: Some(80_480 << 20),
    context_bytes: Some(528 << 20),
};

fn advice(devices: &Value) -> Vec<String> {
    let cluster = snapshot().cluster;
    let known = Known {
        classes: &cluster.classes,
        selectors: &cluster.selectors,
        shares: SHARES,
    };
    let spec: ResourceClaimSpec = object(json!({"devices": devices}));
    of_claim("default", &spec, "spec", known)
}

/// Advice for a request of a share with these amounts, without the path of the amounts.
fn advice_for(amounts: &Value) -> Vec<String> {
    let exactly = json!({"deviceClassName": "vgpu.drava.dev", "capacity": {"requests": amounts}});
    let found = advice(&json!({"requests": [{"name": "gpu", "exactly": exactly}]}));
    let path = "spec.devices.requests[0].exactly.capacity.requests";
    let relative = |text: &String| text.strip_prefix(path).unwrap().to_owned();
    found.iter().map(relative).collect()
}

#[test]
fn names_what_an_amount_means() {
    for (amounts, expected) in [
        (
            json!({"memory": "8"}),
            ".memory: 8 is 8 bytes; did you mean 8Gi?",
        ),
        (
            json!({"memory": "8000"}),
            ".memory: 8000 is 8000 bytes; did you mean 8000Mi?",
        ),
        // As the API server writes it.
        (
            json!({"memory": "8k"}),
            ".memory: 8k is 8000 bytes; did you mean 8000Mi?",
        ),
        (
            json!({"memory": "8Mi"}),
            ".memory: 8Mi is less than a CUDA context, which takes about 528 MiB; did you mean 8Gi?",
        ),
        (
            json!({"memory": "500Mi"}),
            ".memory: 500Mi is less than a CUDA context, which takes about 528 MiB",
        ),
        (
            json!({"memory": "79Gi"}),
            ".memory: 79 GiB exceeds the largest share of the GPUs of this cluster, 80480Mi",
        ),
        (
            json!({"memory": "8Gi", "cores": "0.3"}),
            ".cores: 0.3 is rounded up to 1% of the GPU time of one GPU; did you mean 30?",
        ),
        (
            json!({"memory": "8Gi", "cores": "130"}),
            ".cores: 130 exceeds 100, the GPU time of one GPU; for several GPUs set count",
        ),
        (
            json!({"memory": "8Gi", "mem": "8Gi"}),
            ".mem: no GPU of drava has this capacity: shares have memory, cores and slots; did you mean memory?",
        ),
        (
            json!({"memory": "8Gi", "gpu.drava.dev/cores": "8Gi"}),
            ".gpu.drava.dev/cores: no GPU of drava has this capacity: shares have memory, cores and slots; did you mean cores?",
        ),
        (
            json!({"memory": "0"}),
            ".memory: 0 is not an amount, so pods with the claim stay pending; request more, or omit memory for its default",
        ),
        (
            json!({"memory": "8Gi", "cores": "-5"}),
            ".cores: -5 is negative, so pods with the claim stay pending; did you mean 5?",
        ),
        (
            json!({"memory": "-8Gi"}),
            ".memory: -8Gi is negative, so pods with the claim stay pending; did you mean 8Gi?",
        ),
        (
            json!({"cores": "30"}),
            ": without memory the share has all memory of a GPU, and no other fits beside it, unless a GpuQuota sets another \
             default; did you mean memory: 8Gi?",
        ),
    ] {
        assert_eq!(advice_for(&amounts), [expected], "{amounts}");
    }
}

#[test]
fn says_nothing_about_sound_requests() {
    for amounts in [
        json!({"memory": "8Gi", "cores": "30"}),
        json!({"memory": "8G"}),
        json!({"memory": "528Mi", "cores": "0", "slots": "1"}),
        json!({"memory": "80480Mi", "cores": "100"}),
    ] {
        assert_eq!(advice_for(&amounts), Vec::<String>::new(), "{amounts}");
    }
    for class in ["gpu.drava.dev", "mig.drava.dev", "gpu.example.com"] {
        let requests = json!([{"name": "gpu", "exactly": {"deviceClassName": class}}]);
        let expected = usize::from(class == "mig.drava.dev");
        assert_eq!(
            advice(&json!({"requests": requests})).len(),
            expected,
            "{class}"
        );
    }
    // Whole GPUs and partitions have amounts of their own, and a monitor has none.
    for (class, memory, is_admin) in [
        ("gpu.drava.dev", Some("79Gi"), false),
        ("gpu.drava.dev", Some("1Mi"), false),
        ("vgpu.drava.dev", None, true),
    ] {
        let requests = memory.map(|memory| json!({"requests": {"memory": memory}}));
        let exactly =
            json!({"deviceClassName": class, "capacity": requests, "adminAccess": is_admin});
        let found = advice(&json!({"requests": [{"name": "gpu", "exactly": exactly}]}));
        assert_eq!(found, Vec::<String>::new(), "{class} {memory:?}");
    }
}

#[test]
fn knows_percentage_of_memory() {
    let config = |requests: &Value| {
        json!([{"requests": requests, "opaque": {"driver": "gpu.drava.dev", "parameters": {
            "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "memory": {"percent": 50},
        }}}])
    };
    let requests = json!([{"name": "gpu", "exactly": {"deviceClassName": "vgpu.drava.dev"}}]);
    let found = |of: Value| advice(&json!({"requests": requests, "config": config(&of)})).len();
    assert_eq!(found(json!(["gpu"])), 0);
    assert_eq!(found(json!(["other"])), 1);
}

#[test]
fn names_driver_of_config_without_effect() {
    let requests = json!([{"name": "gpu", "exactly": {
        "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": "8Gi"}},
    }}]);
    let config = json!([{"opaque": {"driver": "drava.dev", "parameters": {}}}]);
    assert_eq!(
        advice(&json!({"requests": requests, "config": config})),
        [
            "spec.devices.config[0].opaque.driver: config for driver drava.dev has no effect on devices of gpu.drava.dev; did \
             you mean gpu.drava.dev?"
        ]
    );
}

#[test]
fn corrects_names_of_own_classes_only() {
    let of_class = |class: &str| {
        advice(&json!({"requests": [
            {"name": "a", "firstAvailable": [{"name": "b", "deviceClassName": class}]},
        ]}))
    };
    assert_eq!(
        of_class("vgpu.drava.io"),
        [
            "spec.devices.requests[0].firstAvailable[0].deviceClassName: device class vgpu.drava.io does not exist; did you \
             mean vgpu.drava.dev?"
        ]
    );
    assert_eq!(of_class("gpu.example.com"), Vec::<String>::new());
    assert_eq!(
        of_class("open.drava.dev"),
        Vec::<String>::new(),
        "it exists"
    );
}

#[test]
fn names_claims_that_no_container_uses() {
    let pod = |claims: &Value| -> Pod {
        object(json!({"spec": {
            "resourceClaims": [{"name": "gpu"}, {"name": "other-driver"}],
            "initContainers": [{"name": "i"}],
            "containers": [{"name": "c", "resources": {"claims": claims}}],
        }}))
    };
    let own = BTreeSet::from(["gpu".to_owned()]);
    assert_eq!(
        of_pod(&pod(&json!([])), &own),
        [
            "spec.resourceClaims[0]: no container names claim gpu, so none gets its GPUs; add resources: {claims: [{name: \
             gpu}]} to a container"
        ]
    );
    assert!(of_pod(&pod(&json!([{"name": "gpu"}])), &own).is_empty());
}

#[test]
fn knows_shares_of_slices() {
    let device = |product: &str, memory: &str| {
        json!({
            "name": product, "allowMultipleAllocations": true, "capacity": {"memory": {"value": memory}},
            "attributes": {"productName": {"string": product}},
        })
    };
    let slice: ResourceSlice = object(json!({"metadata": {}, "spec": {
        "driver": "gpu.drava.dev", "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
        "devices": [
            device("NVIDIA H100 80GB HBM3", "80480Mi"), device("NVIDIA A100-SXM4-40GB", "40Gi"),
            {"name": "gpu-0", "capacity": {"memory": {"value": "90Gi"}}},
        ],
    }}));
    assert_eq!(
        Shares::of(&slice),
        Shares {
            largest_bytes: Some(80_480 << 20),
            context_bytes: Some(432 << 20),
        }
    );
}

/// The page for users: each warning that it quotes is given for one of these requests.
#[test]
fn page_quotes_what_is_said() {
    let page = include_str!("../../../../docs/mistakes.md");
    let request = |class: &str, amounts: Value| json!([{"name": "gpu", "exactly": {"deviceClassName": class, "capacity": {"requests": amounts}}}]);
    let mut said: Vec<String> = [
        request("vgpu.drava.io", json!({})),
        request("vgpu.drava.dev", json!({"memory": "100Gi"})),
        request("vgpu.drava.dev", json!({"memory": "8000", "mem": "8Gi"})),
        request("vgpu.drava.dev", json!({"memory": "8Mi", "cores": "0.3"})),
        request("vgpu.drava.dev", json!({"cores": "130"})),
        request("vgpu.drava.dev", json!({"memory": "0", "cores": "-5"})),
    ]
    .iter()
    .flat_map(|requests| {
        let config = json!([{"opaque": {"driver": "drava.dev", "parameters": {}}}]);
        advice(&json!({"requests": requests, "config": config}))
    })
    .collect();
    let pod = json!({"spec": {"resourceClaims": [{"name": "gpu"}], "containers": [{"name": "c"}]}});
    said.extend(of_pod(&object(pod), &BTreeSet::from(["gpu".to_owned()])));
    let rows = page
        .lines()
        .filter(|line| line.starts_with("| ") && line.contains("| warning "));
    let quoted: Vec<&str> = rows
        .map(|row| row.trim_end_matches("` |").rsplit('`').next().unwrap())
        .collect();
    assert_eq!(quoted.len(), 12, "{quoted:?}");
    for text in quoted {
        assert!(
            said.iter().any(|said| said.contains(text)),
            "{text}: {said:#?}"
        );
    }
}

#[test]
fn names_class_with_invalid_config() {
    let mut cluster = crate::fixture::snapshot().cluster;
    let mut class = serde_json::to_value(&cluster.classes["vgpu.drava.dev"]).unwrap();
    class["spec"]["config"] = json!([{"opaque": {"driver": "gpu.drava.dev", "parameters": {
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "memory": {"maxLimit": "10GB"},
    }}}]);
    cluster.classes.insert(
        "vgpu.drava.dev".to_owned(),
        serde_json::from_value(class).unwrap(),
    );
    let spec = json!({"devices": {"requests": [{"name": "gpu", "exactly": {
        "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": "8Gi"}},
    }}]}});
    let known = Known {
        classes: &cluster.classes,
        selectors: &cluster.selectors,
        shares: Shares::default(),
    };
    let found = of_claim(
        "default",
        &serde_json::from_value(spec).unwrap(),
        "spec",
        known,
    );
    assert_eq!(
        found,
        [
            "spec.devices.requests[0].exactly.deviceClassName: device class vgpu.drava.dev has an invalid config, so pods with the \
             claim stay pending: config field memory.maxLimit: \"10GB\" is not a quantity: unknown suffix \"GB\", use one of n u m k M G T P E \
             Ki Mi Gi Ti Pi Ei"
        ]
    );
}

#[test]
fn returns_close_names_only() {
    let known = ["memory", "cores", "vgpu.drava.dev"];
    assert_eq!(closest("memmory", known), Some("memory"));
    assert_eq!(closest("core", known), Some("cores"));
    assert_eq!(closest("vgpu.drava.io", known), Some("vgpu.drava.dev"));
    assert_eq!(closest("x", known), None);
    assert_eq!(closest("bandwidth", known), None);
}
