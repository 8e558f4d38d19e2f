//! Columns as kubectl prints them.

/// Lays rows out in columns, three spaces apart; the last column is not padded.
pub(crate) fn columns(header: &[&str], rows: &[Vec<String>]) -> String {
    let header: Vec<String> = header.iter().map(|name| (*name).to_owned()).collect();
    let all: Vec<&Vec<String>> = std::iter::once(&header).chain(rows).collect();
    let widths: Vec<usize> = (0..header.len())
        .map(|column| {
            all.iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for row in all {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            let padding = width + 3 - cell.chars().count();
            line.extend(std::iter::repeat_n(' ', padding));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_line_up() {
        let rows = [
            vec!["n1".to_owned(), "8 GiB".to_owned(), String::new()],
            vec!["node-2".to_owned(), "–".to_owned(), "x".to_owned()],
        ];
        assert_eq!(
            columns(&["NODE", "MEMORY", "WHO"], &rows),
            "NODE     MEMORY   WHO\nn1       8 GiB\nnode-2   –        x\n"
        );
    }
}
