//! Format of a record file. Pure.
//!
//! ```text
//! 0d4a1f9e {"version":1,"gpus":["GPU-…"],"crc32":"5be07c11"}
//! {"claim":{…},"devices":[…],…}
//! ```
//!
//! The first line is the header, after its own CRC-32. The header has the same form in every version, so a build of any
//! version reads which GPUs the claim holds. The second line is the body; its form depends on the version. The CRC-32 of
//! the body covers the raw bytes, so builds with more or fewer fields can verify it.
//!
//! A body with a valid checksum that does not parse was written by another build: it has a newer version, or within the
//! version a kind (of device, policy or delivery) that this build does not know. Fields may be added within a version if
//! they have a default and a build that ignores them stays correct; everything else needs a new kind or version.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{ClaimRecord, Damage, Unsupported};

/// Version of the body that this build writes. It reads this one and all before.
const VERSION: u32 = 1;

/// Variable with a version, for tests of two processes: a debug build with it stands for a later build.
#[cfg(debug_assertions)]
const TEST_VERSION: &str = "DRAVA_TEST_RECORD_VERSION";

fn version() -> u32 {
    #[cfg(debug_assertions)]
    if let Some(version) = std::env::var(TEST_VERSION)
        .ok()
        .and_then(|version| version.parse().ok())
    {
        return version;
    }
    VERSION
}

/// Header of a record. Its form never changes, except for additional fields, which older builds ignore.
#[derive(Serialize, Deserialize)]
struct Header {
    /// Version of the body.
    version: u32,
    /// UUIDs of the GPUs that the claim holds.
    gpus: BTreeSet<String>,
    /// CRC-32 of the body in hex.
    crc32: String,
}

/// A record that this build cannot use.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unreadable {
    Unsupported(Unsupported),
    Damaged(Damage),
}

pub(super) fn encode(record: &ClaimRecord) -> Vec<u8> {
    // Serializing structs of strings and numbers into memory cannot fail.
    let body = serde_json::to_vec(record).unwrap_or_default();
    let header = Header {
        version: version(),
        gpus: record.held_gpus(),
        crc32: checksum(&body),
    };
    let header = serde_json::to_vec(&header).unwrap_or_default();
    [
        checksum(&header).as_bytes(),
        b" ",
        &header,
        b"\n",
        &body,
        b"\n",
    ]
    .concat()
}

pub(super) fn decode(bytes: &[u8]) -> Result<ClaimRecord, Unreadable> {
    let (header, body) = match bytes.iter().position(|&byte| byte == b'\n') {
        Some(end) => bytes.split_at(end),
        None => (bytes, &[][..]),
    };
    let header = decode_header(header).map_err(|reason| {
        Unreadable::Damaged(Damage {
            gpus: None,
            reason: format!("damaged header: {reason}"),
        })
    })?;
    let unsupported = |reason| {
        Unreadable::Unsupported(Unsupported {
            gpus: header.gpus.clone(),
            reason,
        })
    };
    if !(1..=version()).contains(&header.version) {
        return Err(unsupported(format!(
            "format version {}, this build reads version {}",
            header.version,
            version()
        )));
    }
    let body = decode_body(body, &header.crc32).map_err(|reason| {
        Unreadable::Damaged(Damage {
            gpus: Some(header.gpus.clone()),
            reason,
        })
    })?;
    serde_json::from_slice(body)
        .map_err(|error| unsupported(format!("content of another build: {error}")))
}

fn decode_header(line: &[u8]) -> Result<Header, String> {
    let (found, header) = line.split_at_checked(9).ok_or("truncated")?;
    let expected = checksum(header);
    if found != format!("{expected} ").as_bytes() {
        let found = String::from_utf8_lossy(found);
        return Err(format!("checksum {found:?}, expected {expected}"));
    }
    serde_json::from_slice(header).map_err(|error| error.to_string())
}

/// Returns the body if its checksum matches. `rest` follows the header.
fn decode_body<'a>(rest: &'a [u8], expected: &str) -> Result<&'a [u8], String> {
    let body = rest
        .strip_prefix(b"\n")
        .and_then(|rest| rest.strip_suffix(b"\n"))
        .ok_or("truncated")?;
    let found = checksum(body);
    if found == expected {
        Ok(body)
    } else {
        Err(format!("checksum {found}, expected {expected}"))
    }
}

fn checksum(bytes: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(bytes))
}
