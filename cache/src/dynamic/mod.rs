//! Dynamic tables: rows for any u64 id, without collisions, of bounded number.
//!
//! [`IdMap`] gives ids row numbers in `0..capacity` of an ordinary row store and decides which
//! ids get one (admission) and which lose theirs (eviction). It knows nothing of weights: it
//! tells the owner which rows went to which ids, and the owner gives such a row its first value,
//! a function of (seed, table, id), and zero state.
//!
//! ```text
//! batch of raw ids -> known ids: touch their rows                     found in bulk
//!                  -> unknown ids, ascending:
//!                       admission says no  -> no row (rejected)
//!                       a row is free      -> the free row of the lowest number
//!                       a row can go       -> that of the lowest (score, id) not seen this step
//!                       else               -> no row (overflow)
//! ```
//!
//! What happens is a function of the options, of the ids of each batch and how often they occur in
//! it, and of the steps: their order in the batch, hash order, memory and threads have no part in
//! it. Memory: 40 to 50 bytes a row of the capacity
//! ([`IdMap::bytes`]), and a counting sketch's counters.

mod admission;
mod map;
mod rows;
mod shortlist;
mod state;

pub use admission::SketchShape;
pub use map::IdMap;
pub use state::{Dealt, IdMapState, Move, SketchState};

/// What an [`IdMap`] is made of. All ranks of a table have the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IdMapOptions {
    /// Rows, at least 1 and at most 2^32 - 2; more need more shards.
    pub capacity: u64,
    /// Which new ids get a row.
    pub admission: Admission,
    /// Which ids lose their row.
    pub eviction: Eviction,
    /// Seed of random admission and of the sketch's hashes.
    pub seed: u64,
}

/// Which new ids get a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Admission {
    /// Every one, at once.
    Always,
    /// An id that was seen `n` times, by a counting sketch: at its `n`-th sighting at the latest,
    /// and too early with a probability stated at [`SketchShape`]. A sighting is an occurrence in
    /// a training batch while the id has no row. An id that lost its row keeps its count.
    Count {
        /// Sightings, at least 1.
        n: u8,
        /// Size of the sketch, and so its error.
        sketch: SketchShape,
        /// All counts are halved, rounding down, after every so many sightings; 0 for never. With
        /// halving, `n` sightings must come close enough together to be remembered.
        halve_every_sightings: u64,
    },
    /// Each new id of a step with probability `p`, a function of (seed, id, step): ids seen often
    /// get in soon.
    Probability {
        /// From 0 to 1.
        p: f64,
    },
}

/// Which ids lose their row. Ids seen in the current step never do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// None: a full table takes no new ids.
    None,
    /// Those not seen for more than `steps` steps, at [`IdMap::advance`]. A full table takes no
    /// new ids.
    Age {
        /// Steps.
        steps: u64,
    },
    /// When the table is full, as many as there are new ids: first those seen longest ago; of
    /// ids seen last in the same step, the smaller first.
    Lru,
    /// When the table is full, as many as there are new ids: first those with the fewest
    /// occurrences; of ids with as many, the smaller first.
    Lfu {
        /// All counts are halved, rounding up, when the step passes a multiple of this; 0 for
        /// never.
        halve_every_steps: u64,
    },
}

/// An id and its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdRow {
    /// The raw id.
    pub id: u64,
    /// Its row, below the capacity.
    pub row: u64,
}

/// What became of a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolved {
    /// Row of each id given, in the same order, or [`IdMap::NONE`].
    pub rows: Vec<u64>,
    /// Ids that got a row, ascending. The owner gives these rows their first
    /// values.
    pub admitted: Vec<IdRow>,
    /// Ids that lost their row, lowest score first. A row may be in `admitted` too.
    pub evicted: Vec<IdRow>,
    /// The batch in numbers.
    pub stats: IdMapStats,
}

/// A batch in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdMapStats {
    /// Occurrences of ids that had a row.
    pub hits: u64,
    /// Occurrences of ids that had none.
    pub misses: u64,
    /// Ids that got a row.
    pub admitted: u64,
    /// Ids that admission gave none.
    pub rejected: u64,
    /// Ids that would have been admitted, had there been a row.
    pub overflow: u64,
    /// Ids that lost their row.
    pub evicted: u64,
    /// Rows in use after the batch.
    pub occupancy: u64,
}

/// Of several maps together.
impl std::ops::AddAssign for IdMapStats {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.admitted += other.admitted;
        self.rejected += other.rejected;
        self.overflow += other.overflow;
        self.evicted += other.evicted;
        self.occupancy += other.occupancy;
    }
}

/// The splitmix64 hash of an id; different ids have different ones.
///
/// ```text
/// z = id + 0x9E3779B97F4A7C15        (all modulo 2^64)
/// z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
/// z = (z ^ (z >> 27)) * 0x94D049BB133111EB
/// hash = z ^ (z >> 31)
/// ```
///
/// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
#[must_use]
pub const fn id_hash(id: u64) -> u64 {
    let z = id.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The rank of `ranks` that keeps an id: the id's [hash](id_hash), scaled to the number of ranks by
/// multiply and shift. In the order of their hashes, the ids of a rank lie one after another,
/// however many ranks there are.
///
/// The map's own hash is another one, so that a rank's share of the ids is spread in its map.
#[must_use]
pub const fn owner_of(id: u64, ranks: u64) -> u64 {
    ((id_hash(id) as u128 * ranks as u128) >> 64) as u64
}
