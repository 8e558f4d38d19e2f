//! Images of GPU code: object files ("cubins"), PTX, and containers of them ("fat binaries"), as `nvcc` 13 writes them.
//!
//! Little is read: whether PTX calls `vprintf`, and the size of global variables, of the sections `.nv.global` and `.nv.global.init`, or of PTX lines like
//! `.visible .global .align 8 .b8 name[BYTES];`. Any other image loads, too, and has none.

use std::ffi::c_char;

use crate::abi::{CudaResult, In};
use crate::error::CudaError;

const ELF: &[u8] = b"\x7fELF";
const CONTAINER: u32 = 0xba55_ed50;
const WRAPPER: u32 = 0x4662_43b1;
/// Sizes of headers: of a cubin and its sections, of a container and its members.
const ELF_HEADER: usize = 64;
const SECTION: usize = 64;
const MEMBER_COMPRESSED: u64 = 0x8000;

/// An image in the caller's memory.
#[derive(Clone, Copy)]
struct Image(In<c_char>);

impl Image {
    fn bytes<const N: usize>(self, at: usize) -> CudaResult<[u8; N]> {
        let mut bytes = [0; N];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = self.0.element(at + index)?.cast_unsigned();
        }
        Ok(bytes)
    }

    fn number16(self, at: usize) -> CudaResult<usize> {
        Ok(u16::from_le_bytes(self.bytes(at)?).into())
    }

    fn number32(self, at: usize) -> CudaResult<u32> {
        self.bytes(at).map(u32::from_le_bytes)
    }

    fn number64(self, at: usize) -> CudaResult<u64> {
        self.bytes(at).map(u64::from_le_bytes)
    }

    fn offset(self, at: usize) -> CudaResult<usize> {
        usize::try_from(self.number64(at)?).map_err(|_| CudaError::InvalidValue)
    }

    /// Whether the image begins with the text. Bytes are read up to the first that differs.
    fn begins(self, at: usize, text: &[u8]) -> bool {
        let mut letters = text.iter().enumerate();
        letters.all(|(index, letter)| {
            let byte = self.0.element(at + index);
            byte.is_ok_and(|byte| byte.cast_unsigned() == *letter)
        })
    }

    fn is_number32(self, number: u32) -> bool {
        self.begins(0, &number.to_le_bytes())
    }
}

/// What an image declares.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Declared {
    /// Size of its global variables.
    pub(crate) global_bytes: u64,
    /// Whether a kernel prints. Only PTX tells.
    pub(crate) prints: bool,
}

impl Declared {
    fn variables(global_bytes: u64) -> Self {
        Self {
            global_bytes,
            prints: false,
        }
    }
}

/// Reads an image.
///
/// # Errors
/// For PTX with another character than those of ASCII, even in a comment, as the driver's compiler.
pub(crate) fn declared(image: In<c_char>) -> CudaResult<Declared> {
    image.get()?;
    let image = Image(image);
    if image.is_number32(WRAPPER) {
        let container = std::ptr::with_exposed_provenance(image.offset(8)?);
        return of_container(Image(In::at(container)));
    }
    if image.is_number32(CONTAINER) {
        return of_container(image);
    }
    if image.begins(0, ELF) {
        return of_cubin(image, 0).map(Declared::variables);
    }
    if !image.begins(0, b".version") && !image.begins(0, b"//") {
        return Ok(Declared::default());
    }
    // PTX is a terminated string.
    let byte = |at: usize| image.0.element(at).map_or(0, c_char::cast_unsigned);
    let text: Vec<u8> = (0..).map(byte).take_while(|letter| *letter != 0).collect();
    of_ptx(&text)
}

fn of_container(container: Image) -> CudaResult<Declared> {
    let mut at = container.number16(6)?;
    let end = at + container.offset(8)?;
    while at < end {
        let (kind, header) = (
            container.number16(at)?,
            container.number32(at + 4)? as usize,
        );
        let length = container.offset(at + 8)?;
        let body = at + header;
        // The only member is loaded. A "compressed" one is stored with its variables' size in front.
        if container.number64(at + 40)? & MEMBER_COMPRESSED != 0 {
            return container.number64(body).map(Declared::variables);
        }
        match kind {
            2 => return of_cubin(container, body).map(Declared::variables),
            1 => {
                let text: Result<Vec<u8>, _> = (body..body + length)
                    .map(|at| container.bytes::<1>(at).map(|[byte]| byte))
                    .collect();
                return of_ptx(&text?);
            }
            _ => at = body + length,
        }
    }
    Ok(Declared::default())
}

fn of_cubin(image: Image, start: usize) -> CudaResult<u64> {
    let table = start + image.offset(start + 40)?;
    let count = image.number16(start + 60)?;
    let names = table + image.number16(start + 62)? * SECTION;
    let names = start + image.offset(names + 24)?;
    let mut sum = 0u64;
    for section in (0..count).map(|index| table + index * SECTION) {
        let name = names + image.number32(section)? as usize;
        if image.begins(name, b".nv.global\0") || image.begins(name, b".nv.global.init\0") {
            sum = sum.saturating_add(image.number64(section + 32)?);
        }
    }
    Ok(sum)
}

fn of_ptx(text: &[u8]) -> CudaResult<Declared> {
    let text = String::from_utf8_lossy(text);
    if !text.is_ascii() {
        return Err(CudaError::InvalidPtx);
    }
    let bytes = text.lines().filter_map(|line| {
        let (_, variable) = line.split_once(".global ")?;
        let (_, size) = variable.split_once('[')?;
        let (size, _) = size.split_once(']')?;
        size.parse::<u64>().ok()
    });
    Ok(Declared {
        global_bytes: bytes.fold(0, u64::saturating_add),
        prints: text.contains("vprintf"),
    })
}

/// A cubin with global variables of this size.
pub(crate) fn cubin(global_bytes: u64) -> Vec<u8> {
    const NAMES: &[u8] = b"\0.shstrtab\0.nv.global\0\0\0";
    let mut cubin = vec![0; ELF_HEADER];
    let table = ELF_HEADER + NAMES.len();
    cubin[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\x41");
    // Type, machine, version.
    cubin[16..24].copy_from_slice(&[2, 0, 190, 0, 1, 0, 0, 0]);
    cubin[40..48].copy_from_slice(&(table as u64).to_le_bytes());
    // Size of the header; sizes and counts of tables; section of the names.
    let counts: [u16; 6] = [64, 0, 0, 64, 3, 1];
    for (count, at) in counts.into_iter().zip((52..64).step_by(2)) {
        cubin[at..at + 2].copy_from_slice(&count.to_le_bytes());
    }
    cubin.extend_from_slice(NAMES);
    let mut section = |name: u32, kind: u32, offset: usize, bytes: u64| {
        let mut section = [0; SECTION];
        section[..4].copy_from_slice(&name.to_le_bytes());
        section[4..8].copy_from_slice(&kind.to_le_bytes());
        section[24..32].copy_from_slice(&(offset as u64).to_le_bytes());
        section[32..40].copy_from_slice(&bytes.to_le_bytes());
        cubin.extend_from_slice(&section);
    };
    section(0, 0, 0, 0);
    section(1, 3, ELF_HEADER, NAMES.len() as u64);
    // Without contents.
    section(11, 8, 0, global_bytes);
    cubin
}
