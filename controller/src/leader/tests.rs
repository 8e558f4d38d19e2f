//! Tests of the loop of the leader.

mod inputs;
mod term;
