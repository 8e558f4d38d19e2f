//! Taking neighbours' time slices out of what a share's events measure.
//!
//! Contexts of different processes run by turns. An event pair round a kernel that was interrupted measures the
//! neighbours' turns too, and no share can tell from inside. The node agent can: it knows what each share measured
//! in a stretch of time, and from NVML what each process used ([`own_part`]), or at least for how long the card ran
//! anything at all ([`own_parts`]). The second is an estimate: the surplus is time that was measured by more than one
//! share, each of which had half of it, a third of it… on average; a share whose kernels are short has all of its own.

/// The most shares that are told apart; the figures of further ones are left alone.
pub const MOST_SHARES: usize = 64;

/// The figure for [`crate::own_time`] when everything measured is a share's own.
pub const ALL: u32 = 1_000_000;

/// Of what a share measured, how many parts per million are its own, if what it used is known: both figures of the same
/// stretch of time, `measured_us` as in [`own_parts`].
#[must_use]
pub fn own_part(measured_us: u64, used_us: u64) -> u32 {
    let parts = u128::from(used_us.min(measured_us)) * u128::from(ALL);
    parts
        .checked_div(u128::from(measured_us))
        .and_then(|parts| u32::try_from(parts).ok())
        .unwrap_or(ALL)
        .max(1)
}

/// Of each share's measured time, how many parts per million are its own.
///
/// `measured_us` is what each share of a card measured in one stretch of time **with every figure taken as it is**
/// (what was given out before for [`crate::own_time`] undone), `busy_us` for how long the card ran anything in it.
/// Writes one figure per share to `own` and returns how many.
///
/// The surplus of the sum over `busy_us` is taken from the shares by how likely each met the others: in proportion
/// to its own time times that of all others. For two shares that is half each, which is exact.
pub fn own_parts(measured_us: &[u64], busy_us: u64, own: &mut [u32]) -> usize {
    let count = measured_us.len().min(own.len()).min(MOST_SHARES);
    // Below 2^32 µs (an hour) each, so that the products fit.
    let bounded = |us: &u64| (*us).min(u64::from(u32::MAX));
    let sum: u64 = measured_us.iter().take(count).map(bounded).sum();
    let surplus = sum.saturating_sub(busy_us);
    let meeting = |us: u64| u128::from(us) * u128::from(sum.saturating_sub(us));
    let meetings: u128 = measured_us
        .iter()
        .take(count)
        .map(|us| meeting(bounded(us)))
        .sum();
    for (us, own) in measured_us
        .iter()
        .map(bounded)
        .zip(own.iter_mut())
        .take(count)
    {
        let foreign = (u128::from(surplus) * meeting(us))
            .checked_div(meetings)
            .and_then(|foreign| u64::try_from(foreign).ok())
            .unwrap_or(0)
            .min(us);
        let parts = ((us - foreign) * u64::from(ALL)).checked_div(us);
        *own = parts
            .and_then(|parts| u32::try_from(parts).ok())
            .unwrap_or(ALL)
            .max(1);
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(measured: &[u64], busy: u64) -> [u32; 4] {
        let mut own = [0; 4];
        own_parts(measured, busy, &mut own);
        own
    }

    #[test]
    fn what_did_not_overlap_is_all_ones_own() {
        assert_eq!(own(&[300, 700], 1000), [ALL, ALL, 0, 0]);
        assert_eq!(own(&[300, 0], 1000), [ALL, ALL, 0, 0]);
        assert_eq!(own(&[], 1000), [0; 4]);
        // A card that says it did less than one share alone measured: the figures do not belong together.
        assert_eq!(own(&[300], 100), [ALL, 0, 0, 0]);
    }

    #[test]
    fn two_shares_lose_half_of_the_surplus_each() {
        // 200 µs alone, 700 µs alone, 100 µs both: measured 300 and 800, had 250 and 750.
        let [first, second, ..] = own(&[300, 800], 1000);
        assert_eq!((first, second), (833_333, 937_500));
    }

    #[test]
    fn three_equal_shares_all_the_time_have_a_third_each() {
        let [first, second, third, _] = own(&[900, 900, 900], 900);
        assert_eq!([first, second, third], [333_333; 3]);
    }

    #[test]
    fn what_is_known_to_be_used_is_ones_own() {
        assert_eq!(own_part(0, 0), ALL);
        assert_eq!(own_part(400, 300), 750_000);
        assert_eq!(own_part(300, 400), ALL);
        assert_eq!(own_part(300, 0), 1);
        assert_eq!(own_part(u64::MAX, u64::MAX), ALL);
    }

    #[test]
    fn no_figures_overflow() {
        let [first, second, ..] = own(&[u64::MAX, u64::MAX], 0);
        assert_eq!((first, second), (1, 1));
    }
}
