//! Gangs: all or nothing.

use std::time::Duration;

use drava_api::names::ALLOCATION_GATE;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::cluster::{RELEASE_AFTER, TestCluster, applied, member};
use crate::action::AllocationFailure;
use crate::fixture::{claim, gated_pod, node, object, pod, slice};
use crate::pods::gang::PodGroupApi;
use crate::pods::pod_group::{Disruption, GroupSpec, PodGroupChange};

#[test]
fn waits_until_enough_members_exist() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_member("m-1", "10Gi", "3");
    cluster.add_member("m-2", "10Gi", "3");
    assert!(cluster.settle().is_empty());
    assert_eq!(
        cluster.messages_of("Pod/m-2"),
        ["WaitingForGang: gang g: 2 of 3 members exist"]
    );
    cluster.add_member("m-3", "10Gi", "3");
    let (jobs, _) = cluster.actions();
    assert_eq!(jobs.len(), 1, "one job for all");
    assert_eq!(jobs[0].pods.len(), 3);
}

#[test]
fn allocates_all_members_or_none() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["m-1", "m-2", "m-3"] {
        cluster.add_member(name, "30Gi", "3");
    }
    assert!(cluster.settle().is_empty(), "two of three fit");
    assert_eq!(
        cluster.messages_of("Pod/m-1"),
        [
            "WaitingForGang: gang g: 2 of 3 members fit; pod m-3: 0/1 nodes: \
             1 InsufficientMemory (most free memory 20 GiB on n1/gpu-0)"
        ]
    );
    cluster.planner.node(applied(node("n2")));
    cluster.planner.slice(applied(slice("n2")));
    assert_eq!(cluster.settle().len(), 3);
}

#[test]
fn partial_gang_holds_nothing() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["m-1", "m-2", "m-3"] {
        cluster.add_member(name, "50Gi", "3");
    }
    assert!(cluster.settle().is_empty());
    cluster.add_pod_with_claim("z-single", "80Gi");
    assert_eq!(cluster.settle(), ["z-single → n1"], "the gang never fits");
}

#[test]
fn counts_members_without_claim() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_member("worker", "10Gi", "2");
    assert!(cluster.settle().is_empty());
    cluster.add_pod(member(pod("launcher", &[]), "2"));
    assert_eq!(cluster.settle(), ["worker → n1"]);
}

#[test]
fn bound_member_without_claim_starts_no_gang() {
    for has_new_leader in [false, true] {
        let mut cluster = TestCluster::new(&["n1"]);
        cluster.add_pod(member(pod("launcher", &[]), "3"));
        cluster.actions();
        cluster.bind(("launcher", "n1"));
        // The workers are created later. One of them fits.
        for name in ["w-1", "w-2"] {
            cluster.add_claim(claim(name, "60Gi"));
            let mut worker = member(gated_pod(name, &[name], &[ALLOCATION_GATE]), "3");
            worker.metadata.creation_timestamp = Some(object(json!("2026-01-01T00:01:00Z")));
            cluster.add_pod(worker);
        }
        if has_new_leader {
            cluster.change_leader();
        }
        assert!(cluster.settle().is_empty(), "all or nothing");
        cluster.planner.node(applied(node("n2")));
        cluster.planner.slice(applied(slice("n2")));
        assert_eq!(cluster.settle().len(), 2);
    }
}

#[test]
fn places_elastic_members_as_far_as_they_fit() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["m-1", "m-2", "m-3"] {
        cluster.add_member(name, "30Gi", "2");
    }
    assert_eq!(cluster.settle(), ["m-1 → n1", "m-2 → n1"]);
    cluster.planner.node(applied(node("n2")));
    cluster.planner.slice(applied(slice("n2")));
    assert_eq!(cluster.settle(), ["m-3 → n2"]);
}

#[test]
fn failed_job_leaves_no_member_allocated() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["m-1", "m-2"] {
        cluster.add_member(name, "30Gi", "2");
    }
    let (mut jobs, _) = cluster.actions();
    let failure = AllocationFailure {
        message: "rejected".to_owned(),
        is_reportable: true,
    };
    cluster.finish(jobs.remove(0), Vec::new(), Some(failure));
    assert!(cluster.settle().is_empty(), "backoff of the gang");
    for name in ["m-1", "m-2"] {
        assert_eq!(cluster.messages_of(&format!("Pod/{name}")), ["rejected"]);
    }
    cluster.advance(Duration::from_secs(1));
    assert_eq!(cluster.settle(), ["m-1 → n1", "m-2 → n1"]);
}

#[test]
fn explains_annotations_without_valid_minimum() {
    for (min, expected) in [
        ("0", "is \"0\"; use a number of pods from 1 on"),
        ("two", "is \"two\""),
        ("-1", "is \"-1\""),
    ] {
        let mut cluster = TestCluster::new(&["n1"]);
        cluster.add_member("m", "10Gi", min);
        assert!(cluster.settle().is_empty());
        let messages = cluster.messages_of("Pod/m");
        assert!(
            messages[0].starts_with("InvalidGang:") && messages[0].contains(expected),
            "{messages:?}"
        );
    }
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_claim(claim("m", "10Gi"));
    let mut pod = member(pod("m", &["m"]), "1");
    let annotations = pod.metadata.annotations.as_mut().unwrap();
    annotations.remove("gpu.drava.dev/gang-min");
    cluster.add_pod(pod);
    assert!(cluster.settle().is_empty());
    assert!(
        cluster.messages_of("Pod/m")[0]
            .contains("gang g has no minimum; set annotation gpu.drava.dev/gang-min")
    );
}

#[test]
fn explains_members_with_different_minimums() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_member("m-1", "10Gi", "1");
    // It waits for a third member, but says first what is wrong.
    cluster.add_member("m-2", "10Gi", "3");
    assert!(cluster.settle().is_empty());
    for pod in ["Pod/m-1", "Pod/m-2"] {
        assert_eq!(
            cluster.messages_of(pod),
            [
                "InvalidGang: members of gang g have different minimums, 1 and 3; set the same gpu.drava.dev/gang-min in all \
                 of them"
            ]
        );
    }
    for name in ["m-1", "m-2"] {
        cluster.add_pod(member(pod(name, &[name]), "2"));
    }
    assert_eq!(cluster.settle(), ["m-1 → n1", "m-2 → n1"]);
}

#[test]
fn decides_for_older_gang_before_younger_pod() {
    let mut cluster = TestCluster::new(&["n1"]);
    for (name, second, is_member) in [("m-1", 10, true), ("single", 20, false), ("m-2", 30, true)] {
        cluster.add_claim(claim(name, "30Gi"));
        let mut pod = pod(name, &[name]);
        if is_member {
            pod = member(pod, "2");
        }
        pod.metadata.creation_timestamp =
            Some(object(json!(format!("2026-01-01T00:00:{second}Z"))));
        cluster.add_pod(pod);
    }
    assert_eq!(cluster.settle(), ["m-1 → n1", "m-2 → n1"]);
}

#[test]
fn gang_has_lowest_priority_of_its_members() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("running", "70Gi", 5)]);
    for (name, priority) in [("m-1", 100), ("m-2", 5)] {
        cluster.add_claim(claim(name, "30Gi"));
        let mut pod = member(pod(name, &[name]), "2");
        pod.spec.as_mut().unwrap().priority = Some(priority);
        cluster.add_pod(pod);
    }
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty());
}

#[test]
fn members_share_one_claim() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_claim(claim("shared", "30Gi"));
    for name in ["m-1", "m-2"] {
        cluster.add_pod(member(pod(name, &["shared"]), "2"));
    }
    assert_eq!(cluster.settle(), ["m-1 → n1"], "the claim is written once");
}

#[test]
fn member_needs_its_own_claim_beside_the_shared_one() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_claim(claim("shared", "30Gi"));
    for (name, memory) in [("m-1", "30Gi"), ("m-2", "30Gi")] {
        cluster.add_claim(claim(name, memory));
        cluster.add_pod(member(pod(name, &["shared", name]), "2"));
    }
    assert!(
        cluster.settle().is_empty(),
        "90 of 80 GiB on the node of the shared claim"
    );
    let messages = cluster.messages_of("Pod/m-2");
    assert!(messages[0].contains("1 of 2 members fit"), "{messages:?}");
    cluster.end("m-2");
    cluster.add_claim(claim("m-3", "10Gi"));
    cluster.add_pod(member(pod("m-3", &["shared", "m-3"]), "2"));
    let placed = cluster.settle();
    assert_eq!(placed.len(), 2, "{placed:?}");
    let node = placed[0].split_once(" → ").unwrap().1;
    assert!(
        placed.iter().all(|placed| placed.ends_with(node)),
        "{placed:?}"
    );
    let devices = |name: &str| {
        cluster.claims[name]
            .status
            .as_ref()
            .is_some_and(|status| status.allocation.is_some())
    };
    assert!(["shared", "m-1", "m-3"].into_iter().all(devices));
}

/// Returns a gated member of the gang `g` without claims that requests CPUs.
fn gated_member(name: &str, cpus: &str, min: &str) -> Pod {
    let mut pod = member(gated_pod(name, &[], &[ALLOCATION_GATE]), min);
    let resources = json!({"requests": {"cpu": cpus}});
    pod.spec.as_mut().unwrap().containers[0].resources = Some(object(resources));
    pod
}

#[test]
fn gates_member_without_claim_until_gang_fits() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod(gated_member("launcher", "1", "3"));
    cluster.add_claim(claim("m-1", "50Gi"));
    let gated = |name: &str| member(gated_pod(name, &[name], &[ALLOCATION_GATE]), "3");
    cluster.add_pod(gated("m-1"));
    assert!(cluster.settle().is_empty());
    assert_eq!(
        cluster.messages_of("Pod/launcher"),
        ["WaitingForGang: gang g: 2 of 3 members exist"]
    );
    cluster.add_claim(claim("m-2", "50Gi"));
    cluster.add_pod(gated("m-2"));
    assert!(cluster.settle().is_empty());
    assert!(cluster.gate_removals.is_empty(), "two of three fit");
    cluster.planner.node(applied(node("n2")));
    cluster.planner.slice(applied(slice("n2")));
    assert_eq!(cluster.settle().len(), 3);
    let mut ungated = cluster.finish_gate_removals(None);
    ungated.sort();
    assert_eq!(ungated, ["launcher", "m-1", "m-2"]);
    assert!(cluster.settle().is_empty(), "placed once");
}

#[test]
fn gang_without_claims_waits_for_cpus() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["m-1", "m-2", "m-3"] {
        cluster.add_pod(gated_member(name, "3", "3"));
    }
    assert!(cluster.settle().is_empty(), "9 of 8 CPUs");
    let messages = cluster.messages_of("Pod/m-1");
    assert!(
        messages[0].contains("2 of 3 members fit") && messages[0].contains("insufficient cpu"),
        "{messages:?}"
    );
    // A node without GPUs.
    cluster.planner.node(applied(node("n2")));
    assert_eq!(cluster.settle().len(), 3);
    assert_eq!(cluster.finish_gate_removals(None).len(), 3);
}

#[test]
fn failed_gate_removal_keeps_place_of_member() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod(gated_member("m", "1", "1"));
    assert_eq!(cluster.settle(), ["m → n1"]);
    let failure = AllocationFailure {
        message: "conflict".to_owned(),
        is_reportable: false,
    };
    assert_eq!(cluster.finish_gate_removals(Some(&failure)), ["m"]);
    cluster.advance(Duration::from_secs(1));
    assert!(cluster.settle().is_empty(), "no second job");
    assert_eq!(cluster.finish_gate_removals(None), ["m"]);
}

#[test]
fn pod_waits_for_minimum_of_its_pod_group() {
    let group = |min: Option<usize>| PodGroupChange::Group {
        api: PodGroupApi::Coscheduling,
        namespace: "default".to_owned(),
        name: "g".to_owned(),
        spec: min.map(|min| GroupSpec {
            min,
            ..GroupSpec::default()
        }),
    };
    let mut cluster = TestCluster::new(&["n1"]);
    let served = PodGroupChange::Served(PodGroupApi::Coscheduling, true);
    cluster.planner.pod_group(served);
    let add = |cluster: &mut TestCluster, name: &str| {
        cluster.add_claim(claim(name, "10Gi"));
        let mut pod = pod(name, &[name]);
        let label = ("scheduling.x-k8s.io/pod-group".to_owned(), "g".to_owned());
        pod.metadata.labels = Some([label].into());
        cluster.add_pod(pod);
    };
    add(&mut cluster, "m-1");
    assert!(cluster.settle().is_empty());
    assert!(cluster.messages_of("Pod/m-1")[0].contains("or create its PodGroup"));
    cluster.planner.pod_group(group(Some(3)));
    add(&mut cluster, "m-2");
    assert!(cluster.settle().is_empty());
    assert_eq!(
        cluster.messages_of("Pod/m-2"),
        ["WaitingForGang: gang g: 2 of 3 members exist"]
    );
    cluster.planner.pod_group(group(Some(2)));
    assert_eq!(cluster.settle().len(), 2);
}

#[test]
fn gang_of_annotations_is_not_its_namesake_among_pod_groups() {
    let mut cluster = TestCluster::new(&["n1"]);
    let served = PodGroupChange::Served(PodGroupApi::Coscheduling, true);
    cluster.planner.pod_group(served);
    for name in ["own-1", "own-2"] {
        cluster.add_member(name, "10Gi", "2");
    }
    assert_eq!(cluster.settle().len(), 2);
    for name in ["own-1", "own-2"] {
        cluster.bind((name, "n1"));
    }
    // The gang of annotations has started, with two members of two; its namesake needs three.
    cluster.add_claim(claim("of-group", "10Gi"));
    let mut of_group = pod("of-group", &["of-group"]);
    let label = ("scheduling.x-k8s.io/pod-group".to_owned(), "g".to_owned());
    of_group.metadata.labels = Some([label].into());
    cluster.add_pod(of_group);
    cluster.planner.pod_group(PodGroupChange::Group {
        api: PodGroupApi::Coscheduling,
        namespace: "default".to_owned(),
        name: "g".to_owned(),
        spec: Some(GroupSpec {
            min: 3,
            priority: Some(7),
            ..GroupSpec::default()
        }),
    });
    assert!(cluster.settle().is_empty());
    let messages = cluster.messages_of("Pod/of-group");
    let expected = "WaitingForGang: gang g: 1 of 3 members exist";
    assert_eq!(messages.last(), Some(&expected));
    let own = cluster.planner.world.live_pods.get("pod-own-1").unwrap();
    assert_eq!((own.gang_min, own.priority), (Some(2), 0));
    cluster.advance(20 * RELEASE_AFTER);
    cluster.actions();
    assert!(cluster.evictions.is_empty(), "its gang is complete");
}

/// Cluster with a gang of three, of which kube-scheduler has bound `m-1` and `m-2`.
fn cluster_with_incomplete_gang() -> TestCluster {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["m-1", "m-2", "m-3"] {
        cluster.add_member(name, "20Gi", "3");
    }
    cluster.settle();
    for name in ["m-1", "m-2"] {
        cluster.bind((name, "n1"));
    }
    cluster.actions();
    cluster
}

#[test]
fn evicts_bound_members_of_incomplete_gang() {
    for has_new_leader in [false, true] {
        let mut cluster = cluster_with_incomplete_gang();
        if has_new_leader {
            cluster.change_leader();
            cluster.actions();
        }
        cluster.advance(6 * RELEASE_AFTER - Duration::from_secs(1));
        cluster.actions();
        assert!(cluster.evictions.is_empty(), "not yet");
        cluster.advance(Duration::from_secs(1));
        cluster.actions();
        let state = "incomplete gang g: 2 of 3 members were bound within 360 s";
        assert_eq!(
            cluster.evict(),
            [
                format!("m-1 because {state}"),
                format!("m-2 because {state}")
            ]
        );
        cluster.actions();
        let messages = cluster.messages_of("Pod/m-1");
        assert!(messages.last().unwrap().contains(state), "{messages:?}");
    }
}

#[test]
fn incomplete_gang_is_evicted_after_its_last_try() {
    let mut cluster = cluster_with_incomplete_gang();
    cluster.reject("m-3");
    // It fits on the node where kube-scheduler does not bind it only, and is held back there longer each time.
    let start = cluster.now;
    let mut tries = vec![0];
    let mut evicted_after = None;
    while evicted_after.is_none() {
        let (jobs, releases) = cluster.actions();
        let after = (cluster.now - start).as_secs();
        assert!(after < 3600, "the gang ends");
        if !cluster.evictions.is_empty() {
            evicted_after = Some(after);
        }
        for job in jobs {
            tries.push(after);
            cluster.write(job);
            cluster.deliver_claims();
            cluster.reject("m-3");
        }
        for release in releases {
            cluster.release(&release);
        }
        cluster.advance(Duration::from_secs(1));
    }
    let last = tries.last().unwrap() + RELEASE_AFTER.as_secs();
    assert_eq!(tries.len(), 3, "{tries:?}");
    assert!(evicted_after >= Some(last), "{evicted_after:?} {tries:?}");
}

#[test]
fn complete_gang_may_lose_a_member() {
    for has_new_leader in [false, true] {
        let mut cluster = cluster_with_incomplete_gang();
        cluster.bind(("m-3", "n1"));
        cluster.end("m-3");
        cluster.add_claim(claim("m-4", "20Gi"));
        let mut replacement = member(pod("m-4", &["m-4"]), "3");
        replacement.metadata.creation_timestamp = Some(object(json!("2026-01-01T00:01:00Z")));
        cluster.add_pod(replacement);
        if has_new_leader {
            cluster.change_leader();
        }
        cluster.actions();
        cluster.advance(10 * RELEASE_AFTER);
        cluster.actions();
        assert!(cluster.evictions.is_empty());
    }
}

#[test]
fn gang_without_claims_preempts_by_priority() {
    let mut cluster = TestCluster::new(&["n1"]);
    let of_priority = |name: &str, gang: &str, priority: i32| {
        let mut pod = gated_member(name, "4", "2");
        let annotations = pod.metadata.annotations.as_mut().unwrap();
        annotations.insert("gpu.drava.dev/gang".to_owned(), gang.to_owned());
        pod.spec.as_mut().unwrap().priority = Some(priority);
        pod
    };
    for name in ["low-1", "low-2"] {
        cluster.add_pod(of_priority(name, "low", 10));
    }
    assert_eq!(cluster.settle().len(), 2);
    cluster.finish_gate_removals(None);
    for name in ["low-1", "low-2"] {
        cluster.bind((name, "n1"));
    }
    for name in ["high-1", "high-2"] {
        cluster.add_pod(of_priority(name, "high", 100));
    }
    assert!(cluster.settle().is_empty());
    assert_eq!(
        cluster.evict(),
        ["low-1 for high-1", "low-2 for high-1"],
        "the gang as a whole"
    );
    for name in ["low-1", "low-2"] {
        cluster.delete_pod(name);
    }
    assert_eq!(cluster.settle().len(), 2);
}

#[test]
fn opens_no_gate_of_half_written_gang() {
    let names = ["m-1", "m-2", "m-3"];
    // Any set of the writes may have been executed when the leader died.
    for written in 0..8_usize {
        let is_written = |index: usize| written >> index & 1 == 1;
        let mut cluster = TestCluster::new(&["n1", "n2", "n3"]);
        for name in names {
            cluster.add_claim(claim(name, "50Gi"));
            cluster.add_pod(member(gated_pod(name, &[name], &[ALLOCATION_GATE]), "3"));
        }
        let (mut jobs, _) = cluster.actions();
        let before = cluster.claims.clone();
        cluster.written(&jobs.remove(0));
        for (index, name) in names.into_iter().enumerate() {
            if !is_written(index) {
                let claim = before[name].clone();
                cluster.claims.insert(name.to_owned(), claim);
            }
        }
        cluster.change_leader();
        // Meanwhile the rest of the gang does not fit.
        let free: Vec<&str> = ["n1", "n2", "n3"]
            .into_iter()
            .filter(|node| {
                let pool = format!("{node}/gpus");
                !names.iter().any(|name| {
                    let claim = serde_json::to_value(&cluster.claims[*name]).unwrap();
                    claim["status"].to_string().contains(&pool)
                })
            })
            .collect();
        for node in &free {
            cluster.delete_node(node);
        }
        cluster.settle();
        if written == 7 {
            assert_eq!(cluster.finish_gate_removals(None).len(), 3);
            continue;
        }
        assert!(cluster.gate_removals.is_empty(), "writes {written:03b}");
        let count = written.count_ones();
        if let Some(index) = (0..3).find(|index| is_written(*index)) {
            let messages = cluster.messages_of(&format!("Pod/{}", names[index]));
            let expected = format!("WaitingForGang: gang g: {count} of 3 members are allocated");
            assert_eq!(messages, [expected.as_str()]);
        }
        cluster.advance(RELEASE_AFTER);
        let (_, releases) = cluster.actions();
        assert_eq!(releases.len(), count as usize, "the gang holds nothing");
        for release in &releases {
            cluster.release(release);
        }
        for node in free {
            cluster.planner.node(applied(crate::fixture::node(node)));
            cluster.planner.slice(applied(slice(node)));
        }
        cluster.advance(Duration::from_secs(2));
        assert_eq!(cluster.settle().len(), 3);
        assert_eq!(cluster.finish_gate_removals(None).len(), 3);
    }
}

/// Evicts for a pod of priority 10 on a node full of members of a PodGroup of Kubernetes with this specification, whose claim
/// is reserved for the group.
fn evicted_from_group(spec: GroupSpec) -> Vec<String> {
    let mut cluster = TestCluster::new(&["n1"]);
    let api = PodGroupApi::Kubernetes;
    cluster.planner.pod_group(PodGroupChange::Served(api, true));
    cluster.planner.pod_group(PodGroupChange::Group {
        api,
        namespace: "default".to_owned(),
        name: "g".to_owned(),
        spec: Some(spec),
    });
    for name in ["m-1", "m-2", "m-3"] {
        cluster.add_claim(claim(name, "25Gi"));
        let mut pod = pod(name, &[name]);
        let group = json!({"podGroupName": "g"});
        pod.spec.as_mut().unwrap().scheduling_group = Some(object(group));
        cluster.add_pod(pod);
    }
    assert_eq!(cluster.settle().len(), 3);
    for name in ["m-1", "m-2", "m-3"] {
        cluster.bind((name, "n1"));
    }
    let mut reserved = cluster.claims["m-3"].clone();
    let consumer = json!([{"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g", "uid": "g"}]);
    reserved.status.as_mut().unwrap().reserved_for = Some(object(consumer));
    cluster.observe(reserved);
    cluster.add_pod_of_priority("urgent", "20Gi", 10);
    assert!(cluster.settle().is_empty());
    let evicted = cluster.evict().into_iter();
    evicted
        .map(|evicted| evicted.replace(" for urgent", ""))
        .collect()
}

#[test]
fn pod_group_says_which_pods_end_together() {
    let spec = |disruption, priority| GroupSpec {
        min: 2,
        priority,
        disruption,
        ..GroupSpec::default()
    };
    // The claim of m-3 is free only when all have ended.
    assert_eq!(evicted_from_group(spec(Disruption::Single, None)).len(), 1);
    assert_eq!(evicted_from_group(spec(Disruption::All, None)).len(), 3);
    assert_eq!(evicted_from_group(spec(Disruption::Elastic, None)).len(), 3);
    let protected = evicted_from_group(spec(Disruption::Single, Some(10)));
    assert!(
        protected.is_empty(),
        "the priority of the group counts: {protected:?}"
    );
}

#[test]
fn refuses_part_of_composite_group_with_reason() {
    let mut cluster = TestCluster::new(&["n1"]);
    let api = PodGroupApi::Kubernetes;
    cluster.planner.pod_group(PodGroupChange::Served(api, true));
    cluster.planner.pod_group(PodGroupChange::Group {
        api,
        namespace: "default".to_owned(),
        name: "g".to_owned(),
        spec: Some(GroupSpec {
            min: 1,
            composite: Some("job".to_owned()),
            ..GroupSpec::default()
        }),
    });
    cluster.add_claim(claim("m", "20Gi"));
    let mut pod = pod("m", &["m"]);
    pod.spec.as_mut().unwrap().scheduling_group = Some(object(json!({"podGroupName": "g"})));
    cluster.add_pod(pod);
    assert!(cluster.settle().is_empty());
    let messages = cluster.messages_of("Pod/m");
    assert!(
        messages[0].starts_with("InvalidGang: PodGroup g belongs to CompositePodGroup job"),
        "{messages:?}"
    );
}

#[test]
fn gang_replaces_member_after_another_has_succeeded() {
    for has_new_leader in [false, true] {
        let mut cluster = cluster_with_incomplete_gang();
        cluster.bind(("m-3", "n1"));
        cluster.actions();
        // One has succeeded, and one was lost.
        cluster.end("m-1");
        cluster.end("m-2");
        cluster.add_claim(claim("m-4", "20Gi"));
        let mut replacement = member(gated_pod("m-4", &["m-4"], &[ALLOCATION_GATE]), "3");
        replacement.metadata.creation_timestamp = Some(object(json!("2026-01-01T00:01:00Z")));
        cluster.add_pod(replacement);
        if has_new_leader {
            cluster.change_leader();
        }
        assert_eq!(cluster.settle(), ["m-4 → n1"]);
        assert_eq!(cluster.finish_gate_removals(None), ["m-4"]);
    }
}

/// A change of the PodGroup `g` of Kubernetes.
fn kubernetes_group(spec: Option<GroupSpec>) -> PodGroupChange {
    PodGroupChange::Group {
        api: PodGroupApi::Kubernetes,
        namespace: "default".to_owned(),
        name: "g".to_owned(),
        spec,
    }
}

/// Adds a pod of the PodGroup `g` of Kubernetes.
fn add_to_kubernetes_group(cluster: &mut TestCluster, name: &str, memory: &str, priority: i32) {
    cluster.add_claim(claim(name, memory));
    let mut pod = pod(name, &[name]);
    let spec = pod.spec.as_mut().unwrap();
    spec.scheduling_group = Some(object(json!({"podGroupName": "g"})));
    spec.priority = Some(priority);
    cluster.add_pod(pod);
}

fn cluster_with_kubernetes_group(spec: GroupSpec) -> TestCluster {
    let mut cluster = TestCluster::new(&["n1"]);
    let served = PodGroupChange::Served(PodGroupApi::Kubernetes, true);
    cluster.planner.pod_group(served);
    cluster.planner.pod_group(kubernetes_group(Some(spec)));
    cluster
}

#[test]
fn restores_priority_of_running_pods_without_group() {
    let spec = |priority| GroupSpec {
        min: 1,
        priority,
        ..GroupSpec::default()
    };
    for after in [Some(spec(None)), None] {
        let mut cluster = cluster_with_kubernetes_group(spec(Some(100)));
        add_to_kubernetes_group(&mut cluster, "m", "70Gi", 5);
        assert_eq!(cluster.settle(), ["m → n1"]);
        cluster.bind(("m", "n1"));
        cluster.add_pod_of_priority("urgent", "20Gi", 10);
        assert!(cluster.settle().is_empty());
        assert!(cluster.evict().is_empty(), "priority 100 of the group");
        cluster.planner.pod_group(kubernetes_group(after));
        assert!(cluster.settle().is_empty());
        assert_eq!(cluster.evict(), ["m for urgent"], "its own priority is 5");
    }
}

#[test]
fn restores_priority_of_pending_pods_without_group() {
    let spec = |priority| GroupSpec {
        min: 1,
        priority,
        ..GroupSpec::default()
    };
    let mut cluster = cluster_with_kubernetes_group(spec(Some(100)));
    cluster.add_running(&[("runs", "70Gi", 50)]);
    add_to_kubernetes_group(&mut cluster, "m", "20Gi", 5);
    cluster
        .planner
        .pod_group(kubernetes_group(Some(spec(None))));
    assert!(cluster.settle().is_empty());
    assert!(cluster.evict().is_empty(), "its own priority is 5");
    cluster
        .planner
        .pod_group(kubernetes_group(Some(spec(Some(100)))));
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["runs for m"]);
}

#[test]
fn preemption_policy_of_group_precedes_that_of_its_pods() {
    for (may_preempt, of_pod, expected) in [
        (Some(false), None, false),
        (Some(true), Some("Never"), true),
        (None, Some("Never"), false),
        (None, None, true),
    ] {
        let mut cluster = cluster_with_kubernetes_group(GroupSpec {
            min: 1,
            may_preempt,
            ..GroupSpec::default()
        });
        cluster.add_running(&[("runs", "70Gi", 1)]);
        add_to_kubernetes_group(&mut cluster, "m", "20Gi", 5);
        let mut pod = cluster.pods["m"].clone();
        pod.spec.as_mut().unwrap().preemption_policy = of_pod.map(str::to_owned);
        cluster.add_pod(pod);
        assert!(cluster.settle().is_empty());
        let has_evicted = !cluster.evict().is_empty();
        assert_eq!(has_evicted, expected, "{may_preempt:?} {of_pod:?}");
    }
}
