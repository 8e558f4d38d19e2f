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
            plain,
            demand(
                json!({"containers": [{"name": "c", "resources": {"requests": {"nvidia.com/gpu": "1"}}}]}),
            ),
            Ok(()),
        ),
    ];
    for (node, pod, expected) in cases {
        assert_eq!(
            node.admits("n1", &pod, &Amounts::new()),
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
        assert_eq!(sum["cpu"], cpu.parse().unwrap(), "{spec}");
        assert_eq!(sum["pods"], Quantity::count(1));
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
    assert!(sum.is_empty());
}
