//! Order of names with numbers: `node-2` is before `node-10`.

use std::cmp::Ordering;

/// A part of a name.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Part<'a> {
    /// Number of digits and digits, without leading zeros.
    Number(usize, &'a [u8]),
    Text(&'a [u8]),
}

/// Compares two names.
pub(crate) fn compare(one: &str, other: &str) -> Ordering {
    parts(one)
        .cmp(parts(other))
        // Names that differ in leading zeros only.
        .then_with(|| one.cmp(other))
}

fn parts(name: &str) -> impl Iterator<Item = Part<'_>> {
    let runs = name
        .as_bytes()
        .chunk_by(|one, next| one.is_ascii_digit() == next.is_ascii_digit());
    runs.map(|run| {
        if !run.first().is_some_and(u8::is_ascii_digit) {
            return Part::Text(run);
        }
        let zeros = run.iter().take_while(|digit| **digit == b'0').count();
        let digits = run.get(zeros..).unwrap_or_default();
        Part::Number(digits.len(), digits)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_names_by_their_numbers() {
        let ordered = [
            "10-a",
            "gpu",
            "gpu-9",
            "node-1",
            "node-1.zone-2",
            "node-1.zone-10",
            "node-02",
            "node-2",
            "node-3",
            "node-10",
            "node-18446744073709551616",
            "node-a",
        ];
        let mut names = ordered;
        names.reverse();
        names.sort_by(|one, other| compare(one, other));
        assert_eq!(names, ordered);
    }
}
