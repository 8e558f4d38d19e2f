use proptest::prelude::*;

use super::*;

mod mps;
mod timing;

const MS: Nanos = 1_000_000;
const SLICE: Nanos = 2 * MS;
const ALL: u32 = 100;
/// More changes than any test makes.
const MAX_STEPS: u32 = 20_000;
const A: ContextId = ContextId(1);
const B: ContextId = ContextId(2);

fn engine() -> Engine {
    let mut engine = Engine::new(ALL, Timing::slices_of(SLICE), 0);
    engine.add_context(A);
    engine.add_context(B);
    engine
}

fn submit(engine: &mut Engine, context: ContextId, stream: u32, ticket: u64, work: Work) {
    assert!(engine.submit(context, stream, ticket, work));
}

fn kernel(nanos: Nanos) -> Work {
    Work::Kernel {
        nanos,
        multiprocessors: ALL,
    }
}

/// Runs until idle and returns when each (context, stream, ticket) was completed.
fn run(engine: &mut Engine) -> Vec<(ContextId, u32, u64, Nanos)> {
    let mut done = Vec::new();
    let mut outcomes = Vec::new();
    engine.advance(engine.now, &mut outcomes);
    for _ in 0..MAX_STEPS {
        for outcome in outcomes.drain(..) {
            if let Outcome::Completed {
                context,
                stream,
                ticket,
            } = outcome
            {
                done.push((context, stream, ticket, engine.now));
            }
        }
        let Some(next) = engine.next_change() else {
            return done;
        };
        engine.advance(next, &mut outcomes);
    }
    panic!("the engine does not become idle");
}

/// Like [`Engine::advance`], change by change: fails if the engine loops without time passing,
/// where a single call would not return.
fn advance_in_steps(engine: &mut Engine, to: Nanos, outcomes: &mut Vec<Outcome>) {
    for _ in 0..MAX_STEPS {
        match engine.next_change().filter(|next| *next < to) {
            Some(next) => engine.advance(next, outcomes),
            None => return engine.advance(to, outcomes),
        }
    }
    panic!("the engine does not reach {to} ns");
}

#[test]
fn runs_a_single_context_without_gaps() {
    let mut engine = engine();
    for ticket in 1..=3 {
        submit(&mut engine, A, 0, ticket, kernel(5 * MS));
    }
    assert_eq!(
        run(&mut engine),
        [(A, 0, 1, 5 * MS), (A, 0, 2, 10 * MS), (A, 0, 3, 15 * MS)]
    );
    assert_eq!(engine.usage(A), (3, 15 * MS));
}

#[test]
fn alternates_two_contexts_by_time_slice() {
    let mut engine = engine();
    submit(&mut engine, A, 0, 1, kernel(5 * MS));
    submit(&mut engine, B, 0, 1, kernel(3 * MS));
    // A 0-2, B 2-4, A 4-6, B 6-7, A 7-8.
    assert_eq!(run(&mut engine), [(B, 0, 1, 7 * MS), (A, 0, 1, 8 * MS)]);
}

#[test]
fn delays_a_late_context_by_at_most_one_slice() {
    let mut engine = engine();
    let mut outcomes = Vec::new();
    submit(&mut engine, A, 0, 1, kernel(100 * MS));
    engine.advance(51 * MS, &mut outcomes);
    submit(&mut engine, B, 0, 1, kernel(MS));
    let done = run(&mut engine);
    // A is in one of its slices, 50-52.
    assert_eq!(done, [(B, 0, 1, 53 * MS), (A, 0, 1, 101 * MS)]);
}

#[test]
fn overlaps_streams_whose_kernels_fit() {
    let mut engine = engine();
    let half = |nanos| Work::Kernel {
        nanos,
        multiprocessors: ALL / 2,
    };
    submit(&mut engine, A, 0, 1, half(4 * MS));
    submit(&mut engine, A, 1, 1, half(6 * MS));
    submit(&mut engine, A, 2, 1, half(MS));
    assert_eq!(
        run(&mut engine),
        [(A, 0, 1, 4 * MS), (A, 2, 1, 5 * MS), (A, 1, 1, 6 * MS)]
    );
    assert_eq!(engine.usage(A).1, 6 * MS);
}

#[test]
fn keeps_small_kernels_behind_an_earlier_large_one() {
    let mut engine = engine();
    let part = |multiprocessors| Work::Kernel {
        nanos: MS,
        multiprocessors,
    };
    submit(&mut engine, A, 0, 1, part(60));
    submit(&mut engine, A, 1, 1, part(60));
    submit(&mut engine, A, 2, 1, part(30));
    assert_eq!(
        run(&mut engine),
        [(A, 0, 1, MS), (A, 1, 1, 2 * MS), (A, 2, 1, 2 * MS)]
    );
}

#[test]
fn blocks_a_stream_at_a_wait_until_the_other_arrives() {
    let mut engine = engine();
    let mut outcomes = Vec::new();
    submit(
        &mut engine,
        A,
        1,
        1,
        Work::Wait {
            stream: 0,
            ticket: 2,
        },
    );
    submit(
        &mut engine,
        A,
        1,
        2,
        Work::Record {
            event: 7,
            recording: 3,
        },
    );
    submit(&mut engine, A, 0, 1, kernel(MS));
    submit(&mut engine, A, 0, 2, kernel(MS));
    engine.advance(10 * MS, &mut outcomes);
    let recorded = Outcome::Recorded {
        context: A,
        event: 7,
        recording: 3,
        at: 2 * MS,
    };
    assert!(outcomes.contains(&recorded), "{outcomes:?}");
}

#[test]
fn reaches_events_in_the_slice_of_their_context() {
    let mut engine = engine();
    let mut outcomes = Vec::new();
    let record = |event| Work::Record {
        event,
        recording: 1,
    };
    submit(&mut engine, A, 0, 1, kernel(5 * MS));
    engine.advance(0, &mut outcomes);
    submit(&mut engine, B, 0, 1, record(1));
    submit(&mut engine, B, 0, 2, kernel(MS));
    submit(&mut engine, B, 0, 3, record(2));
    engine.advance(20 * MS, &mut outcomes);
    let mut times = outcomes.iter().filter_map(|outcome| match outcome {
        Outcome::Recorded { event, at, .. } => Some((*event, *at)),
        _ => None,
    });
    let (first, started) = times.next().unwrap();
    let (second, ended) = times.next().unwrap();
    assert_eq!((first, second), (1, 2));
    assert!(
        started > 0,
        "not before the other context's time slice is over"
    );
    assert_eq!(ended - started, MS, "and then without waiting");
    assert_eq!(engine.usage(A).1, 5 * MS);
}

#[test]
fn blocks_a_stream_until_its_host_function_returns() {
    let mut engine = engine();
    let mut outcomes = Vec::new();
    submit(&mut engine, A, 0, 1, Work::Host);
    submit(&mut engine, A, 0, 2, kernel(MS));
    engine.advance(5 * MS, &mut outcomes);
    assert_eq!(
        outcomes,
        [Outcome::HostCall {
            context: A,
            stream: 0,
            ticket: 1
        }]
    );
    engine.host_done(A, 0, 2);
    engine.host_done(A, 0, 1);
    assert_eq!(run(&mut engine), [(A, 0, 1, 5 * MS), (A, 0, 2, 6 * MS)]);
}

#[test]
fn runs_copies_on_separate_engines() {
    let mut engine = engine();
    let copy = |direction| Work::Copy {
        nanos: 2 * MS,
        direction,
    };
    submit(&mut engine, A, 0, 1, copy(Direction::ToGpu));
    submit(&mut engine, B, 0, 1, copy(Direction::ToGpu));
    submit(&mut engine, A, 1, 1, copy(Direction::ToHost));
    submit(&mut engine, A, 2, 1, kernel(2 * MS));
    let done: BTreeMap<_, _> = run(&mut engine)
        .into_iter()
        .map(|(context, stream, _, at)| ((context, stream), at))
        .collect();
    assert_eq!(done[&(A, 0)], 2 * MS);
    assert_eq!(done[&(A, 1)], 2 * MS);
    assert_eq!(done[&(A, 2)], 2 * MS);
    assert_eq!(done[&(B, 0)], 4 * MS);
}

#[test]
fn yields_the_gpu_when_a_context_is_removed() {
    let mut engine = engine();
    let mut outcomes = Vec::new();
    submit(&mut engine, A, 0, 1, kernel(100 * MS));
    submit(&mut engine, B, 0, 1, kernel(3 * MS));
    engine.advance(MS, &mut outcomes);
    engine.remove_context(A);
    assert_eq!(run(&mut engine), [(B, 0, 1, 4 * MS)]);
}

#[test]
fn counts_kernel_time_in_closed_sampling_periods() {
    let mut engine = engine();
    let mut outcomes = Vec::new();
    submit(&mut engine, A, 0, 1, kernel(SAMPLE_PERIOD / 2));
    engine.advance(SAMPLE_PERIOD - 1, &mut outcomes);
    assert!(engine.samples().is_empty());
    engine.advance(SAMPLE_PERIOD, &mut outcomes);
    assert_eq!(engine.samples()[0].total, SAMPLE_PERIOD / 2);
    engine.advance(SAMPLE_PERIOD * 10_000, &mut outcomes);
    assert_eq!(engine.samples().len(), 120);
    assert!(engine.samples().iter().all(|sample| sample.total == 0));
    assert_eq!(engine.samples().back().unwrap().end, SAMPLE_PERIOD * 10_000);
}

proptest! {
    /// All submitted work completes, in order within each stream. The GPU is never busy longer than
    /// the work takes and never idle while there is work.
    #[test]
    fn completes_all_work_without_idle_time(
        work in prop::collection::vec((0u64..2, 0u32..3, 0u64..6 * MS, 1u32..=ALL, 0u64..3 * MS), 0..60)
    ) {
        let mut engine = engine();
        let mut done = Vec::new();
        let mut outcomes = Vec::new();
        let mut expected: Nanos = 0;
        let mut tickets = BTreeMap::<_, u64>::new();
        for (context, stream, nanos, multiprocessors, pause) in work {
            let context = ContextId(context + 1);
            let ticket = tickets.entry((context, stream)).or_default();
            *ticket += 1;
            submit(&mut engine, context, stream, *ticket, Work::Kernel { nanos, multiprocessors });
            expected += nanos;
            let next = engine.now + pause;
            advance_in_steps(&mut engine, next, &mut outcomes);
        }
        let end = engine.now + expected;
        advance_in_steps(&mut engine, end, &mut outcomes);
        for outcome in outcomes {
            if let Outcome::Completed { context, stream, ticket } = outcome {
                done.push((context, stream, ticket));
            }
        }
        for (&(context, stream), &last) in &tickets {
            let of_stream: Vec<u64> = done.iter().filter(|(c, s, _)| (*c, *s) == (context, stream)).map(|(_, _, ticket)| *ticket).collect();
            prop_assert_eq!(of_stream, (1..=last).collect::<Vec<_>>());
        }
        let busy = engine.usage(A).1 + engine.usage(B).1;
        prop_assert!(busy <= expected, "{} > {}", busy, expected);
        prop_assert_eq!(engine.next_change(), None);
    }

    /// Two busy contexts get equal time, up to one slice.
    #[test]
    fn shares_time_equally(lengths in (1u64..20 * MS, 1u64..20 * MS)) {
        let mut engine = engine();
        let mut outcomes = Vec::new();
        for ticket in 1..=200 {
            submit(&mut engine, A, 0, ticket, kernel(lengths.0.max(MS)));
            submit(&mut engine, B, 0, ticket, kernel(lengths.1.max(MS)));
        }
        advance_in_steps(&mut engine, 150 * MS, &mut outcomes);
        let (a, b) = (engine.usage(A).1, engine.usage(B).1);
        prop_assert!(a.abs_diff(b) <= SLICE, "{} {}", a, b);
        prop_assert_eq!(a + b, 150 * MS);
    }
}

const LEFT: InstanceId = InstanceId {
    gpu_instance: 1,
    compute: 0,
};
const RIGHT: InstanceId = InstanceId {
    gpu_instance: 2,
    compute: 0,
};

#[test]
fn runs_instances_concurrently() {
    let mut engine = engine();
    engine.enter(A, LEFT, ALL / 2);
    engine.enter(B, RIGHT, ALL / 4);
    submit(&mut engine, A, 0, 1, kernel(10 * MS));
    submit(&mut engine, B, 0, 1, kernel(7 * MS));
    assert_eq!(run(&mut engine), [(B, 0, 1, 7 * MS), (A, 0, 1, 10 * MS)]);
    assert_eq!((engine.usage(A).1, engine.usage(B).1), (10 * MS, 7 * MS));
    assert_eq!(engine.busy(), 10 * MS);
    let counters = |gpu_instance| engine.counters(gpu_instance);
    assert_eq!(counters(Some(LEFT.gpu_instance)).busy, 10 * MS);
    assert_eq!(counters(Some(RIGHT.gpu_instance)).busy, 7 * MS);
    // Half of the GPU for ten, a quarter for seven.
    assert_eq!(counters(None).weighted, 5 * MS + 7 * MS / 4);
    let occupied = u128::from(10 * MS * u64::from(ALL / 2));
    assert_eq!(counters(Some(LEFT.gpu_instance)).occupied, occupied);
}

#[test]
fn shares_copy_engines_within_a_gpu_instance() {
    let mut engine = engine();
    let other = InstanceId {
        gpu_instance: 1,
        compute: 1,
    };
    engine.enter(A, LEFT, ALL / 2);
    engine.enter(B, other, ALL / 2);
    let copy = Work::Copy {
        nanos: 5 * MS,
        direction: Direction::ToGpu,
    };
    submit(&mut engine, A, 0, 1, kernel(4 * MS));
    submit(&mut engine, B, 0, 1, kernel(4 * MS));
    submit(&mut engine, A, 1, 1, copy);
    submit(&mut engine, B, 1, 1, copy);
    assert_eq!(
        run(&mut engine),
        [
            (A, 0, 1, 4 * MS),
            (B, 0, 1, 4 * MS),
            (A, 1, 1, 5 * MS),
            (B, 1, 1, 10 * MS)
        ]
    );
    assert_eq!(engine.counters(Some(1)).busy, 4 * MS);
}

#[test]
fn alternates_contexts_within_one_instance() {
    let mut engine = engine();
    let other = ContextId(3);
    engine.add_context(other);
    engine.enter(A, LEFT, ALL / 2);
    engine.enter(B, LEFT, ALL / 2);
    engine.enter(other, RIGHT, ALL / 2);
    submit(&mut engine, A, 0, 1, kernel(5 * MS));
    submit(&mut engine, B, 0, 1, kernel(3 * MS));
    submit(&mut engine, other, 0, 1, kernel(6 * MS));
    // Remaining: A 0-2, B 2-4, A 4-6, B 6-7, A 7-8.
    assert_eq!(
        run(&mut engine),
        [(other, 0, 1, 6 * MS), (B, 0, 1, 7 * MS), (A, 0, 1, 8 * MS)]
    );
}

#[test]
fn limits_a_kernel_to_its_instance() {
    let mut engine = engine();
    engine.enter(A, LEFT, ALL / 2);
    // Two kernels that fit the GPU together do not fit half of it.
    let most = Work::Kernel {
        nanos: MS,
        multiprocessors: ALL * 2 / 5,
    };
    submit(&mut engine, A, 0, 1, most);
    submit(&mut engine, A, 1, 1, most);
    submit(&mut engine, A, 2, 1, kernel(MS));
    assert_eq!(
        run(&mut engine),
        [(A, 0, 1, MS), (A, 1, 1, 2 * MS), (A, 2, 1, 3 * MS)]
    );
    // A later context gets the size of the instance as created then.
    engine.remove_context(A);
    engine.enter(B, LEFT, ALL);
    submit(&mut engine, B, 0, 1, most);
    submit(&mut engine, B, 1, 1, most);
    let start = engine.now();
    assert_eq!(
        run(&mut engine),
        [(B, 0, 1, start + MS), (B, 1, 1, start + MS)]
    );
}
