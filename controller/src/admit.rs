//! Admission of new pods and claims: the webhook, and the translation of extended resources.

pub mod compatibility;
pub mod webhook;
