//! The controller of managed mode: allocates the claims of pods that wait for devices of this driver.
//!
//! Watches feed the [`planner`], a pure state machine; what it decides is carried out by [`writes`] and [`events`].
//! Only the replica that holds the [`lease`] does so, and it starts from full lists.

pub mod action;
pub mod allocation;
pub mod change;
mod claim;
pub mod events;
#[cfg(test)]
mod fixture;
pub mod health;
pub mod leader;
pub mod lease;
mod left_out;
pub mod notice;
pub mod options;
pub mod planner;
mod pod;
mod unreserved;
mod waiting;
pub mod watches;
pub mod writes;
