//! One durable file per claim: what was prepared for it, enough to answer again, repair, guard and undo without the
//! API server and without the GPU library.
//!
//! The file is two lines: a header `{"version":1,"crc32":"…"}` and the record as JSON. The checksum is over the raw
//! bytes of the second line, so a build that knows more or fewer fields still verifies what another one wrote.
//! A file is replaced by rename after fsync: it is always whole, old or new. One that does not verify (a bad disk, a
//! hand edit) is moved aside and its claim is rebuilt from the API server; it never stops the driver.

use std::fs;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Delivery, Prepared};
use crate::claim::{ClaimRef, ClaimUid};
use crate::files;

/// Version of the record's layout. Fields may be added within a version; they must have a default.
const VERSION: u32 = 1;

/// Ends the name of a record that did not verify, until its claim is rebuilt or gone.
const CORRUPT: &str = "corrupt";

/// How far a claim's preparation has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Stage {
    /// Effects may exist; kubelet has not been told that the claim is ready.
    Intent,
    /// Everything exists; kubelet may have been told.
    Prepared,
}

/// What is recorded about a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimRecord {
    /// The claim.
    pub claim: ClaimRef,
    /// How far it has come.
    pub stage: Stage,
    /// What it holds.
    pub devices: Vec<Prepared>,
    /// Content hash of the libvgpu.so that its containers load.
    pub library: String,
    /// Content hash of the CDI hook that its containers run.
    pub hook: String,
    /// How the library gets into its containers.
    #[serde(default)]
    pub delivery: Delivery,
}

/// What a record file turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub enum Loaded {
    /// There is none.
    Absent,
    /// It verified.
    Present(Box<ClaimRecord>),
    /// It did not verify, and why.
    Corrupt(String),
}

/// A record file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {}", path.display())]
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

/// The records of this node.
#[derive(Debug, Clone)]
pub struct RecordStore {
    dir: PathBuf,
}

impl RecordStore {
    /// Records in `dir`, which exists.
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// Reads the record of a claim.
    ///
    /// # Errors
    /// When the file cannot be read; one that does not verify is [`Loaded::Corrupt`].
    pub fn load(&self, uid: &ClaimUid) -> Result<Loaded, RecordError> {
        let path = self.path(uid);
        match fs::read(&path) {
            Ok(bytes) => Ok(match decode(&bytes) {
                Ok(record) if record.claim.uid == *uid => Loaded::Present(Box::new(record)),
                Ok(record) => Loaded::Corrupt(format!("it is of claim {}", record.claim)),
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

    /// Writes a record; it is on the disk when this returns.
    ///
    /// # Errors
    /// When it cannot be written; the old record, if any, is then still there.
    pub fn save(&self, record: &ClaimRecord) -> Result<(), RecordError> {
        let path = self.path(&record.claim.uid);
        files::write_durably(&path, &encode(record), 0o600).map_err(|source| RecordError {
            operation: "write the claim record",
            path,
            source,
        })
    }

    /// Removes the record of a claim, quarantined ones included. There need not be one.
    ///
    /// # Errors
    /// When a file is there and cannot be removed.
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

    /// Moves a record that does not verify aside.
    ///
    /// # Errors
    /// When it cannot be renamed.
    pub fn quarantine(&self, uid: &ClaimUid) -> Result<PathBuf, RecordError> {
        let (path, aside) = (self.path(uid), self.quarantine_path(uid));
        fs::rename(&path, &aside)
            .and_then(|()| files::sync_dir(&self.dir))
            .map_err(|source| RecordError {
                operation: "move aside the claim record",
                path,
                source,
            })?;
        Ok(aside)
    }

    /// Whether the claim's record did not verify and was not rebuilt yet.
    #[must_use]
    pub fn is_quarantined(&self, uid: &ClaimUid) -> bool {
        self.quarantine_path(uid).exists()
    }

    /// Forgets that a claim's record was quarantined: its claim is recorded anew.
    ///
    /// # Errors
    /// When the file is there and cannot be removed.
    pub fn clear_quarantine(&self, uid: &ClaimUid) -> Result<(), RecordError> {
        let path = self.quarantine_path(uid);
        files::remove_durably(&path).map_err(|source| RecordError {
            operation: "remove the quarantined claim record",
            path,
            source,
        })
    }

    /// Claims that have a record, and claims whose record is quarantined.
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
            let Some((uid, kind)) = name.to_str().and_then(|name| name.split_once(".json")) else {
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
        Ok(listing)
    }

    fn path(&self, uid: &ClaimUid) -> PathBuf {
        self.dir.join(format!("{uid}.json"))
    }

    fn quarantine_path(&self, uid: &ClaimUid) -> PathBuf {
        self.dir.join(format!("{uid}.json.{CORRUPT}"))
    }
}

/// Claims with record files.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Claims that have a record.
    pub recorded: Vec<ClaimUid>,
    /// Claims whose record did not verify and was not rebuilt yet.
    pub quarantined: Vec<ClaimUid>,
}

fn encode(record: &ClaimRecord) -> Vec<u8> {
    // Serialising plain structs of strings and numbers into memory has no way to fail.
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
        .map_err(|error| format!("its header does not decode: {error}"))?;
    if header.version != VERSION {
        return Err(format!(
            "its layout has version {}, this driver knows {VERSION}",
            header.version
        ));
    }
    let body = lines
        .next()
        .and_then(|rest| rest.strip_suffix(b"\n"))
        .ok_or("it is cut short")?;
    let found = format!("{:08x}", crc32fast::hash(body));
    if found != header.crc32 {
        return Err(format!(
            "its checksum is {found}, the header says {}",
            header.crc32
        ));
    }
    serde_json::from_slice(body).map_err(|error| format!("it does not decode: {error}"))
}
