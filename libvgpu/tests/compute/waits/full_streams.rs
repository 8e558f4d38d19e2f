//! A launch into a full stream blocks in libcuda until the GPU progresses. Calls of other threads do not wait for it.

use std::time::Duration;

use super::{ENDLESS_NS, LONGEST, PERCENT, tenant_of_share};

/// Returns the longest time of a call while the event of another thread's launch waits for room in its stream.
fn longest_call(call: &str) -> Duration {
    let test_bed = crate::test_bed();
    let (_share, mut tenant) = tenant_of_share(&test_bed, PERCENT);
    // So that the next launch is in a second stream, and its sample sets the clock of the streams.
    tenant.ok("once 1000").unwrap();
    let answer = tenant.ok(&format!("fullstream {ENDLESS_NS} {call}"));
    Duration::from_micros(answer.unwrap()[0])
}

#[test]
fn begins_capture_while_event_waits_for_room_in_stream() {
    let waited = longest_call("0");
    assert!(waited < LONGEST, "{waited:?}");
}

#[test]
fn destroys_context_while_event_waits_for_room_in_stream() {
    let waited = longest_call("1");
    assert!(waited < LONGEST, "{waited:?}");
}
