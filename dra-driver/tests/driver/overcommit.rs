//! Conflicts of a claim with prepared claims: a pure function.

use drava_dra_driver::gpus::inventory::NodeInventory;
use drava_dra_driver::node::claim::ClaimRef;
use drava_dra_driver::prepare::overcommit::{self, Conflict};
use drava_dra_driver::prepare::plan;
use drava_dra_driver::prepare::{Access, Grant, Phase, Prepared, Suspension};
use drava_nvml::{ComputeMode, Mig};
use proptest::prelude::*;

use crate::fixture::Allocated::{Partition, Share, Whole};
use crate::fixture::{POOL, claim, claim_ref, h100x2};

fn prepared(number: u32, results: &[crate::fixture::Allocated]) -> (ClaimRef, Vec<Prepared>) {
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
    overcommit::check(&new.0, &new.1, others, &h100x2())
}

/// Adds 30 GiB and 40% of the GPU's time to the share of a claim, by the companion with this number.
fn grown(mut claim: (ClaimRef, Vec<Prepared>), companion: u32) -> (ClaimRef, Vec<Prepared>) {
    let share = claim.1[0].share_mut().unwrap();
    share.grants.push(Grant {
        claim: claim_ref(companion),
        memory_bytes: 30 << 30,
        cores: 40,
        slots: 1,
        is_ending: true,
    });
    claim
}

#[test]
fn counts_what_companions_add_until_it_is_given_back() {
    let base = grown(prepared(1, &[Share(0, "20Gi", "20")]), 9);
    let others = std::slice::from_ref(&base);
    assert_eq!(
        guard(&prepared(2, &[Share(0, "28Gi", "40")]), others),
        Ok(())
    );
    for beyond in [Share(0, "29Gi", "0"), Share(0, "1Gi", "41")] {
        assert!(
            guard(&prepared(2, &[beyond]), others).is_err(),
            "{beyond:?}"
        );
    }
    // A base may grow into what is free only.
    let half = prepared(2, &[Share(0, "40Gi", "0")]);
    assert!(guard(&base, std::slice::from_ref(&half)).is_err());
}

fn suspend(claim: &mut (ClaimRef, Vec<Prepared>), phase: Phase) {
    claim.1[0].share_mut().unwrap().suspension = Some(Suspension::new(phase));
}

/// The companion is allocated beside all other claims, also while its base is suspended.
#[test]
fn companion_of_suspended_share_is_not_free_for_others() {
    let mut base = grown(prepared(1, &[Share(0, "40Gi", "50")]), 9);
    suspend(&mut base, Phase::Suspended);
    let others = std::slice::from_ref(&base);
    // 30 GiB and 40% are the companion's.
    let beside = prepared(2, &[Share(0, "48Gi", "60")]);
    assert_eq!(guard(&beside, others), Ok(()));
    for beyond in [Share(0, "49Gi", "0"), Share(0, "1Gi", "61")] {
        let refused = guard(&prepared(2, &[beyond]), others);
        assert!(refused.is_err(), "{beyond:?}");
    }
    // The share may be given the companion beside such a claim, but is not resumed beside it.
    let beside = std::slice::from_ref(&beside);
    assert_eq!(guard(&base, beside), Ok(()));
    suspend(&mut base, Phase::Resuming);
    assert!(guard(&base, beside).is_err());
}

/// The GPU has no room for what the companion of the suspended share adds.
#[test]
fn suspended_share_grows_only_beside_other_claims() {
    let mut base = grown(prepared(1, &[Share(0, "10Gi", "10")]), 9);
    suspend(&mut base, Phase::Suspended);
    for (held, fits) in [
        (Share(0, "48Gi", "60"), true),
        (Share(0, "49Gi", "0"), false),
    ] {
        let other = prepared(2, &[held]);
        let checked = guard(&base, std::slice::from_ref(&other));
        assert_eq!(checked.is_ok(), fits, "{held:?}");
    }
}

#[test]
fn suspended_share_keeps_its_slot() {
    let mut shares: Vec<_> = (1..=10)
        .map(|number| prepared(number, &[Share(0, "1Gi", "0")]))
        .collect();
    suspend(&mut shares[0], Phase::Suspended);
    let one_more = prepared(11, &[Share(0, "1Gi", "0")]);
    assert!(guard(&one_more, &shares).is_err());
    assert_eq!(guard(&one_more, &shares[1..]), Ok(()));
}

/// Its memory is free, and its GPU stays one with shares.
#[test]
fn suspended_share_leaves_its_amounts_to_others_until_it_is_resumed() {
    let mut base = prepared(1, &[Share(0, "60Gi", "80")]);
    let other = prepared(2, &[Share(0, "60Gi", "80")]);
    let whole = prepared(3, &[Whole(0)]);
    for (phase, is_free) in [
        (Phase::Suspending, false),
        (Phase::Suspended, true),
        (Phase::Resuming, false),
        (Phase::Running, false),
    ] {
        suspend(&mut base, phase);
        let others = std::slice::from_ref(&base);
        assert_eq!(guard(&other, others).is_ok(), is_free, "{phase:?}");
        assert!(guard(&whole, others).is_err(), "{phase:?}");
        let fits = guard(&base, std::slice::from_ref(&other)).is_ok();
        assert_eq!(fits, is_free, "{phase:?}");
    }
}

/// Its label was changed from one base to another while the first one holds its memory, or a pod names it.
#[test]
fn companion_adds_to_one_share_only() {
    let first = grown(prepared(1, &[Share(0, "2Gi", "0")]), 9);
    let second = grown(prepared(2, &[Share(1, "2Gi", "0")]), 9);
    let error = guard(&second, std::slice::from_ref(&first)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("its capacity is used by default/claim-1"),
        "{error}"
    );
    let itself = prepared(9, &[Share(1, "2Gi", "0")]);
    let error = guard(&second, std::slice::from_ref(&itself)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("its capacity is used by default/claim-9"),
        "{error}"
    );
}

#[test]
fn rejects_claim_whose_capacity_another_share_uses() {
    let base = grown(prepared(1, &[Share(0, "20Gi", "20")]), 2);
    let error = guard(
        &prepared(2, &[Share(0, "1Gi", "0")]),
        std::slice::from_ref(&base),
    );
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("as its companion, so no pod can use it"),
        "{text}"
    );
}

#[test]
fn rejects_share_beyond_memory_or_cores_with_amounts() {
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
        "another GPU"
    );
    let error = guard(
        &prepared(2, &[Share(0, "39Gi", "0")]),
        std::slice::from_ref(&half),
    )
    .unwrap_err()
    .to_string();
    assert_eq!(
        error,
        "cannot use 39936 MiB of memory of device gpu-0-vgpu (GPU GPU-5f1c8a20-0b7e-4d39-9a64-1e0d6c9b7a01): 40960 MiB of \
         80480 MiB is prepared for other claims: default/claim-1 (uid 00000000-0000-4000-8000-000000000001); delete one \
         of the pods"
    );
    let error = guard(&prepared(2, &[Share(0, "1Gi", "51")]), &[half])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("51% of cores") && error.contains("50% of 100% is prepared"),
        "{error}"
    );
}

#[test]
fn rejects_share_beyond_slots() {
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
fn rejects_whole_gpu_alongside_shares_in_either_order() {
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
        error.contains("as shares: claim default/claim-1"),
        "{error}"
    );
    assert!(matches!(
        guard(&prepared(1, &[Whole(0), Share(0, "1Gi", "0")]), &[]),
        Err(conflict) if matches!(*conflict, Conflict::Exclusive { .. })
    ));
}

#[test]
fn rejects_gpu_excluded_by_compute_mode() {
    let mut inventory = h100x2();
    inventory.nvml.gpus[0].compute_mode = ComputeMode::Prohibited;
    inventory.nvml.gpus[1].compute_mode = ComputeMode::ExclusiveProcess;
    let check = |results| {
        let (claim, devices) = prepared(1, results);
        overcommit::check(&claim, &devices, [], &inventory).map_err(|conflict| conflict.to_string())
    };
    for prohibited in [&[Whole(0)], &[Share(0, "1Gi", "0")]] {
        let error = check(prohibited).unwrap_err();
        assert!(
            error.contains("cannot use device gpu-0")
                && error.contains(": compute mode is Prohibited"),
            "{error}"
        );
    }
    let error = check(&[Share(1, "1Gi", "0")]).unwrap_err();
    assert!(
        error.contains("cannot share device gpu-1-vgpu")
            && error.contains(": compute mode is Exclusive_Process"),
        "{error}"
    );
    assert_eq!(check(&[Whole(1)]), Ok(()));
}

#[test]
fn counts_each_share_of_claim_exactly_once() {
    let both = prepared(1, &[Share(0, "40Gi", "0"), Share(0, "40Gi", "0")]);
    assert!(matches!(
        guard(&both, &[]),
        Err(conflict) if matches!(*conflict, Conflict::Exceeds { ref resource, .. } if resource == "memory")
    ));
    let one = prepared(1, &[Share(0, "70Gi", "0")]);
    assert_eq!(guard(&one, std::slice::from_ref(&one)), Ok(()));
}

#[test]
fn ignores_claims_with_admin_access() {
    let mut monitor = prepared(1, &[Whole(0)]);
    monitor.1[0].access = Access::Admin;
    assert_eq!(guard(&monitor, &[prepared(2, &[Whole(0)])]), Ok(()));
    assert_eq!(guard(&prepared(2, &[Whole(0)]), &[monitor]), Ok(()));
}

/// Returns the H100s with the first in MIG mode.
fn partitioned() -> NodeInventory {
    let mut inventory = h100x2();
    if let Mig::Capable {
        enabled, pending, ..
    } = &mut inventory.nvml.gpus[0].mig
    {
        (*enabled, *pending) = (true, true);
    }
    inventory
}

#[test]
fn rejects_partitions_that_share_slices_or_engines() {
    let check = |new: &[crate::fixture::Allocated], held: &[crate::fixture::Allocated]| {
        let (claim, devices) = prepared(2, new);
        let (other, held) = prepared(1, held);
        overcommit::check(
            &claim,
            &devices,
            [(&other, held.as_slice())],
            &partitioned(),
        )
        .map_err(|conflict| conflict.to_string())
    };
    let small = |start| Partition(0, "1g.10gb", start);
    let media = |start| Partition(0, "1g.10gb+me", start);
    assert_eq!(check(&[small(0)], &[small(1)]), Ok(()));
    assert_eq!(check(&[Partition(0, "3g.40gb", 4)], &[small(3)]), Ok(()));
    let error = check(&[Partition(0, "3g.40gb", 0)], &[small(3)]).unwrap_err();
    assert!(
        error.starts_with("cannot use 1 of memory-slice-3 of device gpu-0-mig-3g-40gb-0")
            && error.contains("1 of 1 is prepared for other claims: default/claim-1"),
        "{error}"
    );
    let error = check(&[media(5)], &[media(1)]).unwrap_err();
    assert!(error.contains("of media-extensions"), "{error}");
    assert!(
        check(&[small(2), small(2)], &[small(0)]).is_err(),
        "within one claim"
    );
}

#[test]
fn rejects_devices_of_other_mig_mode() {
    for (device, reason) in [
        (Whole(0), "MIG mode is enabled"),
        (Share(0, "1Gi", "0"), "MIG mode is enabled"),
        (Partition(1, "1g.10gb", 0), "MIG mode is disabled"),
    ] {
        let (claim, devices) = prepared(1, &[device]);
        let error = overcommit::check(&claim, &devices, [], &partitioned()).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn rejects_partition_of_gpu_held_whole_or_shared() {
    // MIG mode was switched on while the record of a force-deleted claim remains.
    for held in [Whole(0), Share(0, "1Gi", "0")] {
        let (other, held) = prepared(1, &[held]);
        let (claim, devices) = prepared(2, &[Partition(0, "1g.10gb", 0)]);
        let conflict = overcommit::check(
            &claim,
            &devices,
            [(&other, held.as_slice())],
            &partitioned(),
        );
        assert!(matches!(*conflict.unwrap_err(), Conflict::Exclusive { .. }));
    }
}

proptest! {
    /// Accepted claims never exceed the GPU, for any requests in any order.
    #[test]
    fn never_exceeds_gpu_capacity(requests in prop::collection::vec((1u64..60, 0u64..101, any::<bool>()), 1..20)) {
        let mut held: Vec<(ClaimRef, Vec<Prepared>)> = Vec::new();
        for (number, (gib, cores, whole)) in requests.into_iter().enumerate() {
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
