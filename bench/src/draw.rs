//! Which rows requests look up: laws of popularity over the rows of a table.
//!
//! ```text
//! law draws a rank (0 is the most popular) -> scatter moves it to a row
//! ```
//! The scatter keeps popular rows from being neighbours, which would flatter the caches. All
//! numbers come from a counter hashed by splitmix64, so a seed gives the same ids everywhere.

use std::path::Path;

use tessera_data::splitmix64;

use crate::{BenchError, Result};

/// Ranks whose probabilities are summed one by one; the tail beyond is integrated.
const HEAD: u64 = 1024;

/// A stream of pseudo-random numbers.
#[derive(Clone, Debug)]
pub struct Rng {
    key: u64,
    counter: u64,
}

impl Rng {
    /// The stream of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { key: splitmix64(seed), counter: 0 }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.counter += 1;
        splitmix64(self.key ^ splitmix64(self.counter))
    }

    /// Uniform on `0..n`; `n` is at least 1.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }

    /// Uniform on `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A law of popularity.
#[derive(Clone, Debug)]
pub enum Law {
    /// Probability of rank k proportional to `(k + 1)^-alpha`; 0 is uniform.
    Zipf {
        /// The exponent.
        alpha: f64,
    },
    /// The reuse seen in a trace.
    Reuse(Reuse),
}

impl Law {
    /// The law over the rows of one table.
    ///
    /// Errors: [`BenchError::Usage`] for a table without rows or a senseless exponent.
    pub fn over(&self, rows: u64, seed: u64) -> Result<Rows> {
        if rows == 0 {
            return Err(BenchError::usage("a table of 0 rows has no ids to draw"));
        }
        let ranks = match self {
            Self::Zipf { alpha } if !(0.0..=20.0).contains(alpha) => {
                return Err(BenchError::usage(format!("--alpha {alpha} must be from 0 to 20")));
            }
            Self::Zipf { alpha } if *alpha == 0.0 => Ranks::Uniform(rows),
            Self::Zipf { alpha } => Ranks::Zipf(Zipf::new(rows, *alpha)),
            Self::Reuse(reuse) => Ranks::Classes(reuse.over(rows)),
        };
        Ok(Rows { ranks, scatter: Scatter::new(rows, seed) })
    }
}

/// A law over the rows of one table.
#[derive(Debug)]
pub struct Rows {
    ranks: Ranks,
    scatter: Scatter,
}

#[derive(Debug)]
enum Ranks {
    Uniform(u64),
    Zipf(Zipf),
    Classes(Vec<Class>),
}

impl Rows {
    /// The next row.
    pub fn draw(&self, rng: &mut Rng) -> u64 {
        match &self.ranks {
            Ranks::Uniform(rows) => rng.below(*rows),
            Ranks::Zipf(zipf) => self.scatter.row(zipf.draw(rng)),
            Ranks::Classes(classes) => {
                let u = rng.unit();
                let at = classes.partition_point(|class| class.below <= u);
                let class = &classes[at.min(classes.len() - 1)];
                self.scatter.row(class.first + rng.below(class.rows))
            }
        }
    }
}

/// Ranks `0..n` with probability proportional to `(rank + 1)^-alpha`: the head from its exact
/// cumulative sums, the tail from the inverse of the integral of `x^-alpha` between the middles
/// of bars, which is off by less than 1e-6 of a bar beyond [`HEAD`].
#[derive(Debug)]
struct Zipf {
    n: u64,
    alpha: f64,
    head: Vec<f64>, // cumulative
    total: f64,
}

impl Zipf {
    fn new(n: u64, alpha: f64) -> Self {
        let mut sum = 0.0;
        let head: Vec<f64> = (1..=n.min(HEAD))
            .map(|x| {
                sum += (x as f64).powf(-alpha);
                sum
            })
            .collect();
        let mut zipf = Self { n, alpha, head, total: sum };
        if n > HEAD {
            zipf.total += zipf.integral(n as f64 + 0.5);
        }
        zipf
    }

    /// Integral of `x^-alpha` from the end of the head to `x`.
    fn integral(&self, x: f64) -> f64 {
        let (start, power) = (HEAD as f64 + 0.5, 1.0 - self.alpha);
        if power.abs() < 1e-9 {
            (x / start).ln()
        } else {
            (x.powf(power) - start.powf(power)) / power
        }
    }

    fn draw(&self, rng: &mut Rng) -> u64 {
        let u = rng.unit() * self.total;
        let head = self.head[self.head.len() - 1];
        if u < head {
            return self.head.partition_point(|&sum| sum <= u) as u64;
        }
        let (start, power) = (HEAD as f64 + 0.5, 1.0 - self.alpha);
        let x = if power.abs() < 1e-9 {
            start * (u - head).exp()
        } else {
            (start.powf(power) + power * (u - head)).powf(1.0 / power)
        };
        (x.round() as u64).clamp(1, self.n) - 1
    }
}

/// The bijection `rank -> (rank * step + shift) mod rows`, `step` prime to `rows` and near the
/// golden section of the rows.
#[derive(Debug)]
struct Scatter {
    rows: u64,
    step: u64,
    shift: u64,
}

impl Scatter {
    fn new(rows: u64, seed: u64) -> Self {
        let mut step = ((rows as f64 * 0.618_033_988_749_895) as u64).max(1);
        while !coprime(step, rows) {
            step += 1;
        }
        Self { rows, step, shift: splitmix64(seed) % rows }
    }

    fn row(&self, rank: u64) -> u64 {
        let place = u128::from(rank) * u128::from(self.step) + u128::from(self.shift);
        (place % u128::from(self.rows)) as u64
    }
}

fn coprime(mut a: u64, mut b: u64) -> bool {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}

/// How often rows recur in a trace: the histograms of a locality-stats file.
#[derive(Clone, Debug, PartialEq)]
pub struct Reuse {
    /// Lookups of one table in the trace's batch.
    lookups: f64,
    /// Per class of rows: occurrences of a row (mean of the class), share of all lookups.
    classes: Vec<(f64, f64)>,
}

/// Ranks of equal popularity.
#[derive(Debug)]
struct Class {
    below: f64, // cumulative share of lookups up to and including this class
    first: u64,
    rows: u64,
}

impl Reuse {
    /// Reads `FILE:TRACE`: a locality-stats file and the name of a trace in it, or the beginning
    /// of one.
    ///
    /// Errors: a file that cannot be read or has no such trace.
    pub fn load(file_and_trace: &str) -> Result<Self> {
        let (file, trace) = file_and_trace.rsplit_once(':').ok_or_else(|| {
            BenchError::usage(format!("--reuse {file_and_trace} must be FILE:TRACE"))
        })?;
        let path = Path::new(file);
        let text = std::fs::read_to_string(path)
            .map_err(|source| BenchError::Read { path: path.into(), source })?;
        Self::parse(&text, trace)
            .map_err(|reason| BenchError::BadFile { path: path.into(), reason })
    }

    /// Finds a trace in the text of a locality-stats file.
    fn parse(text: &str, trace: &str) -> std::result::Result<Self, String> {
        let names = || text.lines().filter(|line| line.ends_with(".pt")).map(str::trim);
        let name = names()
            .find(|name| *name == trace)
            .or_else(|| names().find(|name| name.starts_with(trace)))
            .ok_or_else(|| {
                let known: Vec<&str> = names().collect();
                format!("no trace {trace}; there are {}", known.join(", "))
            })?;
        let block: Vec<&str> = text
            .lines()
            .skip_while(|line| line.trim() != name)
            .skip(1)
            .take_while(|line| !line.ends_with(".pt"))
            .collect();
        let number = |key: &str| {
            let line = block.iter().find_map(|line| line.strip_prefix(key));
            line.and_then(|rest| rest.trim().parse::<f64>().ok())
                .ok_or_else(|| format!("trace {name} has no line `{key}`"))
        };
        let indices = number("Avg # of indices:")?;
        // The number of tables is in the name: fbgemm_t856_bs65536.pt.
        let tables = name
            .split('_')
            .find_map(|part| part.strip_prefix('t')?.parse::<f64>().ok())
            .filter(|&tables| tables >= 1.0)
            .ok_or_else(|| format!("trace {name} does not name its tables"))?;
        // Shares of lookups, not of rows: rows of the hot tail are too few to show in the latter.
        let lines = block
            .iter()
            .skip_while(|line| !line.starts_with("Ratio of index distribution"))
            .skip(1)
            .map_while(|line| class(line));
        let classes: Vec<(f64, f64)> = lines.filter(|&(_, share)| share > 0.0).collect();
        if classes.is_empty() {
            return Err(format!("trace {name} has no shares of lookups"));
        }
        Ok(Self { lookups: indices / tables, classes })
    }

    /// The classes over a table of `rows` rows. Rows seen once in the trace spread over all rows
    /// that the other classes leave; where a table is smaller than the trace's, all classes
    /// shrink alike.
    fn over(&self, rows: u64) -> Vec<Class> {
        let total: f64 = self.classes.iter().map(|&(_, share)| share).sum();
        let hot = |&(size, share): &(f64, f64)| share / total * self.lookups / size;
        let recurring: f64 = self.classes.iter().filter(|(size, _)| *size > 1.0).map(hot).sum();
        let singles: f64 = self.classes.iter().filter(|(size, _)| *size <= 1.0).map(hot).sum();
        let shrink = (rows as f64 / (recurring + singles)).min(1.0);
        let (mut below, mut first) = (0.0, 0u64);
        let mut classes = Vec::with_capacity(self.classes.len());
        // From the hottest class on, so that hot rows have the low ranks.
        for class in self.classes.iter().rev() {
            below += class.1 / total;
            let first_here = first.min(rows - 1);
            let left = rows - first_here;
            let wanted = if class.0 <= 1.0 { left } else { (hot(class) * shrink).round() as u64 };
            let count = wanted.clamp(1, left);
            classes.push(Class { below, first: first_here, rows: count });
            first = first_here + count;
        }
        classes
    }
}

/// A line `(8, 16]: 0.072` or `(32768+: 0.019`: mean occurrences of a row and share.
fn class(line: &str) -> Option<(f64, f64)> {
    let (range, share) = line.strip_prefix('(')?.split_once(':')?;
    let share = share.trim().parse().ok()?;
    let size = match range.split_once(',') {
        Some((low, high)) => {
            let low: f64 = low.trim().parse().ok()?;
            let high: f64 = high.trim().strip_suffix(']')?.parse().ok()?;
            (low + 1.0 + high) / 2.0
        }
        // The open class: nothing is known of its sizes but where they begin.
        None => 2.0 * range.strip_suffix('+')?.parse::<f64>().ok()?,
    };
    Some((size, share))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn zipf_ids_follow_their_law_in_head_and_tail() {
        for alpha in [0.0, 0.6, 1.0, 1.05, 2.0] {
            let (n, draws) = (5000u64, 400_000u32);
            let rows = Law::Zipf { alpha }.over(n, 3).unwrap();
            let mut rng = Rng::new(1);
            let mut counts: HashMap<u64, u32> = HashMap::new();
            for _ in 0..draws {
                *counts.entry(rows.draw(&mut rng)).or_default() += 1;
            }
            let weights: Vec<f64> = (1..=n).map(|k| (k as f64).powf(-alpha)).collect();
            let total: f64 = weights.iter().sum();
            let scatter = Scatter::new(n, 3);
            let mut ranked = vec![0u32; n as usize];
            for rank in 0..n {
                let row = if alpha == 0.0 { rank } else { scatter.row(rank) };
                ranked[rank as usize] = counts.get(&row).copied().unwrap_or(0);
            }
            // Shares of decades of ranks within five standard deviations.
            let mut low = 0;
            for high in [1, 10, 100, 1000, 5000] {
                let want: f64 = weights[low..high].iter().sum::<f64>() / total;
                let got: u32 = ranked[low..high].iter().sum();
                let got = f64::from(got) / f64::from(draws);
                let deviation = (want * (1.0 - want) / f64::from(draws)).sqrt();
                assert!(
                    (got - want).abs() <= 5.0 * deviation + 1e-6,
                    "alpha {alpha}, ranks {low}..{high}: {got}, not {want}"
                );
                low = high;
            }
        }
    }

    const TRACE: &str = "fbgemm_t2_bs100.pt\n\
        Avg # of indices: 80000\n\
        Histogram of col sizes:\n(0, 1]: 0.9\n\
        Ratio of index distribution at different column sizes:\n\
        (0, 1]: 0.200\n(1, 2]: 0.000\n(2, 4]: 0.300\n(64, 128]: 0.500\n(128+: 0.000\n[0, 1]\n\
        fbgemm_t9_bs7.pt\nAvg # of indices: 1\n";

    #[test]
    fn reuse_of_a_trace_comes_back_in_the_ids() {
        let reuse = Reuse::parse(TRACE, "fbgemm_t2").unwrap();
        assert_eq!(reuse.lookups, 40000.0);
        assert_eq!(reuse.classes, [(1.0, 0.2), (3.5, 0.3), (96.5, 0.5)]);
        let rows = Law::Reuse(reuse).over(1_000_000, 5).unwrap();
        let mut rng = Rng::new(2);
        let mut counts: HashMap<u64, u32> = HashMap::new();
        for _ in 0..40_000 {
            *counts.entry(rows.draw(&mut rng)).or_default() += 1;
        }
        // Share of lookups that go to rows seen as often as the hot class is: its 0.5.
        let hot: u32 = counts.values().filter(|&&count| count > 40).sum();
        assert!((f64::from(hot) / 40000.0 - 0.5).abs() < 0.02, "{hot}");
        // And to rows seen up to 12 times: the rest, about 3.5 times where they recur.
        let rest: Vec<u32> = counts.values().copied().filter(|&count| count <= 12).collect();
        let share = f64::from(rest.iter().sum::<u32>()) / 40000.0;
        assert!((share - 0.5).abs() < 0.02, "{share}");
    }

    #[test]
    fn a_small_table_still_gets_every_class() {
        let reuse = Law::Reuse(Reuse::parse(TRACE, "fbgemm_t2_bs100.pt").unwrap());
        for rows in [1, 2, 3, 50] {
            let law = reuse.over(rows, 1).unwrap();
            let mut rng = Rng::new(4);
            assert!((0..1000).all(|_| law.draw(&mut rng) < rows));
        }
    }

    #[test]
    fn traces_and_laws_that_are_not_there_are_named() {
        let error = Reuse::parse(TRACE, "other").unwrap_err();
        assert!(error.contains("fbgemm_t2_bs100.pt, fbgemm_t9_bs7.pt"), "{error}");
        let error = Reuse::parse(TRACE, "fbgemm_t9").unwrap_err();
        assert!(error.contains("no shares"), "{error}");
        let error = Law::Zipf { alpha: -1.0 }.over(3, 0).unwrap_err().to_string();
        assert!(error.contains("--alpha -1"), "{error}");
        assert!(Law::Zipf { alpha: 1.0 }.over(0, 0).is_err());
    }

    #[test]
    fn the_scatter_reaches_every_row_once() {
        for rows in [1, 2, 6, 97, 1000] {
            let scatter = Scatter::new(rows, 7);
            let mut seen: Vec<u64> = (0..rows).map(|rank| scatter.row(rank)).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..rows).collect::<Vec<_>>());
        }
    }
}
