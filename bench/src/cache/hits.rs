//! Lookups whose rows are all in the device tier, against the same lookups of a resident table.
//!
//! Both are whole collections of `tessera-embedding`, and requests take turns. The tiered table has
//! more rows than its device tier, but no more are asked for than fit. Two ratios come of it: stage
//! `lookup` alone, where the rows' slots are looked up in the index instead of being the rows
//! themselves, and the whole request, to which finding the different rows of the batch belongs: a
//! resident lookup needs that for updates only.

use tessera_cache::{Policy, RowLayout, slot_bytes};
use tessera_device::Cpu;
use tessera_embedding::Tiers;

use super::knobs::CacheArgs;
use super::point::{Bound, CachePoint};
use crate::draw::Law;
use crate::drive::{Stages, Workload};
use crate::requests::{Draw, drawn};
use crate::stats::median;
use crate::tables::Table;
use crate::workloads::{Requests, Tables, Work};
use crate::{BenchError, Result, requests};

/// Different requests, taken in turn.
const REQUESTS: usize = 8;

/// Measures; `table` has the rows that are asked for.
///
/// Errors: a wrong answer; no memory; a row that was not in the device tier after all.
pub fn measure(
    cpu: &Cpu,
    args: &CacheArgs,
    table: &Table,
    layout: RowLayout,
    points: &mut Vec<CachePoint>,
) -> Result<()> {
    let hots = Some(args.pooling);
    let draw = Draw { batch: args.batch, hots, requests: REQUESTS, dense: 0, seed: args.seed };
    let requests = drawn(std::slice::from_ref(table), &Law::Zipf { alpha: args.alpha }, draw)?;
    let slots_bytes = table.spec.rows.saturating_mul(slot_bytes(layout, Policy::Lru));
    let row_bytes = (layout.weight_bytes + layout.state_bytes) as u64;
    let mut large = table.clone();
    // A table of no more bytes than the device tier would be resident.
    large.spec.rows = (slots_bytes / row_bytes + 1).max(2 * table.spec.rows);
    let large = [large];
    crate::tables::check_memory(slots_bytes + crate::tables::bytes(&large))?;
    let tiers = Tiers {
        device_bytes: slots_bytes,
        host_bytes: None,
        cold: None,
        policy: args.policy.policy(),
    };
    let mut resident = Tables::new(cpu, &large, args.seed)?;
    let mut tiered = Tables::with_tiers(cpu, &large, args.seed, Some(&tiers))?;
    {
        let mut work = Requests::new(&mut resident, &requests, Work::Lookup)?;
        work.check()?;
        let mut work = Requests::new(&mut tiered, &requests, Work::Lookup)?;
        work.check()?;
        for number in 0..REQUESTS {
            work.prepare(number)?;
            work.serve()?;
        }
    }
    let before = tiered.stats(0)?;
    let mut samples: [Vec<Stages>; 2] = [Vec::new(), Vec::new()];
    {
        let mut resident = Requests::new(&mut resident, &requests, Work::Lookup)?;
        let mut tiered = Requests::new(&mut tiered, &requests, Work::Lookup)?;
        let both: [&mut dyn Workload; 2] = [&mut resident, &mut tiered];
        for number in 0..args.iterations + REQUESTS {
            let order = if number % 2 == 0 { [0, 1] } else { [1, 0] };
            for which in order {
                both[which].prepare(number)?;
                let stages = both[which].serve()?;
                if number >= REQUESTS {
                    samples[which].push(stages);
                }
            }
        }
    }
    let after = tiered.stats(0)?;
    let missed = after.device.misses - before.device.misses;
    if missed > 0 {
        let what = "number of rows missed in a device tier that has room for all".to_owned();
        return Err(BenchError::WrongAnswer { what, got: missed as f64, want: 0.0 });
    }
    let ids: u64 = requests.iter().map(requests::ids).sum();
    let ids = ids as f64 / requests.len() as f64;
    for (case, stages) in [
        ("lookup, all on device", &["lookup"][..]),
        ("the same and grouping", &["check", "lookup"][..]),
    ] {
        let seconds = |which: usize| -> Vec<f64> {
            let sum = |all: &Stages| -> f64 {
                stages.iter().map(|stage| all.get(*stage).copied().unwrap_or(0.0)).sum()
            };
            samples[which].iter().map(sum).collect()
        };
        let (resident, tiered) = (seconds(0), seconds(1));
        let limit = Bound::new("a resident table, request by request", ids / median(&resident));
        let weights = layout.weight_bytes as f64;
        let mut point = CachePoint::new(case.into(), ids, weights, limit, &tiered);
        let ratios: Vec<f64> = resident.iter().zip(&tiered).map(|(r, t)| r / t).collect();
        point.share_of_limit = median(&ratios);
        points.push(point);
    }
    Ok(())
}
