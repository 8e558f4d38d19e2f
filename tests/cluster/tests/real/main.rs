//! Tests of a real cluster: start, pod, recovery, removal.
//!
//! Each test has its own cluster, and one cluster runs at a time. Without root or Go the tests are skipped.

#![expect(clippy::unwrap_used, reason = "a test fails on the first error")]

mod crash;
mod nodes;
mod pod;
mod rejections;
mod traces;
mod trial;
