//! Identity of a ResourceClaim on this node.

use std::fmt;

use serde::{Deserialize, Serialize};

/// UID of a ResourceClaim. It names files, so it holds only what the API server puts into UIDs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClaimUid(String);

/// A text that is no claim UID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no claim UID: 1 to 63 letters, digits and dashes")]
pub struct InvalidClaimUid(String);

impl ClaimUid {
    /// Checks `text`.
    ///
    /// # Errors
    /// When it holds anything but letters, digits and dashes, or is too long for a limits page.
    pub fn parse(text: &str) -> Result<Self, InvalidClaimUid> {
        let sound = (1..=63).contains(&text.len())
            && text
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if sound {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidClaimUid(text.to_owned()))
        }
    }

    /// The UID as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ClaimUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for ClaimUid {
    type Error = InvalidClaimUid;

    fn try_from(text: String) -> Result<Self, InvalidClaimUid> {
        Self::parse(&text)
    }
}

impl From<ClaimUid> for String {
    fn from(uid: ClaimUid) -> Self {
        uid.0
    }
}

/// ID of a share of a device: the allocation result's `shareID`, a lowercase UUID. It names directories.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ShareId(String);

/// A text that is no share ID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no share ID: a lowercase UUID")]
pub struct InvalidShareId(String);

impl ShareId {
    /// Checks `text`.
    ///
    /// # Errors
    /// When it is not a lowercase UUID.
    pub fn parse(text: &str) -> Result<Self, InvalidShareId> {
        let sound = text.len() == 36
            && text
                .bytes()
                .enumerate()
                .all(|(position, byte)| match position {
                    8 | 13 | 18 | 23 => byte == b'-',
                    _ => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
                });
        if sound {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidShareId(text.to_owned()))
        }
    }

    /// The ID as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ShareId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for ShareId {
    type Error = InvalidShareId;

    fn try_from(text: String) -> Result<Self, InvalidShareId> {
        Self::parse(&text)
    }
}

impl From<ShareId> for String {
    fn from(id: ShareId) -> Self {
        id.0
    }
}

/// A claim as kubelet names it. Prints as `namespace/name (uid …)`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClaimRef {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// UID of the claim; a claim of the same name with another UID is another claim.
    pub uid: ClaimUid,
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} (uid {})", self.namespace, self.name, self.uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uids_that_could_leave_their_directory_are_refused() {
        assert!(ClaimUid::parse("8d5a1c3e-0000-4000-8000-000000000001").is_ok());
        for bad in ["", "..", "a/b", "a.json", "a b", "ä", &"x".repeat(64)] {
            assert!(ClaimUid::parse(bad).is_err(), "{bad:?}");
        }
    }
}
