//! The write protocol with a fake API server.

mod allocate;
mod release;
mod server;
