//! The write protocol against a small API server.

mod allocate;
mod release;
mod server;
