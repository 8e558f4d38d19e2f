//! Tests of the loop of the leader.

use std::time::Duration;

use tokio::time::Instant;

use super::{SLICE, decision_time, is_slice_over};

mod inputs;
mod term;

#[tokio::test(start_paused = true)]
async fn slice_ends_after_its_time() {
    let started = Instant::now();
    let last = started + SLICE - Duration::from_nanos(1);
    assert!(!is_slice_over(started, started) && !is_slice_over(started, last));
    assert!(is_slice_over(started, started + SLICE));

    let time = decision_time();
    assert!(!(time.is_slice_over)(time.instant));
    tokio::time::advance(SLICE).await;
    assert!((time.is_slice_over)(time.instant));
}
