//! How the shares of a card stand to each other by their priorities.

use super::{Card, Shares, complain};
use crate::agent::allot::{CARD, floor};
use crate::agent::control::Terms;
use crate::agent::precedence::Standing;
use crate::agent::tenant::{Rank, Tenant};

impl Card {
    /// Whether some of its shares give way to others.
    #[must_use]
    pub fn is_ranked(&self) -> bool {
        self.is_ranked
    }

    /// When to look next at who gives way, µs.
    #[must_use]
    pub fn gives_way_next_us(&self) -> u64 {
        if self.is_ranked {
            self.precedence.next_us()
        } else {
            u64::MAX
        }
    }

    /// Says to each share how it stands to the others.
    pub fn rank(&mut self, shares: &mut Shares) {
        let here = |tenant: &Tenant| Some((tenant.terms()?.priority, tenant.is_here()));
        let all: Vec<_> = self
            .keys
            .iter()
            .filter_map(|key| here(shares.tenants.get(key)?))
            .collect();
        self.is_ranked = false;
        for key in &self.keys {
            let Some(tenant) = shares.tenants.get_mut(key) else {
                continue;
            };
            let rank = match tenant.terms() {
                Some(Terms { priority, .. }) => Rank {
                    // Who waits for a turn is not to wait for a look at it either, whether or not others are there.
                    calls: tenant.is_here()
                        && all
                            .iter()
                            .any(|(of, here)| *of < priority && (*here || tenant.takes_turns())),
                    gives_way: all.iter().any(|(of, here)| *of > priority && *here),
                },
                None => Rank::default(),
            };
            self.is_ranked |= rank.calls;
            complain(tenant.set_rank(rank), tenant);
        }
    }

    /// Lets shares make no launches while one of higher priority is at work.
    pub fn give_way(&mut self, now_us: u64, shares: &mut Shares) {
        let Shares {
            tenants, scratch, ..
        } = shares;
        let mut standings = Vec::new();
        for key in &self.keys {
            let Some(tenant) = tenants.get(key) else {
                continue;
            };
            let Some(terms) = tenant.terms().filter(|_| tenant.is_here()) else {
                continue;
            };
            standings.push(Standing {
                id: *key,
                priority: terms.priority,
                kept: i64::from(terms.cores.percent()) * CARD / 100,
                weight: match tenant.takes_turns() {
                    true => terms.cores.percent(),
                    false => 1,
                },
                busy_until_us: tenant.busy_until_us(now_us, scratch),
            });
        }
        let without = standings.iter().filter(|standing| standing.kept == 0);
        let floor = floor(without.count());
        for standing in &mut standings {
            standing.kept = standing.kept.max(floor);
        }
        for (key, until_us) in self.precedence.look(now_us, &standings) {
            if let Some(tenant) = tenants.get_mut(&key)
                && tenant.rank.gives_way
            {
                complain(tenant.give_way(until_us), tenant);
            }
        }
    }
}
