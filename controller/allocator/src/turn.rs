//! Turns: the work of one decision, and when it yields to other pods.
//!
//! A selector within its own limits can take seconds on all devices of a cluster, and so can searches among many combinations
//! of devices, and checks of thousands of nodes and pods that are repeated for the members of a gang, or in simulations. So
//! each kind of work has a limit in a turn. A decision whose results so far are kept is suspended then and goes on in another
//! turn; another one has to do without the rest of the searches. Nothing limits the one check of each node that every decision
//! for a pod needs.
//!
//! Charges depend on the input only, so equal inputs have equal results.

/// Units of costly evaluations of selectors in a turn, about 15 ms, and of searches beyond their first path. The last piece
/// of each may exceed them.
const UNITS: u64 = 20_000;

/// Units of checks in a turn, about 50 ms. The last piece may exceed them.
const CHECKS: u64 = 100_000;

/// Work of a decision that is limited in a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Evaluations of selectors.
    Selectors,
    /// Searches for devices beyond their first path.
    Searches,
    /// Checks of nodes and pods.
    Checks,
}

/// The work of a decision in one turn.
#[derive(Debug)]
pub struct Turn {
    /// Units left to selectors; `None` without a limit.
    selectors: Option<u64>,
    /// Units left to searches; `None` without a limit.
    searches: Option<u64>,
    /// Whether a search has found something that the next turns keep.
    has_progress: bool,
    /// Units of checks after which the turn is over; `None` without a limit.
    checks: Option<u64>,
    checked: u64,
    node_checks: u64,
}

impl Turn {
    /// Starts a turn of a decision that goes on in other turns.
    #[must_use]
    pub const fn limited() -> Self {
        Self::of(Some(UNITS), Some(CHECKS))
    }

    /// Starts a turn that suspends nothing.
    #[must_use]
    pub const fn endless() -> Self {
        Self::of(None, None)
    }

    const fn of(units: Option<u64>, checks: Option<u64>) -> Self {
        Self {
            selectors: units,
            searches: units,
            has_progress: false,
            checks,
            checked: 0,
            node_checks: 0,
        }
    }

    /// Returns whether selectors have no units left.
    pub(crate) fn is_out_of_selectors(&self) -> bool {
        self.selectors == Some(0)
    }

    /// Returns whether searches have no units left.
    #[must_use]
    pub fn is_out_of_searches(&self) -> bool {
        self.searches == Some(0)
    }

    /// Returns whether there were as many checks as a turn may have.
    #[must_use]
    pub fn is_out_of_checks(&self) -> bool {
        self.checks.is_some_and(|limit| self.checked >= limit)
    }

    /// Returns the work because of which searches that go on in another turn have to.
    #[must_use]
    pub fn over_by(&self) -> Option<Work> {
        match (self.is_out_of_searches(), self.is_out_of_checks()) {
            (true, _) => Some(Work::Searches),
            (false, true) => Some(Work::Checks),
            (false, false) => None,
        }
    }

    /// Returns the work because of which the decision is suspended before another evaluation whose result would be kept. Each
    /// turn has one.
    pub(crate) fn suspends_evaluation(&self) -> Option<Work> {
        self.over_by().filter(|_| self.has_progress)
    }

    /// Returns whether the decision is suspended before another search whose result would be kept. Each turn has one.
    pub(crate) fn suspends_search(&self) -> bool {
        self.is_out_of_searches() && self.has_progress
    }

    /// Notes a search whose result is kept.
    pub(crate) fn note_progress(&mut self) {
        self.has_progress = true;
    }

    /// Returns the units left to searches, to compare.
    pub(crate) const fn left_to_searches(&self) -> Option<u64> {
        self.searches
    }

    /// Takes units for a costly evaluation.
    pub(crate) fn charge(&mut self, units: u64) {
        self.selectors = self.selectors.map(|left| left.saturating_sub(units));
    }

    /// Takes units for a search beyond its first path.
    pub(crate) fn charge_search(&mut self, units: u64) {
        self.searches = self.searches.map(|left| left.saturating_sub(units));
    }

    /// Counts units of checks.
    pub fn count(&mut self, units: u64) {
        self.checked = self.checked.saturating_add(units);
    }

    /// Returns the units of all checks.
    #[must_use]
    pub const fn checked(&self) -> u64 {
        self.checked
    }

    /// Counts a check of a node, or a search of its devices.
    pub(crate) fn count_node(&mut self) {
        self.count(1);
        self.node_checks = self.node_checks.saturating_add(1);
    }

    /// Returns how often a node was checked, or its devices searched.
    #[must_use]
    pub const fn node_checks(&self) -> u64 {
        self.node_checks
    }
}
