//! The write protocol with a fake API server.

mod allocate;
mod gate;
mod quota;
mod release;
mod server;
