//! Turns: the work of one decision, and when it yields to other pods.
//!
//! A selector within its own limits can take seconds on all devices of a cluster, and searches among many combinations of
//! devices, or their repetition in simulations, too. So both kinds of work have a limit in a turn. A decision whose results so
//! far are kept is suspended then and goes on in another turn; another one has to do without the rest of the searches.
//!
//! Charges depend on the input only, so equal inputs have equal results. The turn belongs to the thread: functions of the
//! `cel` crate carry no state.

use std::cell::Cell;

/// Units of costly evaluations of selectors in a turn, about 15 ms, and of searches beyond their first path. The last piece
/// of each may exceed them.
const UNITS: u64 = 20_000;

thread_local! {
    /// Units left to selectors in the turn on this thread. `None` outside of turns.
    static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    /// Units left to searches.
    static SEARCHES: Cell<Option<u64>> = const { Cell::new(None) };
    /// Units of all checks of devices since the start of the turn.
    static CHECKED: Cell<u64> = const { Cell::new(0) };
    static SUSPENDED_BY: Cell<Option<Work>> = const { Cell::new(None) };
}

/// Work of a decision that is limited in a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Evaluations of selectors.
    Selectors,
    /// Searches for devices, or for pods whose end makes room.
    Searches,
}

/// Runs a decision in a turn of this thread; [`is_suspended`] tells afterwards whether it has to be repeated.
pub fn in_turn<T>(decide: impl FnOnce() -> T) -> T {
    LEFT.set(Some(UNITS));
    SEARCHES.set(Some(UNITS));
    CHECKED.set(0);
    SUSPENDED_BY.set(None);
    let decided = decide();
    LEFT.set(None);
    SEARCHES.set(None);
    decided
}

/// Returns whether the current turn, or the last one of this thread, was too short for its decision. What it decided is not
/// valid then, and it has to be repeated in another turn.
#[must_use]
pub fn is_suspended() -> bool {
    suspended_by().is_some()
}

/// Returns the work for which the turn was too short.
#[must_use]
pub fn suspended_by() -> Option<Work> {
    SUSPENDED_BY.get()
}

/// Returns whether selectors have units left; otherwise the decision is suspended.
pub(crate) fn continues() -> bool {
    or_suspend(LEFT.get() != Some(0), Work::Selectors)
}

/// Suspends the decision because of its searches.
pub fn suspend_search() {
    or_suspend(false, Work::Searches);
}

/// Returns whether searches have units left; otherwise the decision is suspended.
pub(crate) fn continues_to_search() -> bool {
    or_suspend(!has_searched(), Work::Searches)
}

fn or_suspend(continues: bool, work: Work) -> bool {
    if !continues && SUSPENDED_BY.get().is_none() {
        SUSPENDED_BY.set(Some(work));
    }
    continues
}

/// Returns whether searches have no units left.
#[must_use]
pub fn has_searched() -> bool {
    SEARCHES.get() == Some(0)
}

/// Takes units for a costly evaluation from the turn.
pub(crate) fn charge(units: u64) {
    LEFT.set(LEFT.get().map(|left| left.saturating_sub(units)));
}

/// Takes units for a search beyond its first path from the turn.
pub(crate) fn charge_search(units: u64) {
    SEARCHES.set(SEARCHES.get().map(|left| left.saturating_sub(units)));
}

/// Counts units of checks that every decision needs. They suspend nothing.
pub fn count(units: u64) {
    CHECKED.set(CHECKED.get().saturating_add(units));
}

/// Returns the units of all checks of devices since the start of the turn, by which simulations are limited.
#[must_use]
pub fn checked() -> u64 {
    CHECKED.get()
}
