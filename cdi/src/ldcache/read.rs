//! Parses caches. Files come from images, so every offset is checked and sizes are bounded.

use super::{
    ENTRY, EXTENSION_MAGIC, EXTENSION_SECTION, Entry, HEADER, LITTLE_ENDIAN, LdCache, NEW_MAGIC,
    ParseError, SECTION_HWCAPS, hwcap_name,
};

const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
const OLD_HEADER: usize = 16;
const OLD_ENTRY: usize = 12;

/// Maximum number of entries; a desktop's cache has some thousands.
const MAX_ENTRIES: usize = 1 << 20;
/// Maximum length of a name or path, so that a hostile file cannot make every entry a megabyte.
const MAX_STRING: usize = 4096;
/// Maximum number of bytes of all names and paths: entries of a hostile file may share one string.
const MAX_STRINGS: usize = 64 << 20;

pub(super) fn cache(file: &[u8]) -> Result<LdCache, ParseError> {
    if file.starts_with(NEW_MAGIC) {
        return new_format(file, file);
    }
    if !file.starts_with(OLD_MAGIC) {
        return Err(ParseError::Magic);
    }
    let table = table(file, OLD_HEADER, OLD_ENTRY, usize_at(file, 12)?)?;
    let end = OLD_HEADER + table.len();
    match file.get(end.next_multiple_of(8)..) {
        Some(cache) if cache.starts_with(NEW_MAGIC) => new_format(file, cache),
        Some(_) | None => old_format(table, file.get(end..).unwrap_or_default()),
    }
}

/// Parses the new format. After an old cache, offsets of the extension are relative to the file, all others to
/// `cache`.
fn new_format(file: &[u8], cache: &[u8]) -> Result<LdCache, ParseError> {
    let byte_order = *cache.get(28).ok_or(ParseError::Truncated)?;
    if byte_order != 0 && byte_order != LITTLE_ENDIAN {
        return Err(ParseError::ByteOrder);
    }
    let mut strings = Strings {
        bytes: cache,
        left: MAX_STRINGS,
    };
    let hwcaps = hwcaps(file, usize_at(cache, 32)?, &mut strings)?;
    let mut entries = Vec::new();
    for entry in table(cache, HEADER, ENTRY, usize_at(cache, 20)?)?.chunks_exact(ENTRY) {
        let hwcap = u64_at(entry, 16)?;
        if hwcap_name(hwcap).is_some_and(|name| name >= hwcaps.len()) {
            return Err(ParseError::Truncated);
        }
        entries.push(Entry {
            os_version: u32_at(entry, 12)?,
            hwcap,
            ..strings.entry(entry)?
        });
    }
    Ok(LdCache { entries, hwcaps })
}

/// Parses the old format, whose strings follow its entries; offsets are relative to the first string.
fn old_format(table: &[u8], strings: &[u8]) -> Result<LdCache, ParseError> {
    let mut strings = Strings {
        bytes: strings,
        left: MAX_STRINGS,
    };
    let entries = table
        .chunks_exact(OLD_ENTRY)
        .map(|entry| strings.entry(entry))
        .collect::<Result<_, _>>()?;
    Ok(LdCache {
        entries,
        hwcaps: Vec::new(),
    })
}

fn hwcaps(file: &[u8], at: usize, strings: &mut Strings<'_>) -> Result<Vec<Vec<u8>>, ParseError> {
    if at == 0 || u32_at(file, at)? != EXTENSION_MAGIC {
        return Ok(Vec::new());
    }
    let sections = usize_at(file, at.saturating_add(4))?;
    for section in table(file, at.saturating_add(8), EXTENSION_SECTION, sections)?
        .chunks_exact(EXTENSION_SECTION)
    {
        if u32_at(section, 0)? == SECTION_HWCAPS {
            let names = slice(file, usize_at(section, 8)?, usize_at(section, 12)?)?;
            return names
                .chunks_exact(4)
                .map(|name| strings.take(usize_at(name, 0)?))
                .collect();
        }
    }
    Ok(Vec::new())
}

/// Reads zero-terminated strings by offset.
struct Strings<'a> {
    bytes: &'a [u8],
    left: usize,
}

impl Strings<'_> {
    /// Parses the fields of both formats: flags, name, path.
    fn entry(&mut self, entry: &[u8]) -> Result<Entry, ParseError> {
        Ok(Entry {
            name: self.take(usize_at(entry, 4)?)?,
            path: self.take(usize_at(entry, 8)?)?,
            flags: u32_at(entry, 0)?.cast_signed(),
            os_version: 0,
            hwcap: 0,
        })
    }

    fn take(&mut self, at: usize) -> Result<Vec<u8>, ParseError> {
        let rest = self.bytes.get(at..).ok_or(ParseError::Truncated)?;
        let rest = rest.get(..MAX_STRING).unwrap_or(rest);
        let end = rest
            .iter()
            .position(|byte| *byte == 0)
            .ok_or(ParseError::Truncated)?;
        self.left = self.left.checked_sub(end).ok_or(ParseError::Truncated)?;
        rest.get(..end)
            .map(<[u8]>::to_vec)
            .ok_or(ParseError::Truncated)
    }
}

/// Returns `count` entries of `size` bytes.
fn table(bytes: &[u8], at: usize, size: usize, count: usize) -> Result<&[u8], ParseError> {
    if count > MAX_ENTRIES {
        return Err(ParseError::Truncated);
    }
    slice(bytes, at, size * count)
}

fn slice(bytes: &[u8], at: usize, size: usize) -> Result<&[u8], ParseError> {
    let end = at.checked_add(size).ok_or(ParseError::Truncated)?;
    bytes.get(at..end).ok_or(ParseError::Truncated)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, ParseError> {
    let word = bytes
        .get(at..)
        .and_then(<[u8]>::first_chunk)
        .ok_or(ParseError::Truncated)?;
    Ok(u32::from_le_bytes(*word))
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64, ParseError> {
    let word = bytes
        .get(at..)
        .and_then(<[u8]>::first_chunk)
        .ok_or(ParseError::Truncated)?;
    Ok(u64::from_le_bytes(*word))
}

fn usize_at(bytes: &[u8], at: usize) -> Result<usize, ParseError> {
    Ok(u32_at(bytes, at)? as usize)
}
