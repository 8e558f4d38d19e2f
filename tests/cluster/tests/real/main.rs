//! The cluster against itself: it starts, runs a pod, survives what it should, and leaves nothing behind.
//!
//! Each test has a cluster of its own, one at a time on the machine. Without root or Go the tests are skipped.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod crash;
mod pod;
mod refusal;
mod traces;
mod trial;
