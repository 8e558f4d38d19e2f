//! Functions that a loaded library exports, from the dynamic symbol table of its ELF file.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

/// Little-endian, 64 bits.
const MAGIC: &[u8] = b"\x7fELF\x02\x01";
/// `SHT_DYNSYM`
const DYNAMIC_SYMBOLS: usize = 11;
/// `STT_FUNC` and `STT_GNU_IFUNC`
const FUNCTIONS: [u8; 2] = [2, 10];

/// Returns the file of a library that this process has loaded.
pub(crate) fn file_of(library: &str) -> Result<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut paths = maps.lines().filter_map(|line| line.get(line.find('/')?..));
    let path = paths.find(|path| {
        let file = path.rsplit('/').next().unwrap_or_default();
        file.starts_with(library)
    });
    Ok(path
        .with_context(|| format!("{library} is not loaded"))?
        .into())
}

/// Returns the names of the functions that an ELF file defines.
pub(crate) fn functions(file: &[u8]) -> Result<BTreeSet<String>> {
    ensure!(file.starts_with(MAGIC), "not an ELF file of 64 bits");
    let sections = Table {
        offset: number(file, 0x28, 8)?,
        entry_bytes: number(file, 0x3a, 2)?,
        count: number(file, 0x3c, 2)?,
    };
    let sections = sections.entries(file)?;
    let is_dynamic =
        |section: &&&[u8]| number(section, 4, 4).is_ok_and(|kind| kind == DYNAMIC_SYMBOLS);
    let symbols = sections.iter().find(is_dynamic);
    let symbols = symbols.context("no dynamic symbols")?;
    let names = sections.get(number(symbols, 0x28, 4)?);
    let names = names.context("no names of dynamic symbols")?;
    let names = part(file, number(names, 0x18, 8)?, number(names, 0x20, 8)?)?;
    let entry_bytes = number(symbols, 0x38, 8)?;
    let symbols = Table {
        offset: number(symbols, 0x18, 8)?,
        entry_bytes,
        count: number(symbols, 0x20, 8)?
            .checked_div(entry_bytes)
            .context("symbols without a size")?,
    };
    let symbols = symbols.entries(file)?.into_iter();
    symbols
        .filter(|symbol| is_function(symbol))
        .map(|symbol| {
            let name = names.get(number(symbol, 0, 4)?..);
            let name = name.and_then(|name| name.split(|byte| *byte == 0).next());
            Ok(String::from_utf8(
                name.context("a symbol without a name")?.to_vec(),
            )?)
        })
        .collect()
}

/// Returns whether the file defines the symbol, as a function.
fn is_function(symbol: &[u8]) -> bool {
    let is_defined = number(symbol, 6, 2).is_ok_and(|section| section != 0);
    is_defined
        && symbol
            .get(4)
            .is_some_and(|info| FUNCTIONS.contains(&(info & 15)))
}

struct Table {
    offset: usize,
    entry_bytes: usize,
    count: usize,
}

impl Table {
    fn entries<'a>(&self, file: &'a [u8]) -> Result<Vec<&'a [u8]>> {
        let entries = (0..self.count).map(|number| {
            let offset = number.checked_mul(self.entry_bytes);
            let offset = offset.and_then(|offset| offset.checked_add(self.offset));
            part(
                file,
                offset.context("a table beyond the file")?,
                self.entry_bytes,
            )
        });
        entries.collect()
    }
}

fn part(file: &[u8], offset: usize, bytes: usize) -> Result<&[u8]> {
    let end = offset.checked_add(bytes);
    end.and_then(|end| file.get(offset..end))
        .context("a part beyond the end of the file")
}

/// Reads a number of at most 8 bytes.
fn number(bytes: &[u8], offset: usize, width: usize) -> Result<usize> {
    let digits = part(bytes, offset, width)?.iter().rev();
    Ok(digits.fold(0, |value, digit| value << 8 | usize::from(*digit)))
}

#[cfg(test)]
mod tests {
    use super::{file_of, functions};

    #[test]
    fn lists_functions_of_loaded_library() {
        let libc = functions(&std::fs::read(file_of("libc.so").unwrap()).unwrap()).unwrap();
        assert!(libc.contains("malloc"), "{} functions", libc.len());
        // A variable, and a function that libc imports from the loader.
        for other in ["environ", "__tls_get_addr"] {
            assert!(!libc.contains(other), "{other}");
        }
    }

    #[test]
    fn rejects_files_that_end_early() {
        let file = std::fs::read(file_of("libc.so").unwrap()).unwrap();
        assert!(functions(&file[..file.len() / 2]).is_err());
        assert!(functions(b"").is_err());
        assert!(file_of("libnosuch.so").is_err());
    }
}
