//! Texts of objects, which anyone may have written, for terminals.

/// Returns a text without control characters, which must not reach a terminal.
#[must_use]
pub fn printable(text: &str) -> String {
    text.replace(char::is_control, " ")
}
