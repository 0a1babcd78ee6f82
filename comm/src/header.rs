//! What every message says of itself.
//!
//! The header is compared with the receiver's own before a byte of the payload is used. Ranks of
//! a job are processes of one build on machines of one byte order, so it is sent as it lies:
//!
//! ```text
//! bytes 0..8    communicator   its id, the same on all its ranks
//!       8..16   sequence       number of the operation on this communicator, from 0
//!      16..24   step           training step that the sender is in
//!      24..32   extent         what all ranks of the operation must share (a length, a hash), or 0
//!      32..40   count          elements of the payload
//!      40..44   detail         root of a broadcast; kind of a reduction (byte 40) and hash of its cut
//!      44       kind           operation
//!      45       phase          0, or 1 for the second exchange of an operation
//!      46       dtype
//!      47       version        of this layout
//! ```

use bytemuck::{Pod, Zeroable};

use crate::Dtype;

/// Version of the header's layout.
pub(crate) const VERSION: u8 = 1;

/// Bytes 0 to 47 of a message.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Header {
    pub(crate) communicator: u64,
    pub(crate) sequence: u64,
    pub(crate) step: u64,
    pub(crate) extent: u64,
    pub(crate) count: u64,
    pub(crate) detail: u32,
    pub(crate) kind: u8,
    pub(crate) phase: u8,
    pub(crate) dtype: u8,
    pub(crate) version: u8,
}

/// The operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllToAllV,
    AllGather,
    AllReduce,
    ReduceScatter,
    Broadcast,
    Barrier,
    Agree,
    Split,
}

impl Kind {
    pub(crate) const ALL: [Self; 8] = [
        Self::AllToAllV,
        Self::AllGather,
        Self::AllReduce,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::Barrier,
        Self::Agree,
        Self::Split,
    ];

    /// Its name in messages and metrics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::AllToAllV => "all_to_all_v",
            Self::AllGather => "all_gather",
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::Agree => "agree",
            Self::Split => "split",
        }
    }
}

/// Kinds of reduction, as `detail` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sum,
    Max,
    Min,
}

impl Header {
    /// Whether `other` belongs to the same operation.
    pub(crate) fn agrees_with(&self, other: &Self) -> bool {
        Self { count: 0, ..*self } == Self { count: 0, ..*other }
    }

    /// The operation for people: `all_gather<u64> #17`.
    pub(crate) fn describe(&self) -> String {
        if self.version != VERSION {
            return format!("a message of layout {}", self.version);
        }
        let dtype = Dtype::of_code(self.dtype).map_or("?", Dtype::name);
        let Some(kind) = Kind::ALL.get(usize::from(self.kind)) else {
            return format!("operation {} #{}", self.kind, self.sequence);
        };
        let name = kind.name();
        let reduction = match self.detail & 0xFF {
            0 => "sum",
            1 => "max",
            _ => "min",
        };
        let mut text = match kind {
            Kind::AllToAllV | Kind::AllGather => format!("{name}<{dtype}>"),
            Kind::AllReduce => format!("{name}<{dtype}, {reduction}> of {} elements", self.extent),
            Kind::ReduceScatter => format!(
                "{name}<{dtype}, {reduction}> of {} elements in cut {:06x}",
                self.extent,
                self.detail >> 8
            ),
            Kind::Broadcast => format!("{name}<{dtype}> from its rank {}", self.detail),
            Kind::Agree => format!("{name} on subject {:08x}", self.extent as u32),
            Kind::Barrier | Kind::Split => name.to_owned(),
        };
        text.push_str(&format!(" #{}", self.sequence));
        if self.phase != 0 {
            text.push_str(" (second phase)");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_as_drawn() {
        assert_eq!(size_of::<Header>(), 48);
        let header = Header {
            communicator: 1,
            sequence: 17,
            step: 4,
            extent: 5,
            count: 6,
            detail: 7,
            kind: 8,
            phase: 9,
            dtype: 10,
            version: 11,
        };
        let bytes = bytemuck::bytes_of(&header);
        assert_eq!(bytes[8..16], 17u64.to_ne_bytes());
        assert_eq!(bytes[40..44], 7u32.to_ne_bytes());
        assert_eq!(bytes[44..], [8, 9, 10, 11]);
    }

    #[test]
    fn any_field_but_the_count_tells_operations_apart() {
        let header = Header { version: VERSION, ..Header::zeroed() };
        assert!(header.agrees_with(&Header { count: 9, ..header }));
        for other in [
            Header { communicator: 1, ..header },
            Header { sequence: 1, ..header },
            Header { step: 1, ..header },
            Header { extent: 1, ..header },
            Header { detail: 1, ..header },
            Header { kind: 1, ..header },
            Header { phase: 1, ..header },
            Header { dtype: 1, ..header },
            Header { version: 2, ..header },
        ] {
            assert!(!header.agrees_with(&other), "{other:?}");
        }
        for (code, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, code);
            let text = Header { kind: code as u8, sequence: 3, ..header }.describe();
            assert!(text.starts_with(kind.name()) && text.contains("#3"), "{text}");
        }
        assert!(Header { kind: 99, ..header }.describe().contains("operation 99"));
    }
}
