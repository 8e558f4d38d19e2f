//! Tables of pods and nodes.

use serde_json::{Value, json};

use super::*;

fn node(spec: &Value, ready: &str) -> NodeInfo {
    NodeInfo::of(
        &serde_json::from_value(json!({
            "metadata": {"name": "n1", "labels": {"zone": "a", "gpus": "4"}},
            "spec": spec,
            "status": {
                "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "10"},
                "conditions": [{"type": "Ready", "status": ready}],
            },
        }))
        .unwrap(),
    )
}

fn demand(spec: Value) -> PodDemand {
    let mut full = json!({"containers": []});
    if let (Some(full), Value::Object(spec)) = (full.as_object_mut(), spec) {
        full.extend(spec);
    }
    PodDemand::of(
        &serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": full})).unwrap(),
    )
}

fn affinity(expression: &Value) -> PodDemand {
    demand(
        json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [expression]}],
        }}}}),
    )
}

#[test]
fn names_first_obstacle() {
    let plain = node(&json!({}), "True");
    let cases = [
        (plain.clone(), demand(json!({})), Ok(())),
        (
            node(&json!({}), "False"),
            demand(json!({})),
            Err("the node is not ready"),
        ),
        (
            node(&json!({}), "Unknown"),
            demand(json!({})),
            Err("the node is not ready"),
        ),
        (
            node(&json!({"unschedulable": true}), "True"),
            demand(json!({})),
            Err("the node is cordoned"),
        ),
        (
            node(&json!({"unschedulable": true}), "True"),
            demand(
                json!({"tolerations": [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]}),
            ),
            Ok(()),
        ),
        (
            node(
                &json!({"taints": [{"key": "gpu", "effect": "NoSchedule"}]}),
                "True",
            ),
            demand(json!({})),
            Err("untolerated node taint gpu"),
        ),
        (
            node(
                &json!({"taints": [{"key": "gpu", "value": "x", "effect": "NoExecute"}]}),
                "True",
            ),
            demand(json!({"tolerations": [{"key": "gpu", "value": "x"}]})),
            Ok(()),
        ),
        (
            node(
                &json!({"taints": [{"key": "gpu", "effect": "PreferNoSchedule"}]}),
                "True",
            ),
            demand(json!({})),
            Ok(()),
        ),
        (
            plain.clone(),
            demand(json!({"nodeSelector": {"zone": "a"}})),
            Ok(()),
        ),
        (
            plain.clone(),
            demand(json!({"nodeSelector": {"zone": "b"}})),
            Err("node selector does not match"),
        ),
        (
            plain.clone(),
            demand(json!({"nodeName": "n2"})),
            Err("the pod specifies another node"),
        ),
        (
            plain.clone(),
            affinity(&json!({"key": "zone", "operator": "In", "values": ["a", "b"]})),
            Ok(()),
        ),
        (
            plain.clone(),
            affinity(&json!({"key": "zone", "operator": "NotIn", "values": ["a"]})),
            Err("node affinity does not match"),
        ),
        (
            plain.clone(),
            affinity(&json!({"key": "nope", "operator": "NotIn", "values": ["a"]})),
            Ok(()),
        ),
        (
            plain.clone(),
            affinity(&json!({"key": "nope", "operator": "Exists"})),
            Err("node affinity does not match"),
        ),
        (
            plain.clone(),
            affinity(&json!({"key": "nope", "operator": "DoesNotExist"})),
            Ok(()),
        ),
        (
            plain.clone(),
            affinity(&json!({"key": "gpus", "operator": "Gt", "values": ["3"]})),
            Ok(()),
        ),
        (
            plain.clone(),
            affinity(&json!({"key": "gpus", "operator": "Lt", "values": ["4"]})),
            Err("node affinity does not match"),
        ),
        (
            plain.clone(),
            affinity(&json!({"key": "zone", "operator": "Gt", "values": ["3"]})),
            Err("node affinity does not match"),
        ),
        (
            plain.clone(),
            affinity(&json!({"key": "zone", "operator": "Sometimes"})),
            Err("node affinity does not match"),
        ),
        (
            plain.clone(),
            demand(
                json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{}, {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}],
                }}}}),
            ),
            Ok(()),
        ),
        (
            plain.clone(),
            demand(
                json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{}],
                }}}}),
            ),
            Err("node affinity does not match"),
        ),
        (
            plain.clone(),
            demand(json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "5"}}}]})),
            Err("insufficient cpu"),
        ),
        (
            plain.clone(),
            demand(
                json!({"containers": [{"name": "c", "resources": {"requests": {"hugepages-2Mi": "2Mi"}}}]}),
            ),
            Err("insufficient hugepages-2Mi"),
        ),
        (
            plain.clone(),
            demand(
                json!({"containers": [{"name": "c", "resources": {"requests": {"nvidia.com/gpu": "1"}}}]}),
            ),
            Ok(()),
        ),
        (
            plain.clone(),
            demand(
                json!({"containers": [{"name": "c", "resources": {"requests": {"example.com/rdma": "1"}}}]}),
            ),
            Err("insufficient example.com/rdma"),
        ),
        (
            plain,
            demand(
                json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "1e30"}}}]}),
            ),
            Err("insufficient cpu"),
        ),
    ];
    let served = crate::fixture::object(
        json!({"metadata": {"name": "gpus"}, "spec": {"extendedResourceName": "nvidia.com/gpu"}}),
    );
    let classes = BTreeMap::from([("gpus".to_owned(), served)]);
    for (node, pod, expected) in cases {
        assert_eq!(
            node.admits("n1", &pod, &Amounts::new(), &classes),
            expected.map_err(str::to_owned),
            "{node:?} {pod:?}"
        );
    }
}

#[test]
fn sums_requests_as_kube_scheduler() {
    let pod =
        |spec: Value| serde_json::from_value::<Pod>(json!({"metadata": {}, "spec": spec})).unwrap();
    let container = |cpu: &str| json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
    let sidecar = |cpu: &str| json!({"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": cpu}}});
    let cases = [
        (
            json!({"containers": [container("1"), container("500m")]}),
            "1500m",
        ),
        (
            json!({"containers": [container("1")], "initContainers": [container("3"), container("2")]}),
            "3",
        ),
        (
            json!({"containers": [container("1")], "initContainers": [sidecar("1"), container("3")]}),
            "4",
        ),
        (
            json!({"containers": [container("4")], "initContainers": [container("3"), sidecar("1")]}),
            "5",
        ),
        (
            json!({"containers": [container("1")], "overhead": {"cpu": "250m"}}),
            "1250m",
        ),
        (
            json!({"containers": [container("1")], "resources": {"requests": {"cpu": "2"}}}),
            "2",
        ),
    ];
    for (spec, cpu) in cases {
        let sum = requests(&pod(spec.clone()));
        assert_eq!(sum.get("cpu"), Some(&cpu.parse().unwrap()), "{spec}");
        assert_eq!(sum.get("pods"), Some(&Quantity::count(1)));
    }
}

/// A running pod that requests `spec` CPUs, of which kubelet reports what is allocated and what the container has.
fn running(
    spec: &str,
    allocated: Option<&str>,
    actual: Option<&str>,
    pending: Option<&str>,
) -> Pod {
    let requests = |cpu: Option<&str>| cpu.map(|cpu| json!({"requests": {"cpu": cpu}}));
    let conditions = pending
        .map(|reason| json!([{"type": "PodResizePending", "status": "True", "reason": reason}]));
    serde_json::from_value(json!({
        "metadata": {},
        "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": spec}}}]},
        "status": {
            "conditions": conditions,
            "containerStatuses": [{
                "name": "c", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "allocatedResources": allocated.map(|cpu| json!({"cpu": cpu})),
                "resources": requests(actual),
            }],
        },
    }))
    .unwrap()
}

#[test]
fn holds_most_of_resize_in_place() {
    let (infeasible, deferred) = (Some("Infeasible"), Some("Deferred"));
    for (spec, allocated, actual, pending, cpu) in [
        ("2", None, None, None, "2"),
        ("100", Some("1"), Some("1"), infeasible, "1"),
        ("100", None, None, infeasible, "0"),
        ("3", Some("1"), Some("1"), deferred, "3"),
        ("1", Some("3"), Some("3"), None, "3"),
        ("1", Some("1"), Some("3"), None, "3"),
        ("2", Some("1"), None, None, "2"),
        ("1", Some("2"), None, None, "2"),
    ] {
        let pod = running(spec, allocated, actual, pending);
        let held = held(&pod).get("cpu").copied().unwrap_or_default();
        assert_eq!(
            held,
            cpu.parse().unwrap(),
            "{spec} {allocated:?} {actual:?} {pending:?}"
        );
        assert_eq!(requests(&pod).get("cpu"), Some(&spec.parse().unwrap()));
    }
}

#[test]
fn holds_most_of_pod_level_resize() {
    let pod = |reason: &str| {
        serde_json::from_value::<Pod>(json!({
            "metadata": {},
            "spec": {
                "containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}],
                "resources": {"requests": {"cpu": "8", "memory": "1Gi"}},
            },
            "status": {
                "conditions": [{"type": "PodResizePending", "status": "True", "reason": reason}],
                "allocatedResources": {"cpu": "2", "memory": "2Gi"},
                "resources": {"requests": {"cpu": "3", "memory": "1Gi"}},
            },
        }))
        .unwrap()
    };
    let infeasible = held(&pod("Infeasible"));
    assert_eq!(infeasible.get("cpu"), Some(&"3".parse().unwrap()));
    assert_eq!(infeasible.get("memory"), Some(&"2Gi".parse().unwrap()));
    assert_eq!(
        held(&pod("Deferred")).get("cpu"),
        Some(&"8".parse().unwrap())
    );
}

#[test]
fn compares_values_of_taints() {
    let tainted = node(
        &json!({"taints": [{"key": "gpu", "value": "5", "effect": "NoSchedule"}]}),
        "True",
    );
    for (operator, value, is_tolerated) in [
        ("Gt", "5", false),
        ("Gt", "4", true),
        ("Lt", "5", false),
        ("Lt", "6", true),
        ("Gt", "+4", false),
        ("Lt", "many", false),
        ("Equal", "5", true),
        ("", "5", true),
        ("Near", "5", false),
    ] {
        let pod =
            demand(json!({"tolerations": [{"key": "gpu", "operator": operator, "value": value}]}));
        assert_eq!(
            tainted.is_tolerated(&pod).is_ok(),
            is_tolerated,
            "{operator} {value}"
        );
    }
}

#[test]
fn removes_zero_sums() {
    let amounts = Amounts::from([("cpu".to_owned(), Quantity::count(2))]);
    let mut sum = Amounts::new();
    add(&mut sum, &amounts);
    add(&mut sum, &amounts);
    subtract(&mut sum, &amounts);
    assert_eq!(sum, amounts);
    subtract(&mut sum, &amounts);
    assert_eq!(sum, Amounts::new());
}
