//! Names that are close to a misspelled one.

/// Most edits between a name and what was meant.
const MAX_EDITS: usize = 3;

/// Returns the candidate that the name most likely misspells; none if no candidate is close.
pub(super) fn closest<'a>(
    name: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let limit = MAX_EDITS.min(name.len() / 3);
    let close = candidates.into_iter().filter_map(|candidate| {
        let edits = edits(name, candidate);
        (edits <= limit).then_some((edits, candidate))
    });
    close.min().map(|(_, candidate)| candidate)
}

/// Returns the number of letters to insert, delete or replace to turn one name into the other (Levenshtein).
fn edits(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (deleted, letter) in one.bytes().enumerate() {
        let mut before = deleted;
        let mut left = deleted + 1;
        let mut next = vec![left];
        for (above, candidate) in row.iter().skip(1).zip(other.bytes()) {
            let replaced = before + usize::from(letter != candidate);
            left = replaced.min(above + 1).min(left + 1);
            before = *above;
            next.push(left);
        }
        row = next;
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_edits() {
        for (one, other, count) in [
            ("", "abc", 3),
            ("abc", "abc", 0),
            ("vgpu.drava.io", "vgpu.drava.dev", 3),
            ("vpgu", "vgpu", 2),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(edits(one, other), count, "{one} {other}");
            assert_eq!(edits(other, one), count, "{other} {one}");
        }
    }

    #[test]
    fn returns_close_names_only() {
        let known = ["memory", "cores"];
        assert_eq!(closest("memmory", known), Some("memory"));
        assert_eq!(closest("core", known), Some("cores"));
        assert_eq!(closest("x", known), None);
        assert_eq!(closest("bandwidth", known), None);
    }
}
