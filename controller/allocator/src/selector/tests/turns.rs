//! Evaluations of a decision in turns.

use super::*;

/// An expression of about that many steps.
fn steps(steps: usize) -> String {
    let list = format!("[{}]", vec!["1"; 100].join(", "));
    let range = format!("[{}]", vec!["1"; steps / 100].join(", "));
    format!("{range}.all(a, {list}.all(b, a == b))")
}

#[test]
fn suspends_costly_evaluations_of_a_turn() {
    let selectors = Selectors::default();
    let costly = selectors.compile("", &steps(15_000));
    let device = device(false);
    let mut turn = Turn::limited();
    let results = [(); 3].map(|()| selectors.matches(&costly, &device, &mut turn));
    let expected = [Ok(true), Ok(true), Err(SelectorError::Suspended)];
    assert_eq!(results, expected, "the second one exceeds the turn");
    let next = selectors.matches(&costly, &device, &mut Turn::limited());
    assert_eq!(next, Ok(true), "the next turn");
    let mut endless = Turn::endless();
    for _ in 0..3 {
        let matched = selectors.matches(&costly, &device, &mut endless);
        assert_eq!(matched, Ok(true), "without a limit");
    }
}

#[test]
fn suspends_no_usual_evaluations() {
    let selectors = Selectors::default();
    let device = device(false);
    for expression in [
        r#"device.attributes["dra.example.com"].name == "fish""#,
        r#"device.attributes["dra.example.com"].name.matches("^fi.*")"#,
        r#"["cat", "bird", "fish"].exists(name, device.attributes["dra.example.com"].name == name)"#,
        r#"device.capacity["dra.example.com"].memory.compareTo(quantity("1Mi")) >= 0"#,
    ] {
        let selector = selectors.compile("", expression);
        let mut turn = Turn::limited();
        for _ in 0..20_000 {
            let matched = selectors.matches(&selector, &device, &mut turn);
            assert_eq!(matched, Ok(true), "{expression}");
        }
    }
}
