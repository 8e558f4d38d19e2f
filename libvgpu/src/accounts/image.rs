//! Size of the global variables of GPU code, as its image declares it.
//!
//! An image is an object file of GPU code (a "cubin"), PTX, or a container of several of them (a "fat binary"), of which
//! libcuda loads the one that fits the GPU. The table of a cubin has the size of its variables; PTX declares them.
//!
//! Compressed members of a container are not read, and count as nothing.

use core::ffi::c_void;

/// Bytes of an image. The readers return `None` beyond its end.
#[derive(Clone, Copy)]
struct Bytes {
    start: *const u8,
    length: usize,
}

impl Bytes {
    fn read<const N: usize>(self, at: usize) -> Option<[u8; N]> {
        if at.checked_add(N)? > self.length {
            return None;
        }
        let address = self.start.wrapping_add(at).cast::<[u8; N]>();
        // SAFETY: within the image, by the contract of `global_bytes`.
        Some(unsafe { address.read_unaligned() })
    }

    fn byte(self, at: usize) -> Option<u8> {
        self.read(at).map(u8::from_le_bytes)
    }

    fn half(self, at: usize) -> Option<u16> {
        self.read(at).map(u16::from_le_bytes)
    }

    fn word(self, at: usize) -> Option<u32> {
        self.read(at).map(u32::from_le_bytes)
    }

    fn number(self, at: usize) -> Option<usize> {
        usize::try_from(u64::from_le_bytes(self.read(at)?)).ok()
    }

    fn from(self, at: usize) -> Self {
        Self {
            start: self.start.wrapping_add(at),
            length: self.length.saturating_sub(at),
        }
    }

    fn begins_with(self, text: &[u8]) -> bool {
        let mut bytes = text.iter().enumerate();
        bytes.all(|(at, byte)| self.byte(at) == Some(*byte))
    }
}

const ELF: &[u8] = b"\x7fELF";
/// Class of 64-bit ELF files.
const ELF_64: u8 = 2;
const CUDA_MACHINE: u16 = 190;
const WRAPPER: u32 = 0x4662_43b1;
const CONTAINER: u32 = 0xba55_ed50;
/// Members of a container, and their flags of compressions.
const PTX_MEMBER: u16 = 1;
const CUBIN_MEMBER: u16 = 2;
const COMPRESSED: u32 = 0x2000 | 0x8000;

/// Returns the bytes of the global variables of an image, 0 if it does not tell. `length` is `None` for an image in
/// memory, which has no known end.
///
/// # Safety
/// `image` is null or an image that libcuda may read: of `length` bytes, or as long as its headers say; PTX in memory ends
/// with a zero byte.
pub(crate) unsafe fn global_bytes(image: *const c_void, length: Option<usize>) -> u64 {
    if image.is_null() {
        return 0;
    }
    let bytes = Bytes {
        start: image.cast(),
        length: length.unwrap_or(isize::MAX.cast_unsigned()),
    };
    // PTX begins with a directive or a comment, and may end at once.
    if let Some(0 | b'.' | b'/' | b' ' | b'\t' | b'\r' | b'\n') = bytes.byte(0) {
        return of_ptx(bytes);
    }
    match bytes.word(0) {
        // Only the image in memory has an address in it.
        Some(WRAPPER) if length.is_none() => {
            let address = bytes.number(8).unwrap_or(0);
            let container = Bytes {
                start: core::ptr::with_exposed_provenance(address),
                ..bytes
            };
            if address == 0 || container.word(0) != Some(CONTAINER) {
                return 0;
            }
            of_container(container)
        }
        Some(CONTAINER) => of_container(bytes),
        _ if bytes.begins_with(ELF) => of_cubin(bytes).unwrap_or(0),
        _ => 0,
    }
}

/// The largest size of the members: they are variants of the same code.
fn of_container(container: Bytes) -> u64 {
    let sizes = || Some((usize::from(container.half(6)?), container.number(8)?));
    let Some((header, length)) = sizes() else {
        return 0;
    };
    let members = Bytes {
        length: length.min(container.from(header).length),
        ..container.from(header)
    };
    let (mut most, mut at) = (0, 0);
    while let Some((bytes, next)) = of_member(members.from(at)) {
        most = bytes.max(most);
        at = match at.checked_add(next) {
            Some(next) if next > at => next,
            _ => break,
        };
    }
    most
}

/// Returns the size of a member of a container, and the distance to the next one.
fn of_member(member: Bytes) -> Option<(u64, usize)> {
    let kind = member.half(0)?;
    let header = usize::try_from(member.word(4)?).ok()?;
    let length = member.number(8)?;
    let body = Bytes {
        length: length.min(member.from(header).length),
        ..member.from(header)
    };
    let is_readable = member.word(40)? & COMPRESSED == 0;
    let bytes = match kind {
        CUBIN_MEMBER if is_readable && body.begins_with(ELF) => of_cubin(body).unwrap_or(0),
        PTX_MEMBER if is_readable => of_ptx(body),
        _ => 0,
    };
    Some((bytes, header.checked_add(length)?))
}

/// Size of the header of a section.
const SECTION_BYTES: usize = 64;

/// The sum of the sections with global variables, initialized or not.
fn of_cubin(cubin: Bytes) -> Option<u64> {
    if cubin.byte(4)? != ELF_64 || cubin.half(18)? != CUDA_MACHINE {
        return None;
    }
    let (table, each) = (cubin.number(40)?, usize::from(cubin.half(58)?));
    // libcuda refuses it, and the header is no table of sections.
    if table == 0 || each < SECTION_BYTES {
        return None;
    }
    let section = |index: usize| Some(cubin.from(table.checked_add(index.checked_mul(each)?)?));
    // The first section has the numbers that do not fit into the header.
    let count = match cubin.half(60)? {
        0 => section(0)?.number(32)?,
        count => usize::from(count),
    };
    let names = match cubin.half(62)? {
        u16::MAX => usize::try_from(section(0)?.word(40)?).ok()?,
        names => usize::from(names),
    };
    let names = cubin.from(section(names)?.number(24)?);
    let mut sum = 0u64;
    for index in 0..count {
        let section = section(index)?;
        let name = names.from(usize::try_from(section.word(0)?).ok()?);
        if name.begins_with(b".nv.global\0") || name.begins_with(b".nv.global.") {
            sum = sum.saturating_add(section.number(32)? as u64);
        }
    }
    Some(sum)
}

/// A word or another character of PTX.
#[derive(Clone, Copy)]
struct Token {
    text: Bytes,
    length: usize,
}

impl Token {
    fn is(self, word: &[u8]) -> bool {
        self.length == word.len() && self.text.begins_with(word)
    }

    fn first(self) -> u8 {
        self.text.byte(0).unwrap_or(0)
    }

    /// Returns the product of the decimal or hexadecimal numbers in a word; `None` without any.
    fn number(self) -> Option<u64> {
        let digits = |radix: u32, at: usize| {
            let bytes = (at..self.length).map_while(|at| self.text.byte(at));
            bytes.map_while(move |byte| char::from(byte).to_digit(radix))
        };
        let value = |radix: u32, at: usize| {
            digits(radix, at).fold(0u64, |number, digit| {
                let shifted = number.saturating_mul(u64::from(radix));
                shifted.saturating_add(u64::from(digit))
            })
        };
        if self.text.begins_with(b"0x") {
            return Some(value(16, 2));
        }
        let (mut product, mut at) = (None::<u64>, 0usize);
        while at < self.length {
            let count = digits(10, at).count();
            if count != 0 {
                product = Some(product.unwrap_or(1).saturating_mul(value(10, at)));
            }
            at = at.saturating_add(count.max(1));
        }
        product
    }
}

/// The tokens of PTX without its comments and strings.
struct Tokens {
    rest: Bytes,
}

impl Tokens {
    fn next(&mut self) -> Option<Token> {
        loop {
            let first = self.rest.byte(0).filter(|byte| *byte != 0)?;
            let length_while = |is_part: fn(u8) -> bool| {
                let bytes = (0..self.rest.length).map_while(|at| self.rest.byte(at));
                bytes.take_while(|byte| is_part(*byte)).count()
            };
            if first == b'"' {
                self.skip_string();
            } else if self.rest.begins_with(b"//") {
                let length = length_while(|byte| !matches!(byte, b'\n' | 0));
                self.rest = self.rest.from(length);
            } else if self.rest.begins_with(b"/*") {
                self.skip_comment();
            } else if first.is_ascii_whitespace() {
                self.rest = self.rest.from(1);
            } else {
                let token = Token {
                    text: self.rest,
                    length: length_while(is_letter).max(1),
                };
                self.rest = self.rest.from(token.length);
                return Some(token);
            }
        }
    }

    /// Skips a string, such as the name of a file. It ends with its line at the latest.
    fn skip_string(&mut self) {
        self.rest = self.rest.from(1);
        while let Some(byte) = self.rest.byte(0).filter(|byte| !matches!(byte, b'\n' | 0)) {
            self.rest = self.rest.from(1);
            if byte == b'"' {
                return;
            }
        }
    }

    /// Skips a comment that may have several lines.
    fn skip_comment(&mut self) {
        self.rest = self.rest.from(2);
        while !self.rest.begins_with(b"*/") {
            match self.rest.byte(0) {
                None | Some(0) => return,
                Some(_) => self.rest = self.rest.from(1),
            }
        }
        self.rest = self.rest.from(2);
    }

    /// Returns the bytes of the variable that is declared after `.global`.
    fn variable(&mut self) -> u64 {
        let (mut element_bytes, mut elements) = (0u64, 1u64);
        while let Some(token) = self.next() {
            match token.first() {
                b';' | b'=' | b',' => break,
                _ if token.is(b".align") => {
                    self.next();
                }
                // An attribute's values, which may be numbers with commas.
                b'(' => while self.next().is_some_and(|token| token.first() != b')') {},
                b'.' => {
                    let number = token.number().unwrap_or(0);
                    if token.text.begins_with(b".v") {
                        elements = elements.saturating_mul(number);
                    } else {
                        element_bytes = element_bytes.max(number / 8);
                    }
                }
                // A dimension; names do not begin with a digit.
                byte if byte.is_ascii_digit() => {
                    elements = elements.saturating_mul(token.number().unwrap_or(0));
                }
                _ => {}
            }
        }
        elements.saturating_mul(element_bytes)
    }
}

fn is_letter(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// The sum of the variables that PTX declares, one with each `.global`, as compilers write it. A parameter may point to
/// global memory, and an imported variable is another module's.
fn of_ptx(text: Bytes) -> u64 {
    let mut tokens = Tokens { rest: text };
    let mut sum = 0u64;
    let mut is_declaration = true;
    while let Some(token) = tokens.next() {
        if token.is(b".global") && is_declaration {
            sum = sum.saturating_add(tokens.variable());
        }
        is_declaration = !token.is(b".extern") && !token.is(b".ptr");
    }
    sum
}
