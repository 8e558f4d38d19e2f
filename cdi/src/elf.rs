//! Reads machine, SONAME and dependencies of shared libraries, and the loader of programs, and writes libraries without code ([`Stub`]).
//!
//! Files come from the driver root and from images, so every offset is checked and every read is bounded.
//! Source: System V ABI, chapters "Object Files" and "Dynamic Linking". Only 64-bit little-endian files are supported.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

mod stub;

pub use stub::Stub;

/// Maximum length of a name.
const MAX_NAME: usize = 255;
/// Size limit of the dynamic section; those of the NVIDIA driver have less than 2 KiB.
const MAX_DYNAMIC: u64 = 64 << 10;

/// Longest path of a dynamic loader.
const MAX_PATH: u64 = 4096;

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const ET_DYN: u16 = 3;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;
const DT_SONAME: u64 = 14;

/// Machine of an ELF file (`e_machine`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// 64-bit x86.
    X86_64,
    /// 64-bit Arm.
    Aarch64,
}

impl Machine {
    /// Machine that this program was built for.
    #[cfg(target_arch = "x86_64")]
    pub const HOST: Self = Self::X86_64;
    /// Machine that this program was built for.
    #[cfg(target_arch = "aarch64")]
    pub const HOST: Self = Self::Aarch64;
}

/// Facts in a shared library's headers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedLibrary {
    /// Machine.
    pub machine: Machine,
    /// `DT_SONAME`; a library without one is loaded by its file name.
    pub soname: Option<String>,
    /// `DT_NEEDED`, in order.
    pub needed: Vec<String>,
}

/// Reads the headers of `file`. Returns `Ok(None)` for any file that is not a 64-bit shared library for a supported
/// machine: 32-bit libraries, linker scripts, programs.
///
/// # Errors
/// Only when the operating system cannot read the file; malformed contents are `Ok(None)`.
pub fn inspect(file: &File) -> io::Result<Option<SharedLibrary>> {
    without_malformed(read(file))
}

fn without_malformed<T>(read: io::Result<Option<T>>) -> io::Result<Option<T>> {
    match read {
        Ok(found) => Ok(found),
        Err(error) => match error.kind() {
            // An offset beyond the end of the file.
            io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput => Ok(None),
            _ => Err(error),
        },
    }
}

/// Returns the dynamic loader that a program names. Returns `Ok(None)` for a program without one, and for any file that is not a 64-bit
/// program.
///
/// # Errors
/// Only when the operating system cannot read the file; malformed contents are `Ok(None)`.
pub fn interpreter(file: &File) -> io::Result<Option<String>> {
    without_malformed(read_interpreter(file))
}

fn read_interpreter(file: &File) -> io::Result<Option<String>> {
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0)?;
    if !header.starts_with(&[0x7f, b'E', b'L', b'F', 2, 1]) {
        return Ok(None);
    }
    let Some(headers) = program_headers(file, &header)? else {
        return Ok(None);
    };
    let mut entries = headers.chunks_exact(PROGRAM_HEADER);
    let Some(entry) = entries.find(|entry| u32_at(entry, 0) == Some(PT_INTERP)) else {
        return Ok(None);
    };
    let (Some(offset), Some(size)) = (u64_at(entry, 8), u64_at(entry, 32)) else {
        return Ok(None);
    };
    let mut path = vec![0; usize::try_from(size.min(MAX_PATH)).unwrap_or(0)];
    file.read_exact_at(&mut path, offset)?;
    let end = path.iter().position(|byte| *byte == 0);
    path.truncate(end.unwrap_or(path.len()));
    Ok(String::from_utf8(path).ok())
}

fn read(file: &File) -> io::Result<Option<SharedLibrary>> {
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0)?;
    // Magic, 64 bits, little-endian.
    if !header.starts_with(&[0x7f, b'E', b'L', b'F', 2, 1]) || u16_at(&header, 16) != Some(ET_DYN) {
        return Ok(None);
    }
    let machine = match u16_at(&header, 18) {
        Some(62) => Machine::X86_64,
        Some(183) => Machine::Aarch64,
        Some(_) | None => return Ok(None),
    };
    let dynamic = match segments(file, &header)? {
        Some(segments) => Dynamic::read(file, segments)?,
        None => None,
    };
    let Some(dynamic) = dynamic else {
        return Ok(Some(SharedLibrary {
            machine,
            soname: None,
            needed: Vec::new(),
        }));
    };
    // A SONAME must be a file name.
    let soname = dynamic.names(file, DT_SONAME)?.into_iter().next();
    let soname = soname.filter(|name| !name.contains('/'));
    let needed = dynamic.names(file, DT_NEEDED)?;
    Ok(Some(SharedLibrary {
        machine,
        soname,
        needed,
    }))
}

/// A segment of the file that is mapped to memory.
struct Load {
    offset: u64,
    address: u64,
    size: u64,
}

struct Segments {
    loads: Vec<Load>,
    dynamic_offset: u64,
    dynamic_size: u64,
}

fn program_headers(file: &File, header: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let (Some(offset), Some(size), Some(count)) =
        (u64_at(header, 32), u16_at(header, 54), u16_at(header, 56))
    else {
        return Ok(None);
    };
    if usize::from(size) != PROGRAM_HEADER {
        return Ok(None);
    }
    let mut headers = vec![0; PROGRAM_HEADER * usize::from(count)];
    file.read_exact_at(&mut headers, offset)?;
    Ok(Some(headers))
}

fn segments(file: &File, header: &[u8]) -> io::Result<Option<Segments>> {
    let Some(headers) = program_headers(file, header)? else {
        return Ok(None);
    };
    let mut loads = Vec::new();
    let mut dynamic = None;
    for entry in headers.chunks_exact(PROGRAM_HEADER) {
        let fields = (
            u32_at(entry, 0),
            u64_at(entry, 8),
            u64_at(entry, 16),
            u64_at(entry, 32),
        );
        match fields {
            (Some(PT_LOAD), Some(offset), Some(address), Some(size)) => loads.push(Load {
                offset,
                address,
                size,
            }),
            (Some(PT_DYNAMIC), Some(offset), _, Some(size)) => dynamic = Some((offset, size)),
            _ => {}
        }
    }
    Ok(dynamic.map(|(dynamic_offset, dynamic_size)| Segments {
        loads,
        dynamic_offset,
        dynamic_size,
    }))
}

/// The dynamic section.
struct Dynamic {
    loads: Vec<Load>,
    /// Tag and value of each entry.
    entries: Vec<(u64, u64)>,
    /// Address of the string table.
    strings: u64,
}

impl Dynamic {
    /// Returns `None` for a section without a string table.
    fn read(file: &File, segments: Segments) -> io::Result<Option<Self>> {
        let size = usize::try_from(segments.dynamic_size.min(MAX_DYNAMIC)).unwrap_or(0);
        let mut dynamic = vec![0; size];
        file.read_exact_at(&mut dynamic, segments.dynamic_offset)?;
        let entries: Vec<(u64, u64)> = dynamic
            .chunks_exact(16)
            .filter_map(|entry| Some((u64_at(entry, 0)?, u64_at(entry, 8)?)))
            .take_while(|(tag, _)| *tag != 0)
            .collect();
        let strings = entries.iter().find(|(tag, _)| *tag == DT_STRTAB);
        let strings = strings.map(|(_, address)| *address);
        Ok(strings.map(|strings| Self {
            loads: segments.loads,
            entries,
            strings,
        }))
    }

    /// Returns the strings of all entries with the tag; invalid strings are skipped.
    fn names(&self, file: &File, wanted: u64) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for (_, value) in self.entries.iter().filter(|(tag, _)| *tag == wanted) {
            names.extend(self.name(file, *value)?);
        }
        Ok(names)
    }

    fn name(&self, file: &File, name: u64) -> io::Result<Option<String>> {
        let Some(address) = self.strings.checked_add(name) else {
            return Ok(None);
        };
        let place = self.loads.iter().find_map(|load| {
            let distance = address.checked_sub(load.address)?;
            let offset = load.offset.checked_add(distance)?;
            (distance < load.size).then_some(offset)
        });
        let Some(place) = place else { return Ok(None) };
        let mut bytes = [0; MAX_NAME + 1];
        let read = file.read_at(&mut bytes, place)?;
        let name = bytes
            .get(..read)
            .and_then(|bytes| bytes.split(|byte| *byte == 0).next());
        let name = name
            .filter(|name| !name.is_empty() && name.len() < read)
            .and_then(|name| std::str::from_utf8(name).ok());
        Ok(name.map(str::to_owned))
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes
        .get(at..)?
        .first_chunk()
        .map(|bytes| u16::from_le_bytes(*bytes))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes
        .get(at..)?
        .first_chunk()
        .map(|bytes| u32::from_le_bytes(*bytes))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes
        .get(at..)?
        .first_chunk()
        .map(|bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn reads_c_library_of_this_machine() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = maps
            .lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .find(|path| path.contains("libc.so"));
        let library = inspect(&File::open(path.unwrap()).unwrap())
            .unwrap()
            .unwrap();
        assert_eq!(library.machine, Machine::HOST);
        assert_eq!(library.soname.as_deref(), Some("libc.so.6"));
        assert!(
            library
                .needed
                .iter()
                .any(|name| name.starts_with("ld-linux")),
            "{library:?}"
        );
    }

    #[test]
    fn reads_back_a_written_stub() {
        for machine in [Machine::X86_64, Machine::Aarch64] {
            let stub = Stub {
                machine,
                soname: "libcuda.so.1",
                needed: &["/opt/first.so", "/opt/libcuda.so.1"],
                link_names: &["cuInit", "cuMemAlloc_v2"],
            };
            let library = inspect(&file(&stub.to_bytes())).unwrap().unwrap();
            assert_eq!(
                library,
                SharedLibrary {
                    machine,
                    soname: Some("libcuda.so.1".into()),
                    needed: vec!["/opt/first.so".into(), "/opt/libcuda.so.1".into()],
                }
            );
        }
    }

    #[test]
    fn returns_none_for_files_that_are_no_library() {
        let mut truncated = b"\x7fELF\x02\x01".to_vec();
        truncated.resize(40, 0);
        let mut thirty_two_bits = b"\x7fELF\x01\x01".to_vec();
        thirty_two_bits.resize(200, 0);
        for bytes in [
            &b""[..],
            b"/* GNU ld script */",
            &truncated,
            &thirty_two_bits,
        ] {
            assert_eq!(inspect(&file(bytes)).unwrap(), None);
        }
    }

    #[test]
    fn ignores_offsets_beyond_the_end() {
        let mut bytes = vec![0xff; 4096];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[16..18].copy_from_slice(&ET_DYN.to_le_bytes());
        bytes[18..20].copy_from_slice(&62_u16.to_le_bytes());
        bytes[54..56].copy_from_slice(&56_u16.to_le_bytes());
        assert_eq!(
            inspect(&file(&bytes)).unwrap(),
            None,
            "program headers beyond the end"
        );

        bytes[32..40].copy_from_slice(&64_u64.to_le_bytes());
        bytes[56..58].copy_from_slice(&2_u16.to_le_bytes());
        bytes[64..68].copy_from_slice(&PT_DYNAMIC.to_le_bytes());
        assert_eq!(
            inspect(&file(&bytes)).unwrap(),
            None,
            "dynamic section beyond the end"
        );
    }
}
