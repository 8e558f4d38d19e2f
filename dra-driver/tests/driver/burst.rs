//! Claims with a memory limit above their guarantee, and claims that get memory which is lent.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drava_api::error::describe;
use drava_dra_driver::agent::policy::idle;
use drava_dra_driver::agent::{Agent, Config, FollowedRecords};
use drava_dra_driver::node::claim::ShareId;
use drava_dra_driver::prepare::apply::{Failure, MissedReclaims, Unreturned};
use drava_dra_driver::prepare::plan;
use drava_dra_driver::prepare::record::{Loaded, RecordStore};
use drava_vgpu_abi::{decode, update};
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};
use simulator_machine::testing::poll;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::cluster::FakeGpus;
use crate::crash::CrashingEffects;
use crate::fixture::Allocated::{Share, Whole};
use crate::fixture::{GPU_UUIDS, POOL, claim, claim_ref, claim_with, config, h100x2};
use crate::node::{TestNode, lacks_device_files, page_of, prepare, record_of, spec_of};

const GIB: u64 = 1 << 30;

/// Returns a claim for 4 GiB of the first GPU whose class allows a limit of 70 GiB, with this config of its memory.
fn claim_with_memory(number: u32, memory: &Value) -> ResourceClaim {
    let of_class = config("FromClass", &json!({"memory": {"maxLimit": "70Gi"}}));
    let of_claim = config("FromClaim", &json!({"memory": memory}));
    let configs = json!([of_class[0], of_claim[0]]);
    claim_with(number, &[Share(0, "4Gi", "0")], &configs)
}

fn bursting(number: u32) -> ResourceClaim {
    claim_with_memory(number, &json!({"limit": "70Gi", "reclaim": "kill"}))
}

fn limit_of(node: &TestNode, number: u32) -> Option<u64> {
    let page = fs::read(page_of(node, number)).unwrap();
    decode(&page).unwrap().spec.limits.memory_limit_bytes
}

/// Sets the memory limit in a page, as the agent does.
fn set_limit(node: &TestNode, number: u32, bytes: u64) {
    let path = page_of(node, number);
    let content = fs::read(&path).unwrap();
    let mut limits = decode(&content).unwrap().spec.limits;
    limits.memory_limit_bytes = Some(bytes);
    let page = fs::OpenOptions::new().write(true).open(path).unwrap();
    for write in update(&content, &limits).unwrap() {
        page.write_all_at(write.bytes(), write.offset()).unwrap();
    }
}

/// Runs the node agent while `work` runs, on GPUs without processes, whose shares get 80 GiB.
fn with_agent<T>(node: &TestNode, work: impl FnOnce() -> T) -> T {
    let gpus = FakeGpus::h100x2();
    gpus.set_processes(GPU_UUIDS[0], Vec::new());
    let config = Config {
        layout: node.layout(),
        proc_root: node.root.path().join("proc"),
        open: Arc::new(move || Ok(Box::new(gpus.clone()))),
        estimate: Arc::new(|_| None),
        allocatable: Arc::new(|_| Some(80 * GIB)),
        missed_reclaims: MissedReclaims::default(),
        metrics: watch::Sender::new(Arc::default()),
        idle_after_us: idle::FIRST_US,
        followed: FollowedRecords::default(),
        terminate: Arc::new(|_, _| {}),
    };
    let stop = CancellationToken::new();
    std::thread::scope(|scope| {
        scope.spawn(|| Agent::new(config).run(&stop, |_| {}));
        let _stop = stop.clone().drop_guard();
        work()
    })
}

fn await_limit(node: &TestNode, number: u32, gib: u64) {
    let is_set = || Ok((limit_of(node, number) == Some(gib * GIB)).then_some(()));
    poll(is_set).unwrap();
}

#[test]
fn refuses_limit_without_way_to_give_back() {
    let planned = |claim: &ResourceClaim| {
        let devices = plan::plan(&claim_ref(1), Some(claim), POOL, &h100x2());
        let devices = devices.map_err(|error| error.to_string())?;
        Ok::<_, String>(devices[0].share().and_then(|share| share.limit_bytes))
    };
    assert_eq!(planned(&bursting(1)), Ok(Some(70 * GIB)));
    for (memory, text) in [
        (json!({"limit": "70Gi"}), "memory.reclaim: missing"),
        (
            json!({"limit": "1Gi", "reclaim": "kill"}),
            "1Gi is less than the 4096 MiB",
        ),
        (
            json!({"limit": "71Gi", "reclaim": "kill"}),
            "71Gi exceeds the class's maximum of 70Gi",
        ),
    ] {
        let error = planned(&claim_with_memory(1, &memory)).unwrap_err();
        assert!(error.contains(text), "{error}");
    }
    let mut whole = bursting(1);
    *crate::fixture::results_of(&mut whole) =
        crate::fixture::results_of(&mut claim(1, &[Whole(0)])).clone();
    let error = planned(&whole).unwrap_err();
    assert!(
        error.contains("config field memory.limit applies to shares"),
        "{error}"
    );
}

/// A build without the kind gives nothing of the GPU to other claims.
#[test]
fn records_share_that_bursts_as_a_kind_of_its_own() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    let (record, _) = prepare(&node, &applier, 1, &bursting(1)).unwrap();
    let text = fs::read_to_string(record_of(&node, 1)).unwrap();
    assert!(text.contains(r#""kind":"burstShare""#), "{text}");
    let store = RecordStore::new(node.layout().claims());
    let loaded = store.load(&claim_ref(1).uid).unwrap();
    assert_eq!(loaded, Loaded::Present(Box::new(record)));
    assert_eq!(limit_of(&node, 1), Some(4 * GIB), "lent before the agent");
}

/// A build without the kind would never give the share back what it lends.
#[test]
fn records_share_that_lends_as_a_kind_of_its_own() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    let lending = |number, lends: bool| {
        let class = config("FromClass", &json!({"memory": {"lendIdle": lends}}));
        claim_with(number, &[Share(0, "4Gi", "0")], &json!([class[0]]))
    };
    let (record, _) = prepare(&node, &applier, 1, &lending(1, true)).unwrap();
    let text = fs::read_to_string(record_of(&node, 1)).unwrap();
    assert!(text.contains(r#""kind":"lendingShare""#), "{text}");
    let store = RecordStore::new(node.layout().claims());
    let loaded = store.load(&claim_ref(1).uid).unwrap();
    assert_eq!(loaded, Loaded::Present(Box::new(record)));
    prepare(&node, &applier, 2, &lending(2, false)).unwrap();
    let text = fs::read_to_string(record_of(&node, 2)).unwrap();
    assert!(text.contains(r#""kind":"share""#), "{text}");
}

#[test]
fn records_whether_share_bursts_into_idle_guarantees() {
    let planned = |max: &str, chosen: &str| {
        let class = json!({"memory": {"maxLimit": "70Gi", "maxBurst": max}});
        let own = json!({"memory": {"limit": "70Gi", "burst": chosen, "reclaim": "kill"}});
        let configs = json!([config("FromClass", &class)[0], config("FromClaim", &own)[0]]);
        let claim = claim_with(1, &[Share(0, "4Gi", "0")], &configs);
        let devices = plan::plan(&claim_ref(1), Some(&claim), POOL, &h100x2());
        devices.map(|devices| devices[0].share().map(|share| share.bursts_idle))
    };
    assert_eq!(planned("idle", "idle").unwrap(), Some(true));
    assert_eq!(planned("idle", "unallocated").unwrap(), Some(false));
    let error = planned("unallocated", "idle").unwrap_err().to_string();
    assert!(error.contains("no memory.maxBurst: idle"), "{error}");
}

#[test]
fn page_beside_share_that_bursts_begins_without_memory() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    prepare(&node, &applier, 1, &bursting(1)).unwrap();
    set_limit(&node, 1, 70 * GIB);
    // Another GPU has nothing to wait for.
    prepare(&node, &applier, 2, &claim(2, &[Share(1, "6Gi", "0")])).unwrap();
    assert_eq!(limit_of(&node, 2), Some(6 * GIB));
    let third = claim(3, &[Share(0, "30Gi", "0")]);
    let started = Instant::now();
    let error = prepare(&node, &applier, 3, &third).unwrap_err();
    assert!(
        started.elapsed() < Duration::from_secs(10),
        "a hanging prepare"
    );
    let text = describe(&error);
    assert!(
        text.contains("default/claim-1")
            && text.contains("the node agent has not lowered its limit"),
        "{text}"
    );
    let cause = |error: &Failure| match error {
        Failure::Unreturned { cause, .. } => Some(*cause),
        _ => None,
    };
    assert_eq!(cause(&error.failure), Some(Unreturned::NotLowered));
    assert_eq!(limit_of(&node, 3), Some(0));
    assert!(record_of(&node, 3).exists(), "the memory is wanted still");
    // The limit is low, and programs use the memory still.
    set_limit(&node, 1, 4 * GIB);
    let error = prepare(&node, &applier, 3, &third).unwrap_err();
    assert_eq!(cause(&error.failure), Some(Unreturned::InUse));
    set_limit(&node, 3, 30 * GIB);
    let (_, repairs) = prepare(&node, &applier, 3, &third).unwrap();
    assert_eq!(repairs, Vec::<String>::new());
}

/// The memory of a page that cannot be read may be lent when it is replaced.
#[test]
fn damaged_page_beside_share_that_bursts_is_replaced_without_memory() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    let second = claim(2, &[Share(0, "30Gi", "0")]);
    prepare(&node, &applier, 2, &second).unwrap();
    prepare(&node, &applier, 1, &bursting(1)).unwrap();
    assert_eq!(limit_of(&node, 2), Some(30 * GIB));
    fs::write(page_of(&node, 2), b"damaged").unwrap();
    prepare(&node, &applier, 2, &second).unwrap_err();
    assert_eq!(limit_of(&node, 2), Some(0));
}

#[test]
fn agent_backs_claim_before_it_is_prepared() {
    if lacks_device_files() {
        return;
    }
    let node = TestNode::started();
    let applier = node.applier(node.effects());
    prepare(&node, &applier, 1, &bursting(1)).unwrap();
    with_agent(&node, || {
        await_limit(&node, 1, 70);
        let second = claim(2, &[Share(0, "30Gi", "0")]);
        // A loaded host may need several calls, as kubelet makes them.
        poll(|| Ok(prepare(&node, &applier, 2, &second).ok())).unwrap();
        assert_eq!(limit_of(&node, 2), Some(30 * GIB));
        assert!(limit_of(&node, 1) <= Some(50 * GIB));
        // Lent again when the second has gone.
        applier.unprepare(&claim_ref(2)).unwrap();
        await_limit(&node, 1, 70);
    });
}

/// The driver ends after each step of prepare; then another one prepares the claim.
#[test]
fn crash_between_record_and_limits_promises_nothing_twice() {
    if lacks_device_files() {
        return;
    }
    for steps in 1..5 {
        let node = TestNode::started();
        let applier = node.applier(node.effects());
        prepare(&node, &applier, 1, &bursting(1)).unwrap();
        let share = ShareId::parse(&crate::fixture::share_id(2, 0)).unwrap();
        let page = node.layout().limits(&claim_ref(2).uid, &share);
        let second = claim(2, &[Share(0, "30Gi", "0")]);
        with_agent(&node, || await_limit(&node, 1, 70));
        let crashing = node.applier(CrashingEffects::after(steps, node.effects()));
        prepare(&node, &crashing, 2, &second).unwrap_err();
        if page.exists() {
            assert_eq!(limit_of(&node, 2), Some(0), "after {steps} steps");
        }
        assert!(!spec_of(&node, 2).exists());
        with_agent(&node, || {
            let applier = node.applier(node.effects());
            poll(|| Ok(prepare(&node, &applier, 2, &second).ok())).unwrap();
        });
        assert_eq!(limit_of(&node, 2), Some(30 * GIB));
        assert!(limit_of(&node, 1) <= Some(50 * GIB), "after {steps} steps");
    }
}
