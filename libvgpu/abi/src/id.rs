//! Identities in the limits page: claim and share as text, the GPU by its UUID.

use core::fmt;
use core::str::FromStr;

/// Size of an [`IdText`] in the page, including its terminating NUL.
pub const ID_TEXT_SIZE: usize = 64;

/// A claim UID or share ID: 1 to 63 printable ASCII characters.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IdText {
    bytes: [u8; ID_TEXT_SIZE],
}

/// Error: the text is not an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidId;

impl fmt::Display for InvalidId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("identity must be 1 to 63 printable ASCII characters without spaces")
    }
}

impl core::error::Error for InvalidId {}

impl IdText {
    /// Checks `text` and copies it.
    ///
    /// # Errors
    /// If the text is empty, longer than 63 bytes, or not printable ASCII.
    pub fn new(text: &str) -> Result<Self, InvalidId> {
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(InvalidId);
        }
        let mut bytes = [0; ID_TEXT_SIZE];
        match bytes.get_mut(..text.len()) {
            Some(target) if text.len() < ID_TEXT_SIZE => target.copy_from_slice(text.as_bytes()),
            _ => return Err(InvalidId),
        }
        Ok(Self { bytes })
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let end = self.bytes.iter().position(|&byte| byte == 0).unwrap_or(0);
        self.bytes
            .get(..end)
            .and_then(|text| core::str::from_utf8(text).ok())
            .unwrap_or_default()
    }

    pub(crate) fn to_bytes(self) -> [u8; ID_TEXT_SIZE] {
        self.bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; ID_TEXT_SIZE]) -> Result<Self, InvalidId> {
        let end = bytes.iter().position(|&byte| byte == 0).ok_or(InvalidId)?;
        let text = bytes.get(..end).ok_or(InvalidId)?;
        Self::new(core::str::from_utf8(text).map_err(|_| InvalidId)?)
    }
}

impl fmt::Debug for IdText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for IdText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for IdText {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::new(text)
    }
}

/// UUID of a GPU, as `cuDeviceGetUuid` returns it (16 bytes) and NVML prints it (`GPU-` + UUID).
///
/// A MIG device has a UUID with another prefix and is never limited by the interposer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceUuid(pub [u8; 16]);

/// Error: the text is not `GPU-` followed by a UUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidDeviceUuid;

impl fmt::Display for InvalidDeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("device UUID must have the form GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx")
    }
}

impl core::error::Error for InvalidDeviceUuid {}

/// Positions of the hyphens in a UUID.
const HYPHENS: [usize; 4] = [8, 13, 18, 23];

impl FromStr for DeviceUuid {
    type Err = InvalidDeviceUuid;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let uuid = text.strip_prefix("GPU-").ok_or(InvalidDeviceUuid)?;
        if uuid.len() != 36 {
            return Err(InvalidDeviceUuid);
        }
        let mut value = 0u128;
        for (position, byte) in uuid.bytes().enumerate() {
            if HYPHENS.contains(&position) {
                if byte != b'-' {
                    return Err(InvalidDeviceUuid);
                }
                continue;
            }
            let digit = char::from(byte).to_digit(16).ok_or(InvalidDeviceUuid)?;
            value = (value << 4) | u128::from(digit);
        }
        Ok(Self(value.to_be_bytes()))
    }
}

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::string::ToString as _;

    #[test]
    fn accepts_only_short_printable_ids() {
        assert_eq!(
            IdText::new("8d5a").map(|id| id.to_string()),
            Ok("8d5a".into())
        );
        assert!(IdText::new(&"x".repeat(63)).is_ok());
        for bad in ["", "a b", "ä", "a\0", &"x".repeat(64)] {
            assert_eq!(IdText::new(bad), Err(InvalidId), "{bad:?}");
        }
    }

    #[test]
    fn round_trips_device_uuid() {
        let text = "GPU-00112233-4455-6677-8899-aabbccddeeff";
        let uuid: DeviceUuid = text.parse().unwrap();
        assert_eq!(uuid.0[0], 0);
        assert_eq!(uuid.0[15], 0xff);
        assert_eq!(uuid.to_string(), text);
    }

    #[test]
    fn rejects_malformed_device_uuid() {
        for bad in [
            "00112233-4455-6677-8899-aabbccddeeff",
            "MIG-00112233-4455-6677-8899-aabbccddeeff",
            "GPU-00112233-4455-6677-8899-aabbccddeef",
            "GPU-00112233-4455-6677-8899-aabbccddeeffa",
            "GPU-0011223344-55-6677-8899-aabbccddeeff",
            "GPU-00112233-4455-6677-8899-aabbccddeefg",
        ] {
            assert_eq!(bad.parse::<DeviceUuid>(), Err(InvalidDeviceUuid), "{bad:?}");
        }
    }
}
