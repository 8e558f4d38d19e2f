use proptest::prelude::*;

use super::*;

const GIB: u64 = 1 << 30;

/// A share without a limit above its guarantee, whose page has the guarantee.
fn share(id: u32, held_gib: u64) -> ShareMemory<u32> {
    let held_bytes = held_gib * GIB;
    ShareMemory {
        id,
        priority: Priority::default(),
        held_bytes,
        kept_bytes: held_bytes,
        limit_bytes: None,
        present_bytes: held_bytes,
        unreturned_bytes: 0,
        used_bytes: Some(0),
        is_reclaimed: false,
    }
}

/// A share with a limit, which uses what its page allows.
fn bursting(id: u32, held_gib: u64, limit_gib: u64, present_gib: u64) -> ShareMemory<u32> {
    ShareMemory {
        limit_bytes: Some(limit_gib * GIB),
        present_bytes: present_gib * GIB,
        used_bytes: Some(present_gib * GIB),
        ..share(id, held_gib)
    }
}

/// A share whose page has nothing so far.
fn waiting(id: u32, held_gib: u64) -> ShareMemory<u32> {
    ShareMemory {
        present_bytes: 0,
        ..share(id, held_gib)
    }
}

fn with_priority(share: ShareMemory<u32>, priority: i64) -> ShareMemory<u32> {
    let priority = Priority::try_from(priority).unwrap();
    ShareMemory { priority, ..share }
}

/// Returns the limits in GiB.
fn gib(division: &Division<u32>) -> Vec<(u32, u64)> {
    let limits = division.limits.iter();
    limits.map(|(id, limit)| (*id, limit / GIB)).collect()
}

#[test]
fn lends_what_no_claim_holds_up_to_the_limit() {
    let alone = divide(16 * GIB, &[bursting(1, 4, 12, 4)]);
    assert_eq!((gib(&alone), alone.unbacked), (vec![(1, 12)], vec![]));
    let beside = divide(16 * GIB, &[bursting(1, 4, 12, 4), share(2, 6)]);
    assert_eq!(gib(&beside), [(1, 10)]);
    let full = divide(16 * GIB, &[bursting(1, 4, 12, 4), share(2, 12)]);
    assert_eq!(gib(&full), [(1, 4)]);
}

#[test]
fn divides_by_priority_then_evenly() {
    let even = [
        bursting(1, 2, 12, 2),
        bursting(2, 2, 12, 2),
        bursting(3, 2, 3, 2),
    ];
    // The third leaves what it does not want.
    assert_eq!(gib(&divide(17 * GIB, &even)), [(1, 7), (2, 7), (3, 3)]);
    let ranked = [bursting(1, 2, 8, 2), with_priority(bursting(2, 2, 8, 2), 5)];
    assert_eq!(gib(&divide(12 * GIB, &ranked)), [(2, 8), (1, 4)]);
}

#[test]
fn takes_back_for_waiting_claim_what_is_lent() {
    let shares = [bursting(1, 4, 12, 12), waiting(2, 6)];
    let division = divide(16 * GIB, &shares);
    assert_eq!(gib(&division), [(1, 4)]);
    assert_eq!((division.reclaimed, division.unbacked), (vec![1], vec![2]));
    // Lowered, and its programs use it still.
    let lowered = ShareMemory {
        present_bytes: 4 * GIB,
        unreturned_bytes: 12 * GIB,
        is_reclaimed: true,
        ..shares[0]
    };
    assert_eq!(divide(16 * GIB, &[lowered, waiting(2, 6)]).unbacked, [2]);
    let returned = ShareMemory {
        unreturned_bytes: 0,
        ..lowered
    };
    let division = divide(16 * GIB, &[returned, waiting(2, 6)]);
    assert_eq!(division.unbacked, Vec::<u32>::new());
}

/// A limit above the guarantee is no reason to get the guarantee before the memory is back.
#[test]
fn waiting_share_that_can_burst_gets_nothing_before_memory_is_back() {
    let lent = bursting(1, 4, 12, 12);
    let division = divide(16 * GIB, &[lent, bursting(2, 6, 8, 0)]);
    assert_eq!(gib(&division), [(1, 4), (2, 0)]);
    // A companion has added 4 GiB to its guarantee.
    let division = divide(16 * GIB, &[lent, bursting(2, 6, 8, 2)]);
    assert_eq!(gib(&division), [(1, 4), (2, 2)]);
}

#[test]
fn takes_back_unused_room_without_victims() {
    let unused = ShareMemory {
        used_bytes: Some(5 * GIB),
        ..bursting(1, 4, 12, 12)
    };
    let division = divide(16 * GIB, &[unused, waiting(2, 6)]);
    assert_eq!(gib(&division), [(1, 5)]);
    assert_eq!(division.reclaimed, Vec::<u32>::new());
}

#[test]
fn takes_from_lowest_priority_then_from_largest_use() {
    let room = [
        with_priority(bursting(1, 2, 9, 8), 5),
        bursting(2, 2, 9, 4),
        bursting(3, 2, 9, 5),
        waiting(4, 2),
    ];
    // 19 of 18 GiB.
    let one = divide(18 * GIB, &room);
    assert_eq!(
        (one.reclaimed.as_slice(), one.unbacked.as_slice()),
        (&[3][..], &[4][..])
    );
    assert_eq!(gib(&one), [(1, 8), (2, 4), (3, 2)]);
    let two = divide(14 * GIB, &room);
    assert_eq!(two.reclaimed, [3, 2]);
    let all = divide(13 * GIB, &room);
    assert_eq!(all.reclaimed, [3, 2, 1]);
}

#[test]
fn rebalances_without_taking_what_is_used() {
    // The second has come later and has the higher priority.
    let shares = [
        bursting(1, 2, 12, 10),
        with_priority(bursting(2, 2, 12, 2), 5),
    ];
    let division = divide(14 * GIB, &shares);
    assert_eq!(division.reclaimed, Vec::<u32>::new());
    assert_eq!(gib(&division), [(2, 4), (1, 10)]);
}

#[test]
fn lends_nothing_of_oversubscribed_gpu() {
    let shares = [bursting(1, 10, 12, 10), share(2, 10)];
    let division = divide(16 * GIB, &shares);
    assert_eq!((gib(&division), division.unbacked), (vec![(1, 10)], vec![]));
}

#[test]
fn share_that_shrinks_gives_back_its_burst_first() {
    let shrinking = ShareMemory {
        kept_bytes: 4 * GIB,
        used_bytes: Some(3 * GIB),
        ..bursting(1, 6, 12, 12)
    };
    assert_eq!(gib(&divide(16 * GIB, &[shrinking])), [(1, 4)]);
}

/// One share that gives nothing back does not hold up claims for which the GPU has memory.
#[test]
fn backs_each_waiting_share_that_fits() {
    let lent = bursting(1, 4, 12, 10);
    let shares = [lent, waiting(2, 8), waiting(3, 3), bursting(4, 2, 8, 0)];
    let division = divide(17 * GIB, &shares);
    assert_eq!(division.unbacked, [2]);
    assert_eq!(
        (gib(&division), division.reclaimed),
        (vec![(1, 4), (4, 2)], vec![1])
    );
    // In the order of their IDs.
    let [first, second, third] = [5, 3, 4].map(|id| waiting(id, 3));
    let division = divide(16 * GIB, &[lent, first, second, third]);
    assert_eq!(division.unbacked, [5]);
}

/// A tenant can write any use to its region.
#[test]
fn forged_use_takes_nothing_from_others() {
    let forged = ShareMemory {
        used_bytes: Some(u64::MAX),
        ..with_priority(bursting(1, 2, 4, 4), 5)
    };
    let unused = ShareMemory {
        used_bytes: Some(3 * GIB),
        ..bursting(2, 2, 8, 6)
    };
    let division = divide(11 * GIB, &[forged, unused, waiting(3, 2)]);
    assert_eq!(division.reclaimed, Vec::<u32>::new());
    assert_eq!(gib(&division), [(1, 4), (2, 3)]);
}

#[test]
fn share_of_unknown_use_counts_with_all_it_was_promised() {
    let unknown = ShareMemory {
        used_bytes: None,
        ..bursting(1, 4, 12, 12)
    };
    let division = divide(16 * GIB, &[unknown, waiting(2, 6)]);
    assert_eq!(division.reclaimed, [1]);
}

fn any_share(id: u32) -> impl Strategy<Value = ShareMemory<u32>> {
    let amounts = (
        1u64..8,
        0u64..12,
        0u64..12,
        0u64..4,
        prop_oneof![0u64..24, Just(u64::MAX / GIB)],
    );
    (amounts, -2i64..3, any::<bool>(), any::<bool>()).prop_map(
        move |((held, most, lent, unreturned, used), priority, can_burst, is_waiting)| {
            let present = match (can_burst, is_waiting) {
                (_, true) => 0,
                (true, false) => held + lent.min(most),
                (false, false) => held,
            };
            let share = bursting(id, held, held + most, present);
            let share = ShareMemory {
                limit_bytes: share.limit_bytes.filter(|_| can_burst),
                used_bytes: Some(used * GIB),
                unreturned_bytes: match can_burst && unreturned > 0 {
                    true => (present + unreturned).min(held + most) * GIB,
                    false => 0,
                },
                ..share
            };
            with_priority(share, priority)
        },
    )
}

proptest! {
    #[test]
    fn promises_nothing_twice(
        shares in (1u32..6).prop_flat_map(|count| (0..count).map(any_share).collect::<Vec<_>>()),
        allocatable in 8u64..64,
    ) {
        let allocatable = allocatable * GIB;
        let committed = |share: &ShareMemory<u32>| share.committed_bytes();
        let before: u64 = shares.iter().map(committed).sum();
        let division = divide(allocatable, &shares);
        let limit_of = |id: u32| division.limits.iter().find(|(of, _)| *of == id).map(|(_, limit)| *limit);
        let (mut after, mut promised) = (0, 0);
        for share in &shares {
            let limit = limit_of(share.id);
            prop_assert_eq!(limit.is_some(), share.can_burst());
            let limit = limit.unwrap_or(share.present_bytes);
            // A lowered limit stays promised until it is known to be free.
            after += share.held_bytes.max(limit).max(share.promised_bytes());
            prop_assert!(limit >= share.held_bytes.min(share.present_bytes), "a guarantee was cut");
            let most = share.limit_bytes.unwrap_or(share.held_bytes).max(share.promised_bytes());
            prop_assert!(limit <= most, "beyond the limit of the share");
            let is_unbacked = division.unbacked.contains(&share.id);
            if is_unbacked {
                prop_assert!(limit <= share.promised_bytes(), "raised before memory is back");
            }
            let granted = match share.is_waiting() && !is_unbacked {
                true => limit.max(share.kept_bytes),
                false => limit,
            };
            promised += granted.max(share.promised_bytes());
        }
        prop_assert!(after <= before.max(allocatable), "{} of {}", after, before.max(allocatable));
        let held: u64 = shares.iter().map(|share| share.held_bytes).sum();
        let capacity = allocatable.max(held);
        let promised_before: u64 = shares.iter().map(ShareMemory::promised_bytes).sum();
        prop_assert!(promised <= promised_before.max(capacity), "{} of {}", promised, capacity);
        let is_waiting = shares.iter().any(ShareMemory::is_waiting);
        prop_assert_eq!(division.unbacked.is_empty(), before <= capacity || !is_waiting);
        if !division.reclaimed.is_empty() {
            // With what the victims give back, the guarantees and the use of the others fit.
            let used: u64 = shares.iter().map(|share| limit_of(share.id).map_or(committed(share), |limit| limit.max(share.held_bytes))).sum();
            prop_assert!(used <= allocatable.max(held));
            // A share of higher priority gives back only after all of lower priority have.
            let lowest_kept = shares.iter().filter(|share| !division.reclaimed.contains(&share.id) && share.can_burst());
            let lowest_kept = lowest_kept.filter(|share| share.demand_bytes() > share.held_bytes).map(|share| share.priority).min();
            let highest_taken = shares.iter().filter(|share| division.reclaimed.contains(&share.id)).map(|share| share.priority).max();
            prop_assert!(lowest_kept.is_none_or(|kept| highest_taken.is_none_or(|taken| taken <= kept)));
        }
    }

    #[test]
    fn extras_keep_room_and_order(
        shares in (1u32..6).prop_flat_map(|count| (0..count).map(any_share).collect::<Vec<_>>()),
        room in 0u64..40,
    ) {
        let room = room * GIB;
        let extras = extras(room, &shares);
        prop_assert!(extras.values().sum::<u64>() <= room);
        for share in &shares {
            let extra = extras.get(&share.id).copied().unwrap_or(0);
            prop_assert!(extra <= share.most_extra_bytes());
            for other in &shares {
                let of_other = extras.get(&other.id).copied().unwrap_or(0);
                // A share of lower priority gets something only if this one has all it may have, but for the rounding to 1 MiB.
                if other.priority < share.priority && of_other > 0 {
                    prop_assert!(extra + 8 * MIB >= share.most_extra_bytes());
                }
            }
        }
    }
}
