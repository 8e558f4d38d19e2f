//! Targets, rules and holders of devices.

use super::*;

/// A slice of `node` with two GPUs; the second has a partition.
fn slice(node: &str) -> ResourceSlice {
    let device = |name: &str, minor: i64| json!({"name": name, "attributes": {"minor": {"int": minor}, "uuid": {"string": format!("GPU-{minor}")}}});
    let devices = [
        device("gpu-0", 0),
        device("gpu-0-vgpu", 0),
        device("gpu-1", 1),
        device("gpu-1-vgpu", 1),
        device("gpu-1-mig-1g.10gb-0", 1),
    ];
    let pool = json!({"name": names::pool(node), "generation": 1, "resourceSliceCount": 1});
    let spec = json!({"driver": names::DRIVER, "nodeName": node, "pool": pool, "devices": devices});
    let slice = json!({"metadata": {"name": node}, "spec": spec});
    serde_json::from_value(slice).expect("a slice")
}

fn slices() -> Vec<ResourceSlice> {
    vec![slice("n1"), slice("n2")]
}

fn rules(target: &str) -> Vec<(String, String, Option<String>)> {
    let targeted = targeted(&slices(), target).expect("the target exists");
    let rules = targeted.rules.into_iter();
    rules
        .map(|rule| (rule.name, rule.pool, rule.device))
        .collect()
}

fn error(target: &str) -> String {
    let error = targeted(&slices(), target).expect_err("the target does not exist");
    error.to_string()
}

#[test]
fn selects_node_by_one_rule_for_its_pool() {
    let rule = ("drava-node.n1".to_owned(), "n1/gpus".to_owned(), None);
    assert_eq!(rules("n1"), [rule]);
    let targeted = targeted(&slices(), "n1").expect("a node");
    assert_eq!(targeted.devices.len(), 5);
}

#[test]
fn selects_gpu_by_rules_for_all_its_devices() {
    let names = |target: &str| -> Vec<String> {
        let rules = rules(target).into_iter();
        rules.map(|(name, ..)| name).collect()
    };
    let first = ["drava-device.gpu-0.n1", "drava-device.gpu-0-vgpu.n1"];
    assert_eq!(names("n1/gpu-0"), first);
    assert_eq!(names("n1/GPU-1").len(), 3, "by UUID, with the partition");
}

#[test]
fn lists_existing_targets_if_target_does_not_exist() {
    assert_eq!(
        error("n9"),
        "node n9 publishes no GPUs of driver gpu.drava.dev; nodes that do: n1, n2"
    );
    assert_eq!(
        error("n2/gpu-7"),
        "node n2 has no GPU gpu-7; its GPUs: gpu-0, gpu-1"
    );
    assert_eq!(
        error("n2/gpu-0-vgpu"),
        "node n2 has no GPU gpu-0-vgpu; its GPUs: gpu-0, gpu-1"
    );
}

#[test]
fn writes_rules_with_effect_of_action() {
    let rule = Rule {
        name: "drava-device.gpu-0.n1".to_owned(),
        pool: "n1/gpus".to_owned(),
        device: Some("gpu-0".to_owned()),
    };
    for (action, effect) in [(Action::Cordon, "NoSchedule"), (Action::Drain, "NoExecute")] {
        let object = object(
            "resource.k8s.io/v1",
            &rule,
            action.effect().expect("a taint"),
        );
        let typed: DeviceTaintRule = serde_json::from_value(object).expect("a rule");
        let selector = typed.spec.device_selector.expect("a selector");
        assert_eq!(selector.driver.as_deref(), Some("gpu.drava.dev"));
        assert_eq!(selector.pool.as_deref(), Some("n1/gpus"));
        assert_eq!(selector.device.as_deref(), Some("gpu-0"));
        assert_eq!(typed.spec.taint.effect, effect);
        assert_eq!(typed.spec.taint.key, "gpu.drava.dev/cordoned");
    }
    assert_eq!(Action::Uncordon.effect(), None);
}

fn claim(name: &str, device: &str, pods: &[&str], is_admin: bool) -> ResourceClaim {
    let result = json!({
        "request": "gpu", "driver": names::DRIVER, "pool": "n1/gpus", "device": device,
        "adminAccess": is_admin,
    });
    let consumer = |pod: &&str| json!({"resource": "pods", "name": pod, "uid": pod});
    let reserved: Vec<Value> = pods.iter().map(consumer).collect();
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"devices": {}},
        "status": {"allocation": {"devices": {"results": [result]}}, "reservedFor": reserved},
    }))
    .expect("a claim")
}

#[test]
fn finds_claims_whose_pods_use_the_devices() {
    let claims = [
        claim("a", "gpu-0-vgpu", &["a-pod", "b-pod"], false),
        claim("unreserved", "gpu-0-vgpu", &[], false),
        claim("monitor", "gpu-0", &["dcgm"], true),
        claim("other", "gpu-1", &["c-pod"], false),
    ];
    let claims = claims.map(|claim| Listed::Object(Box::new(claim)));
    let devices = ["gpu-0", "gpu-0-vgpu"].map(str::to_owned).into();
    let found = holders(&claims, "n1/gpus", &devices);
    let [holder] = &found[..] else {
        panic!("{found:?}");
    };
    assert_eq!((holder.claim.as_str(), holder.pods.len()), ("a", 2));
    assert!(holders(&claims, "n2/gpus", &devices).is_empty());
}

fn report(action: Action, rules: &[&str], claims: Vec<Holder>) -> String {
    let report = Report {
        target: "n1/gpu-0".to_owned(),
        action,
        dry_run: false,
        rules: rules.iter().map(|&rule| rule.to_owned()).collect(),
        devices: BTreeSet::new(),
        claims,
    };
    report.text()
}

#[test]
fn text_names_rules_and_remaining_claims() {
    let holder = Holder {
        namespace: "ns".to_owned(),
        claim: "a".to_owned(),
        devices: vec!["gpu-0-vgpu".to_owned()],
        pods: vec!["a-pod".to_owned()],
    };
    let text = report(Action::Cordon, &["drava-device.gpu-0.n1"], vec![holder]);
    assert_eq!(
        text,
        "n1/gpu-0 cordoned\n  devicetaintrule/drava-device.gpu-0.n1\n\nThese claims keep their devices; `kubectl drava \
         drain` evicts their pods:\nCLAIM   DEVICES      PODS\nns/a    gpu-0-vgpu   a-pod\n"
    );
    assert_eq!(
        report(Action::Uncordon, &[], Vec::new()),
        "n1/gpu-0 was not cordoned\n"
    );
}

#[test]
fn finds_rules_of_retired_nodes_and_gpus() {
    let rules = [
        "drava-node.a",
        "drava-device.gpu-1.a",
        "drava-device.gpu-1-vgpu.a",
        "drava-device.gpu-10.a",
        "drava-device.gpu-1-vgpu.x.a",
        "other",
    ];
    let rules = rules.map(str::to_owned);
    let found = |target: &str| -> Vec<String> {
        let targeted = retired(&rules, target).into_iter();
        targeted
            .flat_map(|targeted| targeted.rules)
            .map(|rule| rule.name)
            .collect()
    };
    assert_eq!(found("a"), ["drava-node.a"]);
    assert_eq!(
        found("a/gpu-1"),
        ["drava-device.gpu-1.a", "drava-device.gpu-1-vgpu.a"]
    );
    assert_eq!(found("b"), Vec::<String>::new());
    assert_eq!(found("a/gpu-2"), Vec::<String>::new());
}
