//! What the parts know of the process around them.

use std::sync::{Mutex, MutexGuard};

pub(crate) const MAX_SHARES: usize = 64;

/// A process, which has one guard for its threads.
#[derive(Default)]
pub(crate) struct Process(Mutex<()>);

impl Process {
    pub(crate) fn guard(&self) -> MutexGuard<'_, ()> {
        self.0.lock().unwrap()
    }
}
