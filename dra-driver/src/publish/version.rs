//! Conversion of NVIDIA version strings to semver 2.0.0, which version attributes require.

/// Returns `text` as three numbers without leading zeros: `580.65.06` becomes `580.65.6` and `13.0` becomes `13.0.0`.
/// Text after the third number is dropped; text without a leading number becomes `0.0.0`.
#[must_use]
pub(super) fn normalize(text: &str) -> String {
    let mut parts = text
        .split('.')
        .map_while(|part| {
            let digits = part
                .find(|char: char| !char.is_ascii_digit())
                .unwrap_or(part.len());
            part.get(..digits)
                .and_then(|digits| digits.parse::<u64>().ok())
        })
        .fuse();
    let mut next = || parts.next().unwrap_or(0);
    let (major, minor, patch) = (next(), next(), next());
    format!("{major}.{minor}.{patch}")
}

#[cfg(test)]
mod tests {
    use super::normalize;

    #[test]
    fn converts_driver_versions_to_semver() {
        for (text, version) in [
            ("580.65.06", "580.65.6"),
            ("13.0", "13.0.0"),
            ("9.0", "9.0.0"),
            ("470.82.01-grid", "470.82.1"),
            ("535.104.05.1", "535.104.5"),
            ("550.rc1.7", "550.0.0"),
            ("", "0.0.0"),
            ("unknown", "0.0.0"),
            ("99999999999999999999.1", "0.0.0"),
        ] {
            assert_eq!(normalize(text), version, "{text:?}");
        }
    }
}
