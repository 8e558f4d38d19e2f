//! Pods whose devices can be combined in many ways.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::cluster::{TestCluster, applied, member};
use crate::fixture::{claim, node, object};

const GPUS: usize = 8;
/// Selects no device of another node, which lack the other attributes.
const IS_PARTITION: &str = "device.attributes['gpu.drava.dev'].type == 'mig'";

/// Adds a node with GPUs of seven partitions each.
fn add_partitioned_node(cluster: &mut TestCluster) {
    cluster.planner.node(applied(node("mig")));
    let slices = |range: std::ops::Range<usize>| -> Value {
        range
            .map(|slice| (format!("memory-slice-{slice}"), json!({"value": "1"})))
            .collect()
    };
    let sets: Vec<Value> = (0..GPUS)
        .map(|gpu| json!({"name": format!("gpu-{gpu}"), "counters": slices(0..7)}))
        .collect();
    let device = |gpu: usize, start: usize| {
        json!({
            "name": format!("gpu-{gpu}-mig-1g-5gb-{start}"),
            "attributes": {
                "type": {"string": "mig"}, "profile": {"string": "1g.5gb"},
                "uuid": {"string": format!("GPU-{gpu}")}, "index": {"int": gpu},
            },
            "capacity": {"memory": {"value": "4864Mi"}},
            "consumesCounters": [{"counterSet": format!("gpu-{gpu}"), "counters": slices(start..start + 1)}],
        })
    };
    let devices: Vec<Value> = (0..GPUS)
        .flat_map(|gpu| (0..7).map(move |start| device(gpu, start)))
        .collect();
    let pool = json!({"name": "mig/gpus", "generation": 1, "resourceSliceCount": 2});
    for (name, key, content) in [
        ("counters", "sharedCounters", sets),
        ("devices", "devices", devices),
    ] {
        let mut spec = json!({"driver": "gpu.drava.dev", "nodeName": "mig", "pool": pool});
        spec[key] = json!(content);
        let slice = json!({"metadata": {"name": name, "resourceVersion": "1"}, "spec": spec});
        cluster.planner.slice(applied(object(slice)));
    }
}

fn request(name: &str, expression: &str) -> Value {
    json!({"name": name, "exactly": {
        "deviceClassName": "vgpu.drava.dev", "selectors": [{"cel": {"expression": expression}}],
    }})
}

fn add_pod(cluster: &mut TestCluster, name: &str, devices: &Value) {
    add_pod_of(cluster, "default", name, devices);
}

fn add_pod_of(cluster: &mut TestCluster, namespace: &str, name: &str, devices: &Value) {
    let mut claim = claim(name, "1Gi");
    claim.metadata.namespace = Some(namespace.to_owned());
    claim.spec = Some(object(json!({"devices": devices})));
    cluster.add_claim(claim);
    let requests = devices["requests"].as_array().unwrap();
    let containers: Vec<Value> = requests
        .iter()
        .map(|request| {
            json!({"name": request["name"], "resources": {"claims": [{"name": name, "request": request["name"]}]}})
        })
        .collect();
    let pod: Pod = object(json!({
        "metadata": {"name": name, "namespace": namespace, "uid": format!("pod-{name}")},
        "spec": {
            "schedulerName": "default-scheduler",
            "resourceClaims": [{"name": name, "resourceClaimName": name}],
            "containers": containers,
        },
        "status": {"phase": "Pending"},
    }));
    cluster.add_pod(pod);
}

/// Binds pods that use this many partitions of each GPU.
fn use_partitions(cluster: &mut TestCluster, used: [usize; GPUS]) {
    for (gpu, count) in used.into_iter().enumerate() {
        for index in 0..count {
            let name = format!("held-{gpu}-{index}");
            let expression =
                format!("{IS_PARTITION} && device.attributes['gpu.drava.dev'].index == {gpu}");
            let devices = json!({"requests": [request("w", &expression)]});
            add_pod(cluster, &name, &devices);
            let placed = cluster.settle();
            assert_eq!(placed, [format!("{name} → mig")]);
            cluster.bind((&name, "mig"));
        }
    }
}

/// Adds a pod that needs six partitions of one GPU.
fn add_six(cluster: &mut TestCluster) {
    let requests: Vec<Value> = (0..6)
        .map(|index| request(&format!("w{index}"), IS_PARTITION))
        .collect();
    let constraint = json!({"matchAttribute": "gpu.drava.dev/uuid"});
    let devices = json!({"requests": requests, "constraints": [constraint]});
    add_pod(cluster, "six", &devices);
}

#[test]
fn finds_gpu_with_six_partitions_at_once() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_partitioned_node(&mut cluster);
    use_partitions(&mut cluster, [2, 2, 2, 2, 2, 2, 2, 0]);
    add_six(&mut cluster);
    let (start, before) = (Instant::now(), cluster.planner.work());
    assert_eq!(cluster.settle(), ["six → mig"]);
    let (time, units) = (start.elapsed(), cluster.planner.work() - before);
    assert!(units < 5_000, "{units} units of work in {time:?}");
}

#[test]
fn search_for_victims_is_as_limited_as_decision() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_partitioned_node(&mut cluster);
    use_partitions(&mut cluster, [2; GPUS]);
    add_six(&mut cluster);
    cluster.add_pod_with_claim("other", "8Gi");
    let start = Instant::now();
    assert_eq!(cluster.settle(), ["other → n1"]);
    let time = start.elapsed();
    assert!(time < Duration::from_secs(20), "{time:?}");
    let messages = cluster.messages_of("Pod/six");
    assert!(!messages.is_empty(), "the pod has its reason");
    assert!(
        messages.iter().all(|text| !text.contains("SearchLimit")),
        "{messages:?}"
    );
}

/// What the decisions for a pod with many combinations cost, and how long they delay a pod that is due at the same time.
#[derive(Debug, Default)]
struct Delay {
    /// Turns until the other pod was allocated.
    turns_of_other: usize,
    turns: usize,
    /// Units of work in the longest turn.
    longest: u64,
}

/// Decides turn by turn until no decision is due. The pod needs six partitions of one GPU; `used` partitions of each are in use.
fn decide_six(used: [usize; GPUS], priority: i32) -> (TestCluster, Delay) {
    let mut cluster = TestCluster::new(&["n1"]);
    add_partitioned_node(&mut cluster);
    use_partitions(&mut cluster, used);
    add_six(&mut cluster);
    let mut six = cluster.pods["six"].clone();
    six.spec.as_mut().unwrap().priority = Some(priority);
    cluster.add_pod(six);
    cluster.add_pod_with_claim("z-other", "8Gi");
    cluster.is_slice_over = |_| true;
    let mut delay = Delay::default();
    let start = Instant::now();
    loop {
        delay.turns += 1;
        assert!(delay.turns < 100, "the decisions end");
        let before = cluster.planner.work();
        let jobs = cluster.actions().0;
        delay.longest = delay.longest.max(cluster.planner.work() - before);
        let has_jobs = !jobs.is_empty();
        for job in jobs {
            if job.pods[0].uid == "pod-z-other" {
                delay.turns_of_other = delay.turns;
            }
            cluster.write(job);
        }
        if has_jobs {
            cluster.deliver_claims();
        }
        let deadline = cluster.planner.next_deadline();
        if deadline.is_none_or(|deadline| deadline > cluster.now) {
            break;
        }
    }
    println!("{used:?}: {delay:?} in {:?}", start.elapsed());
    (cluster, delay)
}

#[test]
fn pod_with_many_combinations_delays_others_by_one_turn() {
    // One GPU has six partitions left. None has: pods of the same priority stay, one of a lower priority ends.
    let cases = [
        ([2, 2, 2, 2, 2, 2, 2, 0], 0, 0),
        ([2; GPUS], 0, 0),
        ([2; GPUS], 10, 1),
    ];
    for (used, priority, evicted) in cases {
        let (mut cluster, delay) = decide_six(used, priority);
        assert!(delay.turns_of_other <= 2, "{delay:?}");
        assert!(delay.longest < 60_000, "{delay:?}");
        assert_eq!(cluster.evict().len(), evicted, "victims");
    }
}

/// Adds a node with that many shared GPUs of 80 GiB.
fn add_node(cluster: &mut TestCluster, name: &str, gpus: u32) {
    cluster.planner.node(applied(node(name)));
    let device = |gpu: u32| {
        json!({
            "name": format!("gpu-{gpu}-vgpu"), "allowMultipleAllocations": true,
            "attributes": {
                "type": {"string": "vgpu"}, "uuid": {"string": format!("GPU-{name}-{gpu}")}, "index": {"int": gpu},
            },
            "capacity": {"memory": {"value": "80Gi"}},
        })
    };
    let pool = json!({"name": format!("{name}/gpus"), "generation": 1, "resourceSliceCount": 1});
    let devices: Vec<Value> = (0..gpus).map(device).collect();
    let spec =
        json!({"driver": "gpu.drava.dev", "nodeName": name, "pool": pool, "devices": devices});
    // A node that is added again has more GPUs.
    let version = gpus.to_string();
    let slice = json!({"metadata": {"name": name, "resourceVersion": version}, "spec": spec});
    cluster.planner.slice(applied(object(slice)));
}

fn shares(name: &str, count: u32, memory: &str) -> Value {
    json!({"name": name, "exactly": {
        "deviceClassName": "vgpu.drava.dev", "count": count, "capacity": {"requests": {"memory": memory}},
    }})
}

/// Adds a pod of this priority that needs half of 17 GPUs and a little more, and nearly half of GPU 0. A search gives up on a
/// node with 16 GPUs: another request is so small that the amounts do not tell that they are too few.
fn add_hard(cluster: &mut TestCluster, name: &str, priority: i32) {
    add_hard_and_tiny(cluster, name, priority, "1Mi");
}

/// As [`add_hard`], with that much memory in the smallest request.
fn add_hard_and_tiny(cluster: &mut TestCluster, name: &str, priority: i32, tiny: &str) {
    let mut requests: Vec<Value> = (0..17)
        .map(|index| shares(&format!("r{index}"), 1, "41Gi"))
        .collect();
    let mut last = shares("last", 1, "39.5Gi");
    let expression = "device.attributes['gpu.drava.dev'].index == 0";
    last["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    requests.extend([shares("tiny", 1, tiny), last]);
    add_pod(cluster, name, &json!({"requests": requests}));
    let mut pod = cluster.pods[name].clone();
    let spec = pod.spec.as_mut().unwrap();
    spec.priority = Some(priority);
    cluster.add_pod(pod);
}

#[test]
fn node_of_which_search_gave_up_leaves_preemption_to_others() {
    let mut cluster = TestCluster::new(&[]);
    add_node(&mut cluster, "large", 18);
    add_pod(
        &mut cluster,
        "low",
        &json!({"requests": [shares("all", 18, "79Gi")]}),
    );
    assert_eq!(cluster.settle(), ["low → large"]);
    cluster.bind(("low", "large"));
    add_node(&mut cluster, "small", 16);
    add_hard(&mut cluster, "hard", 10);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["low for hard"]);
}

#[test]
fn every_node_is_searched_with_a_quota() {
    let mut cluster = TestCluster::new(&[]);
    let quota = json!({"namespaces": ["default"], "limit": {"devices": 1000}});
    cluster.set_quota("team", &quota);
    for name in ["a", "b", "c"] {
        add_node(&mut cluster, name, 16);
    }
    add_node(&mut cluster, "d", 18);
    add_hard(&mut cluster, "hard", 0);
    // Each call is one turn of the decision.
    cluster.is_slice_over = |_| true;
    let mut turns = 0;
    let mut jobs = Vec::new();
    while jobs.is_empty() {
        turns += 1;
        assert!(turns < 10, "{:?}", cluster.messages_of("Pod/hard"));
        jobs = cluster.actions().0;
    }
    assert_eq!(jobs[0].pods[0].node, "d", "the last node");
    assert!(turns > 1, "the others are searched in turns before");
}

#[test]
fn search_for_victims_takes_turns() {
    const NODES: i32 = 400;
    let mut cluster = TestCluster::new(&[]);
    let whole_node = json!({"requests": [shares("all", 16, "41Gi")]});
    for index in 0..NODES {
        let name = format!("n{index:03}");
        add_node(&mut cluster, &name, 16);
        add_pod(&mut cluster, &name, &whole_node);
        let mut pod = cluster.pods[&name].clone();
        let spec = pod.spec.as_mut().unwrap();
        // Each node has a better victim than those before.
        spec.priority = Some(NODES - index);
        cluster.add_pod(pod);
    }
    for placed in cluster.settle() {
        let (pod, node) = placed.split_once(" → ").unwrap();
        assert_eq!(pod, node);
        cluster.bind((pod, node));
    }
    add_pod(&mut cluster, "urgent", &whole_node);
    let mut urgent = cluster.pods["urgent"].clone();
    urgent.spec.as_mut().unwrap().priority = Some(NODES + 1);
    cluster.add_pod(urgent);
    cluster.is_slice_over = |_| true;
    let mut turns = 0;
    while cluster.evictions.is_empty() {
        turns += 1;
        assert!(turns < 20, "the search ends");
        let before = cluster.planner.work();
        assert!(cluster.actions().0.is_empty());
        let units = cluster.planner.work() - before;
        assert!(units < 200_000, "{units} units in turn {turns}");
    }
    assert_eq!(cluster.evict(), ["n399 for urgent"], "the lowest priority");
    assert!(turns > 1, "a decision for another pod comes between");
    let messages: Vec<_> = cluster
        .pod_conditions
        .iter()
        .filter_map(|update| update.condition.message.as_deref())
        .filter(|message| message.starts_with("CostlySearch"))
        .collect();
    assert_eq!(
        messages,
        [
            "CostlySearch: the devices can be combined in many ways, or many pods could end for this one; the search goes on after \
         the decisions for other pods"
        ]
    );
}

#[test]
fn gang_of_hard_pods_is_placed_after_some_turns() {
    for has_quota in [false, true] {
        let mut cluster = TestCluster::new(&[]);
        if has_quota {
            let quota = json!({"namespaces": ["default"], "limit": {"devices": 1000}});
            cluster.set_quota("team", &quota);
        }
        for (name, gpus) in [("a", 16), ("b", 18), ("c", 16), ("d", 18)] {
            add_node(&mut cluster, name, gpus);
        }
        for name in ["m-1", "m-2"] {
            add_hard(&mut cluster, name, 0);
            let pod = member(cluster.pods[name].clone(), "2");
            cluster.add_pod(pod);
        }
        cluster.is_slice_over = |_| true;
        let mut turns = 0;
        let mut jobs = Vec::new();
        while jobs.is_empty() {
            turns += 1;
            assert!(turns < 20, "{:?}", cluster.messages_of("Pod/m-1"));
            jobs = cluster.actions().0;
        }
        let nodes: Vec<_> = jobs[0].pods.iter().map(|pod| pod.node.as_str()).collect();
        assert_eq!(nodes, ["b", "d"], "quota: {has_quota}");
    }
}

#[test]
fn gang_that_searches_in_vain_beside_its_first_member_is_rejected() {
    let mut cluster = TestCluster::new(&[]);
    add_node(&mut cluster, "large", 18);
    // The first node in the order of names, so that nothing is left when the search has ended.
    add_node(&mut cluster, "another", 1);
    let mut whole = shares("whole", 2, "79Gi");
    let expression = "device.attributes['gpu.drava.dev'].index >= 16";
    whole["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    add_pod(&mut cluster, "m-1", &json!({"requests": [whole]}));
    // A search gives up on what the first member leaves.
    add_hard(&mut cluster, "m-2", 0);
    for name in ["m-1", "m-2"] {
        let pod = member(cluster.pods[name].clone(), "2");
        cluster.add_pod(pod);
    }
    cluster.is_slice_over = |_| true;
    let mut turns = 0;
    loop {
        turns += 1;
        assert!(turns < 10, "{:?}", cluster.messages_of("Pod/m-1"));
        assert!(cluster.actions().0.is_empty());
        if !cluster.planner.backlog.queue.is_suspended("pod-m-1") {
            break;
        }
    }
    assert!(turns > 1, "the searches take turns");
    let messages = cluster.messages_of("Pod/m-1");
    let last = messages.last().copied().unwrap_or_default();
    assert!(last.contains("1 of 2 members fit"), "{messages:?}");
}

#[test]
fn gang_takes_no_tenant_below_its_guarantee_in_later_turns() {
    let mut cluster = TestCluster::new(&[]);
    // With a quota every node is searched for each pod.
    for (name, quota) in [
        (
            "team",
            json!({"namespaces": ["team"], "guarantee": {"devices": 2}}),
        ),
        (
            "others",
            json!({"namespaces": ["default"], "limit": {"devices": 1000}}),
        ),
    ] {
        cluster.set_quota(name, &quota);
    }
    let on = |node: &str, memory: &str| {
        let mut devices = shares("all", 1, memory);
        let expression =
            format!("device.attributes['gpu.drava.dev'].uuid.startsWith('GPU-{node}')");
        devices["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
        json!({"requests": [devices]})
    };
    for (name, node) in [
        ("v1", "one-1"),
        ("v2", "one-2"),
        ("v3", "two-1"),
        ("v4", "two-2"),
    ] {
        add_node(&mut cluster, node, 1);
        add_pod_of(&mut cluster, "team", name, &on(node, "79Gi"));
        assert_eq!(cluster.settle(), [format!("{name} → {node}")]);
        cluster.bind((name, node));
    }
    add_node(&mut cluster, "large", 18);
    add_node(&mut cluster, "small", 16);
    for name in ["m-1", "m-2"] {
        add_pod(&mut cluster, name, &on("one-", "60Gi"));
    }
    // The search for it on the small node gives up, so the rest takes another turn.
    add_hard(&mut cluster, "m-3", 10);
    for name in ["m-1", "m-2", "m-3"] {
        let mut pod = cluster.pods[name].clone();
        pod.spec.as_mut().unwrap().priority = Some(10);
        cluster.add_pod(member(pod, "3"));
    }
    cluster.is_slice_over = |_| true;
    let mut turns = 0;
    let mut has_ended = false;
    loop {
        turns += 1;
        assert!(turns < 20, "{:?}", cluster.messages_of("Pod/m-1"));
        assert!(cluster.actions().0.is_empty());
        if !cluster.planner.backlog.queue.is_suspended("pod-m-1") {
            break;
        }
        let room = cluster.planner.backlog.suspended_decisions.room("pod-m-1");
        if room.is_some() && !std::mem::replace(&mut has_ended, true) {
            // Its tenant needs one of the two victims now.
            cluster.end("v3");
        }
    }
    assert!(has_ended, "the search takes turns");
    assert!(cluster.evictions.is_empty(), "{:?}", cluster.evictions);
}

/// Units of work in a turn, at most: those after which others have their turn, and the last search.
const TURN_UNITS: u64 = 200_000;

#[test]
fn gang_of_many_hard_pods_delays_others_by_one_turn() {
    const MEMBERS: usize = 4;
    let mut cluster = TestCluster::new(&[]);
    add_node(&mut cluster, "a", 1);
    add_node(&mut cluster, "small", 16);
    for index in 0..MEMBERS {
        add_node(&mut cluster, &format!("large-{index}"), 18);
        let name = format!("m-{index}");
        // Pods that are not equal share no searches.
        add_hard_and_tiny(&mut cluster, &name, 0, &format!("{}Mi", index + 1));
        let pod = member(cluster.pods[&name].clone(), &MEMBERS.to_string());
        cluster.add_pod(pod);
    }
    cluster.add_pod_with_claim("z-other", "8Gi");
    cluster.is_slice_over = |_| true;
    let (mut turns, mut turns_of_other) = (0, 0);
    loop {
        turns += 1;
        assert!(turns < 60, "{:?}", cluster.messages_of("Pod/m-0"));
        let before = cluster.planner.work();
        let jobs = cluster.actions().0;
        let units = cluster.planner.work() - before;
        assert!(units < TURN_UNITS, "{units} units in turn {turns}");
        let Some(job) = jobs.into_iter().next() else {
            continue;
        };
        if job.pods.len() == MEMBERS {
            break;
        }
        assert_eq!(job.pods[0].uid, "pod-z-other");
        turns_of_other = turns;
        cluster.write(job);
        cluster.deliver_claims();
    }
    assert!((1..=2).contains(&turns_of_other), "{turns_of_other}");
}

#[test]
fn search_for_victims_of_gang_takes_turns() {
    const NODES: i32 = 150;
    const MEMBERS: i32 = 12;
    let mut cluster = TestCluster::new(&[]);
    let add = |cluster: &mut TestCluster, name: &str, memory: &str, priority: i32| {
        let whole_node = json!({"requests": [shares("all", 16, memory)]});
        add_pod(cluster, name, &whole_node);
        let mut pod = cluster.pods[name].clone();
        pod.spec.as_mut().unwrap().priority = Some(priority);
        pod
    };
    for index in 0..NODES {
        let name = format!("n{index:03}");
        add_node(&mut cluster, &name, 16);
        let pod = add(&mut cluster, &name, "41Gi", NODES - index);
        cluster.add_pod(pod);
    }
    for placed in cluster.settle() {
        let (pod, node) = placed.split_once(" → ").unwrap();
        cluster.bind((pod, node));
    }
    for index in 0..MEMBERS {
        // The victims for pods that are not equal are searched for each.
        let memory = format!("{}Mi", 41 * 1024 + index);
        let pod = add(&mut cluster, &format!("m-{index:02}"), &memory, NODES + 1);
        cluster.add_pod(member(pod, &MEMBERS.to_string()));
    }
    cluster.is_slice_over = |_| true;
    let mut turns = 0;
    while cluster.evictions.is_empty() {
        turns += 1;
        assert!(turns < 40, "the search ends");
        let before = cluster.planner.work();
        assert!(cluster.actions().0.is_empty());
        let units = cluster.planner.work() - before;
        assert!(units < TURN_UNITS, "{units} units in turn {turns}");
    }
    let lowest: Vec<String> = (NODES - MEMBERS..NODES)
        .map(|index| format!("n{index:03} for m-00"))
        .collect();
    assert_eq!(cluster.evict(), lowest, "the lowest priorities");
    assert!(turns > 1, "decisions for other pods come between");
}

#[test]
fn search_for_victims_goes_on_where_its_turn_ended() {
    let mut cluster = TestCluster::new(&[]);
    let mut victims = Vec::new();
    for (node, gpus, memory) in [
        ("small-0", 16, "1Gi"),
        ("small-1", 16, "1Gi"),
        ("small-2", 16, "1Gi"),
        ("z-large", 18, "79Gi"),
    ] {
        add_node(&mut cluster, node, gpus);
        let mut devices = shares("all", gpus, memory);
        let of_node = format!("device.attributes['gpu.drava.dev'].uuid.startsWith('GPU-{node}')");
        devices["exactly"]["selectors"] = json!([{"cel": {"expression": of_node}}]);
        let name = format!("on-{node}");
        add_pod(&mut cluster, &name, &json!({"requests": [devices]}));
        victims.extend(cluster.settle());
        cluster.bind((&name, node));
    }
    assert_eq!(victims.len(), 4, "{victims:?}");
    // On each small node the search gives up, which is the work of a turn: of the decision, and of the search for victims.
    add_hard(&mut cluster, "urgent", 10);
    cluster.is_slice_over = |_| true;
    let mut turns = 0;
    while cluster.evictions.is_empty() {
        turns += 1;
        assert!(turns < 20, "the search ends");
        assert!(cluster.actions().0.is_empty());
    }
    assert_eq!(cluster.evict(), ["on-z-large for urgent"]);
    assert!(turns > 5, "{turns}");
}

/// Adds nodes with 18 GPUs, each full of one pod, of a lower priority than those before.
fn add_full_nodes(cluster: &mut TestCluster, nodes: i32) {
    for index in 0..nodes {
        let node = format!("n{index}");
        add_node(cluster, &node, 18);
        let name = format!("on-{node}");
        add_pod(
            cluster,
            &name,
            &json!({"requests": [shares("all", 18, "79Gi")]}),
        );
        let mut pod = cluster.pods[&name].clone();
        pod.spec.as_mut().unwrap().priority = Some(nodes - index);
        cluster.add_pod(pod);
        assert_eq!(cluster.settle(), [format!("{name} → {node}")]);
        cluster.bind((&name, &node));
    }
}

/// The search on the last node uses up a turn; another one has the time to place the pods by the victims that were found before.
#[test]
fn hard_pods_are_placed_by_victims_found_in_earlier_turns() {
    for members in [1, 2] {
        let mut cluster = TestCluster::new(&[]);
        add_full_nodes(&mut cluster, members);
        add_node(&mut cluster, "z-small", 16);
        add_pod(
            &mut cluster,
            "other",
            &json!({"requests": [shares("all", 16, "2Gi")]}),
        );
        assert_eq!(cluster.settle(), ["other → z-small"]);
        cluster.bind(("other", "z-small"));
        for index in 0..members {
            let name = format!("hard-{index}");
            add_hard(&mut cluster, &name, 10);
            if members > 1 {
                let pod = cluster.pods[&name].clone();
                cluster.add_pod(member(pod, &members.to_string()));
            }
        }
        assert!(cluster.settle().is_empty());
        let all: Vec<String> = (0..members)
            .map(|index| format!("on-n{index} for hard-0"))
            .collect();
        assert_eq!(cluster.evict(), all);
    }
}

#[test]
fn first_decision_on_many_nodes_takes_turns() {
    const NODES: usize = 4000;
    let mut cluster = TestCluster::new(&[]);
    for index in 0..NODES {
        add_node(&mut cluster, &format!("n{index:03}"), 16);
    }
    // The other pod is like one before.
    cluster.add_pod_with_claim("before", "8Gi");
    assert_eq!(cluster.settle().len(), 1);
    let decisions = cluster.planner.decisions();
    add_pod(
        &mut cluster,
        "large",
        &json!({"requests": [shares("all", 16, "41Gi")]}),
    );
    cluster.add_pod_with_claim("z-other", "8Gi");
    cluster.is_slice_over = |_| true;
    let mut order = Vec::new();
    while order.len() < 2 {
        assert!(
            cluster.planner.decisions() - decisions < 40,
            "the decisions end"
        );
        let before = cluster.planner.work();
        let jobs = cluster.actions().0;
        let units = cluster.planner.work() - before;
        assert!(units < 110_000, "{units} units in a turn");
        order.extend(jobs.into_iter().map(|job| job.pods[0].uid.clone()));
    }
    assert_eq!(
        order,
        ["pod-z-other", "pod-large"],
        "the other pod does not wait"
    );
}

/// Adds a pod that runs with 6 GiB of a GPU of the node.
fn add_running(cluster: &mut TestCluster, namespace: &str, name: &str, (node, gpu): (&str, usize)) {
    add_pod_of(
        cluster,
        namespace,
        name,
        &json!({"requests": [shares("one", 1, "6Gi")]}),
    );
    let mut claim = cluster.claims[name].clone();
    claim.status = Some(object(json!({
        "allocation": {"devices": {"results": [{
            "request": "one", "driver": "gpu.drava.dev", "pool": format!("{node}/gpus"), "device": format!("gpu-{gpu}-vgpu"),
            "shareID": "s", "consumedCapacity": {"memory": "6Gi"},
        }]}},
        "reservedFor": [{"resource": "pods", "name": name, "uid": format!("pod-{name}")}],
    })));
    cluster.observe(claim);
    cluster.bind((name, node));
}

/// The check of each pod is part of the turn's work.
#[test]
fn protecting_guarantees_of_many_pods_is_counted() {
    const PODS: usize = 60;
    let mut cluster = TestCluster::new(&[]);
    let quota = json!({"namespaces": ["team"], "guarantee": {"devices": PODS}});
    cluster.set_quota("team", &quota);
    add_node(&mut cluster, "n", 8);
    for pod in 0..PODS {
        add_running(&mut cluster, "team", &format!("p-{pod:02}"), ("n", pod % 8));
    }
    assert!(cluster.settle().is_empty());
    // A pod that waits for its quota does not look for others to wait for, which would be more work.
    let used_up = json!({"namespaces": ["default"], "limit": {"devices": 0}});
    cluster.set_quota("default", &used_up);
    let before = cluster.planner.work();
    cluster.add_pod_of_priority("urgent", "80Gi", 10);
    assert!(cluster.settle().is_empty());
    let units = cluster.planner.work() - before;
    assert!(units > 20 * PODS as u64, "{units} units for {PODS} pods");
    assert!(cluster.evictions.is_empty(), "each is within the guarantee");
}

/// A search that its turn has cut short tells nothing about equal pods.
#[test]
fn search_cut_short_hides_no_reservation_from_equal_pods() {
    let mut cluster = TestCluster::new(&[]);
    add_node(&mut cluster, "large", 19);
    let mut device = shares("one", 1, "79Gi");
    let expression = "device.attributes['gpu.drava.dev'].index == 18";
    device["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    add_pod(&mut cluster, "low", &json!({"requests": [device]}));
    assert_eq!(cluster.settle(), ["low → large"]);
    cluster.bind(("low", "large"));
    add_pod(
        &mut cluster,
        "head",
        &json!({"requests": [shares("all", 19, "79Gi")]}),
    );
    let mut head = cluster.pods["head"].clone();
    head.spec.as_mut().unwrap().priority = Some(10);
    cluster.add_pod(head);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evictions.len(), 1, "the node is reserved");
    add_node(&mut cluster, "small", 16);
    let mut devices = shares("all", 16, "1Gi");
    let expression = "device.attributes['gpu.drava.dev'].uuid.startsWith('GPU-small')";
    devices["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    add_pod(&mut cluster, "other", &json!({"requests": [devices]}));
    assert_eq!(cluster.settle(), ["other → small"]);
    cluster.bind(("other", "small"));
    // Whether they would fit on the small node without the other pod is the work of a turn, for the first of them.
    for name in ["hard-0", "hard-1"] {
        add_hard(&mut cluster, name, 0);
    }
    assert!(cluster.settle().is_empty());
    let text = "the pod fits on large, but its devices are reserved for pod default/head";
    let messages = ["Pod/hard-0", "Pod/hard-1"].map(|pod| cluster.messages_of(pod).join("; "));
    assert!(
        messages.iter().any(|message| message.contains(text)),
        "{messages:?}"
    );
}

#[test]
fn usual_selectors_do_not_wait_behind_suspended_searches() {
    let mut cluster = TestCluster::new(&[]);
    for name in ["a", "b", "c"] {
        add_node(&mut cluster, name, 16);
    }
    add_hard(&mut cluster, "hard", 0);
    cluster.is_slice_over = |_| true;
    assert!(cluster.actions().0.is_empty());
    assert!(cluster.planner.backlog.queue.is_suspended("pod-hard"));
    add_pod(
        &mut cluster,
        "usual",
        &json!({"requests": [request("r", "device.driver == 'gpu.drava.dev'")]}),
    );
    let jobs = cluster.actions().0;
    assert_eq!(jobs.len(), 1, "in the next turn");
    assert_eq!(jobs[0].pods[0].uid, "pod-usual");
}

#[test]
fn decision_that_goes_on_searches_changed_node_again() {
    let mut cluster = TestCluster::new(&[]);
    let quota = json!({"namespaces": ["default"], "limit": {"devices": 1000}});
    cluster.set_quota("team", &quota);
    for name in ["a", "b"] {
        add_node(&mut cluster, name, 16);
    }
    add_hard(&mut cluster, "first", 0);
    add_hard(&mut cluster, "twin", 10);
    let claim = cluster.claims["twin"].clone();
    cluster.delete_claim("twin");
    cluster.is_slice_over = |_| true;
    // The twin has no claim so far, and the first turn of the other one finds nothing on node a.
    for _ in 0..2 {
        assert!(cluster.actions().0.is_empty());
    }
    assert!(cluster.planner.backlog.queue.is_suspended("pod-first"));
    cluster.observe(claim);
    add_node(&mut cluster, "a", 18);
    cluster.is_slice_over = |_| false;
    let jobs = cluster.actions().0;
    let placed: Vec<_> = jobs.iter().map(|job| &job.pods[0]).collect();
    assert_eq!(placed.len(), 1);
    assert_eq!(
        (placed[0].uid.as_str(), placed[0].node.as_str()),
        ("pod-first", "a"),
        "what it has found there before is outdated"
    );
}
