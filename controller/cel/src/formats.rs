//! Named formats: `format.named`, `format.dns1123Label()` and others, and `validate`, as in
//! `k8s.io/apiserver/pkg/cel/library`. The patterns and texts are those of Kubernetes.

use std::sync::LazyLock;

use cel::common::types::{CelList, CelOptional, CelString, Type};
use cel::common::value::{CowVal, Val};
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload};
use regex::Regex;

use crate::opaque::{Content, Opaque};
use crate::{budget, url};

/// A format with a name. `validate` returns what is wrong with a text.
#[derive(Debug)]
pub(crate) struct Format {
    /// Name of the function.
    pub(crate) name: &'static str,
    validate: fn(&str) -> Vec<String>,
}

type FormatValue = Opaque<&'static Format>;

impl Content for &'static Format {
    fn cel_type() -> &'static Type {
        static TYPE: Type = Type::new_unspecified_type("kubernetes.NamedFormat");
        &TYPE
    }
}

impl PartialEq for Format {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

const COUNT: usize = 13;

pub(crate) static FORMATS: [Format; COUNT] = [
    Format {
        name: "dns1123Label",
        validate: dns1123_label,
    },
    Format {
        name: "dns1123Subdomain",
        validate: dns1123_subdomain,
    },
    Format {
        name: "dns1035Label",
        validate: dns1035_label,
    },
    Format {
        name: "qualifiedName",
        validate: qualified_name,
    },
    Format {
        name: "dns1123LabelPrefix",
        validate: |text| dns1123_label(&mask_trailing_dash(text)),
    },
    Format {
        name: "dns1123SubdomainPrefix",
        validate: |text| dns1123_subdomain(&mask_trailing_dash(text)),
    },
    Format {
        name: "dns1035LabelPrefix",
        validate: |text| dns1035_label(&mask_trailing_dash(text)),
    },
    Format {
        name: "labelValue",
        validate: label_value,
    },
    Format {
        name: "uri",
        validate: |text| url::request_uri_error(text).into_iter().collect(),
    },
    Format {
        name: "uuid",
        validate: |text| unless(UUID.is_match(text), "does not match the UUID format"),
    },
    Format {
        name: "byte",
        validate: |text| unless(BASE64.is_match(text), "invalid base64"),
    },
    Format {
        name: "date",
        validate: |text| unless(is_date(text), "invalid date"),
    },
    Format {
        name: "datetime",
        validate: |text| unless(is_datetime(text), "invalid datetime"),
    },
];

/// `format.NAME()` of each format; the `cel` crate takes functions, not closures.
static CONSTANTS: [Function; COUNT] = [
    constant::<0>,
    constant::<1>,
    constant::<2>,
    constant::<3>,
    constant::<4>,
    constant::<5>,
    constant::<6>,
    constant::<7>,
    constant::<8>,
    constant::<9>,
    constant::<10>,
    constant::<11>,
    constant::<12>,
];

type Outcome<'b, 'v> = Result<CowVal<'b, 'v>, ExecutionError>;
type Function = for<'b, 'v> fn(Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v>;

pub(crate) fn register(env: &mut Env) -> Result<(), DeclarationError> {
    for (format, constant) in FORMATS.iter().zip(CONSTANTS) {
        let name = format!("format.{}", format.name);
        env.add_overload(&name, &name, vec![], constant)?;
    }
    add_overload!(env, fn named: (CelString) -> CelOptional, name = "format.named")?;
    add_member_overload!(env, fn validate: (FormatValue, CelString) -> Result<CelOptional>)
}

fn constant<'b, 'v, const INDEX: usize>(_: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    Ok(CowVal::owned(Opaque(&FORMATS[INDEX])))
}

fn named(name: &CelString<'_>) -> CelOptional<'static> {
    let found = FORMATS.iter().find(|format| format.name == name.inner());
    found.map_or_else(CelOptional::none, |format| {
        CelOptional::of(Box::new(Opaque(format)))
    })
}

/// Returns an optional without a value for a valid text.
fn validate(
    this: &FormatValue,
    text: &CelString<'_>,
) -> Result<CelOptional<'static>, ExecutionError> {
    budget::charge_text(text.inner())?;
    let errors = (this.0.validate)(text.inner());
    if errors.is_empty() {
        return Ok(CelOptional::none());
    }
    let errors: Vec<Box<dyn Val>> = errors
        .into_iter()
        .map(|error| Box::new(CelString::from(error)) as Box<dyn Val>)
        .collect();
    Ok(CelOptional::of(Box::new(CelList::from(errors))))
}

const DNS1123_LABEL: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const DNS1123_SUBDOMAIN: &str = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const DNS1035_LABEL: &str = "[a-z]([-a-z0-9]*[a-z0-9])?";
const LABEL_KEY: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const LABEL_VALUE: &str = "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?";

static IS_DNS1123_LABEL: LazyLock<Regex> = LazyLock::new(|| compiled(DNS1123_LABEL));
static IS_DNS1123_SUBDOMAIN: LazyLock<Regex> = LazyLock::new(|| compiled(DNS1123_SUBDOMAIN));
static IS_DNS1035_LABEL: LazyLock<Regex> = LazyLock::new(|| compiled(DNS1035_LABEL));
static IS_LABEL_KEY: LazyLock<Regex> = LazyLock::new(|| compiled(LABEL_KEY));
static IS_LABEL_VALUE: LazyLock<Regex> = LazyLock::new(|| compiled(LABEL_VALUE));
static UUID: LazyLock<Regex> = LazyLock::new(|| {
    compiled("(?i)[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}")
});
static BASE64: LazyLock<Regex> = LazyLock::new(|| {
    compiled("([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{4})")
});
static DATE: LazyLock<Regex> = LazyLock::new(|| compiled("([0-9]{4})-([0-9]{2})-([0-9]{2})"));
static TIME: LazyLock<Regex> = LazyLock::new(|| {
    compiled("([0-9]{2}):([0-9]{2}):([0-9]{2})(.[0-9]+)?(z|([+-][0-9]{2}:[0-9]{2}))")
});

/// Returns the expression that matches whole texts.
#[expect(clippy::expect_used, reason = "the patterns are constants")]
fn compiled(pattern: &str) -> Regex {
    Regex::new(&format!("^{pattern}$")).expect("a valid pattern")
}

fn unless(is_valid: bool, error: &str) -> Vec<String> {
    if is_valid {
        return Vec::new();
    }
    vec![error.to_owned()]
}

/// Maximum lengths, in bytes.
const LABEL_BYTES: usize = 63;
const SUBDOMAIN_BYTES: usize = 253;

/// Kubernetes calls the unit `characters` or `bytes`.
fn too_long(text: &str, limit: usize, unit: &str) -> Option<String> {
    (text.len() > limit).then(|| format!("must be no more than {limit} {unit}"))
}

fn mismatch(message: &str, pattern: &str, examples: &[&str]) -> String {
    let examples: Vec<String> = examples.iter().map(|text| format!("'{text}', ")).collect();
    format!(
        "{message} (e.g. {}regex used for validation is '{pattern}')",
        examples.join(" or ")
    )
}

fn dns1123_label(text: &str) -> Vec<String> {
    let mut errors: Vec<String> = too_long(text, LABEL_BYTES, "characters")
        .into_iter()
        .collect();
    if !IS_DNS1123_LABEL.is_match(text) {
        errors.push(if IS_DNS1123_SUBDOMAIN.is_match(text) {
            "must not contain dots".to_owned()
        } else {
            let message = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must \
                 start and end with an alphanumeric character";
            mismatch(message, DNS1123_LABEL, &["my-name", "123-abc"])
        });
    }
    errors
}

fn dns1123_subdomain(text: &str) -> Vec<String> {
    subdomain(text, "characters")
}

fn subdomain(text: &str, unit: &str) -> Vec<String> {
    let mut errors: Vec<String> = too_long(text, SUBDOMAIN_BYTES, unit).into_iter().collect();
    if !IS_DNS1123_SUBDOMAIN.is_match(text) {
        let message = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and \
             must start and end with an alphanumeric character";
        errors.push(mismatch(message, DNS1123_SUBDOMAIN, &["example.com"]));
    }
    errors
}

fn dns1035_label(text: &str) -> Vec<String> {
    let mut errors: Vec<String> = too_long(text, LABEL_BYTES, "characters")
        .into_iter()
        .collect();
    if !IS_DNS1035_LABEL.is_match(text) {
        let message = "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic \
             character, and end with an alphanumeric character";
        errors.push(mismatch(message, DNS1035_LABEL, &["my-name", "abc-123"]));
    }
    errors
}

fn qualified_name(text: &str) -> Vec<String> {
    let message = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";
    let expected = || mismatch(message, LABEL_KEY, &["MyName", "my.name", "123-abc"]);
    let (prefix, name) = match text.split_once('/') {
        None => (None, text),
        Some((_, rest)) if rest.contains('/') => {
            return vec![format!(
                "a valid label key {} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')",
                expected()
            )];
        }
        Some((prefix, name)) => (Some(prefix), name),
    };
    let mut errors = match prefix {
        None => Vec::new(),
        Some("") => vec!["prefix part must be non-empty".to_owned()],
        Some(prefix) => subdomain(prefix, "bytes")
            .into_iter()
            .map(|error| format!("prefix part {error}"))
            .collect(),
    };
    if name.is_empty() {
        errors.push("name part must be non-empty".to_owned());
    }
    errors.extend(too_long(name, LABEL_BYTES, "bytes").map(|error| format!("name part {error}")));
    if !IS_LABEL_KEY.is_match(name) {
        errors.push(format!("name part {}", expected()));
    }
    errors
}

fn label_value(text: &str) -> Vec<String> {
    let mut errors: Vec<String> = too_long(text, LABEL_BYTES, "bytes").into_iter().collect();
    if !IS_LABEL_VALUE.is_match(text) {
        let message = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and \
             must start and end with an alphanumeric character";
        errors.push(mismatch(
            message,
            LABEL_VALUE,
            &["MyValue", "my_value", "12345"],
        ));
    }
    errors
}

/// A prefix may end with a dash. As in Kubernetes, the character before the dash is not checked.
fn mask_trailing_dash(text: &str) -> String {
    let bytes = text.as_bytes();
    match bytes.split_last_chunk::<2>() {
        Some((start, [_, b'-'])) => String::from_utf8_lossy(start).into_owned() + "a",
        _ => text.to_owned(),
    }
}

fn is_date(text: &str) -> bool {
    let Some(parts) = DATE.captures(text) else {
        return false;
    };
    let (_, [year, month, day]) = parts.extract();
    let number = |text: &str| text.parse::<u32>().unwrap_or_default();
    let year = number(year);
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let days = match number(month) {
        4 | 6 | 9 | 11 => 30,
        2 if is_leap => 29,
        2 => 28,
        1..=12 => 31,
        _ => return false,
    };
    (1..=days).contains(&number(day))
}

/// As Kubernetes, ignores everything after a second `T`.
fn is_datetime(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    let mut parts = lower.split('t');
    let (Some(date), Some(time)) = (parts.next(), parts.next()) else {
        return false;
    };
    let in_range = |index: usize, limit: &str, parts: &regex::Captures<'_>| {
        parts.get(index).is_some_and(|part| part.as_str() <= limit)
    };
    is_date(date)
        && TIME.captures(time).is_some_and(|parts| {
            in_range(1, "23", &parts) && in_range(2, "59", &parts) && in_range(3, "59", &parts)
        })
}
