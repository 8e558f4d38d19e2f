//! Errors as text, the same in every program. Each error type says only what was attempted; the causes come after it,
//! once.

use std::error::Error;
use std::fmt::Write as _;

/// The error and its causes in one line. A cause that repeats the text before it is left out.
#[must_use]
pub fn describe(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.ends_with(&next) {
            // Writing to a string has no way to fail.
            let _ = write!(text, ": {next}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("open a door")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn causes_follow_once() {
        let error = Outer(std::io::Error::other("it is locked"));
        assert_eq!(describe(&error), "open a door: it is locked");
    }
}
