//! Percent-encoding of the parts of a URL, as in Go's `net/url`.

/// A part of a URL, which determines the characters that stand for themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Path,
    Host,
    /// Zone of an IPv6 address.
    Zone,
    User,
    Query,
    Fragment,
}

impl Part {
    /// Returns whether `byte` stands for itself.
    pub(super) const fn allows(self, byte: u8) -> bool {
        match byte {
            b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'-' | b'.' | b'_' | b'~' => true,
            b'$' | b'&' | b'+' | b'=' | b',' | b';' => !matches!(self, Self::Query),
            b'!' | b'(' | b')' | b'*' => {
                matches!(self, Self::Fragment | Self::Zone | Self::Host)
            }
            b':' => matches!(self, Self::Fragment | Self::Zone | Self::Host | Self::Path),
            b'"' | b'\'' | b'<' | b'>' | b'[' | b']' => matches!(self, Self::Zone | Self::Host),
            b'/' | b'@' => matches!(self, Self::Fragment | Self::Path),
            b'?' => matches!(self, Self::Fragment),
            _ => false,
        }
    }

    /// Returns whether an encoded `value` is allowed; `escape` is its spelling.
    fn allows_encoded(self, value: u8, escape: &[u8]) -> bool {
        match self {
            Self::Host => value >= 0x80 || escape == b"%25",
            Self::Zone => escape == b"%25" || value == b' ' || Self::Host.allows(value),
            Self::Path | Self::User | Self::Query | Self::Fragment => true,
        }
    }
}

/// Decodes `text`.
///
/// # Errors
/// The text of Go for an invalid escape, or an invalid character of a host.
pub(super) fn decode(text: &str, part: Part) -> Result<Vec<u8>, String> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        match byte {
            b'%' => {
                let digits = tail.get(..2).unwrap_or(tail);
                let escape: Vec<u8> = [b"%".as_slice(), digits].concat();
                let value = hexadecimal(digits)
                    .filter(|value| part.allows_encoded(*value, &escape))
                    .ok_or_else(|| {
                        let escape = String::from_utf8_lossy(&escape);
                        format!("invalid URL escape {escape:?}")
                    })?;
                decoded.push(value);
                rest = tail.get(2..).unwrap_or_default();
            }
            b'+' if part == Part::Query => decoded.push(b' '),
            _ if matches!(part, Part::Host | Part::Zone)
                && byte.is_ascii()
                && !part.allows(byte) =>
            {
                let character = char::from(byte).to_string();
                return Err(format!("invalid character {character:?} in host name"));
            }
            _ => decoded.push(byte),
        }
    }
    Ok(decoded)
}

fn hexadecimal(digits: &[u8]) -> Option<u8> {
    let [high, low] = digits else { return None };
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let value = digit(*high)? * 16 + digit(*low)?;
    u8::try_from(value).ok()
}

/// Encodes `bytes`.
pub(super) fn encode(bytes: &[u8], part: Part) -> String {
    let mut encoded = String::with_capacity(bytes.len());
    for &byte in bytes {
        if part.allows(byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Returns whether `text` can be the encoding of a part: it has no character that must be encoded.
pub(super) fn is_encoded(text: &str, part: Part) -> bool {
    text.bytes().all(|byte| {
        matches!(
            byte,
            b'!' | b'$'
                | b'&'
                | b'\''
                | b'('
                | b')'
                | b'*'
                | b'+'
                | b','
                | b';'
                | b'='
                | b':'
                | b'@'
                | b'['
                | b']'
                | b'%'
        ) || part.allows(byte)
    })
}

#[cfg(test)]
mod tests {
    use super::{Part, decode, encode};

    #[test]
    fn decodes_escapes_of_each_part() {
        assert_eq!(decode("a%20b+c", Part::Path).unwrap(), b"a b+c");
        assert_eq!(decode("a%20b+c", Part::Query).unwrap(), b"a b c");
        assert_eq!(
            decode("a%2", Part::Path).unwrap_err(),
            r#"invalid URL escape "%2""#
        );
        assert_eq!(
            decode("%zzz", Part::Path).unwrap_err(),
            r#"invalid URL escape "%zz""#
        );
        assert!(decode("%41", Part::Host).is_err(), "ASCII is not encoded");
        assert_eq!(decode("%E9", Part::Host).unwrap(), [0xe9]);
        assert_eq!(encode(b"a b/?", Part::Path), "a%20b/%3F");
    }
}
