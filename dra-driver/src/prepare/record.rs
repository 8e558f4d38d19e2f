//! Claim records: one durable file per prepared claim.
//!
//! A record suffices to answer kubelet again, to repair, to check conflicts and to unprepare, without the API server and
//! without the GPU library.
//!
//! The file has two lines: a header `{"version":1,"crc32":"…"}` and the record as JSON. The checksum covers the raw bytes
//! of the second line, so builds with more or fewer fields can verify it. Files are replaced atomically. A damaged record
//! (disk error, manual edit) is quarantined and rebuilt from the API server; it does not stop the driver.

use std::fs;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Delivery, Prepared};
use crate::claim::{ClaimRef, ClaimUid};
use crate::files;

/// Version of the record format. Fields may be added within a version if they have a default.
const VERSION: u32 = 1;

/// File extension of a quarantined record.
const CORRUPT: &str = "corrupt";

/// Stage of a claim's preparation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Stage {
    /// State may exist; kubelet got no successful answer.
    Intent,
    /// All state exists; kubelet may have got a successful answer.
    Prepared,
}

/// Record of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimRecord {
    /// The claim.
    pub claim: ClaimRef,
    /// Stage of the preparation.
    pub stage: Stage,
    /// Devices of the claim.
    pub devices: Vec<Prepared>,
    /// Content hash of the libvgpu.so of its containers.
    pub library: String,
    /// Content hash of the CDI hook of its containers.
    pub hook: String,
    /// Delivery of libvgpu.so.
    #[serde(default)]
    pub delivery: Delivery,
}

/// Content of a record file.
#[derive(Debug, PartialEq, Eq)]
pub enum Loaded {
    /// The file does not exist.
    Absent,
    /// The record is valid.
    Present(Box<ClaimRecord>),
    /// The record is damaged, for this reason.
    Corrupt(String),
}

/// A record file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {}", path.display())]
pub struct RecordError {
    operation: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    crc32: String,
}

/// Record files of this node.
#[derive(Debug, Clone)]
pub struct RecordStore {
    dir: PathBuf,
}

impl RecordStore {
    /// Returns the records in `dir`, which must exist.
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// Reads the record of a claim.
    ///
    /// # Errors
    /// When the file cannot be read. A damaged record is [`Loaded::Corrupt`].
    pub fn load(&self, uid: &ClaimUid) -> Result<Loaded, RecordError> {
        let path = self.path(uid);
        match fs::read(&path) {
            Ok(bytes) => Ok(match decode(&bytes) {
                Ok(record) if record.claim.uid == *uid => Loaded::Present(Box::new(record)),
                Ok(record) => Loaded::Corrupt(format!("record of claim {}", record.claim)),
                Err(reason) => Loaded::Corrupt(reason),
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Loaded::Absent),
            Err(source) => Err(RecordError {
                operation: "read the claim record",
                path,
                source,
            }),
        }
    }

    /// Writes a record durably.
    ///
    /// # Errors
    /// When the record cannot be written; an existing record then stays.
    pub fn save(&self, record: &ClaimRecord) -> Result<(), RecordError> {
        let path = self.path(&record.claim.uid);
        files::write_durably(&path, &encode(record), 0o600).map_err(|source| RecordError {
            operation: "write the claim record",
            path,
            source,
        })
    }

    /// Removes the record of a claim, quarantined or not. Succeeds when no record exists.
    ///
    /// # Errors
    /// When a file exists and cannot be removed.
    pub fn remove(&self, uid: &ClaimUid) -> Result<(), RecordError> {
        for path in [self.path(uid), self.quarantine_path(uid)] {
            files::remove_durably(&path).map_err(|source| RecordError {
                operation: "remove the claim record",
                path,
                source,
            })?;
        }
        Ok(())
    }

    /// Quarantines a damaged record. Returns the new path.
    ///
    /// # Errors
    /// When the file cannot be renamed.
    pub fn quarantine(&self, uid: &ClaimUid) -> Result<PathBuf, RecordError> {
        let (path, quarantined) = (self.path(uid), self.quarantine_path(uid));
        fs::rename(&path, &quarantined)
            .and_then(|()| files::sync_dir(&self.dir))
            .map_err(|source| RecordError {
                operation: "quarantine the claim record",
                path,
                source,
            })?;
        Ok(quarantined)
    }

    /// Returns whether the claim's record is quarantined.
    #[must_use]
    pub fn is_quarantined(&self, uid: &ClaimUid) -> bool {
        self.quarantine_path(uid).exists()
    }

    /// Removes the quarantined record after a rebuild.
    ///
    /// # Errors
    /// When the file exists and cannot be removed.
    pub fn clear_quarantine(&self, uid: &ClaimUid) -> Result<(), RecordError> {
        let path = self.quarantine_path(uid);
        files::remove_durably(&path).map_err(|source| RecordError {
            operation: "remove the quarantined claim record",
            path,
            source,
        })
    }

    /// Lists the claims with records.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn list(&self) -> Result<Listing, RecordError> {
        let error = |source| RecordError {
            operation: "list the claim records in",
            path: self.dir.clone(),
            source,
        };
        let mut listing = Listing::default();
        for entry in fs::read_dir(&self.dir).map_err(error)? {
            let name = entry.map_err(error)?.file_name();
            let Some(name) = name.to_str() else {
                continue;
            };
            let Some((uid, kind)) = name.split_once(".json") else {
                listing.limits.extend(ClaimUid::parse(name).ok());
                continue;
            };
            let Ok(uid) = ClaimUid::parse(uid) else {
                continue;
            };
            match kind {
                "" => listing.recorded.push(uid),
                kind if kind.strip_prefix('.') == Some(CORRUPT) => listing.quarantined.push(uid),
                _ => {}
            }
        }
        listing.recorded.sort();
        listing.quarantined.sort();
        listing.limits.sort();
        Ok(listing)
    }

    fn path(&self, uid: &ClaimUid) -> PathBuf {
        self.dir.join(format!("{uid}.json"))
    }

    fn quarantine_path(&self, uid: &ClaimUid) -> PathBuf {
        self.dir.join(format!("{uid}.json.{CORRUPT}"))
    }
}

/// Claims with records.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Claims with a record that is not quarantined.
    pub recorded: Vec<ClaimUid>,
    /// Claims with a quarantined record.
    pub quarantined: Vec<ClaimUid>,
    /// Claims with a directory of limits.
    pub limits: Vec<ClaimUid>,
}

fn encode(record: &ClaimRecord) -> Vec<u8> {
    // Serializing structs of strings and numbers into memory cannot fail.
    let body = serde_json::to_vec(record).unwrap_or_default();
    let header = Header {
        version: VERSION,
        crc32: format!("{:08x}", crc32fast::hash(&body)),
    };
    let mut bytes = serde_json::to_vec(&header).unwrap_or_default();
    bytes.push(b'\n');
    bytes.extend_from_slice(&body);
    bytes.push(b'\n');
    bytes
}

fn decode(bytes: &[u8]) -> Result<ClaimRecord, String> {
    let mut lines = bytes.splitn(2, |&byte| byte == b'\n');
    let header: Header = serde_json::from_slice(lines.next().unwrap_or_default())
        .map_err(|error| format!("invalid header: {error}"))?;
    if header.version != VERSION {
        return Err(format!(
            "unsupported version {}, expected {VERSION}",
            header.version
        ));
    }
    let body = lines
        .next()
        .and_then(|rest| rest.strip_suffix(b"\n"))
        .ok_or("truncated")?;
    let found = format!("{:08x}", crc32fast::hash(body));
    if found != header.crc32 {
        return Err(format!("checksum {found}, expected {}", header.crc32));
    }
    serde_json::from_slice(body).map_err(|error| format!("invalid body: {error}"))
}
