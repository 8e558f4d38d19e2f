//! Everything that is written to the API server, and the lease that admits it.

pub mod event_publisher;
pub mod evictions;
pub mod lease;
mod metadata_answer;
pub mod writes;
