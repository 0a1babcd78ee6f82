//! The machine's own limit of a pooled lookup: random rows of a buffer on huge pages, read and
//! summed bag by bag, with nothing else in the way.
//!
//! ```text
//! for each bag, for each of its rows:
//!     prefetch the row 32 places on, every cache line of it
//!     acc += row                      acc stays in registers for widths up to 64
//! ```
//! It reads the same rows of tables of the same size as the lookup does, and nothing is left to
//! do but wait for memory. Rows of 16-bit tables are read as half as many floats: the limit is
//! about bytes. The hint of the prefetch makes a difference: into the second-level cache (T1)
//! more rows can be on their way than there are line-fill buffers of the first level, which hint
//! T0 has to itself. Both are measured; the limit is T1's.
//!
//! Cost: `ids * row bytes` read, `bags * row bytes` written, one addition a float.

use std::ops::Range;
use std::time::Instant;

use rayon::prelude::*;
use tessera_data::Batch;
use tessera_device::{Cpu, Device, HostBuffer, prefetch_l1, prefetch_l2, simd_kernel};

use crate::Result;
use crate::tables::Table;

/// Rows that are on their way at a time.
const AHEAD: usize = 32;

/// Tasks a thread, so that a slow one does not hold up the rest.
const TASKS_PER_THREAD: usize = 8;

/// Where a prefetch brings a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Into the first-level cache.
    T0,
    /// Into the second-level cache.
    T1,
}

/// Rows of one feature in some bags: the unit of work.
#[derive(Debug)]
struct Task {
    width: usize,
    rows: Range<usize>,
    bags: Range<usize>,
}

/// The rows that a request reads, as places in the buffer.
#[derive(Debug)]
pub struct Plan {
    tasks: Vec<Task>,
    starts: Vec<u64>, // first element of each row
    ends: Vec<u64>,   // one past the last row of each bag, counted in `starts`
    floats: usize,    // of output
}

impl Plan {
    /// Rows that are read.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.starts.len()
    }
}

/// A buffer as large as some tables.
pub struct Gather {
    cpu: Cpu,
    memory: HostBuffer<f32>,
    tables: Vec<(usize, usize)>, // first element, floats a row
    out: Vec<f32>,
}

impl Gather {
    /// A buffer of the size of `tables`, every page of it written.
    ///
    /// Errors: no memory.
    pub fn new(cpu: &Cpu, tables: &[Table]) -> Result<Self> {
        let mut floats = 0;
        let places = tables
            .iter()
            .map(|table| {
                let width = (table.spec.dim * table.spec.precision.bytes()).div_ceil(4);
                let first = floats;
                floats += table.spec.rows as usize * width;
                // Tables begin at cache lines, as the real ones do.
                floats = floats.next_multiple_of(16);
                (first, width)
            })
            .collect();
        let mut memory = cpu.alloc::<f32>(floats)?;
        cpu.run(|| {
            memory.par_chunks_mut(1 << 20).enumerate().for_each(|(chunk, values)| {
                for (i, value) in values.iter_mut().enumerate() {
                    *value = ((chunk << 20 | i) as f32) * 1e-9;
                }
            });
        });
        Ok(Self { cpu: cpu.clone(), memory, tables: places, out: Vec::new() })
    }

    /// Lays out the reading of a request, whose features come in the order of tables. An id that
    /// its table does not have is left out.
    #[must_use]
    pub fn plan(&self, tables: &[Table], request: &Batch) -> Plan {
        let mut plan = Plan { tasks: Vec::new(), starts: Vec::new(), ends: Vec::new(), floats: 0 };
        let owners = tables.iter().enumerate();
        let owners = owners.flat_map(|(i, table)| table.features.iter().map(move |_| i));
        let total: usize = request.features().iter().map(|feature| feature.bags()).sum();
        let bags_a_task = total.div_ceil(TASKS_PER_THREAD * self.cpu.threads()).max(1);
        for (feature, table) in request.features().iter().zip(owners) {
            let ((first, width), rows) = (self.tables[table], tables[table].spec.rows);
            for low in (0..feature.bags()).step_by(bags_a_task) {
                let bags = low..feature.bags().min(low + bags_a_task);
                let (row0, bag0) = (plan.starts.len(), plan.ends.len());
                for bag in bags {
                    let known = feature.bag(bag).iter().filter(|id| (id.0 as u64) < rows);
                    plan.starts.extend(known.map(|id| first as u64 + id.0 as u64 * width as u64));
                    plan.ends.push(plan.starts.len() as u64);
                }
                let bags = bag0..plan.ends.len();
                plan.floats += bags.len() * width;
                plan.tasks.push(Task { width, rows: row0..plan.starts.len(), bags });
            }
        }
        plan
    }

    /// Reads and sums a plan's rows; gives seconds.
    pub fn run(&mut self, plan: &Plan, hint: Hint) -> f64 {
        if self.out.len() < plan.floats {
            self.out.resize(plan.floats, 0.0);
        }
        let mut rest = self.out.as_mut_slice();
        let mut work = Vec::with_capacity(plan.tasks.len());
        for task in &plan.tasks {
            let (out, others) = rest.split_at_mut(task.bags.len() * task.width);
            work.push((task, out));
            rest = others;
        }
        let (memory, simd) = (&*self.memory, self.cpu.simd());
        let start = Instant::now();
        self.cpu.run(|| {
            work.into_par_iter().with_max_len(1).for_each(|(task, out)| {
                let rows = Rows {
                    memory,
                    width: task.width,
                    starts: &plan.starts[..task.rows.end],
                    first: task.rows.start,
                    ends: &plan.ends[task.bags.clone()],
                };
                match hint {
                    Hint::T0 => sum_t0(simd, &rows, out),
                    Hint::T1 => sum_t1(simd, &rows, out),
                }
            });
        });
        start.elapsed().as_secs_f64()
    }
}

/// Some bags of rows of one width.
struct Rows<'a> {
    memory: &'a [f32],
    width: usize,
    starts: &'a [u64],
    first: usize,
    ends: &'a [u64],
}

/// Prefetches the `width` floats at `start`, line by line.
#[inline(always)]
fn prefetch<const NEAR: bool>(memory: &[f32], start: u64, width: usize) {
    let row = memory.as_ptr().wrapping_add(start as usize).cast::<u8>();
    // From the row's first line to its last: a row need not begin at a line.
    let lines = (row as usize % 64 + width * 4).div_ceil(64);
    for line in 0..lines {
        let at = row.wrapping_add(line * 64);
        if NEAR { prefetch_l1(at) } else { prefetch_l2(at) }
    }
}

#[inline(always)]
fn sum<const NEAR: bool>(rows: &Rows<'_>, out: &mut [f32]) {
    match rows.width {
        16 => sum_fixed::<NEAR, 16>(rows, out),
        32 => sum_fixed::<NEAR, 32>(rows, out),
        64 => sum_fixed::<NEAR, 64>(rows, out),
        128 => sum_fixed::<NEAR, 128>(rows, out),
        _ => sum_any::<NEAR>(rows, out),
    }
}

/// Rows of a width known when this is compiled: the sums stay in registers.
#[inline(always)]
fn sum_fixed<const NEAR: bool, const WIDTH: usize>(rows: &Rows<'_>, out: &mut [f32]) {
    let mut row = rows.first;
    for (&end, out) in rows.ends.iter().zip(out.chunks_exact_mut(WIDTH)) {
        let mut acc = [0.0f32; WIDTH];
        while row < end as usize {
            if let Some(&next) = rows.starts.get(row + AHEAD) {
                prefetch::<NEAR>(rows.memory, next, WIDTH);
            }
            let values = &rows.memory[rows.starts[row] as usize..][..WIDTH];
            for (acc, value) in acc.iter_mut().zip(values) {
                *acc += value;
            }
            row += 1;
        }
        out.copy_from_slice(&acc);
    }
}

/// Rows of any width: the sums stay in the first-level cache.
#[inline(always)]
fn sum_any<const NEAR: bool>(rows: &Rows<'_>, out: &mut [f32]) {
    let mut row = rows.first;
    for (&end, out) in rows.ends.iter().zip(out.chunks_exact_mut(rows.width)) {
        out.fill(0.0);
        while row < end as usize {
            if let Some(&next) = rows.starts.get(row + AHEAD) {
                prefetch::<NEAR>(rows.memory, next, rows.width);
            }
            let values = &rows.memory[rows.starts[row] as usize..][..rows.width];
            for (out, value) in out.iter_mut().zip(values) {
                *out += value;
            }
            row += 1;
        }
    }
}

#[inline(always)]
fn sum_t0_body(rows: &Rows<'_>, out: &mut [f32]) {
    sum::<true>(rows, out);
}

#[inline(always)]
fn sum_t1_body(rows: &Rows<'_>, out: &mut [f32]) {
    sum::<false>(rows, out);
}

simd_kernel! {
    /// Sums bags, prefetching into the first-level cache.
    fn sum_t0 = sum_t0_body(rows: &Rows<'_>, out: &mut [f32])
}
simd_kernel! {
    /// Sums bags, prefetching into the second-level cache.
    fn sum_t1 = sum_t1_body(rows: &Rows<'_>, out: &mut [f32])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Law;
    use crate::knobs::{Hots, TableKnobs};
    use crate::requests::{Draw, drawn};
    use crate::tables::{Defaults, tables};

    #[test]
    fn every_row_of_every_bag_is_summed_once() {
        let knobs = TableKnobs { dim: vec![16, 5, 64, 128, 32], ..TableKnobs::default() };
        let defaults = Defaults { tables: 5, rows: 300, dim: 0, hots: Hots { mean: 3, spread: 3 } };
        let tables = tables(&knobs, defaults).unwrap();
        let draw = Draw { batch: 70, hots: None, requests: 1, dense: 0, seed: 1 };
        let request = drawn(&tables, &Law::Zipf { alpha: 0.9 }, draw).unwrap().remove(0);
        let cpu = Cpu::new(std::num::NonZeroUsize::new(2)).unwrap();
        let mut gather = Gather::new(&cpu, &tables).unwrap();
        let plan = gather.plan(&tables, &request);
        assert_eq!(plan.rows() as u64, crate::requests::ids(&request));
        for hint in [Hint::T0, Hint::T1] {
            gather.out.fill(7.0);
            assert!(gather.run(&plan, hint) > 0.0);
            let mut at = 0;
            for (feature, (table, &(first, width))) in
                request.features().iter().zip(tables.iter().zip(&gather.tables))
            {
                assert_eq!(width, table.spec.dim);
                for bag in 0..feature.bags() {
                    for column in 0..width {
                        let mut want = 0.0f32;
                        for id in feature.bag(bag) {
                            want += gather.memory[first + id.0 as usize * width + column];
                        }
                        assert_eq!(gather.out[at], want, "bag {bag}, column {column}, {hint:?}");
                        at += 1;
                    }
                }
            }
            assert_eq!(at, plan.floats);
        }
    }
}
