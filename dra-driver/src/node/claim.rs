//! Identities of ResourceClaims and of their shares.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};

/// UID of a ResourceClaim: 1 to 63 letters, digits and dashes, because the UID names files and fits a limits page.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClaimUid(String);

/// The text is not a claim UID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid claim UID {0:?}: expected 1 to 63 letters, digits and dashes")]
pub struct InvalidClaimUid(String);

impl ClaimUid {
    /// Parses a UID.
    ///
    /// # Errors
    /// When the text has other characters or another length.
    pub fn parse(text: &str) -> Result<Self, InvalidClaimUid> {
        let is_valid = (1..=63).contains(&text.len())
            && text
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if is_valid {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidClaimUid(text.to_owned()))
        }
    }

    /// Returns the UID of a claim; `None` without a valid one.
    #[must_use]
    pub fn of(claim: &ObjectMeta) -> Option<Self> {
        Self::parse(claim.uid.as_deref()?).ok()
    }

    /// Returns the UID as text.
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

/// ID of a share: the `shareID` of the allocation result, a lowercase UUID. The ID names directories.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ShareId(String);

/// The text is not a share ID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid share ID {0:?}: expected a lowercase UUID")]
pub struct InvalidShareId(String);

impl ShareId {
    /// Parses an ID.
    ///
    /// # Errors
    /// When the text is not a lowercase UUID.
    pub fn parse(text: &str) -> Result<Self, InvalidShareId> {
        let is_valid = text.len() == 36
            && text
                .bytes()
                .enumerate()
                .all(|(position, byte)| match position {
                    8 | 13 | 18 | 23 => byte == b'-',
                    _ => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
                });
        if is_valid {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidShareId(text.to_owned()))
        }
    }

    /// Returns the ID as text.
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

/// Reference to a claim, as kubelet sends it. Displays as `namespace/name (uid …)`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClaimRef {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// UID of the claim; another UID means another claim of the same name.
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
    fn rejects_uids_that_are_unsafe_file_names() {
        assert!(ClaimUid::parse("8d5a1c3e-0000-4000-8000-000000000001").is_ok());
        for bad in ["", "..", "a/b", "a.json", "a b", "ä", &"x".repeat(64)] {
            assert!(ClaimUid::parse(bad).is_err(), "{bad:?}");
        }
    }
}
