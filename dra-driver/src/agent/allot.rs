//! Who may use how much of a card's time. Pure.
//!
//! All figures are microseconds of GPU time per second, so a card has [`CARD`] of them.
//!
//! 1. Everyone gets what is guaranteed to it, or less if it wants less. A tenant without a guarantee gets the
//!    [`floor`], so that nobody starves.
//! 2. What is left goes to tenants that may use others' idle time, the highest priority first, within a priority by
//!    weight.
//!
//! A tenant that is idle is allotted nothing, but [`Allotment::rate`] still says what it may use at once when it wakes.

use drava_vgpu_abi::{Cores, Priority};

/// One card, all of the time.
pub const CARD: i64 = 1_000_000;

/// One percent of a card.
const PERCENT: i64 = CARD / 100;

/// What a tenant without a guarantee gets however busy the card is.
const FLOOR: i64 = PERCENT;

/// What all of them get together at most, taken from the guarantees in proportion where those are the whole card.
const FLOORS: i64 = 2 * PERCENT;

/// Whether a tenant may use time that others leave idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spare {
    /// It may.
    Taken,
    /// It may not.
    Left,
}

/// How much time a tenant wants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Demand {
    /// None.
    #[default]
    Idle,
    /// About this much; it has not been held back.
    UpTo(i64),
    /// More than it gets.
    All,
}

/// A metered tenant of a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tenant {
    /// What is guaranteed to it.
    pub cores: Cores,
    /// Whether it may have more.
    pub spare: Spare,
    /// Its rank.
    pub priority: Priority,
    /// What it wants.
    pub demand: Demand,
}

/// What a tenant may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allotment {
    /// Its part of the card. All parts together are at most the card.
    pub part: i64,
    /// What it may use before anybody looks again: more than its part where it wants less than its guarantee.
    pub rate: i64,
}

impl Tenant {
    fn guarantee(&self) -> i64 {
        i64::from(self.cores.percent()) * PERCENT
    }

    /// How idle time is divided. A tenant without a guarantee weighs as little as the smallest one with it.
    fn weight(&self) -> i64 {
        i64::from(self.cores.percent()).max(1)
    }

    fn wanted(&self) -> i64 {
        match self.demand {
            Demand::Idle => 0,
            Demand::UpTo(rate) => rate.clamp(0, CARD),
            Demand::All => CARD,
        }
    }
}

/// What one tenant without a guarantee gets at least, if there are `count` that want time.
#[must_use]
pub fn floor(count: usize) -> i64 {
    let count = i64::try_from(count).unwrap_or(i64::MAX).max(1);
    FLOOR.min(FLOORS / count).max(1)
}

/// Divides a card.
#[must_use]
pub fn allot(tenants: &[Tenant]) -> Vec<Allotment> {
    let is_beggar = |tenant: &Tenant| tenant.guarantee() == 0;
    let wants = |tenant: &&Tenant| tenant.demand != Demand::Idle;
    let beggars = tenants.iter().filter(wants).filter(|t| is_beggar(t));
    let floor = floor(beggars.count());
    let floors: i64 = tenants
        .iter()
        .map(|tenant| {
            if is_beggar(tenant) {
                floor.min(tenant.wanted())
            } else {
                0
            }
        })
        .sum();
    let guarantees: i64 = tenants
        .iter()
        .map(|tenant| tenant.guarantee().min(tenant.wanted()))
        .sum();
    let room = CARD - floors;
    let mut parts: Vec<i64> = tenants
        .iter()
        .map(|tenant| {
            let guarantee = tenant.guarantee().min(tenant.wanted());
            match is_beggar(tenant) {
                true => floor.min(tenant.wanted()),
                false if guarantees > room => guarantee * room / guarantees,
                false => guarantee,
            }
        })
        .collect();
    let mut left = CARD - parts.iter().sum::<i64>();
    let mut ranks: Vec<Priority> = tenants.iter().map(|tenant| tenant.priority).collect();
    ranks.sort_unstable_by(|a, b| b.cmp(a));
    ranks.dedup();
    for rank in ranks {
        left = share_out(left, tenants, &mut parts, |tenant| tenant.priority == rank);
    }
    tenants
        .iter()
        .zip(parts)
        .map(|(tenant, part)| {
            let at_once = match tenant.spare {
                // Nobody wants what is left, so a tenant may take it without being asked first.
                Spare::Taken => tenant.guarantee().max(part + left),
                Spare::Left => tenant.guarantee(),
            };
            Allotment {
                part,
                rate: at_once.max(part).max(floor).min(CARD),
            }
        })
        .collect()
}

/// Gives `left` by weight to the tenants that are `eligible` until they have what they want; returns what they leave.
fn share_out(
    mut left: i64,
    tenants: &[Tenant],
    parts: &mut [i64],
    eligible: impl Fn(&Tenant) -> bool,
) -> i64 {
    loop {
        let open = |(tenant, part): &(&Tenant, &mut i64)| {
            tenant.spare == Spare::Taken && eligible(tenant) && **part < tenant.wanted()
        };
        let weights: i64 = tenants
            .iter()
            .zip(&mut *parts)
            .filter(open)
            .map(|(tenant, _)| tenant.weight())
            .sum();
        if weights == 0 || left < weights {
            return left;
        }
        let round = left;
        for (tenant, part) in tenants.iter().zip(&mut *parts).filter(open) {
            let more = (round * tenant.weight() / weights).min(tenant.wanted() - *part);
            *part += more;
            left -= more;
        }
    }
}
