//! Order of the entries of a cache. The loader uses binary search, so the order must equal the loader's exactly.

use std::cmp::Ordering;

use super::{Entry, hwcap_name};

/// `ldconfig`'s order: names descending in the loader's order, then flags descending. Among entries of one name and
/// kind, variants for particular processors come first, ordered by subdirectory, then by descending number of bits of
/// `hwcap`, then by descending `hwcap`.
pub(super) fn entries(a: &Entry, b: &Entry) -> Ordering {
    compare_names(&b.name, &a.name)
        .then_with(|| b.flags.cmp(&a.flags))
        .then_with(|| {
            match (hwcap_name(a.hwcap), hwcap_name(b.hwcap)) {
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                // The names are sorted, so their indices have the order of the names.
                (Some(a_name), Some(b_name)) => a_name.cmp(&b_name),
                (None, None) => {
                    let bits = |entry: &Entry| entry.hwcap.count_ones();
                    bits(b).cmp(&bits(a)).then_with(|| b.hwcap.cmp(&a.hwcap))
                }
            }
        })
}

/// The loader's order of names (`_dl_cache_libcmp`): digits compare as numbers, and greater than any other character.
/// Numbers wrap at 32 bits; characters are signed where C's `char` is.
fn compare_names(a: &[u8], b: &[u8]) -> Ordering {
    let (mut a, mut b) = (a, b);
    loop {
        let (Some(first_a), Some(first_b)) = (a.first(), b.first()) else {
            return tail(a).cmp(&tail(b));
        };
        match (first_a.is_ascii_digit(), first_b.is_ascii_digit()) {
            (true, true) => {
                let (number_a, number_b) = (number(&mut a), number(&mut b));
                if number_a != number_b {
                    return number_a.wrapping_sub(number_b).cmp(&0);
                }
            }
            (true, false) => return Ordering::Greater,
            (false, true) => return Ordering::Less,
            (false, false) if first_a == first_b => {
                a = a.get(1..).unwrap_or_default();
                b = b.get(1..).unwrap_or_default();
            }
            (false, false) => return character(*first_a).cmp(&character(*first_b)),
        }
    }
}

/// Returns the character at which a comparison ends; a C string ends with a zero byte.
fn tail(rest: &[u8]) -> i32 {
    rest.first().map_or(0, |first| character(*first))
}

#[cfg(target_arch = "x86_64")]
fn character(byte: u8) -> i32 {
    i32::from(byte.cast_signed())
}

#[cfg(not(target_arch = "x86_64"))]
fn character(byte: u8) -> i32 {
    i32::from(byte)
}

fn number(rest: &mut &[u8]) -> i32 {
    let mut value = 0_i32;
    while let Some((digit, tail)) = rest
        .split_first()
        .filter(|(digit, _)| digit.is_ascii_digit())
    {
        value = value
            .wrapping_mul(10)
            .wrapping_add(i32::from(*digit - b'0'));
        *rest = tail;
    }
    value
}
