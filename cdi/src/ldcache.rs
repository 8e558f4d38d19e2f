//! The cache of the dynamic loader, `/etc/ld.so.cache`: parsed, changed and written without `ldconfig`.
//!
//! Running an image's `ldconfig` as root would execute a tenant's program with the node's privileges, and many images
//! have none. Both formats are parsed: the new one (`glibc-ld.so.cache1.1`, glibc 2.2 and later), alone or after the
//! old one, with the section of `glibc-hwcaps` names (2.33 and later), and the old one alone, which loaders still
//! accept. The written file has only the new format, which every glibc since 2.2 reads.
//! Source: `sysdeps/generic/dl-cache.h`, `elf/dl-cache.c` and `elf/cache.c` of glibc.
//!
//! musl ignores the file.

use crate::elf::Machine;

mod order;
mod read;

/// Directories that the loaders of glibc search without a cache.
pub const DEFAULT_DIRECTORIES: [&str; 8] = [
    "/lib",
    "/usr/lib",
    "/lib64",
    "/usr/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
];

const NEW_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const HEADER: usize = 48;
const ENTRY: usize = 24;
/// Header field with the byte order of the file; 0 in files of glibc before 2.32.
const LITTLE_ENDIAN: u8 = 2;
const EXTENSION_MAGIC: u32 = 0xeaa4_2174;
const EXTENSION_SECTION: usize = 16;
const SECTION_GENERATOR: u32 = 0;
const SECTION_HWCAPS: u32 = 1;
/// Bit of an entry's `hwcap` that makes the low half an index into the names of `glibc-hwcaps`.
const HWCAP_EXTENSION: u64 = 1 << 62;

/// Libraries by SONAME.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LdCache {
    entries: Vec<Entry>,
    /// Names of subdirectories of `glibc-hwcaps`, sorted; entries refer to them by index.
    hwcaps: Vec<Vec<u8>>,
}

/// One library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Name that programs load, such as `libcuda.so.1`.
    pub name: Vec<u8>,
    /// Path of the library.
    pub path: Vec<u8>,
    /// Kind of library and machine; the loader accepts only entries whose flags equal its own.
    pub flags: i32,
    /// Oldest kernel that the library supports; 0 for any.
    pub os_version: u32,
    /// Required processor features; 0 for none.
    pub hwcap: u64,
}

/// A file is not a cache of glibc.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// The file starts with neither magic.
    #[error("not a cache of glibc")]
    Magic,
    /// The byte order is not this machine's.
    #[error("a cache in the other byte order")]
    ByteOrder,
    /// A length or offset lies outside the file or exceeds a limit.
    #[error("a length or offset lies outside the file or exceeds the limit")]
    Truncated,
}

impl Entry {
    /// Returns a library for `machine` without requirements of kernel or processor.
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
    /// Parses a cache.
    ///
    /// # Errors
    /// [`ParseError`]; the loader ignores such a file.
    pub fn parse(file: &[u8]) -> Result<Self, ParseError> {
        read::cache(file)
    }

    /// Returns the libraries, in the file's order.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Adds a library and removes those of the same name and kind, including variants for particular processors: the
    /// NVIDIA library must match the kernel module, so an image's library of that name must not win.
    pub fn insert(&mut self, entry: Entry) {
        self.entries
            .retain(|old| old.name != entry.name || old.flags != entry.flags);
        self.entries.push(entry);
    }

    /// Returns the file, with entries in the loader's search order.
    ///
    /// # Errors
    /// [`ParseError::Truncated`] where the file would exceed 4 GiB, the range of offsets.
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
        // The loader requires the extension at a multiple of four.
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

/// String table of a file under construction; each string ends with a zero byte.
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

/// Returns the extension at `at`: generator, and position of the `glibc-hwcaps` names.
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

/// Returns the index of an entry's name in `glibc-hwcaps`; `None` for entries without one.
fn hwcap_name(hwcap: u64) -> Option<usize> {
    let low = u32::try_from(hwcap & u64::from(u32::MAX)).ok()?;
    (hwcap & HWCAP_EXTENSION != 0).then_some(low as usize)
}

fn offset(value: usize) -> Result<u32, ParseError> {
    u32::try_from(value).map_err(|_| ParseError::Truncated)
}
