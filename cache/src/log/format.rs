//! Bytes of a segment file: header page, records, seal. docs/formats.md draws them.
//!
//! ```text
//! file:   header page (4096) | record 0 | record 1 | ... | seal | zeros to a whole page
//! record: crc32 u32 | kind u32 | id u64 | version u64 | weights | state
//! ```
//!
//! A read of one record should touch one page: `floor(4096 / record)` records are packed into a
//! page when that leaves at most an eighth of it empty (for 284-byte records: 14 a page, 3%).
//! Where it would leave more, records lie one after another.
//!
//! A record's checksum begins from a seed of table, segment and record number, so that sound bytes
//! in the wrong place are as wrong as flipped ones.

use crate::RowLayout;

/// Bytes of a page: unit of direct reads, size of the header.
pub(crate) const PAGE: u64 = 4096;
/// Bytes before a record's planes.
pub(crate) const RECORD_HEADER: usize = 24;
/// Bytes of the header that mean something.
const HEADER: usize = 68;
const MAGIC: [u8; 8] = *b"TESSROWS";
const FORMAT: u32 = 1;

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A row's planes.
    Row,
    /// The row is forgotten.
    Tombstone,
    /// All records before this one had reached the medium when it was written; `id` is their
    /// number.
    Mark,
    /// The last record of a sealed segment: `id` is the number of records before it, `version`
    /// the checksum of their checksums.
    Seal,
}

impl Kind {
    fn number(self) -> u32 {
        match self {
            Self::Row => 1,
            Self::Tombstone => 2,
            Self::Mark => 3,
            Self::Seal => 4,
        }
    }

    fn of(number: u32) -> Option<Self> {
        [Self::Row, Self::Tombstone, Self::Mark, Self::Seal]
            .into_iter()
            .find(|kind| kind.number() == number)
    }
}

/// Where records lie in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub layout: RowLayout,
    pub record_bytes: usize,
    /// Records that share a page; 0 when they lie one after another.
    pub per_page: u64,
}

impl Geometry {
    /// The geometry of a layout, or `None` when a record would exceed 1 GiB.
    pub fn new(layout: RowLayout) -> Option<Self> {
        let record_bytes = layout
            .weight_bytes
            .checked_add(layout.state_bytes)
            .and_then(|planes| planes.checked_add(RECORD_HEADER))
            .filter(|&bytes| bytes <= 1 << 30)?;
        let per_page = PAGE / record_bytes as u64;
        let empty = PAGE - per_page * record_bytes as u64;
        let per_page = if empty * 8 <= PAGE { per_page } else { 0 };
        Some(Self { layout, record_bytes, per_page })
    }

    /// First byte of record `slot`.
    pub fn offset(&self, slot: u64) -> u64 {
        let record = self.record_bytes as u64;
        match (slot.checked_div(self.per_page), slot.checked_rem(self.per_page)) {
            (Some(page), Some(place)) => PAGE + page * PAGE + place * record,
            _ => PAGE + slot * record,
        }
    }

    /// Bytes of a file with `slots` records, before its last page is filled.
    pub fn end(&self, slots: u64) -> u64 {
        match slots.checked_sub(1) {
            Some(last) => self.offset(last) + self.record_bytes as u64,
            None => PAGE,
        }
    }

    /// Bytes of a sealed file with `slots` records, the seal included.
    pub fn file_bytes(&self, slots: u64) -> u64 {
        self.end(slots).next_multiple_of(PAGE)
    }

    /// Whole records for which a file of `bytes` has room.
    pub fn slots_in(&self, bytes: u64) -> u64 {
        let body = bytes.saturating_sub(PAGE);
        let record = self.record_bytes as u64;
        if self.per_page == 0 {
            return body / record;
        }
        body / PAGE * self.per_page + (body % PAGE / record).min(self.per_page)
    }
}

/// How a segment came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// Compaction copied its records: versions are below `base`.
    Copied,
    /// Puts and removals appended its records: versions rise from `base` on.
    Appended,
}

/// What a segment file's header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub tag: u64,
    pub number: u32,
    pub base: u64,
    pub origin: Origin,
}

/// Why a header was not read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HeaderFault {
    Damaged(&'static str),
    Other { what: &'static str, found: u64, expected: u64 },
}

impl Header {
    /// The header page.
    pub fn encode(&self, geometry: &Geometry) -> Vec<u8> {
        let mut page = Vec::with_capacity(PAGE as usize);
        page.extend_from_slice(&MAGIC);
        page.extend_from_slice(&FORMAT.to_le_bytes());
        page.extend_from_slice(&(geometry.per_page as u32).to_le_bytes());
        page.extend_from_slice(&self.tag.to_le_bytes());
        page.extend_from_slice(&(geometry.layout.weight_bytes as u64).to_le_bytes());
        page.extend_from_slice(&(geometry.layout.state_bytes as u64).to_le_bytes());
        page.extend_from_slice(&u64::from(self.number).to_le_bytes());
        page.extend_from_slice(&self.base.to_le_bytes());
        page.extend_from_slice(&u64::from(self.origin == Origin::Appended).to_le_bytes());
        let crc = crc32fast::hash(&page);
        page.extend_from_slice(&crc.to_le_bytes());
        page.resize(PAGE as usize, 0);
        page
    }

    /// Reads the header page of a segment that must be of this table and geometry.
    pub fn decode(page: &[u8], tag: u64, geometry: &Geometry) -> Result<Self, HeaderFault> {
        if page.len() < HEADER || page[..8] != MAGIC {
            return Err(HeaderFault::Damaged("it does not begin as a segment file"));
        }
        if crc32fast::hash(&page[..HEADER - 4]) != u32_at(page, HEADER - 4) {
            return Err(HeaderFault::Damaged("the header's checksum is wrong"));
        }
        let same = |what, found: u64, expected: u64| {
            (found == expected).then_some(()).ok_or(HeaderFault::Other { what, found, expected })
        };
        same("format version", u64::from(u32_at(page, 8)), u64::from(FORMAT))?;
        same("table tag", u64_at(page, 16), tag)?;
        same("bytes of weights", u64_at(page, 24), geometry.layout.weight_bytes as u64)?;
        same("bytes of state", u64_at(page, 32), geometry.layout.state_bytes as u64)?;
        same("records a page", u64::from(u32_at(page, 12)), geometry.per_page)?;
        let number = u32::try_from(u64_at(page, 40));
        let number = number.map_err(|_| HeaderFault::Damaged("its number exceeds 32 bits"))?;
        let origin = if u64_at(page, 56) == 1 { Origin::Appended } else { Origin::Copied };
        Ok(Self { tag, number, base: u64_at(page, 48), origin })
    }

    /// Where checksums of this segment's records begin.
    pub fn seed(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&self.tag.to_le_bytes());
        hasher.update(&self.number.to_le_bytes());
        hasher.finalize()
    }
}

/// A record's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub kind: Kind,
    pub id: u64,
    pub version: u64,
}

fn checksum(seed: u32, slot: u64, rest: &[u8]) -> u32 {
    // A segment has fewer than 2^31 records, so the number fits.
    let mut hasher = crc32fast::Hasher::new_with_initial(seed ^ slot as u32);
    hasher.update(rest);
    hasher.finalize()
}

/// Appends record `slot` to the image of a file that begins at byte `image_at`; gives its checksum.
/// Planes are zero where none are given.
pub(crate) fn encode(
    image: &mut Vec<u8>,
    image_at: u64,
    geometry: &Geometry,
    seed: u32,
    slot: u64,
    record: Record,
    planes: Option<(&[u8], &[u8])>,
) -> u32 {
    let start = (geometry.offset(slot) - image_at) as usize;
    image.resize(start + 4, 0);
    image.extend_from_slice(&record.kind.number().to_le_bytes());
    image.extend_from_slice(&record.id.to_le_bytes());
    image.extend_from_slice(&record.version.to_le_bytes());
    if let Some((weights, state)) = planes {
        image.extend_from_slice(weights);
        image.extend_from_slice(state);
    }
    image.resize(start + geometry.record_bytes, 0);
    let crc = checksum(seed, slot, &image[start + 4..]);
    image[start..start + 4].copy_from_slice(&crc.to_le_bytes());
    crc
}

/// Reads a record, if its checksum holds.
pub(crate) fn decode(bytes: &[u8], seed: u32, slot: u64) -> Option<Record> {
    if checksum(seed, slot, &bytes[4..]) != u32_at(bytes, 0) {
        return None;
    }
    let kind = Kind::of(u32_at(bytes, 4))?;
    Some(Record { kind, id: id_of(bytes), version: u64_at(bytes, 16) })
}

/// A record's weights and state.
pub(crate) fn planes(bytes: &[u8], weight_bytes: usize) -> (&[u8], &[u8]) {
    bytes[RECORD_HEADER..].split_at(weight_bytes)
}

/// A record's checksum field.
pub(crate) fn crc_of(bytes: &[u8]) -> u32 {
    u32_at(bytes, 0)
}

/// A record's id field, checked or not.
pub(crate) fn id_of(bytes: &[u8]) -> u64 {
    u64_at(bytes, 8)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(weight_bytes: usize, state_bytes: usize) -> Geometry {
        Geometry::new(RowLayout { weight_bytes, state_bytes }).unwrap()
    }

    #[test]
    fn records_fill_pages_where_that_wastes_little() {
        assert_eq!(geometry(256, 4).per_page, 14);
        assert_eq!(geometry(0, 0).per_page, 170);
        assert_eq!(geometry(4072, 0).per_page, 1);
        assert_eq!(geometry(4073, 0).per_page, 0);
        // 2 a page would leave 1 KiB empty.
        assert_eq!(geometry(1512, 0).per_page, 0);
        assert!(Geometry::new(RowLayout { weight_bytes: 1 << 30, state_bytes: 0 }).is_none());
        let wide = RowLayout { weight_bytes: usize::MAX, state_bytes: 1 };
        assert!(Geometry::new(wide).is_none());
    }

    #[test]
    fn slots_offsets_and_sizes_agree() {
        for (weights, state) in [(256, 4), (0, 0), (1, 0), (1512, 0), (4072, 0), (4073, 9)] {
            let geometry = geometry(weights, state);
            assert_eq!((geometry.end(0), geometry.offset(0)), (PAGE, PAGE));
            for slot in 0..400 {
                let (start, next) = (geometry.offset(slot), geometry.offset(slot + 1));
                let end = geometry.end(slot + 1);
                assert_eq!(end, start + geometry.record_bytes as u64);
                assert!(end <= next);
                if geometry.per_page > 0 {
                    assert_eq!(start / PAGE, (end - 1) / PAGE, "slot {slot} straddles");
                }
                assert_eq!(geometry.slots_in(end), slot + 1);
                assert_eq!(geometry.slots_in(end - 1), slot);
            }
        }
    }

    #[test]
    fn a_record_is_sound_in_its_own_place_only() {
        let geometry = geometry(5, 3);
        let mut image = Vec::new();
        let record = Record { kind: Kind::Row, id: u64::MAX - 1, version: 9 };
        encode(&mut image, PAGE, &geometry, 7, 0, record, Some((&[1, 2, 3, 4, 5], &[6, 7, 8])));
        assert_eq!(image.len(), geometry.record_bytes);
        assert_eq!(decode(&image, 7, 0), Some(record));
        assert_eq!(decode(&image, 7, 1), None);
        assert_eq!(decode(&image, 8, 0), None);
        for bit in 0..image.len() * 8 {
            image[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&image, 7, 0), None, "bit {bit}");
            image[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(decode(&vec![0; geometry.record_bytes], 7, 0), None);
    }

    #[test]
    fn a_header_names_what_differs() {
        let ours = geometry(8, 4);
        let header = Header { tag: 77, number: 3, base: 12, origin: Origin::Appended };
        let mut page = header.encode(&ours);
        assert_eq!(page.len() as u64, PAGE);
        assert_eq!(Header::decode(&page, 77, &ours), Ok(header));
        let other = HeaderFault::Other { what: "table tag", found: 77, expected: 78 };
        assert_eq!(Header::decode(&page, 78, &ours), Err(other));
        let other = HeaderFault::Other { what: "bytes of state", found: 4, expected: 8 };
        assert_eq!(Header::decode(&page, 77, &geometry(8, 8)), Err(other));
        for bit in 0..HEADER * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(Header::decode(&page, 77, &ours), Err(HeaderFault::Damaged(_))));
            page[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(Header::decode(&page[..60], 77, &ours).is_err());
    }
}
