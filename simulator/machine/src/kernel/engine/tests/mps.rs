//! Clients of an MPS server.

use super::*;

const SERVER: ContextId = ContextId(10);
const FIRST: ContextId = ContextId(11);
const SECOND: ContextId = ContextId(12);

/// An engine with a server and two clients with these numbers of multiprocessors.
fn served(first: u32, second: u32) -> Engine {
    let mut engine = engine();
    engine.add_context(SERVER);
    engine.add_client(FIRST, SERVER, first);
    engine.add_client(SECOND, SERVER, second);
    engine
}

#[test]
fn runs_clients_concurrently_on_their_parts() {
    let mut engine = served(ALL / 2, ALL / 2);
    let half = Work::Kernel {
        nanos: 5 * MS,
        multiprocessors: ALL / 2,
    };
    submit(&mut engine, FIRST, 0, 1, half);
    submit(&mut engine, SECOND, 0, 1, half);
    assert_eq!(
        run(&mut engine),
        [(FIRST, 0, 1, 5 * MS), (SECOND, 0, 1, 5 * MS)]
    );
    assert_eq!(engine.busy(), 5 * MS);
    let occupied = u128::from(5 * MS) * u128::from(ALL);
    assert_eq!(engine.counters(None).occupied, occupied);
    assert_eq!(engine.counters(None).weighted, 5 * MS);
}

#[test]
fn slows_kernel_that_would_fill_more_than_the_part() {
    let mut engine = served(ALL / 2, ALL / 4);
    submit(&mut engine, FIRST, 0, 1, kernel(5 * MS));
    submit(&mut engine, SECOND, 0, 1, kernel(5 * MS));
    assert_eq!(
        run(&mut engine),
        [(FIRST, 0, 1, 10 * MS), (SECOND, 0, 1, 20 * MS)]
    );
}

#[test]
fn limits_all_kernels_of_a_client_together() {
    let mut engine = served(ALL / 2, ALL);
    let part = |multiprocessors| Work::Kernel {
        nanos: MS,
        multiprocessors,
    };
    submit(&mut engine, FIRST, 0, 1, part(ALL / 2));
    submit(&mut engine, FIRST, 1, 1, part(ALL / 4));
    // The client at its limit does not hold up the other one.
    submit(&mut engine, SECOND, 0, 1, part(ALL / 4));
    assert_eq!(
        run(&mut engine),
        [(FIRST, 0, 1, MS), (SECOND, 0, 1, MS), (FIRST, 1, 1, 2 * MS)]
    );
}

#[test]
fn orders_kernels_of_clients_beyond_the_gpu_by_submission() {
    let mut engine = served(ALL, ALL);
    for ticket in 1..=2 {
        submit(&mut engine, FIRST, 0, ticket, kernel(5 * MS));
        submit(&mut engine, SECOND, 0, ticket, kernel(MS));
    }
    // No time slices among clients.
    assert_eq!(
        run(&mut engine),
        [
            (FIRST, 0, 1, 5 * MS),
            (SECOND, 0, 1, 6 * MS),
            (FIRST, 0, 2, 11 * MS),
            (SECOND, 0, 2, 12 * MS)
        ]
    );
}

#[test]
fn gives_all_clients_the_time_of_one_holder() {
    let mut engine = served(ALL / 2, ALL / 2);
    let half = Work::Kernel {
        nanos: 10 * MS,
        multiprocessors: ALL / 2,
    };
    submit(&mut engine, A, 0, 1, kernel(10 * MS));
    submit(&mut engine, FIRST, 0, 1, half);
    submit(&mut engine, SECOND, 0, 1, half);
    // A 0-2, clients 2-4, and so on.
    assert_eq!(
        run(&mut engine),
        [
            (A, 0, 1, 18 * MS),
            (FIRST, 0, 1, 20 * MS),
            (SECOND, 0, 1, 20 * MS)
        ]
    );
}

#[test]
fn drops_work_of_a_cancelled_context() {
    let mut engine = served(ALL, ALL);
    let mut outcomes = Vec::new();
    submit(&mut engine, FIRST, 0, 1, kernel(100 * MS));
    let copy = Work::Copy {
        nanos: 100 * MS,
        direction: Direction::ToGpu,
    };
    submit(&mut engine, FIRST, 1, 1, copy);
    submit(&mut engine, SECOND, 0, 1, kernel(MS));
    engine.advance(10 * MS, &mut outcomes);
    engine.cancel(FIRST);
    assert!(engine.is_idle(FIRST));
    assert_eq!(run(&mut engine), [(SECOND, 0, 1, 11 * MS)]);
}
