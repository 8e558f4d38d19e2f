//! Format of the files in `corpus/`, one input each: `page-*.txt` or `region-*.txt`.
//!
//! ```text
//! like page-golden        start from that input instead of no bytes
//! size 4096               truncate, or extend with zeroes
//! at 8 02000000           write bytes at an offset
//! fill 24 40 a5           offset, length and value of repeated bytes
//! seal 256 128            offset and length of a range whose last eight bytes become its checksum
//! means Version { found: 2 }  the expected result
//! ```

use std::fmt::Write as _;
use std::path::Path;

/// The decoder of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A limits page.
    Page,
    /// A usage region.
    Region,
}

/// An input.
pub(crate) struct Seed {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) bytes: Vec<u8>,
    /// The expected result.
    pub(crate) meaning: String,
}

impl Seed {
    /// The whole corpus, by name.
    pub(crate) fn all() -> Vec<Self> {
        let entries = std::fs::read_dir(directory()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let names = names.filter_map(|name| Some(name.strip_suffix(".txt")?.to_owned()));
        let mut names: Vec<String> = names.collect();
        names.sort();
        names.iter().map(|name| Self::named(name)).collect()
    }

    fn named(name: &str) -> Self {
        let path = directory().join(format!("{name}.txt"));
        let text = std::fs::read_to_string(&path).unwrap();
        let kind = match name.split_once('-').unwrap().0 {
            "page" => Kind::Page,
            "region" => Kind::Region,
            other => panic!("{name} is a {other}"),
        };
        let mut seed = Self {
            name: name.to_owned(),
            kind,
            bytes: Vec::new(),
            meaning: String::new(),
        };
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            seed.follow(line);
        }
        seed
    }

    fn follow(&mut self, line: &str) {
        let (word, rest) = line.split_once(' ').unwrap();
        let numbers = || -> Vec<usize> {
            let numbers = rest.split(' ').map_while(|text| text.parse().ok());
            numbers.collect()
        };
        match (word, numbers().as_slice()) {
            ("like", _) => self.bytes = Self::named(rest).bytes,
            ("size", &[size]) => self.bytes.resize(size, 0),
            ("at", &[at, ..]) => {
                let bytes = hex(rest.split_once(' ').unwrap().1);
                self.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            ("fill", &[at, length, ..]) => {
                let byte = hex(rest.rsplit_once(' ').unwrap().1)[0];
                self.bytes[at..at + length].fill(byte);
            }
            ("seal", &[at, length]) => seal(&mut self.bytes[at..at + length]),
            ("means", _) => rest.clone_into(&mut self.meaning),
            _ => panic!("{}: {line:?}", self.name),
        }
    }

    /// Formats other bytes as a corpus file based on this input.
    pub(crate) fn difference(&self, bytes: &[u8]) -> String {
        let mut text = format!("like {}\nsize {}\n", self.name, bytes.len());
        for (index, chunk) in bytes.chunks(16).enumerate() {
            let at = index * 16;
            let end = (at + chunk.len()).min(self.bytes.len());
            if self.bytes.get(at..end) != Some(chunk) && chunk.iter().any(|&byte| byte != 0)
                || self
                    .bytes
                    .get(at..end)
                    .is_some_and(|before| before != chunk)
            {
                let hex: String = chunk.iter().map(|byte| format!("{byte:02x}")).collect();
                writeln!(text, "at {at} {hex}").unwrap();
            }
        }
        text
    }
}

/// FNV-1a, 64 bits, of all bytes except the last eight.
pub(crate) fn seal(bytes: &mut [u8]) {
    let Some((content, checksum)) = bytes.split_last_chunk_mut::<8>() else {
        return;
    };
    let mut hash: u64 = 14_695_981_039_346_656_037;
    for byte in content {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(1_099_511_628_211);
    }
    *checksum = hash.to_le_bytes();
}

fn hex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16);
    digits.map(|digits| byte(digits).unwrap()).collect()
}

fn directory() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus"))
}
