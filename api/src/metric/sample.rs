//! Reading of OpenMetrics text, as [`exposition`](super::exposition) writes it.

/// A line of OpenMetrics text with a value.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample<'a> {
    /// Name of the metric: without the suffix of counters.
    pub name: &'a str,
    labels: Vec<(&'a str, String)>,
    /// Its value.
    pub value: f64,
}

impl<'a> Sample<'a> {
    /// Reads a line; `None` if it has no value, or labels that are not closed.
    #[must_use]
    pub fn read(line: &'a str) -> Option<Self> {
        let end = line.find(['{', ' '])?;
        let (name, mut rest) = line.split_at(end);
        let mut labels = Vec::new();
        if let Some(mut inside) = rest.strip_prefix('{') {
            rest = loop {
                if let Some(after) = inside.strip_prefix('}') {
                    break after;
                }
                let (label, after) = inside.split_once("=\"")?;
                let (text, after) = quoted(after)?;
                labels.push((label, text));
                inside = after.strip_prefix(',').unwrap_or(after);
            };
        }
        // A time may follow.
        let value = rest.split_whitespace().next()?.parse().ok()?;
        Some(Self {
            name: name.strip_suffix("_total").unwrap_or(name),
            labels,
            value,
        })
    }

    /// Returns the value of a label; empty without it.
    #[must_use]
    pub fn label(&self, name: &str) -> String {
        let label = self.labels.iter().find(|(label, _)| *label == name);
        label.map(|(_, text)| text.clone()).unwrap_or_default()
    }
}

/// Reads a text up to its closing quote, and returns what follows.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut read = String::new();
    let mut letters = text.char_indices();
    while let Some((position, letter)) = letters.next() {
        match letter {
            '"' => return Some((read, text.get(position + 1..)?)),
            '\\' => match letters.next()?.1 {
                'n' => read.push('\n'),
                other => read.push(other),
            },
            other => read.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_lines_that_are_no_samples() {
        for line in [
            "",
            "# EOF",
            "name",
            "name{",
            "name{a=\"b",
            "name{a=\"b\"}",
            "name{a=b} 1",
            "name x",
        ] {
            assert!(Sample::read(line).is_none(), "{line}");
        }
        let sample = Sample::read("name_total{a=\"b\",} 1.5 1700000000").expect("a sample");
        assert_eq!(
            (sample.name, sample.label("a"), sample.value),
            ("name", "b".to_owned(), 1.5)
        );
    }
}
