//! Kubernetes quantities ("8Gi", "500m", "1e3") as exact fixed-point numbers.
//!
//! A value is a whole number of nano-units in an `i128`, so sums and comparisons are exact, plus its suffix family, used
//! for printing. Equality, order and hash depend on the value only: `1Gi == 1024Mi`. The semantics are those of
//! `k8s.io/apimachinery/pkg/api/resource`: precision beyond a nano-unit rounds away from zero, binary values are capped at
//! 2⁶³−1, printing is canonical.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Add, AddAssign, Neg, Sub};
use std::str::FromStr;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Nano-units in one unit.
const NANO: i128 = 1_000_000_000;
/// Largest value in binary notation, as in Kubernetes: 2⁶³−1 units.
const BINARY_CAP: i128 = i64::MAX as i128 * NANO;
const BINARY_SUFFIXES: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const DECIMAL_SUFFIXES: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];

/// Exact number with a suffix family for printing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quantity {
    nano: i128,
    format: Format,
}

/// Family of suffixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// Powers of ten: `n u m k M G T P E`.
    #[default]
    DecimalSi,
    /// Powers of two: `Ki Mi Gi Ti Pi Ei`.
    BinarySi,
    /// Powers of ten as `e3`.
    DecimalExponent,
}

/// Error of parsing a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseQuantityError {
    /// The text has no number, two points or trailing text.
    #[error(
        "{text:?} is not a quantity: expected a number with an optional suffix, such as 8Gi, 500m or 1e3"
    )]
    Malformed {
        /// The text.
        text: String,
    },
    /// The number has a suffix that Kubernetes does not know.
    #[error(
        "{text:?} is not a quantity: unknown suffix {suffix:?}, use one of n u m k M G T P E Ki Mi Gi Ti Pi Ei"
    )]
    UnknownSuffix {
        /// The text.
        text: String,
        /// The part after the number.
        suffix: String,
    },
    /// The number has more digits than a Kubernetes object can hold.
    #[error("{text:?} is too large or too precise for a quantity")]
    OutOfRange {
        /// The text.
        text: String,
    },
}

impl Quantity {
    /// Zero.
    pub const ZERO: Self = Self {
        nano: 0,
        format: Format::DecimalSi,
    };

    /// Returns a count, printed in decimal.
    #[must_use]
    pub const fn count(value: u64) -> Self {
        Self {
            nano: value as i128 * NANO,
            format: Format::DecimalSi,
        }
    }

    /// Returns a number of bytes, printed with binary suffixes.
    #[must_use]
    pub const fn bytes(value: u64) -> Self {
        Self {
            nano: value as i128 * NANO,
            format: Format::BinarySi,
        }
    }

    /// Returns the value in nano-units.
    #[must_use]
    pub const fn nano(self) -> i128 {
        self.nano
    }

    /// Returns a value of `nano` nano-units with the suffix family of `self`.
    #[must_use]
    pub const fn with_nano(self, nano: i128) -> Self {
        Self { nano, ..self }
    }

    /// Returns the suffix family.
    #[must_use]
    pub const fn format(self) -> Format {
        self.format
    }

    /// Returns whether the value is zero.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.nano == 0
    }

    /// Returns whether the value is below zero.
    #[must_use]
    pub const fn is_negative(self) -> bool {
        self.nano < 0
    }

    /// Returns the value in whole units; `None` with a fraction or beyond `i64`.
    #[must_use]
    pub fn to_i64(self) -> Option<i64> {
        (self.nano % NANO == 0)
            .then(|| i64::try_from(self.nano / NANO).ok())
            .flatten()
    }

    /// Returns the value in whole units, rounded up; `None` where these are below zero or beyond `u64`.
    #[must_use]
    pub fn to_u64_rounded_up(self) -> Option<u64> {
        u64::try_from(div_up(self.nano, NANO)).ok()
    }

    /// Returns the value in units as the nearest float.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "the result is approximate by contract"
    )]
    pub fn to_f64_lossy(self) -> f64 {
        self.nano as f64 / NANO as f64
    }

    /// Returns the sum, limited to the range of `i128` nano-units.
    #[must_use]
    pub fn saturating_add(self, other: Self) -> Self {
        Self {
            nano: self.nano.saturating_add(other.nano),
            format: if self.is_zero() {
                other.format
            } else {
                self.format
            },
        }
    }

    /// Returns the difference, limited to the range of `i128` nano-units.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        self.saturating_add(-other)
    }
}

/// Returns the quotient rounded towards positive infinity; `divisor` is positive.
const fn div_up(value: i128, divisor: i128) -> i128 {
    let quotient = value.div_euclid(divisor);
    if value.rem_euclid(divisor) == 0 {
        quotient
    } else {
        quotient + 1
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nano == other.nano
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nano.cmp(&other.nano)
    }
}

impl Hash for Quantity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.nano.hash(state);
    }
}

impl Add for Quantity {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.saturating_add(other)
    }
}

impl AddAssign for Quantity {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Quantity {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.saturating_sub(other)
    }
}

impl Neg for Quantity {
    type Output = Self;

    fn neg(self) -> Self {
        self.with_nano(self.nano.saturating_neg())
    }
}

impl FromStr for Quantity {
    type Err = ParseQuantityError;

    fn from_str(text: &str) -> Result<Self, ParseQuantityError> {
        let malformed = || ParseQuantityError::Malformed {
            text: text.to_owned(),
        };
        let out_of_range = || ParseQuantityError::OutOfRange {
            text: text.to_owned(),
        };

        let (negative, unsigned) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let number_len = unsigned
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(number_len);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.len() + fraction.len() == 0 || fraction.contains('.') {
            return Err(malformed());
        }
        let scale = Scale::parse(suffix).ok_or_else(|| {
            match suffix.chars().all(|c| c.is_ascii_alphanumeric()) {
                true => ParseQuantityError::UnknownSuffix {
                    text: text.to_owned(),
                    suffix: suffix.to_owned(),
                },
                false => malformed(),
            }
        })?;

        let digits = format!("{whole}{}", fraction.trim_end_matches('0'));
        let mantissa: i128 = match digits.trim_start_matches('0') {
            "" => 0,
            significant => significant.parse().map_err(|_| out_of_range())?,
        };
        let fraction_len =
            i32::try_from(fraction.trim_end_matches('0').len()).map_err(|_| out_of_range())?;
        let magnitude = scale
            .nano(mantissa, fraction_len)
            .ok_or_else(out_of_range)?;
        let (magnitude, format) = match scale {
            Scale::Binary(_) if magnitude > BINARY_CAP => (BINARY_CAP, Format::BinarySi),
            // A fraction of a byte is printed in decimal: 2n, not a fraction of Ki.
            Scale::Binary(_) if magnitude > 0 && magnitude < NANO => (magnitude, Format::DecimalSi),
            Scale::Binary(_) => (magnitude, Format::BinarySi),
            Scale::Decimal(_, format) => (magnitude, format),
        };
        Ok(Self {
            nano: if negative { -magnitude } else { magnitude },
            format,
        })
    }
}

/// Factor of a suffix.
enum Scale {
    /// Power of 2 by exponent.
    Binary(u32),
    /// Power of 10 by exponent.
    Decimal(i32, Format),
}

impl Scale {
    fn parse(suffix: &str) -> Option<Self> {
        if let Some(index) = BINARY_SUFFIXES.iter().position(|s| *s == suffix) {
            return Some(Self::Binary(10 * (u32::try_from(index).ok()? + 1)));
        }
        if let Some(index) = DECIMAL_SUFFIXES.iter().position(|s| *s == suffix) {
            return Some(Self::Decimal(
                3 * (i32::try_from(index).ok()? - 3),
                Format::DecimalSi,
            ));
        }
        let exponent = suffix.strip_prefix(['e', 'E'])?;
        Some(Self::Decimal(
            exponent.parse().ok()?,
            Format::DecimalExponent,
        ))
    }

    /// Returns `mantissa × 10^-fraction_len × self` in nano-units, rounded up; `None` beyond `i128`.
    fn nano(&self, mantissa: i128, fraction_len: i32) -> Option<i128> {
        if mantissa == 0 {
            return Some(0);
        }
        let (mut power_of_two, power_of_ten) = match self {
            Self::Binary(exponent) => (*exponent, 9 - fraction_len),
            Self::Decimal(exponent, _) => (0, exponent.checked_add(9)?.checked_sub(fraction_len)?),
        };
        if power_of_ten >= 0 {
            let factor = 10_i128.checked_pow(power_of_ten.unsigned_abs())?;
            // Overflow of `i128` is far beyond the cap of binary values.
            let product = mantissa.checked_mul(factor);
            return match self {
                Self::Binary(exponent) => Some(
                    product
                        .and_then(|value| value.checked_mul(1 << exponent))
                        .unwrap_or(i128::MAX),
                ),
                Self::Decimal(..) => product,
            };
        }
        // 10^n = 2^n 5^n: cancelling the powers of 2 first keeps the product small.
        let divide = power_of_ten.unsigned_abs();
        let cancelled = divide.min(power_of_two);
        power_of_two -= cancelled;
        let numerator = mantissa.checked_mul(1 << power_of_two)?;
        let divisor = 5_i128
            .checked_pow(divide)
            .and_then(|fives| fives.checked_mul(1_i128.checked_shl(divide - cancelled)?));
        // A divisor beyond `i128` leaves a fraction of a nano-unit, which rounds up to one.
        Some(
            divisor
                .filter(|d| *d > 0)
                .map_or(1, |divisor| div_up(numerator, divisor)),
        )
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_zero() {
            return f.write_str("0");
        }
        let whole = self.nano % NANO == 0;
        let large = self.nano.unsigned_abs() >= 1024 * NANO.unsigned_abs();
        match self.format {
            Format::BinarySi if whole && large => {
                let (number, steps) = strip_factor(self.nano / NANO, 1024, BINARY_SUFFIXES.len());
                let suffix = steps
                    .checked_sub(1)
                    .and_then(|i| BINARY_SUFFIXES.get(i))
                    .copied()
                    .unwrap_or_default();
                write!(f, "{number}{suffix}")
            }
            Format::BinarySi | Format::DecimalSi => {
                let (number, steps) = strip_factor(self.nano, 1000, DECIMAL_SUFFIXES.len() - 1);
                let suffix = DECIMAL_SUFFIXES.get(steps).copied().unwrap_or_default();
                write!(f, "{number}{suffix}")
            }
            Format::DecimalExponent => {
                let (number, steps) = strip_factor(self.nano, 1000, usize::MAX);
                match steps {
                    3 => write!(f, "{number}"),
                    0..3 => write!(f, "{number}e-{}", 9 - 3 * steps),
                    _ => write!(f, "{number}e{}", 3 * steps - 9),
                }
            }
        }
    }
}

/// Divides `value` by `factor` while there is no remainder, at most `limit` times.
fn strip_factor(mut value: i128, factor: i128, limit: usize) -> (i128, usize) {
    let mut steps = 0;
    while steps < limit && value % factor == 0 {
        value /= factor;
        steps += 1;
    }
    (value, steps)
}

impl TryFrom<&RawQuantity> for Quantity {
    type Error = ParseQuantityError;

    fn try_from(raw: &RawQuantity) -> Result<Self, ParseQuantityError> {
        raw.0.parse()
    }
}

impl From<Quantity> for RawQuantity {
    fn from(quantity: Quantity) -> Self {
        Self(quantity.to_string())
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// Kubernetes also accepts a JSON number.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Text {
            Text(String),
            Number(serde_json::Number),
        }
        let text = match Text::deserialize(deserializer)? {
            Text::Text(text) => text,
            Text::Number(number) => number.to_string(),
        };
        text.trim().parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests;
