//! Scenarios of the managed mode.

mod deciding;
mod releasing;
mod telling;
mod world;
