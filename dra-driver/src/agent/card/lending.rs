//! What the controller decided, and shares that want back what others use of theirs.

use std::collections::BTreeMap;

use super::{Card, Shares, complain};
use crate::agent::control::{Decision, Terms, Turn};
use crate::agent::tenant::{Key, Tenant};

impl Card {
    /// Whether shares are idle while others use their time, or were a moment ago, and may turn at any moment.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.is_lent
    }

    /// Gives back what is lent of shares that have woken, at once, and lends what those have that rest again: the others are
    /// told what they may use without being measured, since in a moment nobody does anything typical. Returns whether
    /// there are any.
    pub fn give_back(&mut self, now_us: u64, shares: &mut Shares) -> bool {
        if !self.is_lent {
            return false;
        }
        let Shares {
            tenants, scratch, ..
        } = shares;
        let mut turned: Vec<(Key, Turn)> = Vec::new();
        for key in &self.keys {
            let tenant = tenants.get_mut(key);
            let turn = tenant.and_then(|tenant| tenant.turn(now_us, scratch));
            turned.extend(turn.map(|turn| (*key, turn)));
        }
        if turned.is_empty() {
            return false;
        }
        let terms = |key: &Key| Some((*key, tenants.get(key)?.terms()?));
        let metered: Vec<(Key, Terms)> = self.keys.iter().filter_map(terms).collect();
        let decisions = self.controller.turn(&metered, &turned);
        self.quiet = 0;
        self.apply(now_us, &decisions, tenants);
        true
    }

    /// Tells the shares what was decided.
    pub(super) fn apply(
        &mut self,
        now_us: u64,
        decisions: &[(Key, Decision)],
        tenants: &mut BTreeMap<Key, Tenant>,
    ) {
        self.is_lent = false;
        for (key, decision) in decisions {
            let Some(tenant) = tenants.get_mut(key) else {
                continue;
            };
            complain(tenant.set_rate(decision.rate_us_per_s), tenant);
            complain(tenant.set_own_time(decision.own_parts), tenant);
            complain(tenant.set_lent(decision.is_lent), tenant);
            self.is_lent |= tenant.may_turn(now_us);
        }
    }
}
