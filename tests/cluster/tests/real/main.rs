//! The cluster against itself: it starts, runs a pod, survives what it should, and leaves nothing behind.
//!
//! Needs root and Go. Run one after another (`cargo test -p drava-cluster --test real -- --test-threads=1`): each test has
//! a cluster of its own, and a machine that runs three at once is slow.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod crash;
mod pod;
mod refusal;
mod traces;
mod trial;
