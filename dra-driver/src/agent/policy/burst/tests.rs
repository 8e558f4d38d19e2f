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
        bursts_idle: false,
        loan: Loan::default(),
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

/// A share that may use unused guarantees.
fn bursting_idle(id: u32, held_gib: u64, limit_gib: u64, present_gib: u64) -> ShareMemory<u32> {
    ShareMemory {
        bursts_idle: true,
        ..bursting(id, held_gib, limit_gib, present_gib)
    }
}

/// A share that lends `lent_gib` and could lend `idle_gib`.
fn lending(id: u32, held_gib: u64, lent_gib: u64, idle_gib: u64) -> ShareMemory<u32> {
    ShareMemory {
        loan: Loan {
            lent_bytes: lent_gib * GIB,
            idle_bytes: idle_gib * GIB,
            is_recalled: false,
        },
        present_bytes: (held_gib - lent_gib) * GIB,
        ..share(id, held_gib)
    }
}

fn recalled(share: ShareMemory<u32>) -> ShareMemory<u32> {
    let loan = Loan {
        idle_bytes: 0,
        is_recalled: true,
        ..share.loan
    };
    ShareMemory { loan, ..share }
}

/// Returns what is lent in GiB.
fn lent_gib(division: &Division<u32>) -> Vec<(u32, u64)> {
    let loans = division.loans.iter();
    loans.map(|(id, bytes)| (*id, bytes / GIB)).collect()
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

/// An agent that has restarted does not know what was lent to it.
#[test]
fn waiting_share_gets_nothing_of_what_it_may_have_been_lent() {
    let lowered = ShareMemory {
        unreturned_bytes: 12 * GIB,
        used_bytes: Some(0),
        ..bursting(1, 4, 12, 4)
    };
    let new = ShareMemory {
        unreturned_bytes: 12 * GIB,
        ..waiting(2, 6)
    };
    let new = ShareMemory {
        limit_bytes: Some(12 * GIB),
        ..new
    };
    let division = divide(16 * GIB, &[lowered, new]);
    assert_eq!(division.unbacked, [2]);
    assert_eq!(gib(&division), [(1, 4), (2, 0)]);
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

#[test]
fn lends_unused_guarantee_after_its_page_lacks_it() {
    let borrower = bursting_idle(1, 4, 12, 4);
    // First the page of the lender is lowered.
    let division = divide(16 * GIB, &[borrower, lending(2, 12, 0, 10)]);
    assert_eq!(
        (gib(&division), lent_gib(&division)),
        (vec![(1, 4)], vec![(2, 8)])
    );
    // Its use is not known to be below that so far.
    let lender = lending(2, 12, 8, 10);
    let lowered = ShareMemory {
        unreturned_bytes: 12 * GIB,
        ..lender
    };
    let division = divide(16 * GIB, &[borrower, lowered]);
    assert_eq!(
        (gib(&division), lent_gib(&division)),
        (vec![(1, 4)], vec![(2, 8)])
    );
    let division = divide(16 * GIB, &[borrower, lender]);
    assert_eq!(
        (gib(&division), lent_gib(&division)),
        (vec![(1, 12)], vec![(2, 8)])
    );
    // No more than is wanted, and memory that no claim holds first.
    let division = divide(20 * GIB, &[borrower, lending(2, 12, 0, 10)]);
    assert_eq!(
        (gib(&division), lent_gib(&division)),
        (vec![(1, 8)], vec![(2, 4)])
    );
}

#[test]
fn lends_unused_guarantees_to_shares_with_burst_idle_only() {
    let shares = [bursting(1, 4, 12, 4), lending(2, 12, 0, 10)];
    let division = divide(16 * GIB, &shares);
    assert_eq!(
        (gib(&division), lent_gib(&division)),
        (vec![(1, 4)], vec![(2, 0)])
    );
    // The other share of the room that no claim holds is not taken for it either.
    let shares = [
        bursting(1, 2, 12, 2),
        bursting_idle(2, 2, 12, 2),
        lending(3, 12, 4, 10),
    ];
    let division = divide(20 * GIB, &shares);
    assert_eq!(lent_gib(&division), [(3, 8)]);
    assert_eq!(gib(&division), [(1, 4), (2, 8)]);
    // An oversubscribed GPU has nothing to lend.
    let shares = [bursting_idle(1, 6, 12, 6), lending(2, 12, 0, 10)];
    assert_eq!(lent_gib(&divide(16 * GIB, &shares)), [(2, 0)]);
}

#[test]
fn recalled_guarantee_is_taken_back_from_borrower() {
    let borrower = bursting_idle(1, 4, 12, 12);
    let lender = recalled(lending(2, 12, 8, 0));
    let division = divide(16 * GIB, &[borrower, lender]);
    assert_eq!(
        (gib(&division), lent_gib(&division)),
        (vec![(1, 4)], vec![(2, 8)])
    );
    assert_eq!((division.reclaimed, division.unbacked), (vec![1], vec![2]));
    let lowered = ShareMemory {
        present_bytes: 4 * GIB,
        unreturned_bytes: 12 * GIB,
        is_reclaimed: true,
        ..borrower
    };
    let division = divide(16 * GIB, &[lowered, lender]);
    assert_eq!(lent_gib(&division), [(2, 8)], "the memory is not back");
    let returned = ShareMemory {
        unreturned_bytes: 0,
        ..lowered
    };
    let division = divide(16 * GIB, &[returned, lender]);
    assert_eq!(lent_gib(&division), [(2, 0)]);
    assert_eq!((gib(&division), division.unbacked), (vec![(1, 4)], vec![]));
}

/// What no claim holds is not taken from a share that has no part in the loan, whatever its priority.
/// A loan goes on; of the others, shares of lower priority lend first.
#[test]
fn lends_from_earlier_lender_then_from_lowest_priority() {
    let lent = |earlier_gib| {
        let borrower = bursting_idle(1, 2, 6, 2);
        let first = with_priority(lending(2, 8, earlier_gib, 6), 10);
        let division = divide(18 * GIB, &[borrower, first, lending(3, 8, 0, 6)]);
        lent_gib(&division)
    };
    assert_eq!(lent(0), [(3, 4), (2, 0)]);
    assert_eq!(lent(4), [(2, 4), (3, 0)]);
}

#[test]
fn loan_grows_in_steps() {
    let lent_mib = |idle_mib| {
        let mut lender = lending(2, 12, 4, 4);
        lender.loan.idle_bytes = idle_mib * MIB;
        let division = divide(16 * GIB, &[bursting_idle(1, 4, 12, 8), lender]);
        division.loans[0].1 / MIB
    };
    assert_eq!(lent_mib(4096 + 255), 4096);
    assert_eq!(lent_mib(4096 + 256), 4352);
}

/// A page that is beyond what its share holds, as after the loss of a grant, is the share's.
#[test]
fn room_is_without_what_other_pages_promise() {
    let other = ShareMemory {
        present_bytes: 8 * GIB,
        ..share(2, 4)
    };
    let lent = ShareMemory {
        used_bytes: Some(5 * GIB),
        ..bursting(1, 4, 12, 12)
    };
    assert_eq!(gib(&divide(16 * GIB, &[lent, other])), [(1, 8)]);
}

#[test]
fn recall_takes_from_shares_with_burst_idle_first() {
    let shares = [
        bursting(1, 2, 4, 4),
        with_priority(bursting_idle(2, 2, 10, 10), 5),
        recalled(lending(3, 10, 8, 0)),
    ];
    let division = divide(16 * GIB, &shares);
    assert_eq!(division.reclaimed, [2]);
    assert_eq!(gib(&division), [(1, 4), (2, 2)]);
}

/// The use of a lender grows within its page: its loan shrinks as the borrower gives back, and no process ends.
#[test]
fn growing_use_of_lender_takes_nothing_by_force() {
    let used = |gib: u64| ShareMemory {
        used_bytes: Some(gib * GIB),
        ..bursting_idle(1, 4, 12, 12)
    };
    let lender = lending(2, 12, 8, 5);
    let full = divide(16 * GIB, &[used(12), lender]);
    assert_eq!((gib(&full), lent_gib(&full)), (vec![(1, 12)], vec![(2, 8)]));
    assert_eq!((full.reclaimed, full.unbacked), (vec![], vec![]));
    let unused = divide(16 * GIB, &[used(3), lender]);
    assert_eq!(gib(&unused), [(1, 9)]);
    let returned = divide(16 * GIB, &[bursting_idle(1, 4, 12, 9), lender]);
    assert_eq!(lent_gib(&returned), [(2, 5)]);
}

#[test]
fn keeps_margin_of_what_is_lent() {
    assert_eq!(idle_bytes(4 * GIB, 0), 3 * GIB);
    assert_eq!(idle_bytes(4 * GIB, 3 * GIB), 0);
    assert_eq!(idle_bytes(40 * GIB, 10 * GIB), 25 * GIB);
    assert_eq!(idle_bytes(40 * GIB, u64::MAX), 0);
    assert_eq!(idle_bytes(GIB / 2, 0), 0);
}

fn any_share(id: u32) -> impl Strategy<Value = ShareMemory<u32>> {
    let amounts = (
        1u64..8,
        0u64..12,
        0u64..12,
        0u64..4,
        prop_oneof![0u64..24, Just(u64::MAX / GIB)],
    );
    let lends = (0u64..8, 0u64..8, 0u32..4);
    (amounts, -2i64..3, any::<(bool, bool, bool)>(), lends).prop_map(
        move |(
            (held, most, lent, unreturned, used),
            priority,
            (can_burst, bursts_idle, is_waiting),
            (loan, idle, lender),
        )| {
            if !can_burst && lender > 0 {
                let loan = loan.min(held);
                let share = lending(id, held, loan, idle.min(held));
                let share = match lender {
                    1 => recalled(share),
                    // Its page was lowered just now.
                    2 => ShareMemory {
                        unreturned_bytes: held * GIB,
                        ..share
                    },
                    _ => share,
                };
                return with_priority(share, priority);
            }
            let present = match (can_burst, is_waiting) {
                (_, true) => 0,
                (true, false) => held + lent.min(most),
                (false, false) => held,
            };
            let share = bursting(id, held, held + most, present);
            let share = ShareMemory {
                limit_bytes: share.limit_bytes.filter(|_| can_burst),
                bursts_idle: can_burst && bursts_idle,
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
        let loan_of = |share: &ShareMemory<u32>| {
            let mut loans = division.loans.iter();
            loans.find(|(of, _)| *of == share.id).map_or(share.loan.lent_bytes, |(_, bytes)| *bytes)
        };
        let (mut after, mut promised) = (0, 0);
        for share in &shares {
            let limit = limit_of(share.id);
            prop_assert_eq!(limit.is_some(), share.can_burst());
            let lent = loan_of(share);
            prop_assert!(lent <= share.loan.lent_bytes.max(share.loan.idle_bytes), "lent more than is idle");
            if share.loan.is_recalled {
                let is_back = !division.unbacked.contains(&share.id);
                prop_assert_eq!(lent, if is_back { 0 } else { share.loan.lent_bytes });
            }
            if share.loan.lent_bytes > 0 || lent > 0 {
                // Its page, and what it was promised before.
                let page = share.held_bytes - lent;
                after += page.max(share.promised_bytes());
                promised += page.max(share.promised_bytes());
                continue;
            }
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
            let rank = |share: &ShareMemory<u32>| (!share.bursts_idle, share.priority);
            let lowest_kept = shares.iter().filter(|share| !division.reclaimed.contains(&share.id) && share.can_burst());
            let lowest_kept = lowest_kept.filter(|share| share.demand_bytes() > share.held_bytes).map(rank).min();
            let highest_taken = shares.iter().filter(|share| division.reclaimed.contains(&share.id)).map(rank).max();
            prop_assert!(lowest_kept.is_none_or(|kept| highest_taken.is_none_or(|taken| taken <= kept)));
        }
    }

    #[test]
    fn extras_keep_room_and_order(
        shares in (1u32..6).prop_flat_map(|count| (0..count).map(any_share).collect::<Vec<_>>()),
        room in 0u64..40,
    ) {
        let room = room * GIB;
        let extras = extras(room, &shares, ShareMemory::most_extra_bytes);
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
