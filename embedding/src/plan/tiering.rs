//! How large the tiers of memory should be: what miss-ratio curves say of budgets that tables share
//! as they do in training.
//!
//! ```text
//! budget --Tiers::rows_held--> slots of every part --curve of its table--> misses a step
//! the least budget of the device tier with 90%, 95%, 99% hits, no batch in passes
//!   -> the least of the host tier with which an SSD keeps up
//! ```
//! Tiers are exclusive, so that device and host tier together hold what one tier of lru of both
//! sizes would. A part of a table that takes the share `f` of its uses has the curve of the table
//! at `slots / f`, times `f`.

use serde::{Deserialize, Serialize};
use tessera_cache::{Policy, RowLayout, slot_bytes};

use super::{MissCurve, Planned, TableLoad};
use crate::Tiers;
use crate::tiers::RECORD_EXTRA_BYTES;

/// Shares of a table's rows that its curve is told at besides powers of two, in percent.
pub const CURVE_PERCENTS: [u64; 6] = [1, 2, 5, 10, 20, 50];

/// Shares of the repeated uses that are to be hits.
const WANTED: [f64; 3] = [0.9, 0.95, 0.99];

/// What an SSD reads at once.
const BLOCK_BYTES: u64 = 4096;

/// What tiers are advised from.
#[derive(Clone, Debug)]
pub struct TierJob<'a> {
    /// Where the tables are.
    pub planned: &'a Planned,
    /// The tables, in the plan's order.
    pub tables: &'a [TableLoad],
    /// A curve for each of them.
    pub curves: Vec<&'a MissCurve>,
    /// The tiers of a configuration.
    pub given: Option<&'a Tiers>,
    /// Bytes that a rank can read from its SSD in a step; `None` where its speed is not known.
    pub ssd_bytes_max: Option<f64>,
}

/// Curves of all tables, and what they say of sizes. Numbers of rows are a step, over all ranks of
/// a group unless they say otherwise; bytes are of each rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierAdvice {
    /// Batches of the sample.
    pub batches: u64,
    /// Uses of rows that the sample had not shown before. They count in no hit rate.
    pub first_uses: f64,
    /// Bytes that a rank can read from its SSD in a step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssd_bytes_max: Option<f64>,
    /// The curve of every table.
    pub tables: Vec<TableCurve>,
    /// What the tiers of the configuration hold of every part of a table.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<TierShare>,
    /// What is to be expected of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<TierLoad>,
    /// Sizes advised, from small to large.
    pub sizes: Vec<TierSize>,
}

/// The curve of a table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableCurve {
    /// Name.
    pub table: String,
    /// Rows.
    pub rows: u64,
    /// Different rows of each batch, over the whole sample.
    pub uses: u64,
    /// Different rows of the sample; an estimate unless `share_tracked` is 1.
    pub first_uses: f64,
    /// Most different rows of a batch.
    pub batch_rows_max: u64,
    /// Share of the rows that the curve is made from; 1: it is exact.
    pub share_tracked: f64,
    /// Slots ascending, from those of a batch up.
    pub curve: Vec<CurvePart>,
}

/// A size of a tier of one table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CurvePart {
    /// Slots.
    pub slots: u64,
    /// Hits over uses that are not a row's first; absent when there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_rate: Option<f64>,
    /// Misses a step, first uses not among them.
    pub misses: f64,
    /// Bound of the curve's error, over all uses.
    pub error: f64,
}

/// What tiers hold of a part of a table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierShare {
    /// Name of the table.
    pub table: String,
    /// Rank within the group.
    pub rank: usize,
    /// Rows of the part.
    pub rows: u64,
    /// Slots in the device tier.
    pub device_slots: u64,
    /// Slots in the host tier.
    pub host_slots: u64,
    /// Most different rows of a batch, about.
    pub batch_rows_max: u64,
    /// Uses a step that are not a row's first.
    pub repeats: f64,
    /// Those among them that the device tier misses.
    pub device_misses: f64,
    /// Those that the host tier misses too.
    pub host_misses: f64,
}

/// What is to be expected of sizes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierLoad {
    /// Bytes of the device tier.
    pub device_bytes: u64,
    /// Bytes of the host tier; absent: as many as the rows need.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bytes: Option<u64>,
    /// Bytes of a host tier of all rows that the device tier has no slot for.
    pub host_bytes_all: u64,
    /// Hits in the device tier over uses that are not a row's first; absent when there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_rate: Option<f64>,
    /// The same when first uses of parts that are not whole in the device tier count as misses:
    /// what training reaches is between the two. Absent when there are no uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_rate_min: Option<f64>,
    /// Misses of the device tier.
    pub device_misses: f64,
    /// Those of the host tier too: reads of the SSD.
    pub host_misses: f64,
    /// Bytes that the rank with most of them reads from its SSD.
    pub ssd_bytes: f64,
    /// Parts of tables, a batch of which has more rows than their device tier: it works in passes.
    pub parts_in_passes: usize,
}

/// Sizes advised.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierSize {
    /// Hit rate of the device tier that was to be reached.
    pub hit_rate_wanted: f64,
    /// The sizes, and what is to be expected of them.
    pub load: TierLoad,
}

/// Curves of all tables at sizes in powers of two and shares of their rows, what the configuration's tiers make of them,
/// and the least sizes for hit rates of 90%, 95% and 99%.
#[must_use]
pub fn tier_advice(job: &TierJob<'_>) -> TierAdvice {
    let policy = job.given.map_or(Policy::Lru, |tiers| tiers.policy);
    let ranks = Ranks { parts: parts(job), policy };
    let shares = job.given.map_or(Vec::new(), |tiers| {
        ranks.shares(tiers.device_bytes, tiers.host_bytes, |part| {
            job.tables[part.table].name.clone()
        })
    });
    let mut slots: Vec<Vec<u64>> = job.curves.iter().map(|curve| sizes_of(curve)).collect();
    if let Some(tiers) = job.given {
        for (part, device, host) in ranks.held(tiers.device_bytes, tiers.host_bytes) {
            slots[part.table].extend([part.whole(device), part.whole(device.saturating_add(host))]);
        }
    }
    let table = |(table, mut slots): (usize, Vec<u64>)| {
        let (load, curve) = (&job.tables[table], job.curves[table]);
        let least = curve.batch_rows_max();
        slots.retain(|&slots| slots >= least && slots <= curve.rows());
        slots.sort_unstable();
        slots.dedup();
        let part = |slots| CurvePart {
            slots,
            hit_rate: curve.hit_rate(slots),
            misses: curve.misses(slots) / curve.batches().max(1) as f64,
            error: curve.error(slots),
        };
        TableCurve {
            table: load.name.clone(),
            rows: load.rows,
            uses: curve.uses(),
            first_uses: curve.first_uses(),
            batch_rows_max: least,
            share_tracked: curve.share_tracked(),
            curve: slots.into_iter().map(part).collect(),
        }
    };
    let of_step = |curve: &&MissCurve| curve.first_uses() / curve.batches().max(1) as f64;
    TierAdvice {
        batches: job.curves.iter().map(|curve| curve.batches()).max().unwrap_or(0),
        first_uses: job.curves.iter().map(of_step).sum(),
        ssd_bytes_max: job.ssd_bytes_max,
        tables: slots.into_iter().enumerate().map(table).collect(),
        shares,
        given: job.given.map(|tiers| ranks.load(tiers.device_bytes, tiers.host_bytes)),
        sizes: WANTED.map(|wanted| ranks.advise(wanted, job.ssd_bytes_max)).to_vec(),
    }
}

/// Slots that a curve is told at: powers of two, a batch's rows, shares of all rows, and all rows.
fn sizes_of(curve: &MissCurve) -> Vec<u64> {
    let rows = curve.rows();
    let powers = (0..u64::BITS).map(|bit| 1u64 << bit).take_while(|&slots| slots < rows);
    let shares = CURVE_PERCENTS.map(|percent| percent_of(rows, percent));
    powers.chain(shares).chain([curve.batch_rows_max(), rows]).collect()
}

fn percent_of(rows: u64, percent: u64) -> u64 {
    (u128::from(rows) * u128::from(percent) / 100) as u64
}

impl TableCurve {
    /// The curve at so many percent of the rows, one of [`CURVE_PERCENTS`]; `None` when that is
    /// less than a batch has.
    #[must_use]
    pub fn at_percent(&self, percent: u64) -> Option<&CurvePart> {
        let slots = percent_of(self.rows, percent);
        self.curve.iter().find(|part| part.slots == slots)
    }
}

/// A part of a table on one rank.
struct Part<'a> {
    table: usize,
    rank: usize,
    rows: u64,
    layout: RowLayout,
    /// Of the table's uses, those that are of rows of this part.
    share: f64,
    curve: &'a MissCurve,
}

impl Part<'_> {
    /// Slots of a tier of the whole table that keeps this part's rows as long as `slots` of its own.
    fn whole(&self, slots: u64) -> u64 {
        if slots >= self.rows || self.share <= 0.0 {
            return self.curve.rows();
        }
        (slots as f64 / self.share) as u64
    }

    /// `uses` of the whole table and sample, as those of this part a step.
    fn of_step(&self, uses: f64) -> f64 {
        self.share * uses / self.curve.batches().max(1) as f64
    }

    fn misses(&self, slots: u64) -> f64 {
        self.of_step(self.curve.misses(self.whole(slots)))
    }

    fn batch_rows_max(&self) -> u64 {
        let rows = (self.share * self.curve.batch_rows_max() as f64).ceil() as u64;
        rows.min(self.rows)
    }

    /// Bytes read for a row from an SSD.
    fn ssd_bytes(&self) -> u64 {
        let row = (self.layout.weight_bytes + self.layout.state_bytes) as u64;
        (row + RECORD_EXTRA_BYTES).next_multiple_of(BLOCK_BYTES)
    }
}

/// The parts of every rank.
fn parts<'a>(job: &TierJob<'a>) -> Vec<Vec<Part<'a>>> {
    let plan = &job.planned.plan;
    let mut ranks: Vec<Vec<Part<'_>>> = (0..plan.ranks()).map(|_| Vec::new()).collect();
    for (table, spread) in plan.tables().iter().enumerate() {
        let load = &job.tables[table];
        for shard in spread.shards.iter().filter(|shard| !shard.rows.is_empty()) {
            let weight_bytes = shard.columns.len() * load.element_bytes;
            let state_bytes = load.row_bytes(shard.columns.len()) as usize - weight_bytes;
            let rows = shard.rows.end - shard.rows.start;
            ranks[shard.rank].push(Part {
                table,
                rank: shard.rank,
                rows,
                layout: RowLayout { weight_bytes, state_bytes },
                share: match &load.stats {
                    Some(stats) => stats.share(&shard.rows).1,
                    None => rows as f64 / load.rows as f64,
                },
                curve: job.curves[table],
            });
        }
    }
    ranks
}

struct Ranks<'a> {
    parts: Vec<Vec<Part<'a>>>, // of each rank
    policy: Policy,
}

impl<'a> Ranks<'a> {
    /// Every part with its slots in the device and in the host tier.
    fn held(
        &self,
        device_bytes: u64,
        host_bytes: Option<u64>,
    ) -> impl Iterator<Item = (&Part<'a>, u64, u64)> {
        let tiers = Tiers { device_bytes, host_bytes, cold: None, policy: self.policy };
        self.parts.iter().flat_map(move |parts| {
            let sizes: Vec<(u64, RowLayout)> =
                parts.iter().map(|part| (part.rows, part.layout)).collect();
            let held = tiers.rows_held(&sizes).into_iter();
            parts.iter().zip(held).map(|(part, (device, host))| (part, device, host))
        })
    }

    fn shares(
        &self,
        device_bytes: u64,
        host_bytes: Option<u64>,
        name: impl Fn(&Part<'_>) -> String,
    ) -> Vec<TierShare> {
        let share = |(part, device, host): (&Part<'_>, u64, u64)| TierShare {
            table: name(part),
            rank: part.rank,
            rows: part.rows,
            device_slots: device,
            host_slots: host,
            batch_rows_max: part.batch_rows_max(),
            repeats: part.of_step(part.curve.repeats()),
            device_misses: part.misses(device),
            host_misses: part.misses(device.saturating_add(host)),
        };
        self.held(device_bytes, host_bytes).map(share).collect()
    }

    fn load(&self, device_bytes: u64, host_bytes: Option<u64>) -> TierLoad {
        let (mut repeats, mut device_misses, mut host_misses) = (0.0, 0.0, 0.0);
        let (mut uses, mut first_misses) = (0.0, 0.0);
        let mut ssd_bytes = vec![0.0; self.parts.len()];
        let mut below_bytes = vec![0u64; self.parts.len()];
        let mut parts_in_passes = 0;
        for (part, device, host) in self.held(device_bytes, host_bytes) {
            let misses = part.misses(device.saturating_add(host));
            repeats += part.of_step(part.curve.repeats());
            device_misses += part.misses(device);
            host_misses += misses;
            uses += part.of_step(part.curve.uses() as f64);
            if device < part.rows {
                first_misses += part.of_step(part.curve.first_uses());
            }
            ssd_bytes[part.rank] += misses * part.ssd_bytes() as f64;
            let below = (part.rows - device).saturating_mul(slot_bytes(part.layout, self.policy));
            below_bytes[part.rank] = below_bytes[part.rank].saturating_add(below);
            parts_in_passes += usize::from(device < part.batch_rows_max());
        }
        TierLoad {
            device_bytes,
            host_bytes,
            host_bytes_all: below_bytes.into_iter().max().unwrap_or(0),
            hit_rate: (repeats > 0.0).then(|| 1.0 - device_misses / repeats),
            hit_rate_min: (uses > 0.0).then(|| 1.0 - (device_misses + first_misses) / uses),
            device_misses,
            host_misses,
            ssd_bytes: ssd_bytes.into_iter().fold(0.0, f64::max),
            parts_in_passes,
        }
    }

    /// The least sizes with these hits on the device and no more reads than the SSD makes.
    fn advise(&self, hit_rate: f64, ssd_bytes_max: Option<f64>) -> TierSize {
        let all = |part: &Part<'_>| {
            let row_bytes = part.layout.weight_bytes + part.layout.state_bytes;
            part.rows.saturating_mul(row_bytes as u64)
        };
        let sum = |parts: &Vec<Part<'_>>| parts.iter().map(all).fold(0, u64::saturating_add);
        let most = self.parts.iter().map(sum).max().unwrap_or(0);
        let device_bytes = least(1, most, |bytes| {
            let load = self.load(bytes, None);
            load.parts_in_passes == 0 && load.hit_rate.is_none_or(|rate| rate >= hit_rate)
        });
        let unbounded = self.load(device_bytes, None);
        let Some(ssd_bytes_max) = ssd_bytes_max else {
            return TierSize { hit_rate_wanted: hit_rate, load: unbounded };
        };
        let host_bytes = least(0, unbounded.host_bytes_all, |bytes| {
            self.load(device_bytes, Some(bytes)).ssd_bytes <= ssd_bytes_max
        });
        let load = self.load(device_bytes, Some(host_bytes));
        TierSize { hit_rate_wanted: hit_rate, load }
    }
}

/// The least number from `low` on for which `enough` holds, given that it holds for `high` and for
/// all above one for which it holds.
fn least(mut low: u64, mut high: u64, enough: impl Fn(u64) -> bool) -> u64 {
    while low < high {
        let middle = low + (high - low) / 2;
        if enough(middle) { high = middle } else { low = middle + 1 }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::super::{
        Budget, Grid2d, IdCounter, Placement, ReuseCounter, Topology, Workload, plan,
    };
    use super::*;
    use crate::{SparseOptimizer, WeightDecay};

    /// Tables with a sample whose ids fall off as a power, and their curves.
    fn sampled(sizes: &[(u64, usize)]) -> (Vec<TableLoad>, Vec<MissCurve>) {
        let optimizer = SparseOptimizer::RowwiseAdagrad {
            lr: 0.1,
            eps: 0.0,
            decay: WeightDecay::None,
            moment_scale: 1.0,
        };
        let mut tables = Vec::new();
        let mut curves = Vec::new();
        for (number, &(rows, dim)) in sizes.iter().enumerate() {
            let (mut ids, mut reuse) = (IdCounter::new(rows), ReuseCounter::new(rows));
            for batch in 0..200u64 {
                let id = |i: u64| {
                    let u = (i * 2_654_435_761 + batch * 40_503) % 65_536;
                    let rank = (rows as f64).powf(u as f64 / 65_536.0) as u64 - 1;
                    (rank * 7919 % rows) as i64
                };
                ids.batch((0..256).map(id));
                reuse.batch((0..256).map(id));
            }
            let mut load = TableLoad::new(format!("t{number}"), rows, dim, &optimizer, vec![1.0]);
            load.stats = ids.finish();
            tables.push(load);
            curves.push(reuse.finish());
        }
        (tables, curves)
    }

    fn planned(tables: &[TableLoad], ranks: usize) -> Planned {
        let grid = Grid2d::new(ranks, 1, Placement::Strided).unwrap();
        let topology = Topology::preset("cpu").unwrap();
        let workload = Workload::new(256.0 / ranks as f64);
        plan(tables, grid, &topology, &workload, Budget::default()).unwrap()
    }

    #[test]
    fn sizes_are_the_least_that_reach_what_is_wanted() {
        let (tables, curves) = sampled(&[(5000, 64), (900, 32), (40, 8), (20_000, 16)]);
        for ranks in [1, 4] {
            let planned = planned(&tables, ranks);
            let job = TierJob {
                planned: &planned,
                tables: &tables,
                curves: curves.iter().collect(),
                given: None,
                ssd_bytes_max: Some(20_000.0),
            };
            let advice = tier_advice(&job);
            assert_eq!((advice.batches, advice.given, advice.shares.len()), (200, None, 0));
            let of = |device_bytes, host_bytes| {
                let given = Tiers { device_bytes, host_bytes, cold: None, policy: Policy::Lru };
                tier_advice(&TierJob { given: Some(&given), ..job.clone() }).given.unwrap()
            };
            let mut before = 0;
            for size in &advice.sizes {
                let load = size.load;
                assert_eq!(of(load.device_bytes, load.host_bytes), load);
                assert!(load.hit_rate.unwrap() >= size.hit_rate_wanted, "{size:?}");
                assert!(load.parts_in_passes == 0 && load.ssd_bytes <= 20_000.0, "{size:?}");
                assert!(load.device_bytes >= before, "{size:?} after {before} bytes");
                before = load.device_bytes;
                let less = of(load.device_bytes - 1, None);
                let enough = less.hit_rate.unwrap() >= size.hit_rate_wanted;
                assert!(!enough || less.parts_in_passes > 0, "{size:?}: {less:?} is enough");
                if let Some(host @ 1..) = load.host_bytes {
                    let less = of(load.device_bytes, Some(host - 1));
                    assert!(less.ssd_bytes > 20_000.0, "{size:?}: {less:?} is enough");
                }
            }
            // An SSD that is never to be read: memory for every row that comes back.
            let still = tier_advice(&TierJob { ssd_bytes_max: Some(0.0), ..job.clone() });
            for size in &still.sizes {
                assert_eq!((size.load.host_misses, size.load.ssd_bytes), (0.0, 0.0));
            }
            let unknown = tier_advice(&TierJob { ssd_bytes_max: None, ..job });
            assert!(unknown.sizes.iter().all(|size| size.load.host_bytes.is_none()));
        }
    }

    #[test]
    fn given_tiers_are_shared_as_in_training() {
        let (tables, curves) = sampled(&[(5000, 64), (40, 8)]);
        let planned = planned(&tables, 1);
        let given = Tiers {
            device_bytes: 320_000,
            host_bytes: Some(100_000),
            cold: None,
            policy: Policy::Lru,
        };
        let advice = tier_advice(&TierJob {
            planned: &planned,
            tables: &tables,
            curves: curves.iter().collect(),
            given: Some(&given),
            ssd_bytes_max: None,
        });
        // The small one stays whole: 40 rows of 36 bytes. The other has what is left, in slots of
        // 260 bytes and 32 of index.
        let large = &advice.shares[0];
        let slots = (320_000 - 40 * 36) / 292;
        assert_eq!((large.device_slots, large.host_slots), (slots, 100_000 / 292));
        assert_eq!((advice.shares[1].device_slots, advice.shares[1].device_misses), (40, 0.0));
        assert_eq!(large.device_misses, curves[0].misses(slots) / 200.0);
        assert_eq!(large.host_misses, curves[0].misses(slots + 100_000 / 292) / 200.0);
        let load = advice.given.unwrap();
        assert_eq!(load.device_misses, large.device_misses);
        // A row is new at its first use, unless all rows of its table are there.
        let uses = (curves[0].uses() + curves[1].uses()) as f64 / 200.0;
        let misses = load.device_misses + curves[0].first_uses() / 200.0;
        assert!((load.hit_rate_min.unwrap() - (1.0 - misses / uses)).abs() < 1e-12);
        assert!(load.hit_rate_min < load.hit_rate);
        assert_eq!(load.host_bytes_all, (5000 - slots) * 292);
        let at = |slots| advice.tables[0].curve.iter().find(|part| part.slots == slots);
        assert_eq!(at(slots).unwrap().misses, large.device_misses);
        assert!([1024, 4096, 5000].iter().all(|&slots| at(slots).is_some()));
        assert!(at(1).is_none(), "fewer slots than a batch has rows");
        // As small as it gets, both work in passes.
        let tiny = Tiers { device_bytes: 2000, ..given };
        let job = TierJob {
            planned: &planned,
            tables: &tables,
            curves: curves.iter().collect(),
            given: Some(&tiny),
            ssd_bytes_max: None,
        };
        assert_eq!(tier_advice(&job).given.unwrap().parts_in_passes, 2);
    }
}
