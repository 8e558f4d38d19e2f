//! Text for terminals.

use comfy_table::{Table, presets};

/// Formats rows in columns like kubectl: three spaces apart, without borders.
#[must_use]
pub fn table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_header(header.to_vec())
        .add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 3));
    }
    let mut text = table.trim_fmt();
    text.push('\n');
    text
}

/// Returns a text of an object, which any user may have written, without control characters: they must not reach a terminal.
#[must_use]
pub fn printable(text: &str) -> String {
    text.replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligns_columns() {
        let rows = vec![
            vec!["n1".to_owned(), "8 GiB".to_owned(), String::new()],
            vec!["node-2".to_owned(), "–".to_owned(), "x".to_owned()],
        ];
        assert_eq!(
            table(&["NODE", "MEMORY", "CLAIMS"], rows),
            "NODE     MEMORY   CLAIMS\nn1       8 GiB\nnode-2   –        x\n"
        );
    }
}
