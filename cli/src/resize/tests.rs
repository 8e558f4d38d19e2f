use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::from_value;

use super::share::{check_grows, check_runs, check_size, find, published, unsettled};
use super::wait::{invalid, newest, refusal};
use super::*;

const GIB: u64 = 1 << 30;

/// GiB of memory and percent of GPU time.
type Companions<'a> = &'a [(u64, u64)];

fn amounts(gib: u64, cores: u64) -> Amounts {
    Amounts {
        memory_bytes: gib * GIB,
        cores,
    }
}

fn share(companions: &[(u64, u64)]) -> Share {
    let companions = companions.iter().enumerate();
    Share {
        base: ResourceClaim::default(),
        request: "gpu".to_owned(),
        class: names::class::VGPU.to_owned(),
        device: ("gpu-0-vgpu".to_owned(), "n/gpus".to_owned()),
        cores: Cores::Time,
        own: amounts(8, 20),
        companions: companions
            .map(|(index, (gib, cores))| (format!("c{index}"), amounts(*gib, *cores)))
            .collect(),
    }
}

#[test]
fn plans_companions_for_wanted_total() {
    let add = |gib, cores| Some(amounts(gib, cores));
    let cases: [(Companions<'_>, Amounts, Option<Amounts>, &[&str]); 7] = [
        (&[], amounts(12, 20), add(4, 0), &[]),
        (&[], amounts(8, 20), None, &[]),
        // The present companion stays.
        (&[(4, 0)], amounts(14, 30), add(2, 10), &[]),
        // Newest first.
        (&[(4, 0), (2, 10)], amounts(12, 20), None, &["c1"]),
        (&[(4, 0), (2, 10)], amounts(8, 20), None, &["c0", "c1"]),
        // A part of one: the rest comes before the deletion.
        (&[(4, 0)], amounts(11, 20), add(3, 0), &["c0"]),
        (&[(4, 10)], amounts(12, 20), add(4, 0), &["c0"]),
    ];
    for (companions, wanted, add, delete) in cases {
        let plan = plan(&share(companions), wanted).unwrap();
        assert_eq!(
            (plan.add, &plan.delete[..]),
            (
                add,
                &delete
                    .iter()
                    .map(|name| (*name).to_owned())
                    .collect::<Vec<_>>()[..]
            ),
            "{companions:?} {wanted:?}"
        );
    }
    let cores_only = plan(&share(&[]), amounts(8, 50)).unwrap().add;
    assert_eq!(
        cores_only,
        Some(Amounts {
            memory_bytes: MIB,
            cores: 30
        })
    );
}

#[test]
fn refuses_less_than_claim_itself_has() {
    for wanted in [amounts(7, 20), amounts(8, 10)] {
        let error = plan(&share(&[]), wanted).unwrap_err().to_string();
        assert!(
            error.contains("8192 MiB, 20% of GPU time, which cannot shrink"),
            "{error}"
        );
    }
}

const POD: &str = "00000000-0000-4000-8000-00000000000a";
const BASE: &str = "00000000-0000-4000-8000-00000000000b";

fn pod(changes: Value) -> Pod {
    let mut pod = json!({
        "metadata": {"name": "app", "namespace": "a", "uid": POD},
        "spec": {
            "containers": [], "nodeName": "n",
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "base"}, {"name": "other", "resourceClaimName": "other"}],
        },
        "status": {"phase": "Running"},
    });
    merge(&mut pod, changes);
    from_value(pod).unwrap()
}

/// Replaces values by their JSON pointers; the last part may be new.
fn merge(object: &mut Value, changes: Value) {
    let Value::Object(changes) = changes else {
        panic!("no changes: {changes}")
    };
    for (pointer, value) in changes {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        object.pointer_mut(parent).unwrap()[key] = value;
    }
}

fn both(mut changes: Value, others: Value) -> Value {
    if let (Value::Object(changes), Value::Object(others)) = (&mut changes, others) {
        changes.extend(others);
    }
    changes
}

fn claim(name: &str, memory: &str, cores: &str, changes: Value) -> ResourceClaim {
    let result = json!({
        "driver": names::DRIVER, "pool": "n/gpus", "device": "gpu-0", "request": "gpu", "shareID": POD,
        "consumedCapacity": {"memory": memory, "cores": cores},
    });
    let mut claim = json!({
        "metadata": {"name": name, "namespace": "a", "uid": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "vgpu.drava.dev"}}]}},
        "status": {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": "app", "uid": POD}],
        },
    });
    merge(&mut claim, changes);
    from_value(claim).unwrap()
}

fn base(changes: Value) -> ResourceClaim {
    let all = both(json!({"/metadata/uid": BASE}), changes);
    claim("base", "8Gi", "20", all)
}

fn grant(reason: &str, message: &str) -> Value {
    let status = if reason == "Granted" { "True" } else { "False" };
    json!([{
        "driver": names::DRIVER, "pool": "n/gpus", "device": "gpu-0", "shareID": POD,
        "conditions": [{
            "type": "Granted", "status": status, "reason": reason, "message": message,
            "lastTransitionTime": "2026-11-28T00:00:00Z",
        }],
    }])
}

/// Returns a companion with these amounts that the limits include.
fn grown(name: &str, memory: &str, cores: &str, changes: Value) -> ResourceClaim {
    let all = json!({
        "/metadata/labels": {names::COMPANION_LABEL: BASE},
        "/metadata/ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "app", "uid": POD}],
        "/status/devices": grant("Granted", "the limits include it"),
    });
    claim(name, memory, cores, both(all, changes))
}

fn found(companions: &[ResourceClaim]) -> anyhow::Result<Share> {
    let mut claims = vec![base(json!({}))];
    claims.extend_from_slice(companions);
    find(&pod(json!({})), &claims, (Some("gpu"), None))
}

#[test]
fn counts_companions_that_limits_include() {
    let share = found(&[
        grown("more-1", "4Gi", "0", json!({})),
        grown("more-2", "2Gi", "10", json!({})),
    ]);
    assert_eq!(share.unwrap().total(), amounts(14, 30));
}

#[test]
fn companion_that_is_not_settled_ends_command() {
    let delete = "`kubectl delete resourceclaim more -n a`";
    let deleted = "2026-11-28T00:00:00Z";
    let cases = [
        (
            json!({"/status": null}),
            format!("waits for its allocation: wait, or withdraw it with {delete}"),
        ),
        (
            json!({"/status/devices": null}),
            format!(
                "is allocated, and the limits do not include it (the node driver has not reported on it): wait, or withdraw it \
                 with {delete}"
            ),
        ),
        (
            json!({"/status/devices": grant("Refused", "it must be on the GPU of its base")}),
            format!(
                "is allocated, and the limits do not include it (Refused: it must be on the GPU of its base): wait, or withdraw \
                 it with {delete}"
            ),
        ),
        (
            json!({
                "/metadata/deletionTimestamp": deleted,
                "/status/devices": grant("InUse", "the share uses 9 MiB and keeps 8 MiB"),
            }),
            "is being deleted (InUse: the share uses 9 MiB and keeps 8 MiB): wait until it is gone"
                .to_owned(),
        ),
        // The node driver has not seen the deletion so far.
        (
            json!({"/metadata/deletionTimestamp": deleted}),
            "is being deleted (Granted: the limits include it): wait until it is gone".to_owned(),
        ),
        (
            json!({"/metadata/deletionTimestamp": deleted, "/status": null}),
            "is being deleted: wait until it is gone".to_owned(),
        ),
    ];
    for (changes, text) in cases {
        let companion = grown("more", "4Gi", "0", changes);
        assert!(unsettled(&companion).is_some_and(|state| text.starts_with(&state)));
        let error = found(&[companion]).unwrap_err().to_string();
        assert_eq!(error, format!("claim more of an earlier resize {text}"));
    }
}

#[test]
fn companion_of_several_requests_ends_command() {
    let requests = ["gpu", "other"]
        .map(|name| json!({"name": name, "exactly": {"deviceClassName": "vgpu.drava.dev"}}));
    let companion = grown(
        "more",
        "4Gi",
        "0",
        json!({"/spec/devices/requests": requests}),
    );
    assert_eq!(
        found(&[companion]).unwrap_err().to_string(),
        "claim more adds to request other as well as to gpu, so this command does not change it: withdraw it with \
         `kubectl delete resourceclaim more -n a`"
    );
}

#[test]
fn leaves_out_claims_that_are_no_companions_of_pod() {
    let other = json!({"resource": "pods", "name": "other", "uid": "another"});
    let own = json!({"resource": "pods", "name": "app", "uid": POD});
    for (name, changes) in [
        ("more", json!({"/metadata/ownerReferences": null})),
        (
            "more",
            json!({"/metadata/ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "app", "uid": "another"}]}),
        ),
        ("more", json!({"/status/reservedFor": [other]})),
        ("more", json!({"/status/reservedFor": [own, other]})),
        (
            "more",
            json!({"/metadata/labels": {names::COMPANION_LABEL: POD}}),
        ),
        ("more", json!({"/spec/devices/requests/0/name": "another"})),
        // The pod itself uses the claim.
        ("other", json!({})),
    ] {
        let text = changes.to_string();
        let share = found(&[grown(name, "4Gi", "0", changes)]).unwrap();
        assert!(share.companions.is_empty(), "{name} {text}");
    }
}

#[test]
fn least_memory_of_companion_for_gpu_time_counts_as_none() {
    let share = found(&[grown("more", "1Mi", "30", json!({}))]).unwrap();
    assert_eq!(share.total(), amounts(8, 50));
    let back = plan(&share, amounts(8, 20)).unwrap();
    assert_eq!((back.add, back.delete), (None, vec!["more".to_owned()]));
    let again = plan(&share, amounts(8, 50)).unwrap();
    assert_eq!((again.add, again.delete), (None, Vec::new()));
    let mut wanted = amounts(8, 50);
    wanted.memory_bytes += MIB;
    let error = plan(&share, wanted).unwrap_err().to_string();
    assert!(error.contains("cannot grow by exactly 1 MiB"), "{error}");
}

#[test]
fn replacement_needs_time() {
    let replacing = plan(&share(&[(4, 0)]), amounts(11, 20)).unwrap();
    let error = check_order(&replacing, 0).unwrap_err().to_string();
    assert!(
        error.starts_with("this resize replaces c0 by a new claim, which may not fit: --timeout 0"),
        "{error}"
    );
    check_order(&replacing, 1).unwrap();
    for wanted in [amounts(14, 20), amounts(8, 20)] {
        check_order(&plan(&share(&[(4, 0)]), wanted).unwrap(), 0).unwrap();
    }
}

#[test]
fn shares_of_pods_that_do_not_run_stay() {
    check_runs(&pod(json!({}))).unwrap();
    for (changes, text) in [
        (
            json!({"/spec/nodeName": null}),
            "pod app is not bound to a node: change the request in its claim or template instead",
        ),
        (
            json!({"/metadata/deletionTimestamp": "2026-11-28T00:00:00Z"}),
            "pod app is being deleted: only the shares of running pods grow",
        ),
        (
            json!({"/status/phase": "Succeeded"}),
            "pod app has finished (Succeeded): only running pods have shares",
        ),
        (
            json!({"/status/phase": "Failed"}),
            "pod app has finished (Failed): only running pods have shares",
        ),
    ] {
        assert_eq!(check_runs(&pod(changes)).unwrap_err().to_string(), text);
    }
}

#[test]
fn claims_of_several_pods_do_not_grow() {
    let grows = |reserved: Value| {
        let base = base(json!({"/status/reservedFor": reserved}));
        check_grows(&pod(json!({})), &base).map_err(|error| error.to_string())
    };
    let own = json!({"resource": "pods", "name": "app", "uid": POD});
    grows(json!([own])).unwrap();
    let other = json!({"resource": "pods", "name": "other", "uid": "another"});
    let group =
        json!({"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g", "uid": "g"});
    for (reserved, listed) in [
        (json!([own, other]), "pods/app, pods/other"),
        (json!([group]), "podgroups/g"),
        (json!([]), "no pod"),
    ] {
        assert_eq!(
            grows(reserved).unwrap_err(),
            format!(
                "claim base is not reserved for pod app alone (reserved for: {listed}): a companion goes with one pod, so shares \
                 of several pods and of PodGroups do not grow"
            )
        );
    }
}

#[test]
fn refusal_says_how_to_withdraw_claim() {
    let refused = json!({"/status/devices": grant("Refused", "it must be on the GPU of its base")});
    assert_eq!(
        refusal(&grown("more", "4Gi", "0", refused)).unwrap(),
        "the node driver refused claim more: it must be on the GPU of its base. The claim stays and holds its capacity; withdraw \
         it with `kubectl delete resourceclaim more -n a`"
    );
    assert_eq!(refusal(&grown("more", "4Gi", "0", json!({}))), None);
}

#[test]
fn newest_event_is_the_one_observed_last() {
    let event = |message: &str, times: Value| {
        let mut event = json!({"metadata": {}, "involvedObject": {}, "message": message});
        merge(&mut event, times);
        from_value(event).unwrap()
    };
    let at = |minute: u32| format!("2026-11-28T00:{minute:02}:00.000000Z");
    let events = [
        event("created", json!({"/eventTime": at(1)})),
        event(
            "series",
            json!({"/eventTime": at(0), "/series": {"lastObservedTime": at(9)}}),
        ),
        event("old", json!({"/lastTimestamp": "2026-11-28T00:05:00Z"})),
        event("no time", json!({})),
    ];
    for (events, message) in [
        (&events[..], "series"),
        (&events[2..], "old"),
        (&events[3..], "no time"),
    ] {
        assert_eq!(newest(events).unwrap().message.as_deref(), Some(message));
    }
    assert!(newest(&[]).is_none());
}

#[test]
fn invalid_companion_is_told_by_code_of_event() {
    let event = |message: &str| {
        let event = json!({"metadata": {}, "involvedObject": {}, "message": message});
        from_value::<k8s_openapi::api::core::v1::Event>(event).unwrap()
    };
    let text = "InvalidCompanion: its owner, pod app, does not run in namespace a";
    assert_eq!(invalid(&event(text)), Some(text));
    for other in [
        "0/1 nodes: 1 InsufficientMemory (InvalidCompanion: no)",
        "InvalidCompanion",
    ] {
        assert_eq!(invalid(&event(other)), None);
    }
}

#[test]
fn says_what_is_not_known_to_have_happened() {
    let report = |dry_run, is_complete| {
        let report = Report {
            pod: "a/app".to_owned(),
            claim: "base".to_owned(),
            request: "gpu".to_owned(),
            cores: Cores::Time,
            gpu: "gpu-0-vgpu of pool n/gpus".to_owned(),
            dry_run,
            is_complete,
            before: amounts(8, 20),
            after: amounts(12, 20),
            created: dry_run.then(|| json!({})),
            deleted: Vec::new(),
        };
        report.text()
    };
    assert!(report(false, true).contains("of claim base has 12288 MiB"));
    assert!(report(false, false).contains("of claim base is to have 12288 MiB"));
    let dry = report(true, true);
    assert!(
        dry.contains("would have 12288 MiB, 20% of GPU time (before: 8192 MiB, 20% of GPU time)\nif gpu-0-vgpu of pool n/gpus has"),
        "{dry}"
    );
}

#[test]
fn companions_are_numbered() {
    let named = |name: &str| ResourceClaim {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        ..ResourceClaim::default()
    };
    let all = ["c-more-2", "c-more-10", "c-more-x", "d-more-90", "c"].map(named);
    assert_eq!(companion_name("c", &all), "c-more-11");
    assert_eq!(companion_name("e", &all), "e-more-1");
    let long = "n".repeat(253);
    let first = companion_name(&long, &[]);
    assert!(first.len() < 253, "{first}");
    assert!(companion_name(&long, &[named(&first)]).ends_with("-more-2"));
}

#[test]
fn share_cannot_have_more_than_its_gpu() {
    let slice = |generation: i64, gib: u64| {
        let capacity = json!({"memory": {"value": format!("{gib}Gi")}, "cores": {"value": "100"}});
        let slice = json!({
            "metadata": {"name": "s"},
            "spec": {
                "driver": names::DRIVER, "nodeName": "n",
                "pool": {"name": "n/gpus", "generation": generation, "resourceSliceCount": 1},
                "devices": [
                    {"name": "gpu-0", "capacity": {"memory": {"value": "900Gi"}, "cores": {"value": "100"}}},
                    {"name": "gpu-0-vgpu", "capacity": capacity},
                ],
            },
        });
        from_value::<ResourceSlice>(slice).unwrap()
    };
    let share = share(&[]);
    let has = published(&share, &[slice(1, 40), slice(2, 80)]).unwrap();
    assert_eq!(has, amounts(80, 100));
    check_size(&share, amounts(80, 100), has).unwrap();
    let error = check_size(&share, amounts(81, 20), has).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the share can never have 82944 MiB, 20% of GPU time: gpu-0-vgpu of pool n/gpus has 81920 MiB, 100% of GPU time altogether, \
         and a share grows on its own GPU only; a claim for GPU time alone has 1 MiB of memory"
    );
    assert_eq!(published(&share, &[]), None);
    // A companion for GPU time alone has memory, too.
    let plan = plan(&share, amounts(8, 40)).unwrap();
    let full = Amounts {
        memory_bytes: share.own.memory_bytes,
        cores: 100,
    };
    check_size(&share, plan.result(&share), full).unwrap_err();
    check_size(&share, plan.result(&share), has).unwrap();
}

#[test]
fn spatial_share_grows_in_memory_only() {
    let config = json!([{"source": "FromClass", "opaque": {"driver": names::DRIVER, "parameters": {
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "computePolicy": "spatial",
    }}}]);
    let base = base(json!({"/status/allocation/devices/config": config}));
    let share = find(&pod(json!({})), &[base], (None, None)).unwrap();
    let memory = plan(&share, amounts(12, 20)).unwrap();
    assert_eq!(memory.add, Some(amounts(4, 0)));
    let error = plan(&share, amounts(8, 30)).unwrap_err().to_string();
    assert!(
        error.ends_with("its memory grows, its cores stay at 20%"),
        "{error}"
    );
    let error = plan(&share, amounts(8, 10)).unwrap_err().to_string();
    assert!(
        error.contains("8192 MiB, 20% of the multiprocessors, which cannot shrink"),
        "{error}"
    );
}
