//! The stack of current contexts of a thread.

use std::cell::RefCell;

use crate::abi::CudaResult;
use crate::driver::driver;
use crate::error::CudaError;
use crate::types::CUcontext;

/// One entry of the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CurrentContext {
    pub(super) context: CUcontext,
    /// Owner of memory, modules and events: the context itself unless it is green.
    owner: CUcontext,
}

impl CurrentContext {
    pub(super) fn find(context: CUcontext) -> CudaResult<Self> {
        let state = driver()?.state();
        if !state.contexts.contains_key(&context) {
            return Err(CudaError::InvalidContext);
        }
        let owner = state.owner(context);
        Ok(Self { context, owner })
    }

    /// An entry for a context created by this call.
    pub(super) fn created(context: CUcontext) -> Self {
        let owner = context;
        Self { context, owner }
    }
}

thread_local! {
    /// The current context is the last element.
    static STACK: RefCell<Vec<CurrentContext>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn top() -> Option<CurrentContext> {
    STACK.with_borrow(|stack| stack.last().copied())
}

pub(super) fn push(entered: CurrentContext) {
    STACK.with_borrow_mut(|stack| stack.push(entered));
}

pub(super) fn pop() -> Option<CurrentContext> {
    STACK.with_borrow_mut(Vec::pop)
}

/// Returns the context that owns allocations, modules and events of this thread, if it has one.
pub(super) fn owner() -> Option<CUcontext> {
    top().map(|entered| entered.owner)
}

/// Replaces the top of the stack.
pub(super) fn replace(entered: Option<CurrentContext>) {
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        stack.extend(entered);
    });
}

/// Returns the handle of the context that owns allocations, modules and events of this thread. The
/// context may have been destroyed.
pub(crate) fn current_handle() -> CudaResult<CUcontext> {
    driver()?;
    let entered = top().ok_or(CudaError::InvalidContext)?;
    Ok(entered.owner)
}

/// Returns the handle of this thread's current context, which owns its streams.
pub(crate) fn current_context() -> CudaResult<CUcontext> {
    driver()?;
    let entered = top().ok_or(CudaError::InvalidContext)?;
    Ok(entered.context)
}
