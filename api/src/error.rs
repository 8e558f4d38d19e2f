//! Errors as text, equal in all programs. An error type names only the failed operation; its causes follow.

use std::error::Error;
use std::fmt::Write as _;

/// Formats the error and its causes in one line. A cause that repeats the text before it is skipped.
#[must_use]
pub fn describe(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.ends_with(&next) {
            // Writing to a string cannot fail.
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
    #[error("cannot open file a")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn appends_each_cause_once() {
        let error = Outer(std::io::Error::other("permission denied"));
        assert_eq!(describe(&error), "cannot open file a: permission denied");
    }
}
