//! Plans, the guard and orphans: pure functions of what is there.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_api::config::{ComputePolicy, Priority};
use drava_dra_driver::claim::ClaimRef;
use drava_dra_driver::prepare::guard::{self, Conflict};
use drava_dra_driver::prepare::plan::{self, Problem};
use drava_dra_driver::prepare::record::Stage;
use drava_dra_driver::prepare::{Access, Prepared};
use drava_dra_driver::reconcile::{self, Action, Found, Presence, Why};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use proptest::prelude::*;
use serde_json::json;

use crate::fixture::Result::{Share, Whole};
use crate::fixture::{CARDS, POOL, claim, claim_ref, claim_with, config, h100x2, share_id};

fn plan(claim: &ResourceClaim) -> Result<Vec<Prepared>, Problem> {
    plan::plan(&claim_ref(1), Some(claim), POOL, &h100x2())
}

fn refused(claim: &ResourceClaim) -> String {
    plan(claim).unwrap_err().to_string()
}

#[test]
fn a_share_is_what_was_consumed_under_the_settings_of_class_and_claim() {
    let config = json!([
        config("FromClass", &json!({"maxPriority": 50}))[0],
        config(
            "FromClaim",
            &json!({"computePolicy": "fixed", "priority": 20})
        )[0],
    ]);
    let devices = plan(&claim_with(1, &[Share(1, "8Gi", "30")], &config)).unwrap();
    let [device] = devices.as_slice() else {
        panic!("{devices:?}")
    };
    let share = device.share().unwrap();
    assert_eq!(
        (device.request.as_str(), device.device.as_str()),
        ("gpu", "gpu-1-vgpu")
    );
    assert_eq!(
        (device.card.uuid.as_str(), device.card.minor),
        (CARDS[1], 1)
    );
    assert_eq!(share.id.as_str(), share_id(1, 0));
    assert_eq!(
        (share.memory_bytes, share.cores, share.slots),
        (8 << 30, 30, 1)
    );
    assert_eq!(
        (share.compute_policy, share.priority),
        (ComputePolicy::Fixed, Priority::try_from(20).unwrap())
    );
}

#[test]
fn results_of_other_drivers_are_not_ours_and_alternatives_belong_to_their_request() {
    let mut claim = claim(1, &[Whole(0), Whole(1)]);
    let results = claim
        .status
        .as_mut()
        .unwrap()
        .allocation
        .as_mut()
        .unwrap()
        .devices
        .as_mut()
        .unwrap();
    let results = results.results.as_mut().unwrap();
    results[0].driver = "gpu.nvidia.com".to_owned();
    results[1].request = "gpu/whole".to_owned();
    let devices = plan(&claim).unwrap();
    let [device] = devices.as_slice() else {
        panic!("{devices:?}")
    };
    assert_eq!(
        (device.request.as_str(), device.device.as_str()),
        ("gpu", "gpu-1")
    );
    assert_eq!(device.access, Access::Whole);
}

#[test]
fn admin_access_holds_nothing() {
    let mut claim = claim(1, &[Whole(0)]);
    let results = claim
        .status
        .as_mut()
        .unwrap()
        .allocation
        .as_mut()
        .unwrap()
        .devices
        .as_mut()
        .unwrap();
    results.results.as_mut().unwrap()[0].admin_access = Some(true);
    assert_eq!(plan(&claim).unwrap()[0].access, Access::Admin);
}

#[test]
fn claims_that_are_not_ready_are_refused_with_what_is_missing() {
    let sound = || claim(1, &[Share(0, "8Gi", "0")]);
    let with = |change: fn(&mut ResourceClaim)| {
        let mut claim = sound();
        change(&mut claim);
        refused(&claim)
    };
    let gone = plan::plan(&claim_ref(1), None, POOL, &h100x2())
        .unwrap_err()
        .to_string();
    assert_eq!(gone, "it does not exist in the API server any more");
    let replaced = with(|claim| claim.metadata.uid = Some("other".to_owned()));
    assert!(
        replaced.contains("replaced by a claim of the same name (uid other)"),
        "{replaced}"
    );
    let unallocated = with(|claim| claim.status.as_mut().unwrap().allocation = None);
    assert_eq!(
        unallocated,
        "it is not allocated (status.allocation is empty)"
    );
    let unreserved = with(|claim| claim.status.as_mut().unwrap().reserved_for = None);
    assert_eq!(
        unreserved,
        "it is not reserved for any pod (status.reservedFor is empty)"
    );
    let elsewhere = plan::plan(&claim_ref(1), Some(&sound()), "node-b/gpus", &h100x2())
        .unwrap_err()
        .to_string();
    assert!(
        elsewhere.contains("no device of pool node-b/gpus"),
        "{elsewhere}"
    );
}

#[test]
fn a_vanished_device_is_named_with_what_is_there() {
    let mut inventory = h100x2();
    inventory.gpus.cards.remove(1);
    let claim = claim(1, &[Share(1, "8Gi", "0")]);
    let error = plan::plan(&claim_ref(1), Some(&claim), POOL, &inventory)
        .unwrap_err()
        .to_string();
    assert!(error.contains("request gpu: device gpu-1-vgpu is not on this node any more (present: gpu-0, gpu-0-vgpu)"), "{error}");
}

#[test]
fn amounts_that_cannot_be_are_refused_with_their_field() {
    for (capacity, value, text) in [
        (
            "cores",
            "101",
            "consumedCapacity.cores of device gpu-0-vgpu is 101, it must be a whole number from 0 to 100",
        ),
        (
            "cores",
            "-1",
            "is -1, it must be a whole number from 0 to 100",
        ),
        ("cores", "500m", "is 500m, it must be"),
        (
            "memory",
            "0",
            "consumedCapacity.memory of device gpu-0-vgpu is 0, it must be a positive multiple of 1Mi",
        ),
        (
            "memory",
            "-1Gi",
            "is -1Gi, it must be a positive multiple of 1Mi",
        ),
        (
            "memory",
            "1000",
            "is 1000, it must be a positive multiple of 1Mi",
        ),
        ("memory", "lots", "is lots, it must be"),
        (
            "slots",
            "0",
            "consumedCapacity.slots of device gpu-0-vgpu is 0, it must be a whole number from 1",
        ),
    ] {
        let mut claim = claim(1, &[Share(0, "8Gi", "30")]);
        let devices = claim
            .status
            .as_mut()
            .unwrap()
            .allocation
            .as_mut()
            .unwrap()
            .devices
            .as_mut()
            .unwrap();
        let consumed = devices.results.as_mut().unwrap()[0]
            .consumed_capacity
            .as_mut()
            .unwrap();
        consumed.insert(capacity.to_owned(), Quantity(value.to_owned()));
        let error = refused(&claim);
        assert!(error.contains(text), "{capacity} {value}: {error}");
        assert!(error.contains("request gpu"), "{error}");
    }
}

#[test]
fn a_share_without_share_id_or_capacity_names_the_feature_gate() {
    for field in ["shareID", "consumedCapacity"] {
        let mut claim = serde_json::to_value(claim(1, &[Share(0, "8Gi", "30")])).unwrap();
        let result = &mut claim["status"]["allocation"]["devices"]["results"][0];
        result.as_object_mut().unwrap().remove(field);
        let error = refused(&serde_json::from_value(claim).unwrap());
        assert!(
            error.contains(field) && error.contains("DRAConsumableCapacity"),
            "{error}"
        );
    }
    let mut claim = claim(1, &[Share(0, "8Gi", "30")]);
    let devices = claim
        .status
        .as_mut()
        .unwrap()
        .allocation
        .as_mut()
        .unwrap()
        .devices
        .as_mut()
        .unwrap();
    devices.results.as_mut().unwrap()[0].share_id = Some("../../../etc".to_owned());
    assert!(refused(&claim).contains("shareID \"../../../etc\" is not valid"));
}

#[test]
fn config_that_a_claim_may_not_set_is_refused_with_its_field() {
    for (fields, text) in [
        (
            json!({"colour": "red"}),
            "config field colour: unknown field `colour`",
        ),
        (
            json!({"memory": {"percent": 0}}),
            "config field memory.percent: 0 is out of range, use 1 to 100",
        ),
        (
            json!({"computePolicy": "none"}),
            "config field computePolicy: a claim may not set it (it may only choose fixed)",
        ),
        (
            json!({"priority": 1}),
            "config field priority: a claim may not set it (1 is above the class's maximum of 0)",
        ),
        (
            json!({"enforcement": "report"}),
            "config field enforcement: a claim may not set it",
        ),
        (
            json!({"kind": "GpuConfig"}),
            "config is gpu.drava.dev/v1alpha1 GpuConfig",
        ),
    ] {
        let error = refused(&claim_with(
            1,
            &[Share(0, "8Gi", "30")],
            &config("FromClaim", &fields),
        ));
        assert!(error.contains(text), "{fields}: {error}");
        assert!(error.starts_with("request gpu: config"), "{error}");
    }
    let error = refused(&claim_with(
        1,
        &[Whole(0)],
        &config("FromClaim", &json!({"computePolicy": "fixed"})),
    ));
    assert!(
        error.contains(
            "config field computePolicy is for shares (type vgpu), but device gpu-0 is a whole card"
        ),
        "{error}"
    );
}

fn prepared(number: u32, results: &[crate::fixture::Result]) -> (ClaimRef, Vec<Prepared>) {
    let claim = claim(number, results);
    (
        claim_ref(number),
        plan::plan(&claim_ref(number), Some(&claim), POOL, &h100x2()).unwrap(),
    )
}

fn guard(
    new: &(ClaimRef, Vec<Prepared>),
    others: &[(ClaimRef, Vec<Prepared>)],
) -> Result<(), Box<Conflict>> {
    let others = others
        .iter()
        .map(|(claim, devices)| (claim, devices.as_slice()));
    guard::check(&new.0, &new.1, others, &h100x2())
}

#[test]
fn shares_that_fit_pass_and_the_next_one_is_refused_with_the_figures() {
    let half = prepared(1, &[Share(0, "40Gi", "50")]);
    assert_eq!(
        guard(
            &prepared(2, &[Share(0, "38Gi", "50")]),
            std::slice::from_ref(&half)
        ),
        Ok(())
    );
    assert_eq!(
        guard(
            &prepared(2, &[Share(1, "78Gi", "100")]),
            std::slice::from_ref(&half)
        ),
        Ok(()),
        "another card"
    );
    let error = guard(
        &prepared(2, &[Share(0, "39Gi", "0")]),
        std::slice::from_ref(&half),
    )
    .unwrap_err()
    .to_string();
    assert_eq!(
        error,
        "device gpu-0-vgpu (card GPU-5f1c8a20-0b7e-4d39-9a64-1e0d6c9b7a01): 39936 MiB of memory is allocated to this \
         claim, but 40960 MiB of 80480 MiB is prepared for other claims: default/claim-1 (uid \
         00000000-0000-4000-8000-000000000001); delete one of the pods"
    );
    let error = guard(&prepared(2, &[Share(0, "1Gi", "51")]), &[half])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("51 % of cores is allocated to this claim, but 50 % of 100 %"),
        "{error}"
    );
}

#[test]
fn slots_are_counted() {
    let others: Vec<_> = (1..=10)
        .map(|number| prepared(number, &[Share(0, "1Gi", "0")]))
        .collect();
    assert_eq!(
        guard(&prepared(11, &[Share(0, "1Gi", "0")]), &others[..9]),
        Ok(())
    );
    let error = guard(&prepared(11, &[Share(0, "1Gi", "0")]), &others)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("1 of slots") && error.contains("10 of 10"),
        "{error}"
    );
}

#[test]
fn a_whole_card_and_shares_exclude_each_other_both_ways() {
    let (whole, share) = (
        prepared(1, &[Whole(0)]),
        prepared(2, &[Share(0, "1Gi", "0")]),
    );
    assert!(matches!(
        guard(&whole, std::slice::from_ref(&share)),
        Err(conflict) if matches!(*conflict, Conflict::Exclusive { .. })
    ));
    assert!(matches!(
        guard(&prepared(3, &[Whole(0)]), std::slice::from_ref(&whole)),
        Err(conflict) if matches!(*conflict, Conflict::Exclusive { .. })
    ));
    assert_eq!(
        guard(&whole, &[prepared(2, &[Share(1, "1Gi", "0")])]),
        Ok(())
    );
    let error = guard(&share, &[whole]).unwrap_err().to_string();
    assert!(
        error.contains("would be used as shares while claim default/claim-1"),
        "{error}"
    );
    assert!(matches!(
        guard(&prepared(1, &[Whole(0), Share(0, "1Gi", "0")]), &[]),
        Err(conflict) if matches!(*conflict, Conflict::Exclusive { .. })
    ));
}

#[test]
fn two_shares_of_one_claim_count_together_and_the_claim_itself_does_not_count_twice() {
    let both = prepared(1, &[Share(0, "40Gi", "0"), Share(0, "40Gi", "0")]);
    assert!(matches!(
        guard(&both, &[]),
        Err(conflict) if matches!(*conflict, Conflict::Exceeds { what: "memory", .. })
    ));
    let one = prepared(1, &[Share(0, "70Gi", "0")]);
    assert_eq!(guard(&one, std::slice::from_ref(&one)), Ok(()));
}

#[test]
fn monitors_hold_nothing() {
    let mut monitor = prepared(1, &[Whole(0)]);
    monitor.1[0].access = Access::Admin;
    assert_eq!(guard(&monitor, &[prepared(2, &[Whole(0)])]), Ok(()));
    assert_eq!(guard(&prepared(2, &[Whole(0)]), &[monitor]), Ok(()));
}

proptest! {
    /// Whatever is asked for in whatever order, what passes never sums to more than the card has.
    #[test]
    fn what_passes_never_exceeds_the_card(asked in prop::collection::vec((1u64..60, 0u64..101, any::<bool>()), 1..20)) {
        let mut held: Vec<(ClaimRef, Vec<Prepared>)> = Vec::new();
        for (number, (gib, cores, whole)) in asked.into_iter().enumerate() {
            let number = u32::try_from(number).unwrap();
            let mut new = prepared(number, &[if whole { Whole(0) } else { Share(0, "1Gi", "0") }]);
            if let Access::Share(share) = &mut new.1[0].access {
                (share.memory_bytes, share.cores) = (gib << 30, cores);
            }
            if guard(&new, &held).is_ok() {
                held.push(new);
            }
        }
        let shares: Vec<_> = held.iter().filter_map(|(_, devices)| devices[0].share()).collect();
        prop_assert!(shares.len() == held.len() || held.len() == 1);
        prop_assert!(shares.iter().map(|share| share.memory_bytes).sum::<u64>() <= 80_480 << 20);
        prop_assert!(shares.iter().map(|share| share.cores).sum::<u64>() <= 100);
        prop_assert!(shares.len() <= 10);
    }
}

const GRACE: Duration = Duration::from_secs(600);

fn decide(found: &Found, presence: &[(u32, Presence)]) -> Vec<(u32, Action)> {
    let presence = presence
        .iter()
        .map(|(number, presence)| (claim_ref(*number).uid, presence.clone()))
        .collect();
    let actions: BTreeMap<_, _> = reconcile::decide(found, &presence, GRACE);
    let number = |uid: &str| uid[24..].parse().unwrap();
    actions
        .into_iter()
        .map(|(uid, action)| (number(uid.as_str()), action))
        .collect()
}

fn recorded(stages: &[(u32, Stage)]) -> Found {
    let recorded = stages
        .iter()
        .map(|(number, stage)| (claim_ref(*number).uid, (claim_ref(*number), *stage)));
    Found {
        recorded: recorded.collect(),
        ..Found::default()
    }
}

#[test]
fn a_prepared_claim_is_restored_while_it_holds_and_removed_only_after_a_grace() {
    let found = recorded(&[(1, Stage::Prepared)]);
    assert_eq!(
        decide(&found, &[(1, Presence::Holds(claim_ref(1)))]),
        [(1, Action::Restore)]
    );
    assert_eq!(decide(&found, &[(1, Presence::Lost(GRACE / 2))]), []);
    assert_eq!(
        decide(&found, &[(1, Presence::Lost(GRACE))]),
        [(1, Action::Remove(Why::Gone))]
    );
    assert_eq!(decide(&found, &[]), [], "the API server did not answer");
}

#[test]
fn an_interrupted_preparation_waits_for_kubelet_or_goes_with_its_claim() {
    let found = recorded(&[(1, Stage::Intent)]);
    assert_eq!(decide(&found, &[(1, Presence::Holds(claim_ref(1)))]), []);
    assert_eq!(
        decide(&found, &[(1, Presence::Lost(Duration::ZERO))]),
        [(1, Action::Remove(Why::Interrupted))]
    );
}

#[test]
fn a_damaged_record_is_rebuilt_and_what_exists_for_it_is_no_stray() {
    let uid = claim_ref(1).uid;
    let found = Found {
        damaged: BTreeSet::from([uid.clone()]),
        traces: BTreeSet::from([uid]),
        ..Found::default()
    };
    assert_eq!(decide(&found, &[]), []);
    assert_eq!(decide(&found, &[(1, Presence::Lost(Duration::ZERO))]), []);
    assert_eq!(
        decide(&found, &[(1, Presence::Holds(claim_ref(1)))]),
        [(1, Action::Rebuild(claim_ref(1)))]
    );
}

#[test]
fn an_interrupted_rebuild_is_no_interrupted_first_preparation() {
    let mut found = recorded(&[(1, Stage::Intent)]);
    found.damaged.insert(claim_ref(1).uid);
    assert_eq!(decide(&found, &[(1, Presence::Lost(Duration::ZERO))]), []);
    let holds = Presence::Holds(claim_ref(1));
    assert_eq!(
        decide(&found, &[(1, holds)]),
        [(1, Action::Rebuild(claim_ref(1)))]
    );
}

#[test]
fn what_nothing_is_recorded_for_is_removed() {
    let mut found = recorded(&[(1, Stage::Prepared)]);
    found.traces = BTreeSet::from([claim_ref(1).uid, claim_ref(2).uid]);
    let actions = decide(&found, &[(1, Presence::Lost(Duration::ZERO))]);
    assert_eq!(actions, [(2, Action::Remove(Why::NoRecord))]);
}
