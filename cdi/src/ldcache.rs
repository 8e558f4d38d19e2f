//! The cache of the dynamic loader, `/etc/ld.so.cache`: parsed, changed and written without `ldconfig`.
//!
//! Running an image's own `ldconfig` as root would run a tenant's program with the node's privileges, and many
//! images have none. Both formats are read: the new one (`glibc-ld.so.cache1.1`, glibc 2.2 and later), alone or behind
//! the old one, with the section of `glibc-hwcaps` names (2.33 and later), and the old one alone, which loaders still
//! obey. The format written is the new one alone, which every glibc since 2.2 reads. Source: `sysdeps/generic/dl-cache.h`, `elf/dl-cache.c` and `elf/cache.c` of glibc.
//!
//! musl has no such cache and ignores the file.

use crate::elf::Machine;

mod order;
mod read;

const NEW_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const HEADER: usize = 48;
const ENTRY: usize = 24;
/// Field of the header that says in which byte order the file is; 0 in files of glibc before 2.32.
const LITTLE_ENDIAN: u8 = 2;
const EXTENSION_MAGIC: u32 = 0xeaa4_2174;
const EXTENSION_SECTION: usize = 16;
const SECTION_GENERATOR: u32 = 0;
const SECTION_HWCAPS: u32 = 1;
/// Bit of an entry's `hwcap` that makes its low half an index into the names of `glibc-hwcaps`.
const HWCAP_EXTENSION: u64 = 1 << 62;

/// Libraries by the names that programs ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LdCache {
    entries: Vec<Entry>,
    /// Names of subdirectories of `glibc-hwcaps`, sorted; entries refer to them by position.
    hwcaps: Vec<Vec<u8>>,
}

/// One library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name that programs ask for, such as `libcuda.so.1`.
    pub name: Vec<u8>,
    /// The file that they get.
    pub path: Vec<u8>,
    /// Kind of library and machine; the loader takes only those that equal its own.
    pub flags: i32,
    /// Oldest kernel that it runs on; 0 for any.
    pub os_version: u32,
    /// What the processor must have; 0 for nothing.
    pub hwcap: u64,
}

/// A file is no cache of glibc.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// It starts with neither magic.
    #[error("not a cache of glibc")]
    Magic,
    /// It is of a machine with the other byte order.
    #[error("a cache in the other byte order")]
    ByteOrder,
    /// A length or offset leads outside, or is beyond all reason.
    #[error("a length or offset leads outside the file or beyond all reason")]
    Truncated,
}

impl Entry {
    /// A library for `machine` that needs no particular kernel or processor.
    #[must_use]
    pub fn new(name: impl Into<Vec<u8>>, path: impl Into<Vec<u8>>, machine: Machine) -> Self {
        // FLAG_ELF_LIBC6, and FLAG_X8664_LIB64 or FLAG_AARCH64_LIB64.
        let flags = match machine {
            Machine::X86_64 => 0x0303,
            Machine::Aarch64 => 0x0a03,
        };
        Self {
            name: name.into(),
            path: path.into(),
            flags,
            os_version: 0,
            hwcap: 0,
        }
    }
}

impl LdCache {
    /// Reads a cache.
    ///
    /// # Errors
    /// [`ParseError`]; the loader ignores such a file.
    pub fn parse(file: &[u8]) -> Result<Self, ParseError> {
        read::cache(file)
    }

    /// The libraries, in the file's order.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Adds a library in place of those of the same name and kind, variants for particular processors included: the
    /// driver's library must match the kernel module, so an image's own of that name must not win.
    pub fn insert(&mut self, entry: Entry) {
        self.entries
            .retain(|old| old.name != entry.name || old.flags != entry.flags);
        self.entries.push(entry);
    }

    /// The file, in the order in which the loader searches it.
    ///
    /// # Errors
    /// [`ParseError::Truncated`] where it would exceed 4 GiB, which offsets cannot reach.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ParseError> {
        let mut entries: Vec<&Entry> = self.entries.iter().collect();
        entries.sort_by(|a, b| order::entries(a, b));
        let mut strings = Strings {
            base: HEADER + ENTRY * entries.len(),
            bytes: Vec::new(),
        };
        let mut table = Vec::with_capacity(ENTRY * entries.len());
        for entry in &entries {
            table.extend_from_slice(&entry.flags.to_le_bytes());
            table.extend_from_slice(&strings.add(&entry.name)?.to_le_bytes());
            table.extend_from_slice(&strings.add(&entry.path)?.to_le_bytes());
            table.extend_from_slice(&entry.os_version.to_le_bytes());
            table.extend_from_slice(&entry.hwcap.to_le_bytes());
        }
        let hwcaps: Vec<u32> = self
            .hwcaps
            .iter()
            .map(|name| strings.add(name))
            .collect::<Result<_, _>>()?;
        // The loader wants the extension at a multiple of four.
        let end = (strings.base + strings.bytes.len()).next_multiple_of(4);

        let mut file = Vec::with_capacity(end + 128);
        file.extend_from_slice(NEW_MAGIC);
        file.extend_from_slice(&offset(entries.len())?.to_le_bytes());
        file.extend_from_slice(&offset(strings.bytes.len())?.to_le_bytes());
        file.extend_from_slice(&[LITTLE_ENDIAN, 0, 0, 0]);
        file.extend_from_slice(&offset(end)?.to_le_bytes());
        file.extend_from_slice(&[0; 12]);
        file.extend_from_slice(&table);
        file.extend_from_slice(&strings.bytes);
        file.resize(end, 0);
        file.extend_from_slice(&extension(end, &hwcaps)?);
        Ok(file)
    }
}

/// Strings of a file under construction, each ended by a zero byte.
struct Strings {
    base: usize,
    bytes: Vec<u8>,
}

impl Strings {
    fn add(&mut self, string: &[u8]) -> Result<u32, ParseError> {
        let at = offset(self.base + self.bytes.len())?;
        self.bytes.extend_from_slice(string);
        self.bytes.push(0);
        Ok(at)
    }
}

/// The extension at `at`: who wrote the file, and where the `glibc-hwcaps` names are.
fn extension(at: usize, hwcaps: &[u32]) -> Result<Vec<u8>, ParseError> {
    const GENERATOR: &[u8] = b"drava-cdi-hook";
    let directory = 8 + 2 * EXTENSION_SECTION;
    let hwcaps_at = at + directory;
    let generator_at = hwcaps_at + 4 * hwcaps.len();
    let mut bytes = Vec::new();
    let sections = [
        (SECTION_HWCAPS, hwcaps_at, 4 * hwcaps.len()),
        (SECTION_GENERATOR, generator_at, GENERATOR.len()),
    ];
    bytes.extend_from_slice(&EXTENSION_MAGIC.to_le_bytes());
    bytes.extend_from_slice(&offset(sections.len())?.to_le_bytes());
    for (tag, at, size) in sections {
        for word in [tag, 0, offset(at)?, offset(size)?] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
    }
    for string in hwcaps {
        bytes.extend_from_slice(&string.to_le_bytes());
    }
    bytes.extend_from_slice(GENERATOR);
    Ok(bytes)
}

/// Position of an entry's name in `glibc-hwcaps`; `None` for entries without one.
fn hwcap_name(hwcap: u64) -> Option<usize> {
    let low = u32::try_from(hwcap & u64::from(u32::MAX)).ok()?;
    (hwcap & HWCAP_EXTENSION != 0).then_some(low as usize)
}

fn offset(value: usize) -> Result<u32, ParseError> {
    u32::try_from(value).map_err(|_| ParseError::Truncated)
}
