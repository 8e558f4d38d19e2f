//! Errors as text.

pub use drava_api::error::describe;
