//! Records of the process's maps that have more than a charge: physical memory, its mappings, contexts and graphs.

use crate::accounts::charge_map::{Record, pack, record, unpack};
use crate::driver_api::cuda::CUdevice;

/// GPU index of an object that is charged to no GPU.
pub(crate) const NO_GPU: u8 = u8::MAX;

/// Physical memory of the virtual memory management API, or a multicast object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Physical {
    /// Its size; for imported memory the known part, for a multicast object 0.
    pub(crate) bytes: u64,
    /// Index of the GPU's first share; [`NO_GPU`] for a multicast object.
    pub(crate) gpu: u8,
    pub(crate) origin: Origin,
    /// Handles that the program has.
    pub(crate) handles: u32,
    /// Mappings to addresses, arrays and multicast objects.
    pub(crate) mappings: u32,
}

/// Source of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Created by this process.
    Own,
    /// As [`Origin::Own`]; other processes may have it open.
    Exported,
    /// Opened by this process.
    Imported,
}

impl Physical {
    /// Returns whether a handle or mapping keeps it alive.
    pub(crate) fn is_referenced(self) -> bool {
        self.handles != 0 || self.mappings != 0
    }
}

impl Record for Physical {
    fn to_words(self) -> [u64; 2] {
        let origin: u64 = match self.origin {
            Origin::Own => 0,
            Origin::Exported => 1,
            Origin::Imported => 2,
        };
        let packed = pack(self.bytes, self.gpu) | origin << 56;
        [
            packed,
            u64::from(self.handles) << 32 | u64::from(self.mappings),
        ]
    }

    fn from_words([packed, references]: [u64; 2]) -> Self {
        let (bytes, gpu) = unpack(packed);
        let [.., origin] = packed.to_le_bytes();
        let [a, b, c, d, e, f, g, h] = references.to_le_bytes();
        Self {
            bytes,
            gpu,
            origin: match origin {
                0 => Origin::Own,
                1 => Origin::Exported,
                _ => Origin::Imported,
            },
            mappings: u32::from_le_bytes([a, b, c, d]),
            handles: u32::from_le_bytes([e, f, g, h]),
        }
    }
}

/// Implements [`Record`] for a pair of numbers.
macro_rules! pair {
    ($(#[$outer:meta])* $name:ident { $(#[$a:meta])* $first:ident, $(#[$b:meta])* $second:ident $(,)? }) => {
        $(#[$outer])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) struct $name {
            $(#[$a])*
            pub(crate) $first: u64,
            $(#[$b])*
            pub(crate) $second: u64,
        }

        impl Record for $name {
            fn to_words(self) -> [u64; 2] {
                [self.$first, self.$second]
            }

            fn from_words([$first, $second]: [u64; 2]) -> Self {
                Self { $first, $second }
            }
        }
    };
}

pair! {
    /// Mapping of physical memory to addresses.
    Mapping {
        /// Handle of the memory.
        memory,
        bytes,
    }
}

pair! {
    /// Mapping of physical memory to a part of an array, or its binding to a multicast object.
    Binding {
        /// Handle of the memory.
        memory,
        /// Handle of the array or multicast object.
        object,
    }
}

pair! {
    /// Memory of a library in each context that loads it.
    LibraryImage {
        bytes,
        /// Requests for its kernels that were not denied, or are in progress. While it is 0, new contexts do not load it.
        uses,
    }
}

pair! {
    /// A library that is charged in a context.
    LibraryPart {
        library,
        /// Handle of the context.
        context,
    }
}

record! {
    /// A file descriptor by which other processes can open physical memory.
    Descriptor {
        /// The charge that the descriptor keeps alive; 0 while the memory has a handle or mapping.
        bytes,
        /// Index of the GPU's first share.
        gpu,
        /// Handle of the memory; invalid if `bytes` is not 0.
        memory,
    }
}

/// A context that is not primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Context {
    /// A context of its own.
    Own {
        /// Its charge.
        bytes: u64,
        /// Index of the GPU's first share.
        gpu: u8,
        /// Attachments besides that of its creation.
        attachments: u64,
    },
    /// A part of a device's primary context.
    Part { device: CUdevice },
}

impl Context {
    /// Returns the context with more or fewer attachments. A part has none.
    pub(crate) fn attached(self, more: i64) -> Self {
        match self {
            Self::Own {
                bytes,
                gpu,
                attachments,
            } => Self::Own {
                bytes,
                gpu,
                attachments: attachments.saturating_add_signed(more),
            },
            part @ Self::Part { .. } => part,
        }
    }

    /// Returns the context with the additional charge that `more` returns for its GPU.
    pub(crate) fn with_bytes(self, more: impl FnOnce(u8) -> u64) -> Self {
        match self {
            Self::Own {
                bytes,
                gpu,
                attachments,
            } => Self::Own {
                bytes: bytes.saturating_add(more(gpu)),
                gpu,
                attachments,
            },
            part @ Self::Part { .. } => part,
        }
    }

    /// Returns whether a detach leaves the context alive.
    pub(crate) fn is_attached(self) -> bool {
        match self {
            Self::Own { attachments, .. } => attachments != 0,
            Self::Part { .. } => true,
        }
    }
}

impl Record for Context {
    fn to_words(self) -> [u64; 2] {
        match self {
            Self::Own {
                bytes,
                gpu,
                attachments,
            } => [pack(bytes, gpu), attachments],
            Self::Part { device } => [pack(0, NO_GPU), u64::from(device.cast_unsigned())],
        }
    }

    fn from_words([packed, number]: [u64; 2]) -> Self {
        match unpack(packed) {
            (_, NO_GPU) => {
                let [a, b, c, d, ..] = number.to_le_bytes();
                let device = CUdevice::from_le_bytes([a, b, c, d]);
                Self::Part { device }
            }
            (bytes, gpu) => Self::Own {
                bytes,
                gpu,
                attachments: number,
            },
        }
    }
}

/// Largest memory need of an executable graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GraphNeed {
    pub(crate) bytes: u64,
    /// Index of the GPU's first share.
    pub(crate) gpu: u8,
    pub(crate) device: CUdevice,
    /// Whether it is part of the device's total need: it was launched or uploaded.
    pub(crate) is_counted: bool,
}

impl Record for GraphNeed {
    fn to_words(self) -> [u64; 2] {
        let device = u64::from(self.device.cast_unsigned());
        [
            pack(self.bytes, self.gpu),
            device | u64::from(self.is_counted) << 32,
        ]
    }

    fn from_words([packed, word]: [u64; 2]) -> Self {
        let (bytes, gpu) = unpack(packed);
        let [a, b, c, d, is_counted, ..] = word.to_le_bytes();
        Self {
            bytes,
            gpu,
            device: CUdevice::from_le_bytes([a, b, c, d]),
            is_counted: is_counted != 0,
        }
    }
}

/// Total need of all graphs ever launched on a device, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TotalNeed(pub(crate) u64);

impl Record for TotalNeed {
    fn to_words(self) -> [u64; 2] {
        [self.0, 0]
    }

    fn from_words([bytes, _]: [u64; 2]) -> Self {
        Self(bytes)
    }
}
