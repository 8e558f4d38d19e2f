//! Writes a shared library without code: a SONAME, and the libraries that the loader loads instead.
//!
//! A program that loads the stub by its SONAME, or is linked with it, gets the stub's `DT_NEEDED` in order: `dlsym` on
//! the stub's handle and symbol lookups search them breadth first (glibc, `elf/dl-deps.c`).
//!
//! The stub defines no symbol for the loader. `ld` requires the symbols of a library at link time, so the symbol table
//! lists their names, but no bucket of the hash table leads to them. At run time the symbols resolve to the libraries
//! behind the stub, and a symbol that none of them defines is undefined.
//!
//! Layout: one segment, writable because loaders before glibc 2.35 relocate the dynamic section in place.
//! Source: System V ABI, chapters "Object Files" and "Dynamic Linking".

use super::Machine;

/// Contents of a stub.
#[derive(Debug, Clone, Copy)]
pub struct Stub<'a> {
    /// Machine.
    pub machine: Machine,
    /// `DT_SONAME`.
    pub soname: &'a str,
    /// `DT_NEEDED`, in order.
    pub needed: &'a [&'a str],
    /// Functions that programs can be linked with.
    pub link_names: &'a [&'a str],
}

const HEADER: u64 = 64;
const PROGRAM_HEADER: u64 = 56;
const SECTION_HEADER: u64 = 64;
const SYMBOL: u64 = 24;
const DYNAMIC: u64 = 16;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_GNU_STACK: u32 = 0x6474_e551;
const PF_RW: u32 = 6;

const SHT_STRTAB: u32 = 3;
const SHT_HASH: u32 = 5;
const SHT_DYNAMIC: u32 = 6;
const SHT_DYNSYM: u32 = 11;
const SHF_ALLOC: u64 = 2;
const SHF_WRITE: u64 = 1;

const DT_NULL: u64 = 0;
const DT_NEEDED: u64 = 1;
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_STRSZ: u64 = 10;
const DT_SYMENT: u64 = 11;
const DT_SONAME: u64 = 14;
const DT_FLAGS_1: u64 = 0x6fff_fffb;
/// Keeps the stub loaded. The library behind it has the same SONAME and also stays loaded; after an unload, the loader
/// would find that library in place of the stub.
const DF_1_NODELETE: u64 = 8;

/// A global function. Symbols must belong to a section: the hash section serves.
const GLOBAL_FUNCTION: u8 = 1 << 4 | 2;
const HASH_SECTION: u16 = 1;

/// Largest page size of the supported machines: 64 KiB on Arm.
const PAGE: u64 = 0x10000;

impl Stub<'_> {
    /// Returns the file. The same stub gives the same bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let loaded = Loaded::of(self);
        let sections = Sections::of(&loaded);
        let mut file = self.header(sections.headers.at, sections.count);
        file.extend(segment(PT_LOAD, 0, loaded.dynamic.end(), PAGE));
        let dynamic = &loaded.dynamic;
        file.extend(segment(PT_DYNAMIC, dynamic.at, dynamic.size(), 8));
        // Without PT_GNU_STACK, loaders make the stacks of all threads executable.
        file.extend(segment(PT_GNU_STACK, 0, 0, 16));
        for part in [
            &loaded.hash,
            &loaded.symbols,
            &loaded.strings,
            &loaded.dynamic,
            &sections.names,
            &sections.headers,
        ] {
            // The file has some KiB.
            file.resize(usize::try_from(part.at).unwrap_or(usize::MAX), 0);
            file.extend_from_slice(&part.bytes);
        }
        file
    }

    fn header(&self, sections_at: u64, sections: usize) -> Vec<u8> {
        let machine: u16 = match self.machine {
            Machine::X86_64 => 62,
            Machine::Aarch64 => 183,
        };
        let mut header = vec![0x7f, b'E', b'L', b'F', 2, 1, 1];
        header.resize(16, 0);
        header.extend(super::ET_DYN.to_le_bytes());
        header.extend(machine.to_le_bytes());
        header.extend(1_u32.to_le_bytes());
        for offset in [0, HEADER, sections_at] {
            header.extend(offset.to_le_bytes());
        }
        header.extend(0_u32.to_le_bytes());
        let count = sections as u64;
        for half in [HEADER, PROGRAM_HEADER, 3, SECTION_HEADER, count, count - 1] {
            header.extend(half.to_le_bytes().into_iter().take(2));
        }
        header
    }

    fn symbols(&self, strings: &mut Strings) -> Vec<u8> {
        let mut symbols = vec![0; 24];
        for name in self.link_names {
            let name = strings.add(name);
            symbols.extend(name.to_le_bytes().into_iter().take(4));
            symbols.extend([GLOBAL_FUNCTION, 0]);
            symbols.extend(HASH_SECTION.to_le_bytes());
            symbols.extend([0; 16]);
        }
        symbols
    }

    /// One empty bucket, and a chain whose length is the number of symbols.
    fn hash(&self) -> Vec<u8> {
        let chain = self.link_names.len() + 1;
        let mut hash = Vec::new();
        for word in [1, chain, 0] {
            hash.extend((word as u64).to_le_bytes().into_iter().take(4));
        }
        hash.resize(hash.len() + 4 * chain, 0);
        hash
    }
}

/// A contiguous range of the file.
struct Part {
    at: u64,
    bytes: Vec<u8>,
}

impl Part {
    fn size(&self) -> u64 {
        length(&self.bytes)
    }

    fn end(&self) -> u64 {
        self.at + self.size()
    }
}

/// Parts that loaders read.
struct Loaded {
    hash: Part,
    symbols: Part,
    strings: Part,
    dynamic: Part,
}

impl Loaded {
    fn of(stub: &Stub<'_>) -> Self {
        let mut strings = Strings::default();
        let soname = strings.add(stub.soname);
        let needed: Vec<u64> = stub.needed.iter().map(|name| strings.add(name)).collect();
        let symbols = stub.symbols(&mut strings);
        let hash = Part {
            at: HEADER + 3 * PROGRAM_HEADER,
            bytes: stub.hash(),
        };
        let symbols = Part {
            at: aligned(hash.end()),
            bytes: symbols,
        };
        let strings = Part {
            at: symbols.end(),
            bytes: strings.bytes,
        };
        let needed = needed.into_iter().map(|name| (DT_NEEDED, name));
        let others = [
            (DT_SONAME, soname),
            (DT_HASH, hash.at),
            (DT_SYMTAB, symbols.at),
            (DT_SYMENT, SYMBOL),
            (DT_STRTAB, strings.at),
            (DT_STRSZ, strings.size()),
            (DT_FLAGS_1, DF_1_NODELETE),
            (DT_NULL, 0),
        ];
        let dynamic = needed.chain(others);
        let dynamic = dynamic.flat_map(|(tag, value)| [tag.to_le_bytes(), value.to_le_bytes()]);
        let dynamic = Part {
            at: aligned(strings.end()),
            bytes: dynamic.flatten().collect(),
        };
        Self {
            hash,
            symbols,
            strings,
            dynamic,
        }
    }
}

/// Additional parts that `ld` reads: the loaded parts as sections, after the null section.
struct Sections {
    names: Part,
    headers: Part,
    count: usize,
}

impl Sections {
    fn of(loaded: &Loaded) -> Self {
        const SYMBOLS_SECTION: u32 = 2;
        const STRINGS_SECTION: u32 = 3;
        let Loaded {
            hash,
            symbols,
            strings,
            dynamic,
        } = loaded;
        let (alloc, write) = (SHF_ALLOC, SHF_WRITE);
        let mut names = Strings::default();
        let mut section = |name, kind, flags, part: &Part, link, entry| Section {
            name: names.add(name),
            kind,
            flags,
            at: part.at,
            size: part.size(),
            link,
            entry,
        };
        let of_parts = [
            section(".hash", SHT_HASH, alloc, hash, SYMBOLS_SECTION, 4),
            section(
                ".dynsym",
                SHT_DYNSYM,
                alloc,
                symbols,
                STRINGS_SECTION,
                SYMBOL,
            ),
            section(".dynstr", SHT_STRTAB, alloc, strings, 0, 0),
            section(
                ".dynamic",
                SHT_DYNAMIC,
                alloc | write,
                dynamic,
                STRINGS_SECTION,
                DYNAMIC,
            ),
        ];
        let name = names.add(".shstrtab");
        let names = Part {
            at: dynamic.end(),
            bytes: names.bytes,
        };
        let of_names = Section {
            name,
            kind: SHT_STRTAB,
            flags: 0,
            at: names.at,
            size: names.size(),
            link: 0,
            entry: 0,
        };
        let mut headers = vec![0; 64];
        for section in of_parts.iter().chain([&of_names]) {
            headers.extend(section.to_bytes());
        }
        let headers = Part {
            at: aligned(names.end()),
            bytes: headers,
        };
        Self {
            names,
            headers,
            count: 1 + of_parts.len() + 1,
        }
    }
}

/// A string table.
struct Strings {
    bytes: Vec<u8>,
}

impl Default for Strings {
    fn default() -> Self {
        Self { bytes: vec![0] }
    }
}

impl Strings {
    fn add(&mut self, text: &str) -> u64 {
        let at = length(&self.bytes);
        self.bytes.extend_from_slice(text.as_bytes());
        self.bytes.push(0);
        at
    }
}

struct Section {
    name: u64,
    kind: u32,
    flags: u64,
    at: u64,
    size: u64,
    link: u32,
    entry: u64,
}

impl Section {
    fn to_bytes(&self) -> Vec<u8> {
        let is_loaded = self.flags & SHF_ALLOC != 0;
        let address = if is_loaded { self.at } else { 0 };
        // For a symbol table: index of the first global symbol.
        let info = u32::from(self.kind == SHT_DYNSYM);
        let mut bytes: Vec<u8> = self.name.to_le_bytes().into_iter().take(4).collect();
        bytes.extend(self.kind.to_le_bytes());
        for value in [self.flags, address, self.at, self.size] {
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend(self.link.to_le_bytes());
        bytes.extend(info.to_le_bytes());
        let alignment: u64 = if self.kind == SHT_STRTAB { 1 } else { 8 };
        for value in [alignment, self.entry] {
            bytes.extend(value.to_le_bytes());
        }
        bytes
    }
}

fn segment(kind: u32, at: u64, size: u64, alignment: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(PF_RW.to_le_bytes());
    for value in [at, at, at, size, size, alignment] {
        bytes.extend(value.to_le_bytes());
    }
    bytes
}

fn length(bytes: &[u8]) -> u64 {
    bytes.len() as u64
}

fn aligned(at: u64) -> u64 {
    at.next_multiple_of(8)
}
