//! Calls of NVML: one after the other, and none is waited for without end, because NVML can hang.

use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use drava_nvml::{GpuError, GpuLibrary};

use super::LimitError;
use crate::gpus::inventory::OpenLibrary;

/// Longest call.
const CALL: Duration = Duration::from_secs(10);

/// Calls of NVML.
pub(super) struct Calls {
    open: OpenLibrary,
    turn: Arc<Turn>,
}

#[derive(Default)]
struct Turn {
    is_taken: Mutex<bool>,
    freed: Condvar,
}

/// The right to make the next call. It is released when it is dropped: when the call returns, also after its caller has given up.
pub(super) struct Right(Arc<Turn>);

impl Drop for Right {
    fn drop(&mut self) {
        *self
            .0
            .is_taken
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = false;
        self.0.freed.notify_one();
    }
}

impl Calls {
    pub(super) fn new(open: OpenLibrary) -> Self {
        Self {
            open,
            turn: Arc::default(),
        }
    }

    /// Waits for the right to make a call; `None` when others do not end in time.
    pub(super) fn take(&self, wait: Duration) -> Option<Right> {
        let taken = self.turn.is_taken.lock();
        let taken = taken.unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .turn
            .freed
            .wait_timeout_while(taken, wait, |is_taken| *is_taken);
        let (mut is_taken, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *is_taken {
            return None;
        }
        *is_taken = true;
        Some(Right(Arc::clone(&self.turn)))
    }

    /// Makes a call in a thread, which a hung call keeps, with the right.
    pub(super) fn call<T: Send + 'static>(
        &self,
        right: Right,
        call: impl FnOnce(&dyn GpuLibrary) -> Result<T, GpuError> + Send + 'static,
    ) -> Result<(T, Right), LimitError> {
        let (done, result) = mpsc::channel();
        let open = Arc::clone(&self.open);
        let thread = thread::Builder::new().spawn(move || {
            let called = open().map_err(LimitError::Library);
            let called = called.and_then(|library| Ok(call(library.as_ref())?));
            // Fails when the caller does not wait any more.
            let _ = done.send(called.map(|value| (value, right)));
        });
        thread.map_err(LimitError::Thread)?;
        result
            .recv_timeout(CALL)
            .unwrap_or(Err(LimitError::NoAnswer))
    }
}
