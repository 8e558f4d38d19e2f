use super::*;

const NAME: &str = "drava-webhook.drava-system.svc";
const DAY: Duration = Duration::from_secs(24 * 3600);

fn at(day: u64) -> Timestamp {
    Timestamp::UNIX_EPOCH
        .checked_add(DAY * u32::try_from(20_000 + day).unwrap())
        .unwrap()
}

fn issue(day: u64, previous: Option<&str>) -> Certificate {
    Certificate::issue(NAME, at(day), 90 * DAY, previous).unwrap()
}

#[test]
fn issues_certificate_valid_for_lifetime_and_name() {
    let certificate = issue(0, None);
    certificate.verify(NAME, at(0)).unwrap();
    certificate.verify(NAME, at(89)).unwrap();
    assert!(certificate.verify(NAME, at(91)).is_err(), "expired");
    assert!(certificate.verify("other.drava-system.svc", at(0)).is_err());
}

#[test]
fn trusts_previous_authority_during_rotation() {
    let first = issue(0, None);
    let second = issue(60, Some(first.bundle()));
    let third = issue(120, Some(second.bundle()));
    let trusts = |bundle: &Certificate, certificate: &Certificate, day| {
        let mixed = Certificate {
            bundle_pem: bundle.bundle_pem.clone(),
            ..certificate.clone()
        };
        mixed.verify(NAME, at(day)).is_ok()
    };
    assert!(
        trusts(&second, &first, 61),
        "replicas still serve the first"
    );
    assert!(trusts(&second, &second, 61));
    assert!(!trusts(&first, &second, 61), "the bundle comes first");
    assert!(trusts(&third, &second, 121));
    assert!(!trusts(&third, &first, 61), "bundles do not grow");
}

#[test]
fn round_trips_through_secret() {
    let mut secret = Secret::default();
    assert!(Certificate::of_secret(&secret).is_err());
    assert_eq!(bundle_of(&secret), None);
    let certificate = issue(0, None);
    certificate.write_to(&mut secret);
    let read = Certificate::of_secret(&secret).unwrap();
    read.verify(NAME, at(1)).unwrap();
    assert_eq!(bundle_of(&secret).as_deref(), Some(certificate.bundle()));
}

#[test]
fn rejects_damaged_or_mismatched_secret() {
    let certificate = issue(0, None);
    let other = issue(0, None);
    for damaged in [
        Certificate {
            key_pem: other.key_pem.clone(),
            ..certificate.clone()
        },
        Certificate {
            key_pem: "no key".to_owned(),
            ..certificate.clone()
        },
        Certificate {
            chain_pem: String::new(),
            ..certificate.clone()
        },
        Certificate {
            bundle_pem: other.bundle_pem.clone(),
            ..certificate.clone()
        },
        Certificate {
            bundle_pem: "-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----".to_owned(),
            ..certificate.clone()
        },
    ] {
        assert!(damaged.verify(NAME, at(1)).is_err());
    }
}

#[test]
fn replaces_damaged_bundle() {
    let certificate = issue(0, Some("-----END CERTIFICATE-----"));
    certificate.verify(NAME, at(1)).unwrap();
}

#[test]
fn reads_validity_for_metrics() {
    let certificate = issue(0, None);
    let validity = certificate.validity().unwrap();
    certificate
        .verify(NAME, Timestamp::from_second(validity.end).unwrap())
        .unwrap();
    let after = Timestamp::from_second(validity.end + 1).unwrap();
    assert!(certificate.verify(NAME, after).is_err());
    assert!(validity.start < at(0).as_second(), "clocks differ");
}
