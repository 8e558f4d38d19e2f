//! Which contexts are current to a thread.

use std::cell::RefCell;

use crate::abi::Answer;
use crate::driver::driver;
use crate::error::CudaError;
use crate::types::CUcontext;

/// A context that a thread has entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entered {
    pub(super) context: CUcontext,
    /// Whose memory, modules and events it uses: itself, unless it is a green one.
    owner: CUcontext,
}

impl Entered {
    /// A live context.
    pub(super) fn find(context: CUcontext) -> Answer<Self> {
        let state = driver()?.state();
        if !state.contexts.contains_key(&context) {
            return Err(CudaError::InvalidContext);
        }
        let owner = state.owner(context);
        Ok(Self { context, owner })
    }

    /// One that was created just now.
    pub(super) fn created(context: CUcontext) -> Self {
        let owner = context;
        Self { context, owner }
    }
}

thread_local! {
    /// Contexts current to this thread, the top one last.
    static STACK: RefCell<Vec<Entered>> = const { RefCell::new(Vec::new()) };
}

/// The one that is current to this thread.
pub(super) fn top() -> Option<Entered> {
    STACK.with_borrow(|stack| stack.last().copied())
}

/// Makes one current on top of the others.
pub(super) fn push(entered: Entered) {
    STACK.with_borrow_mut(|stack| stack.push(entered));
}

/// Makes the one below the top current.
pub(super) fn pop() -> Option<Entered> {
    STACK.with_borrow_mut(Vec::pop)
}

/// Puts another one, or none, in the place of the top.
pub(super) fn replace(entered: Option<Entered>) {
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        stack.extend(entered);
    });
}

/// The handle of the context that owns what this thread allocates, loads and creates, whether it
/// still exists or not.
pub(crate) fn current_handle() -> Answer<CUcontext> {
    driver()?;
    let entered = top().ok_or(CudaError::InvalidContext)?;
    Ok(entered.owner)
}

/// The handle of the context current to this thread, in which its streams are.
pub(crate) fn current_context() -> Answer<CUcontext> {
    driver()?;
    let entered = top().ok_or(CudaError::InvalidContext)?;
    Ok(entered.context)
}
