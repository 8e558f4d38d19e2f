//! The write protocol with a fake API server.

mod allocate;
mod gate;
mod release;
mod server;
mod status;
mod suspend;
