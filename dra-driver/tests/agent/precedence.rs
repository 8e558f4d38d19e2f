//! Who gives way to whom, in virtual time, and how often a tenant that calls is heard.

use drava_dra_driver::agent::calls::{CALL_US, CALLS, Pace};
use drava_dra_driver::agent::precedence::{AHEAD_US, GAP_US, OWED_US, Precedence, Standing};
use drava_dra_driver::agent::token::{Change, Contender, LONGEST_US, Ring};
use drava_vgpu_abi::Priority;
use drava_vgpu_abi::bucket::TokenSlice;
use proptest::prelude::*;

const SECOND_US: u64 = 1_000_000;
const BEGIN_US: u64 = 1000 * SECOND_US;

fn standing(id: u32, priority: i32, kept_percent: u32, busy_until_us: u64) -> Standing<u32> {
    Standing {
        id,
        priority: Priority::new(priority).unwrap(),
        kept: i64::from(kept_percent) * 10_000,
        weight: 1,
        busy_until_us,
    }
}

#[test]
fn yields_to_higher_priority_until_work_ends() {
    let mut precedence = Precedence::default();
    let now = BEGIN_US;
    let look = |precedence: &mut Precedence<u32>, now, until| {
        let all = [
            standing(1, 100, 50, until),
            standing(2, 100, 1, 0),
            standing(3, 0, 1, 0),
            standing(4, -100, 1, 0),
        ];
        precedence
            .look(now, &all)
            .into_iter()
            .map(|(_, us)| us)
            .collect::<Vec<_>>()
    };
    assert_eq!(look(&mut precedence, now, 0), [0; 4]);
    assert_eq!(precedence.next_us(), u64::MAX, "nothing happens by itself");
    // A quarter of the work, which may have begun late, is added, a millisecond at most.
    let until = now + 2_000;
    let told = look(&mut precedence, now, until);
    assert_eq!(told, [0, 0, until + 500, until + 500]);
    assert!(precedence.gives_way(3, now) && !precedence.gives_way(2, now));
    // It is looked at before the end, at the end, and when it is sure to be over.
    let mut looks = Vec::new();
    while precedence.next_us() < u64::MAX {
        let now = precedence.next_us();
        looks.push(now - until.min(now));
        look(&mut precedence, now, until);
    }
    assert!(looks.len() <= 6, "{looks:?}");
    assert!(!precedence.gives_way(3, until + 500));
    // More work moves the end. It is never told farther ahead than an agent may die.
    look(&mut precedence, now + 5_000, now + 10_000);
    let told = look(&mut precedence, now + 9_500, now + 20_000);
    assert_eq!(told[2], now + 21_000);
    let told = look(&mut precedence, now + 19_500, u64::MAX);
    assert_eq!(told[2], now + 19_500 + AHEAD_US);
    // Whoever goes is forgotten, at work or not.
    assert_eq!(
        precedence.look(now + 19_600, &[standing(3, 0, 1, 0)]),
        [(3, 0)]
    );
}

/// Looks at one above, which says until when it is at work, and at one without a guarantee below, and when the agent itself
/// would before `until_us`. Returns for how long the one below was kept from the card, µs.
fn looks(precedence: &mut Precedence<u32>, now_us: &mut u64, busy_us: u64, until_us: u64) -> u64 {
    let mut kept_us = 0;
    while *now_us < until_us {
        let all = [standing(1, 100, 50, busy_us), standing(2, 0, 1, 0)];
        let told = precedence.look(*now_us, &all)[1].1;
        let next_us = precedence.next_us().min(until_us);
        kept_us += told.clamp(*now_us, next_us) - *now_us;
        *now_us = next_us;
    }
    kept_us
}

#[test]
fn extends_yield_for_work_that_started_late() {
    let mut precedence = Precedence::default();
    let (begun_us, mut now_us) = (BEGIN_US, BEGIN_US);
    let until_us = begun_us + 4_000;
    looks(&mut precedence, &mut now_us, until_us, until_us + 1);
    assert!(precedence.gives_way(2, until_us + 900));
    looks(&mut precedence, &mut now_us, until_us, until_us + 1_100);
    assert!(!precedence.gives_way(2, until_us + 1_000));
}

/// Requests of ten kernels of 500 µs, of which that one waits for one of the others that takes 1 ms, and 200 µs from one to the
/// next.
fn makes_requests_in_pieces(late: u32) {
    let mut precedence = Precedence::default();
    let mut now_us = BEGIN_US;
    for request in 0..40 {
        let idle_us = now_us + 20_000;
        looks(&mut precedence, &mut now_us, 0, idle_us);
        let (mut end_us, mut until_us) = (now_us, now_us);
        let begun_us = now_us;
        for piece in 0..10 {
            let is_kept = precedence.gives_way(2, now_us);
            // That it comes in pieces is seen in the first one.
            let is_news = piece == 0 || (request, piece) == (0, 1);
            assert!(is_kept || is_news, "{piece}: {} µs", now_us - begun_us);
            until_us = until_us.max(now_us) + 500;
            end_us = end_us.max(now_us) + 500 + if piece == late { 1_000 } else { 0 };
            looks(&mut precedence, &mut now_us, until_us, end_us + 200);
        }
        // None of the others was in front of the last one.
        let over_us = until_us + GAP_US;
        looks(&mut precedence, &mut now_us, until_us, over_us + 1);
        assert!(!precedence.gives_way(2, now_us), "it goes on in the end");
    }
}

#[test]
fn yields_between_kernels_of_one_request() {
    makes_requests_in_pieces(0);
}

#[test]
fn tolerates_delay_of_second_kernel_in_request() {
    makes_requests_in_pieces(1);
}

#[test]
fn holds_off_only_after_multi_kernel_requests() {
    let mut precedence = Precedence::default();
    let mut now_us = BEGIN_US;
    // Once it came in pieces.
    for _ in 0..2 {
        let until_us = now_us + 500;
        looks(&mut precedence, &mut now_us, until_us, until_us + 300);
    }
    let mut kept_us = 0;
    for request in 0..100 {
        let until_us = now_us + 4_000;
        let next_us = until_us + 20_000;
        let us = looks(&mut precedence, &mut now_us, until_us, next_us);
        kept_us += if request < 10 { 0 } else { us };
    }
    assert_eq!(kept_us, 90 * 5_000);
}

#[test]
fn bounds_hold_off_after_repeated_short_work() {
    const SAVED_US: u64 = 20_000;
    for pause_us in [300, 700, 1_400] {
        let mut precedence = Precedence::default();
        let mut now_us = BEGIN_US;
        // However long it did nothing before.
        for _ in 0..100 {
            let idle_us = now_us + 100_000;
            looks(&mut precedence, &mut now_us, 0, idle_us);
        }
        let (begun_us, mut kept_us, mut worked_us) = (now_us, 0, 0);
        while now_us < begun_us + SECOND_US {
            let (until_us, next_us) = (now_us + 50, now_us + pause_us);
            kept_us += looks(&mut precedence, &mut now_us, until_us, next_us);
            // With what it may be late in any case, and for its work.
            worked_us += 50 + 50 + 50 / 4 + 1;
        }
        let most_us = worked_us + SECOND_US / 10 + SAVED_US;
        assert!(kept_us <= most_us, "{pause_us}: {kept_us} of {most_us}");
        assert!(kept_us > worked_us, "{pause_us}: nothing waits for more");
    }
}

/// What each share below was let have of the card, in percent, while the first `busy` claim to be at work all the time,
/// and the longest stretch without.
fn claimed(busy: u32, below: &[(i32, u32)], duration_us: u64) -> Vec<(f64, u64)> {
    const TICK_US: u64 = 500;
    let mut precedence = Precedence::default();
    let mut had = vec![(0u64, 0u64, 0u64); below.len()];
    let ids = |index: usize| u32::try_from(index).unwrap() + 100;
    for now in (BEGIN_US..BEGIN_US + duration_us).step_by(500) {
        let mut all: Vec<_> = (0..busy).map(|id| standing(id, 50, 10, u64::MAX)).collect();
        let below = below.iter().enumerate();
        all.extend(
            below.map(|(index, (priority, kept))| standing(ids(index), *priority, *kept, 0)),
        );
        let told = precedence.look(now, &all);
        for (index, (had, pause, longest)) in had.iter_mut().enumerate() {
            let (_, until) = told.iter().find(|(id, _)| *id == ids(index)).unwrap();
            if *until > now {
                *pause += TICK_US;
                *longest = (*longest).max(*pause);
            } else {
                // The card treats all alike.
                *had += TICK_US / u64::from(1 + busy);
                *pause = 0;
            }
        }
    }
    let percent = |us: u64| 100.0 * us as f64 / duration_us as f64;
    had.into_iter()
        .map(|(had, _, longest)| (percent(had), longest))
        .collect()
}

#[test]
fn keeps_guarantees_under_constant_busy_claims() {
    for busy in [1, 2] {
        for kept in [1, 10, 20, 30] {
            let (percent, longest) = claimed(busy, &[(0, kept)], 30 * SECOND_US)[0];
            assert!(
                percent >= f64::from(kept) - 0.2,
                "{kept} of {busy}: {percent}"
            );
            // And no more than that: the others are first.
            assert!(
                percent <= f64::from(kept) + 1.0,
                "{kept} of {busy}: {percent}"
            );
            let most = 2 * OWED_US * 100 / u64::from(kept) + 1_000;
            assert!(longest <= most, "{kept} of {busy}: {longest} µs without");
        }
    }
}

#[test]
fn counts_guarantee_by_weight_in_token_mode() {
    let mut precedence = Precedence::default();
    let (mut stopped, mut had, ticks) = (0.0, 0.0, 60_000);
    for tick in 0..ticks {
        let now = BEGIN_US + tick * 500;
        let urgent = Standing {
            weight: 50,
            ..standing(1, 50, 50, u64::MAX)
        };
        let low = Standing {
            weight: 30,
            ..standing(2, 0, 30, 0)
        };
        match precedence.look(now, &[urgent, low])[1].1 > now {
            true => stopped += 1.0,
            false => had += 30.0 / 80.0,
        }
    }
    let had = 100.0 * had / ticks as f64;
    assert!(
        (29.8..32.0).contains(&had) && stopped > 0.0,
        "{had} {stopped}"
    );
}

#[test]
fn does_not_yield_to_equal_priority() {
    let mut precedence = Precedence::default();
    for now in (BEGIN_US..BEGIN_US + SECOND_US).step_by(1_000) {
        let all = [1, 2, 3].map(|id| standing(id, 7, 1, now + 900));
        assert!(
            precedence
                .look(now, &all)
                .iter()
                .all(|(_, until)| *until == 0)
        );
    }
}

#[test]
fn rate_limits_notifications_of_one_share() {
    let mut pace = Pace::default();
    let mut heard = 0u64;
    for now in (BEGIN_US..BEGIN_US + 10 * SECOND_US).step_by(10) {
        if pace.listens_from_us(now) <= now {
            pace.hear(now);
            heard += 1;
        }
    }
    let most = u64::from(CALLS) + 10 * SECOND_US / CALL_US + 1;
    assert!((most - 3..=most).contains(&heard), "{heard} of {most}");
    // After a rest it is heard at once, as often as at first.
    let rested = BEGIN_US + 20 * SECOND_US;
    for call in 0..u64::from(CALLS) {
        assert_eq!(pace.listens_from_us(rested + call), rested + call);
        pace.hear(rested + call);
    }
    assert!(pace.listens_from_us(rested + 100) > rested + 100);
    // Requests that are not more than that are all heard at once.
    for request in 0..10_000 {
        let now = rested + SECOND_US + request * CALL_US;
        assert_eq!(pace.listens_from_us(now), now, "{request}");
        pace.hear(now);
    }
}

#[test]
fn revokes_token_of_yielding_share_and_compensates_it() {
    let contender = |id: usize, cores, wants, gives_way| Contender {
        id,
        cores,
        wants,
        gives_way,
    };
    let mut ring = Ring::default();
    // Two below, of which the first has its turn; the one above wants nothing.
    let idle = [
        contender(1, 50, true, false),
        contender(2, 50, true, false),
        contender(3, 50, false, false),
    ];
    let whole = TokenSlice {
        from_us: 0,
        until_us: LONGEST_US,
    };
    assert_eq!(ring.look(0, &idle), [Change::Grant(1, whole)]);
    // It begins to want, and they give way.
    let now_us = 10_000;
    let at_work = [
        contender(1, 50, true, true),
        contender(2, 50, true, true),
        contender(3, 50, true, false),
    ];
    let its = TokenSlice {
        from_us: now_us,
        until_us: now_us + LONGEST_US,
    };
    assert_eq!(
        ring.look(now_us, &at_work),
        [Change::Revoke(1), Change::Grant(3, its)]
    );
    // However long it takes.
    for now_us in (15_000..500_000).step_by(5_000) {
        ring.look(now_us, &at_work);
        assert_eq!(ring.holder(), Some(3), "{now_us}");
    }
    // Then it goes as it would have gone, and the first still has what was cut off: 40 ms before the second is as far.
    let again_us = 500_000;
    let mut held = [0u64; 4];
    for now_us in (again_us..again_us + 240_000).step_by(1_000) {
        ring.look(now_us, &idle);
        held[ring.holder().unwrap_or(0)] += 1_000;
    }
    assert_eq!(held, [0, 140_000, 100_000, 0]);
}

proptest! {
    #[test]
    fn bounds_yield_for_any_reported_values(
        steps in proptest::collection::vec((0u64..200_000, any::<[u64; 3]>()), 1..60),
        priorities in any::<[i8; 3]>(),
    ) {
        let mut precedence = Precedence::default();
        let mut now = BEGIN_US;
        for (step, busy) in steps {
            now += step;
            let all: Vec<_> = (0u32..).zip(priorities.into_iter().zip(busy)).map(|(id, (priority, busy))| {
                standing(id, i32::from(priority).clamp(-100, 100), 10, busy)
            }).collect();
            let told = precedence.look(now, &all);
            prop_assert_eq!(told.len(), 3);
            for (_, until) in &told {
                prop_assert!(*until <= now + AHEAD_US);
            }
            let highest = all.iter().map(|standing| standing.priority).max();
            for (standing, (_, until)) in all.iter().zip(&told) {
                prop_assert!(Some(standing.priority) < highest || *until == 0);
            }
            prop_assert!(precedence.next_us() > now);
        }
    }
}
