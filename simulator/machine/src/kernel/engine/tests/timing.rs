//! Time that events, context switches and slices take.

use super::*;

fn engine_with(timing: Timing) -> Engine {
    let mut engine = Engine::new(ALL, timing, 0);
    engine.add_context(A);
    engine.add_context(B);
    engine
}

/// Submits a kernel between two events, and returns the time between the events.
fn measured(engine: &mut Engine, context: ContextId, nanos: Option<Nanos>) -> Nanos {
    let record = |event| Work::Record {
        event,
        recording: 1,
    };
    let kernel = nanos.map(kernel);
    let works = [Some(record(0)), kernel, Some(record(1))];
    for (ticket, work) in (1..).zip(works.into_iter().flatten()) {
        submit(engine, context, 7, ticket, work);
    }
    let mut outcomes = Vec::new();
    engine.advance(engine.now, &mut outcomes);
    while let Some(next) = engine.next_change() {
        engine.advance(next, &mut outcomes);
    }
    let recorded: Vec<Nanos> = outcomes
        .into_iter()
        .filter_map(|outcome| match outcome {
            Outcome::Recorded { at, .. } => Some(at),
            Outcome::Completed { .. } | Outcome::HostCall { .. } => None,
        })
        .collect();
    recorded[1] - recorded[0]
}

#[test]
fn charges_events_to_their_stream() {
    let timing = Timing {
        event: 2_000,
        ..Timing::slices_of(SLICE)
    };
    assert_eq!(measured(&mut engine_with(timing), A, None), 2_000);
    assert_eq!(measured(&mut engine_with(timing), A, Some(MS)), MS + 2_000);
    let even = Timing::slices_of(SLICE);
    assert_eq!(measured(&mut engine_with(even), A, Some(MS)), MS);
}

#[test]
fn records_events_out_of_slice_if_set() {
    for (records_out_of_slice, first_us) in [(false, 2_000), (true, 0)] {
        let mut engine = engine_with(Timing {
            records_out_of_slice,
            ..Timing::slices_of(SLICE)
        });
        submit(&mut engine, A, 0, 1, kernel(10 * MS));
        engine.advance(0, &mut Vec::new());
        let due = 10 * MS - first_us * 1_000;
        // Both kernels alternate, so the short one takes twice its length from its first slice on.
        let nanos = measured(&mut engine, B, Some(4 * MS));
        assert!(nanos.abs_diff(due.min(8 * MS)) <= 2 * MS, "{nanos}");
        let waits_for_slice = nanos > 7 * MS;
        assert_eq!(waits_for_slice, records_out_of_slice, "{nanos}");
    }
}

/// When a context has no more work, only the next one records its events, not all that wait.
#[test]
fn records_events_of_next_context_only() {
    const C: ContextId = ContextId(3);
    let mut engine = engine_with(Timing::slices_of(SLICE));
    engine.add_context(C);
    submit(&mut engine, A, 0, 1, kernel(MS));
    engine.advance(0, &mut Vec::new());
    for context in [B, C] {
        let record = Work::Record {
            event: 0,
            recording: 1,
        };
        submit(&mut engine, context, 0, 1, record);
        submit(&mut engine, context, 0, 2, kernel(MS));
    }
    let mut outcomes = Vec::new();
    engine.advance(3 * MS, &mut outcomes);
    let recorded = outcomes.into_iter().filter_map(|outcome| match outcome {
        Outcome::Recorded { context, at, .. } => Some((context, at)),
        Outcome::Completed { .. } | Outcome::HostCall { .. } => None,
    });
    assert_eq!(recorded.collect::<Vec<_>>(), [(B, MS), (C, 2 * MS)]);
}

#[test]
fn spends_time_on_each_context_switch() {
    const SWITCH: Nanos = 100_000;
    let timing = Timing {
        context_switch: SWITCH,
        ..Timing::slices_of(SLICE)
    };
    let mut engine = engine_with(timing);
    for context in [A, B] {
        submit(&mut engine, context, 0, 1, kernel(4 * MS));
    }
    // A, B, A, B: three switches.
    let ends: Vec<Nanos> = run(&mut engine).iter().map(|done| done.3).collect();
    assert_eq!(ends, [6 * MS + 2 * SWITCH, 8 * MS + 3 * SWITCH]);
    assert_eq!(engine.busy(), 8 * MS, "a switch is not busy time");
    // A single context does not switch.
    let mut engine = engine_with(timing);
    submit(&mut engine, A, 0, 1, kernel(4 * MS));
    assert_eq!(run(&mut engine)[0].3, 4 * MS);
}

#[test]
fn varies_slices_around_their_mean() {
    let timing = Timing {
        slice_deviation_percent: 40,
        ..Timing::slices_of(SLICE)
    };
    let lengths: Vec<Nanos> = (0..10_000).map(|number| timing.slice_of(number)).collect();
    let bounds = SLICE * 60 / 100..=SLICE * 140 / 100;
    assert!(lengths.iter().all(|length| bounds.contains(length)));
    let mean = lengths.iter().sum::<Nanos>() / 10_000;
    assert!(mean.abs_diff(SLICE) < SLICE / 50, "{mean}");
    let mut engine = engine_with(timing);
    for context in [A, B] {
        submit(&mut engine, context, 0, 1, kernel(400 * MS));
    }
    let mut outcomes = Vec::new();
    engine.advance(400 * MS, &mut outcomes);
    let (first, second) = (engine.usage(A).1, engine.usage(B).1);
    assert_eq!(first + second, 400 * MS);
    assert!(first.abs_diff(second) < 20 * MS, "{first} {second}");
}
