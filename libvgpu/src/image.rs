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
        // PTX begins with a directive or a comment.
        _ => match bytes.byte(0) {
            Some(b'.' | b'/' | b' ' | b'\t' | b'\r' | b'\n') => of_ptx(bytes),
            _ => 0,
        },
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

/// The sum of the sections with global variables, initialized or not.
fn of_cubin(cubin: Bytes) -> Option<u64> {
    if cubin.byte(4)? != ELF_64 || cubin.half(18)? != CUDA_MACHINE {
        return None;
    }
    let (table, each) = (cubin.number(40)?, usize::from(cubin.half(58)?));
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

/// A token of PTX: a name, directive or number, or another character.
#[derive(Clone, Copy)]
enum Token {
    Word { at: usize, length: usize },
    Sign(u8),
}

/// The tokens of PTX.
struct Tokens {
    text: Bytes,
    at: usize,
}

impl Tokens {
    /// Returns the byte at a distance from the present one.
    fn peek(&self, distance: usize) -> Option<u8> {
        let at = self.at.checked_add(distance)?;
        self.text.byte(at).filter(|byte| *byte != 0)
    }

    fn skip_while(&mut self, is_part: impl Fn(&Self, u8) -> bool) {
        while let Some(byte) = self.peek(0)
            && is_part(self, byte)
        {
            self.at = self.at.saturating_add(1);
        }
    }

    fn next(&mut self) -> Option<Token> {
        loop {
            self.skip_while(|_, byte| byte.is_ascii_whitespace());
            match (self.peek(0)?, self.peek(1)) {
                (b'/', Some(b'/')) => self.skip_while(|_, byte| byte != b'\n'),
                (b'/', Some(b'*')) => {
                    let ends = |tokens: &Self| {
                        tokens.peek(0) == Some(b'*') && tokens.peek(1) == Some(b'/')
                    };
                    self.skip_while(|tokens, _| !ends(tokens));
                    self.at = self.at.saturating_add(2);
                }
                (byte, _) if is_letter(byte) => {
                    let at = self.at;
                    self.skip_while(|_, byte| is_letter(byte));
                    let length = self.at.saturating_sub(at);
                    return Some(Token::Word { at, length });
                }
                (byte, _) => {
                    self.at = self.at.saturating_add(1);
                    return Some(Token::Sign(byte));
                }
            }
        }
    }

    fn is(&self, at: usize, length: usize, word: &[u8]) -> bool {
        length == word.len() && self.text.from(at).begins_with(word)
    }

    /// Returns the number that a word is.
    fn number(&self, at: usize, length: usize) -> Option<u64> {
        let text = self.text.from(at);
        let (skipped, radix) = match (
            text.byte(0)?,
            length.checked_sub(1).and_then(|_| text.byte(1)),
        ) {
            (b'0', Some(b'x' | b'X')) if length > 2 => (2, 16),
            _ => (0, 10),
        };
        let mut number = 0u64;
        for at in skipped..length {
            let digit = char::from(text.byte(at)?).to_digit(radix);
            // An unsigned number may end with a letter.
            let Some(digit) = digit else {
                return (at > skipped && text.byte(at)? == b'U').then_some(number);
            };
            number = number
                .saturating_mul(u64::from(radix))
                .saturating_add(u64::from(digit));
        }
        Some(number)
    }

    /// Skips a group after its opening sign, and returns the number of its elements.
    fn skip_group(&mut self) -> u64 {
        let (mut depth, mut elements) = (1u32, 1u64);
        while depth != 0 {
            match self.next() {
                Some(Token::Sign(b'{' | b'(')) => depth = depth.saturating_add(1),
                Some(Token::Sign(b'}' | b')')) => depth = depth.saturating_sub(1),
                Some(Token::Sign(b',')) => elements = elements.saturating_add(1),
                Some(_) => {}
                None => break,
            }
        }
        elements
    }

    /// Returns the bytes of the variables that are declared after `.global`.
    fn variables(&mut self) -> u64 {
        let (mut element_bytes, mut elements, mut sum) = (0u64, 0u64, 0u64);
        loop {
            let token = self.next();
            match token {
                // A name. Numbers occur elsewhere.
                Some(Token::Word { at, .. }) if self.text.byte(at) != Some(b'.') => elements = 1,
                Some(Token::Word { at, length }) if self.is(at, length, b".align") => {
                    self.next();
                }
                Some(Token::Word { at, length }) => {
                    let bits = self.number_at_end(at, length);
                    match self.text.byte(at.saturating_add(1)) {
                        Some(b'v') if length == 3 => element_bytes = bits,
                        Some(b'b' | b'u' | b's' | b'f') => {
                            element_bytes = element_bytes.max(1).saturating_mul(bits / 8);
                        }
                        _ => {}
                    }
                }
                Some(Token::Sign(b'(')) => {
                    self.skip_group();
                }
                Some(Token::Sign(b'[')) => {
                    elements = elements.saturating_mul(self.dimension());
                }
                Some(Token::Sign(b'=')) => elements = self.initialized(elements),
                Some(Token::Sign(sign)) if sign != b',' && sign != b';' => {}
                ends => {
                    sum = sum.saturating_add(elements.saturating_mul(element_bytes));
                    elements = 0;
                    if !matches!(ends, Some(Token::Sign(b','))) {
                        return sum;
                    }
                }
            }
        }
    }

    /// Returns the number at the end of a type such as `.b32` or `.f16x2`.
    fn number_at_end(&self, at: usize, length: usize) -> u64 {
        let text = self.text.from(at);
        let is_digit = |at: usize| text.byte(at).is_some_and(|byte| byte.is_ascii_digit());
        let first = (0..length).find(|at| is_digit(*at)).unwrap_or(length);
        let digits = (first..length).take_while(|at| is_digit(*at)).count();
        let number = self.number(at.saturating_add(first), digits).unwrap_or(0);
        // A pair of numbers.
        let is_pair = first.saturating_add(digits).saturating_add(2) == length;
        if is_pair {
            number.saturating_mul(2)
        } else {
            number
        }
    }

    /// Reads a dimension after its opening bracket. One that the initial value determines counts as 0.
    fn dimension(&mut self) -> u64 {
        let mut elements = 0;
        while let Some(token) = self.next() {
            match token {
                Token::Sign(b']') => break,
                Token::Word { at, length } => elements = self.number(at, length).unwrap_or(0),
                Token::Sign(_) => {}
            }
        }
        elements
    }

    /// Reads an initial value, for a variable of as many elements, or of an undefined number of them.
    fn initialized(&mut self, elements: u64) -> u64 {
        match self.next() {
            Some(Token::Sign(b'{')) => match self.skip_group() {
                listed if elements == 0 => listed,
                _ => elements,
            },
            _ => elements,
        }
    }
}

fn is_letter(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// The sum of the variables that PTX declares outside of functions and does not import.
fn of_ptx(text: Bytes) -> u64 {
    let mut tokens = Tokens { text, at: 0 };
    let (mut sum, mut is_imported) = (0u64, false);
    while let Some(token) = tokens.next() {
        match token {
            Token::Word { at, length } if tokens.is(at, length, b".extern") => is_imported = true,
            Token::Word { at, length } if tokens.is(at, length, b".global") => {
                let bytes = tokens.variables();
                if !is_imported {
                    sum = sum.saturating_add(bytes);
                }
                is_imported = false;
            }
            Token::Sign(b'(') => {
                tokens.skip_group();
            }
            Token::Sign(b'{') => {
                tokens.skip_group();
                is_imported = false;
            }
            Token::Sign(b';') => is_imported = false,
            Token::Word { .. } | Token::Sign(_) => {}
        }
    }
    sum
}
