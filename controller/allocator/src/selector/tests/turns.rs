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
    let results = in_turn(|| [(); 3].map(|()| selectors.matches(&costly, &device)));
    let expected = [Ok(true), Ok(true), Err(SelectorError::Suspended)];
    assert_eq!(results, expected, "the second one exceeds the turn");
    assert!(is_suspended());
    assert_eq!(
        in_turn(|| selectors.matches(&costly, &device)),
        Ok(true),
        "the next turn"
    );
    assert!(!is_suspended());
    for _ in 0..3 {
        assert_eq!(selectors.matches(&costly, &device), Ok(true), "no turn");
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
        in_turn(|| {
            for _ in 0..20_000 {
                assert_eq!(
                    selectors.matches(&selector, &device),
                    Ok(true),
                    "{expression}"
                );
            }
        });
        assert!(!is_suspended(), "{expression}");
    }
}
