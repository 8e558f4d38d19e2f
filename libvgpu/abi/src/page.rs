//! The limits page: 4096 bytes that the node driver writes and the hooks in every process of a share read.
//!
//! ```text
//!    0  magic, ABI version, size
//!   16  current: generation of the newest record, a hint that readers compare with their copy
//!   32  own time: the share's own part of the time that events measure
//!   48  yield: until when the share makes no launches, because a share of higher priority is busy
//!   56  window: GPU time that the share may have queued on the GPU
//!   64  identity: claim UID, share ID, device UUID, checksum
//!  216  notify: whether the share notifies the agent when it starts to use the GPU
//!  224  lent: whether other shares use the share's time, so that it notifies the agent when it resumes
//!  232  suspended: which suspension processes that are not yet on the GPU wait for
//!  256  record 0 ┐ 128 bytes each: generation, the limits, flags, checksum
//!  384  record 1 ┘
//! ```
//!
//! Invariants:
//! - A record is valid if its checksum matches. The valid record with the higher generation applies.
//! - An update overwrites the *other* record and then `current`. A crash of the writer or a torn copy leaves one
//!   valid record, so readers neither wait nor see a mixture, and no repair is needed.
//! - The words at 32, 48, 56, 216, 224 and 232 are outside the records: the node agent changes each with one aligned write
//!   of eight bytes, at any rate, and readers read each alone. An implausible value, as from a torn write, is
//!   ignored.
//! - Reserved bytes are zero and ignored by readers; a change that old readers must not ignore gets a new ABI
//!   version. The words at 24 and 40 are reserved: readers that know them take zero, or a time that has passed, for an
//!   agent that is gone, and keep the rate.
//!
//! An intact page of a share is never replaced by another file, so readers do not reopen its path.

use core::fmt;

use crate::id::{DeviceUuid, ID_TEXT_SIZE, IdText};
use crate::limits::{
    BrokenRegion, ComputePolicy, Cores, Limits, LimitsSpec, MemoryPolicy, Priority,
};

mod words;

pub use words::{
    LENT_OFFSET, NOTIFY_OFFSET, OWN_TIME_OFFSET, SUSPENDED_OFFSET, WINDOW_OFFSET,
    YIELD_UNTIL_OFFSET, lent, notify, own_time, suspended, window, yield_until,
};

/// Size of the page and of its file.
pub const PAGE_SIZE: usize = 4096;

/// Version of this layout.
pub const PAGE_ABI_VERSION: u32 = 1;

/// Offset of the generation hint, an aligned little-endian `u64`.
pub const CURRENT_OFFSET: usize = 16;

const MAGIC: [u8; 8] = *b"DRAVALIM";
const IDENTITY_OFFSET: usize = 64;
const IDENTITY_SIZE: usize = 2 * ID_TEXT_SIZE + 16 + 8;
const RECORD_OFFSETS: [usize; 2] = [256, 384];
const RECORD_SIZE: usize = 128;
const CHECKSUM_SIZE: usize = 8;

const FLAG_FAIL_OPEN: u32 = 1 << 1;
const FLAG_SPILL: u32 = 1 << 2;
const FLAG_SUSPEND: u32 = 1 << 3;

const NO_LIMIT: u64 = u64::MAX;
const NO_RATE: u64 = u64::MAX;

const _: () = {
    assert!(IDENTITY_OFFSET + IDENTITY_SIZE <= RECORD_OFFSETS[0]);
    assert!(RECORD_OFFSETS[0] + RECORD_SIZE <= RECORD_OFFSETS[1]);
    assert!(RECORD_OFFSETS[1] + RECORD_SIZE <= PAGE_SIZE);
    assert!(CURRENT_OFFSET.is_multiple_of(8));
    assert!(SUSPENDED_OFFSET + 8 <= RECORD_OFFSETS[0]);
};

/// A decoded page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitsPage {
    /// The content.
    pub spec: LimitsSpec,
    /// Generation of the decoded record; 1 for a page from [`encode`].
    pub generation: u64,
}

/// Reason why bytes are not a limits page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageError {
    /// Fewer than [`PAGE_SIZE`] bytes.
    Short {
        /// Actual length.
        len: usize,
    },
    /// The magic is missing.
    Magic,
    /// Another ABI version.
    Version {
        /// The version found.
        found: u32,
    },
    /// The checksum of the identity does not match.
    Identity,
    /// Neither record is intact.
    Records,
    /// The newest record has a value that is unknown to this version.
    Value {
        /// Name of the field.
        field: &'static str,
        /// The value found.
        found: u64,
    },
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { len } => write!(f, "limits page has {len} of {PAGE_SIZE} bytes"),
            Self::Magic => f.write_str("file is not a limits page"),
            Self::Version { found } => write!(
                f,
                "limits page has ABI version {found}, expected {PAGE_ABI_VERSION}"
            ),
            Self::Identity => f.write_str("limits page has a damaged identity"),
            Self::Records => f.write_str("limits page has no intact record"),
            Self::Value { field, found } => {
                write!(f, "limits page has unknown value {found} for {field}")
            }
        }
    }
}

impl core::error::Error for PageError {}

/// One write to the file of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageWrite {
    offset: usize,
    bytes: [u8; RECORD_SIZE],
    len: usize,
}

impl PageWrite {
    /// Returns the offset in the file.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset as u64
    }

    /// Returns the bytes, to write with a single `pwrite`.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

/// Encodes the page of a new share: generation 1.
#[must_use]
pub fn encode(spec: &LimitsSpec) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    write_at(&mut page, 0, &MAGIC);
    write_at(&mut page, 8, &PAGE_ABI_VERSION.to_le_bytes());
    write_at(&mut page, 12, &4096u32.to_le_bytes());
    write_at(&mut page, CURRENT_OFFSET, &1u64.to_le_bytes());
    write_at(&mut page, IDENTITY_OFFSET, &encode_identity(spec));
    write_at(
        &mut page,
        RECORD_OFFSETS[1],
        &encode_record(1, &spec.limits),
    );
    page
}

/// Decodes a page.
///
/// # Errors
/// If the bytes are not an intact page of this ABI version.
pub fn decode(page: &[u8]) -> Result<LimitsPage, PageError> {
    let Some(page) = page.first_chunk::<PAGE_SIZE>() else {
        return Err(PageError::Short { len: page.len() });
    };
    if read_array::<8>(page, 0) != MAGIC {
        return Err(PageError::Magic);
    }
    let found = u32::from_le_bytes(read_array(page, 8));
    if found != PAGE_ABI_VERSION {
        return Err(PageError::Version { found });
    }
    let (claim_uid, share_id, device_uuid) = decode_identity(page).ok_or(PageError::Identity)?;
    let record = newest_record(page).ok_or(PageError::Records)?;
    Ok(LimitsPage {
        spec: LimitsSpec {
            claim_uid,
            share_id,
            device_uuid,
            limits: decode_limits(&record)?,
        },
        generation: word64(&record, 0),
    })
}

/// Returns the writes that change the limits in place, in order. `page` is the current content of the file.
///
/// # Errors
/// If `page` is not an intact page of this ABI version.
pub fn update(page: &[u8], limits: &Limits) -> Result<[PageWrite; 2], PageError> {
    let current = decode(page)?;
    Ok(writes(current.generation, limits))
}

/// Returns the write of one word.
fn write_word(offset: usize, value: u64) -> PageWrite {
    let mut bytes = [0; RECORD_SIZE];
    write_at(&mut bytes, 0, &value.to_le_bytes());
    PageWrite {
        offset,
        bytes,
        len: 8,
    }
}

fn writes(present: u64, limits: &Limits) -> [PageWrite; 2] {
    let generation = present.wrapping_add(1);
    let record = encode_record(generation, limits);
    let mut current = [0; RECORD_SIZE];
    write_at(&mut current, 0, &generation.to_le_bytes());
    [
        PageWrite {
            offset: record_offset(generation),
            bytes: record,
            len: RECORD_SIZE,
        },
        PageWrite {
            offset: CURRENT_OFFSET,
            bytes: current,
            len: 8,
        },
    ]
}

/// Generations alternate between the records.
fn record_offset(generation: u64) -> usize {
    if generation.is_multiple_of(2) {
        RECORD_OFFSETS[0]
    } else {
        RECORD_OFFSETS[1]
    }
}

fn encode_identity(spec: &LimitsSpec) -> [u8; IDENTITY_SIZE] {
    let mut identity = [0; IDENTITY_SIZE];
    write_at(&mut identity, 0, &spec.claim_uid.to_bytes());
    write_at(&mut identity, ID_TEXT_SIZE, &spec.share_id.to_bytes());
    write_at(&mut identity, 2 * ID_TEXT_SIZE, &spec.device_uuid.0);
    seal(&mut identity);
    identity
}

fn decode_identity(page: &[u8; PAGE_SIZE]) -> Option<(IdText, IdText, DeviceUuid)> {
    let identity: [u8; IDENTITY_SIZE] = read_array(page, IDENTITY_OFFSET);
    if !is_sealed(&identity) {
        return None;
    }
    Some((
        IdText::from_bytes(&read_array(&identity, 0)).ok()?,
        IdText::from_bytes(&read_array(&identity, ID_TEXT_SIZE)).ok()?,
        DeviceUuid(read_array(&identity, 2 * ID_TEXT_SIZE)),
    ))
}

fn encode_record(generation: u64, limits: &Limits) -> [u8; RECORD_SIZE] {
    let Limits {
        memory_limit_bytes,
        driver_reserve_bytes,
        driver_excess_bytes,
        driver_surplus_bytes,
        lent_bytes,
        cores,
        compute_policy,
        priority,
        memory_policy,
        broken_region,
        can_suspend,
        rate_us_per_s,
    } = *limits;
    let mut flags = match broken_region {
        BrokenRegion::Closed => 0,
        BrokenRegion::Open => FLAG_FAIL_OPEN,
    };
    flags |= match memory_policy {
        MemoryPolicy::Hard => 0,
        MemoryPolicy::Spill => FLAG_SPILL,
    };
    flags |= if can_suspend { FLAG_SUSPEND } else { 0 };
    let policy: u32 = match compute_policy {
        ComputePolicy::None => 0,
        ComputePolicy::Balance => 1,
        ComputePolicy::Fixed => 2,
    };
    let mut record = [0; RECORD_SIZE];
    write_at(&mut record, 0, &generation.to_le_bytes());
    write_at(
        &mut record,
        8,
        &memory_limit_bytes.unwrap_or(NO_LIMIT).to_le_bytes(),
    );
    write_at(&mut record, 16, &driver_reserve_bytes.to_le_bytes());
    write_at(&mut record, 24, &cores.percent().to_le_bytes());
    write_at(&mut record, 28, &policy.to_le_bytes());
    write_at(&mut record, 32, &priority.value().to_le_bytes());
    write_at(&mut record, 36, &flags.to_le_bytes());
    write_at(
        &mut record,
        40,
        &rate_us_per_s.map_or(NO_RATE, u64::from).to_le_bytes(),
    );
    write_at(&mut record, 48, &driver_excess_bytes.to_le_bytes());
    write_at(&mut record, 56, &driver_surplus_bytes.to_le_bytes());
    write_at(&mut record, 64, &lent_bytes.to_le_bytes());
    seal(&mut record);
    record
}

fn newest_record(page: &[u8; PAGE_SIZE]) -> Option<[u8; RECORD_SIZE]> {
    let [first, second] = RECORD_OFFSETS.map(|offset| {
        let record: [u8; RECORD_SIZE] = read_array(page, offset);
        let is_at_its_offset = record_offset(word64(&record, 0)) == offset;
        (is_sealed(&record) && is_at_its_offset).then_some(record)
    });
    match (first, second) {
        (Some(first), Some(second)) if word64(&first, 0) > word64(&second, 0) => Some(first),
        (first, second) => second.or(first),
    }
}

fn decode_limits(record: &[u8; RECORD_SIZE]) -> Result<Limits, PageError> {
    let unknown = |field, found: u32| PageError::Value {
        field,
        found: u64::from(found),
    };
    let cores = word32(record, 24);
    let policy = word32(record, 28);
    let priority = i32::from_le_bytes(read_array(record, 32));
    let flags = word32(record, 36);
    let rate = word64(record, 40);
    Ok(Limits {
        memory_limit_bytes: Some(word64(record, 8)).filter(|&bytes| bytes != NO_LIMIT),
        driver_reserve_bytes: word64(record, 16),
        driver_excess_bytes: word64(record, 48),
        driver_surplus_bytes: word64(record, 56),
        lent_bytes: word64(record, 64),
        cores: Cores::new(cores).ok_or(unknown("cores", cores))?,
        compute_policy: match policy {
            0 => ComputePolicy::None,
            // 3 were time slices, whose guarantee is the same.
            1 | 3 => ComputePolicy::Balance,
            2 => ComputePolicy::Fixed,
            other => return Err(unknown("compute policy", other)),
        },
        priority: Priority::new(priority).ok_or(unknown("priority", priority.cast_unsigned()))?,
        memory_policy: if flags & FLAG_SPILL == 0 {
            MemoryPolicy::Hard
        } else {
            MemoryPolicy::Spill
        },
        can_suspend: flags & FLAG_SUSPEND != 0,
        broken_region: if flags & FLAG_FAIL_OPEN == 0 {
            BrokenRegion::Closed
        } else {
            BrokenRegion::Open
        },
        rate_us_per_s: u32::try_from(rate).ok(),
    })
}

/// Writes the checksum of the preceding bytes into the last eight bytes.
fn seal(bytes: &mut [u8]) {
    if let Some((content, checksum)) = bytes.split_last_chunk_mut::<CHECKSUM_SIZE>() {
        *checksum = fnv1a(content).to_le_bytes();
    }
}

fn is_sealed(bytes: &[u8]) -> bool {
    bytes
        .split_last_chunk::<CHECKSUM_SIZE>()
        .is_some_and(|(content, checksum)| *checksum == fnv1a(content).to_le_bytes())
}

/// FNV-1a, 64 bits: detects a torn record. The page is not secret, and tenants cannot write it.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn write_at(target: &mut [u8], offset: usize, bytes: &[u8]) {
    if let Some(target_bytes) = target
        .get_mut(offset..)
        .and_then(|rest| rest.get_mut(..bytes.len()))
    {
        target_bytes.copy_from_slice(bytes);
    }
}

fn read_array<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes
        .get(offset..)
        .and_then(|rest| rest.first_chunk::<N>())
        .copied()
        .unwrap_or([0; N])
}

fn word64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(read_array(bytes, offset))
}

fn word32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(read_array(bytes, offset))
}
