//! Vectors of the documented behavior of Kubernetes quantities, and round trips.

use proptest::prelude::*;

use super::*;

fn parse(text: &str) -> Quantity {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

const fn nano(units: i128) -> i128 {
    units * NANO
}

#[test]
fn parses_values_and_formats() {
    use Format::{BinarySi, DecimalExponent, DecimalSi};
    let cases: &[(&str, i128, Format)] = &[
        ("0", 0, DecimalSi),
        ("0Ki", 0, BinarySi),
        ("1", nano(1), DecimalSi),
        ("+1", nano(1), DecimalSi),
        ("-1", nano(-1), DecimalSi),
        ("1Ki", nano(1024), BinarySi),
        ("6Gi", nano(6 << 30), BinarySi),
        ("3Ei", nano(3 << 60), BinarySi),
        ("5n", 5, DecimalSi),
        ("4u", 4_000, DecimalSi),
        ("3m", 3_000_000, DecimalSi),
        ("8k", nano(8_000), DecimalSi),
        ("1E", nano(1_000_000_000_000_000_000), DecimalSi),
        ("12E", nano(12_000_000_000_000_000_000), DecimalSi),
        ("1e3", nano(1_000), DecimalExponent),
        ("1E3", nano(1_000), DecimalExponent),
        ("1E-3", 1_000_000, DecimalExponent),
        ("1.3E+6", nano(1_300_000), DecimalExponent),
        ("9223372036854775807", nano(i64::MAX as i128), DecimalSi),
        ("100.035k", nano(100_035), DecimalSi),
        (".001", 1_000_000, DecimalSi),
        ("1.", nano(1), DecimalSi),
        ("1.G", nano(1_000_000_000), DecimalSi),
        ("0.5Mi", nano(512 * 1024), BinarySi),
        ("100.035Ki", 102_435_840_000_000, BinarySi),
        ("0.025Ti", 27_487_790_694_400_000_000, BinarySi),
        // More precise than a nano-unit: rounded away from zero.
        ("3.001n", 4, DecimalSi),
        ("0.9n", 1, DecimalSi),
        ("-0.9n", -1, DecimalSi),
        ("0.0000000001", 1, DecimalSi),
        ("1.1E-9", 2, DecimalExponent),
        ("1e-40", 1, DecimalExponent),
        ("0.000000000001Ki", 2, DecimalSi),
        // Beyond 2^63-1 in binary notation: capped.
        ("9Ei", nano(i64::MAX as i128), BinarySi),
        ("12Ei", nano(i64::MAX as i128), BinarySi),
        ("9223372036854775807Ki", nano(i64::MAX as i128), BinarySi),
        ("9223372036854775807Ei", nano(i64::MAX as i128), BinarySi),
    ];
    for (text, expected, format) in cases {
        let quantity = parse(text);
        assert_eq!(
            (quantity.nano(), quantity.format()),
            (*expected, *format),
            "{text}"
        );
    }
}

#[test]
fn rejects_malformed_text() {
    for text in [
        "", "Gi", ".", "-", "+", "1.2.3", "1 Gi", " 1", "1ki", "1KB", "--1", "0x10", "1e", "e3",
        "1e1.5", "٣",
    ] {
        assert!(text.parse::<Quantity>().is_err(), "{text:?} parsed");
    }
    assert_eq!(
        "8GB".parse::<Quantity>().map_err(|e| e.to_string()),
        Err("\"8GB\" is not a quantity: unknown suffix \"GB\", use one of n u m k M G T P E Ki Mi Gi Ti Pi Ei".to_owned())
    );
    assert!(matches!(
        "1e30".parse::<Quantity>(),
        Err(ParseQuantityError::OutOfRange { .. })
    ));
    assert!(matches!(
        "1e2147483647".parse::<Quantity>(),
        Err(ParseQuantityError::OutOfRange { .. })
    ));
}

#[test]
fn prints_canonical_text() {
    for (text, canonical) in [
        ("0Gi", "0"),
        ("1024Mi", "1Gi"),
        ("1.5Gi", "1536Mi"),
        ("1023Ki", "1023Ki"),
        ("1000Ki", "1000Ki"),
        ("1023", "1023"),
        ("0.5Ki", "512"),
        ("1.5", "1500m"),
        ("1500m", "1500m"),
        ("2000m", "2"),
        ("1000k", "1M"),
        ("1e4", "10e3"),
        ("0.001e0", "1e-3"),
        ("12E", "12E"),
        ("-1.5Gi", "-1536Mi"),
        ("81920Mi", "80Gi"),
        ("100", "100"),
        ("1.3Ki", "1331200m"),
    ] {
        assert_eq!(parse(text).to_string(), canonical, "{text}");
    }
}

#[test]
fn ignores_suffix_in_comparisons() {
    assert_eq!(parse("1Gi"), parse("1024Mi"));
    assert!(parse("1G") < parse("1Gi"));
    assert!(parse("100Gi") < parse("10000T"));
    assert!(parse("-1") < parse("0"));
    assert_eq!(parse("500m") + parse("500m"), parse("1"));
    assert_eq!((parse("0") + parse("1Gi")).to_string(), "1Gi");
}

#[test]
fn converts_to_whole_numbers() {
    assert_eq!(parse("8Gi").to_u64_rounded_up(), Some(8 << 30));
    assert_eq!(parse("0.1").to_u64_rounded_up(), Some(1));
    assert_eq!(parse("-1").to_u64_rounded_up(), None);
    assert_eq!(parse("1500m").to_i64(), None);
    assert_eq!(parse("12E").to_i64(), None);
}

#[test]
fn reads_and_writes_json() {
    assert_eq!(
        serde_json::from_str::<Quantity>("\" 8Gi \"").unwrap(),
        parse("8Gi")
    );
    assert_eq!(serde_json::from_str::<Quantity>("30").unwrap(), parse("30"));
    assert_eq!(
        serde_json::from_str::<Quantity>("0.5").unwrap(),
        parse("500m")
    );
    assert_eq!(serde_json::to_string(&parse("1024Mi")).unwrap(), "\"1Gi\"");
    assert!(serde_json::from_str::<Quantity>("true").is_err());
}

proptest! {
    #[test]
    fn parses_printed_values(nano in -1_000_000_000_000_000_000_000_000_000_i128..1_000_000_000_000_000_000_000_000_000, binary in any::<bool>(), exponent in any::<bool>()) {
        let format = match (binary, exponent) {
            (true, _) => Format::BinarySi,
            (false, true) => Format::DecimalExponent,
            (false, false) => Format::DecimalSi,
        };
        let quantity = Quantity { nano, format };
        prop_assert_eq!(parse(&quantity.to_string()).nano(), nano);
        prop_assert_eq!(parse(&quantity.to_string()).to_string(), quantity.to_string());
    }

    #[test]
    fn parses_any_text_without_panic(text in "[-+]?[0-9.]{0,45}[a-zA-Z]{0,3}[-+]?[0-9]{0,12}") {
        if let Ok(quantity) = text.parse::<Quantity>() {
            prop_assert_eq!(parse(&quantity.to_string()), quantity);
        }
    }

    #[test]
    fn parses_mebibytes_exactly(mebibytes in 0_u64..1 << 40) {
        prop_assert_eq!(parse(&format!("{mebibytes}Mi")), Quantity::bytes(mebibytes << 20));
    }
}
