//! What a simulation file says, checked.

use std::path::PathBuf;

use tessera_embedding::plan::{Placement, Topology};

use super::formula::{Formula, Values};

/// What may overlap in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Nothing.
    Serial,
    /// Stages ahead of a step, with earlier steps.
    Prefetch,
    /// Besides, micro-batches within a step.
    Nested,
    /// `Prefetch`, and rows that the step before does not touch travel ahead.
    Split,
    /// `Nested` and `Split`.
    NestedSplit,
    /// `Prefetch` with rows as they were: not exact, for comparison only.
    Async,
}

impl Mode {
    /// All of them, by name.
    pub const ALL: [(&'static str, Self); 6] = [
        ("serial", Self::Serial),
        ("prefetch", Self::Prefetch),
        ("nested", Self::Nested),
        ("split", Self::Split),
        ("nested_split", Self::NestedSplit),
        ("async", Self::Async),
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, mode)| *mode == self).map_or("", |(name, _)| name)
    }

    /// Whether stages run ahead of the step that needs them.
    #[must_use]
    pub fn reads_ahead(self) -> bool {
        self != Self::Serial
    }

    /// Whether micro-batches overlap.
    #[must_use]
    pub fn overlaps_parts(self) -> bool {
        matches!(self, Self::Nested | Self::NestedSplit)
    }

    /// Whether rows are exchanged in two parts.
    #[must_use]
    pub fn splits(self) -> bool {
        matches!(self, Self::Split | Self::NestedSplit)
    }

    /// Whether it gives the bits of `Serial`.
    #[must_use]
    pub fn is_exact(self) -> bool {
        self != Self::Async
    }
}

/// A stage whose cost a file may give.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)] // docs/simulate.md says what they are.
pub enum Stage {
    Read,
    Upload,
    Keys,
    Ssd,
    Host,
    Install,
    Shared,
    Lookup,
    Exchange,
    Dense,
    AllReduce,
    Update,
    Sync,
    Overhead,
}

impl Stage {
    /// All of them, by name.
    pub const ALL: [(&'static str, Self); 14] = [
        ("read", Self::Read),
        ("upload", Self::Upload),
        ("keys", Self::Keys),
        ("ssd", Self::Ssd),
        ("host", Self::Host),
        ("install", Self::Install),
        ("shared", Self::Shared),
        ("lookup", Self::Lookup),
        ("exchange", Self::Exchange),
        ("dense", Self::Dense),
        ("all_reduce", Self::AllReduce),
        ("update", Self::Update),
        ("sync", Self::Sync),
        ("overhead", Self::Overhead),
    ];

    /// Whether `[bytes]` may give it: the others are not a matter of bytes.
    #[must_use]
    pub fn takes_bytes(self) -> bool {
        !matches!(self, Self::Read | Self::Dense | Self::Overhead)
    }
}

/// What a stage costs, by a formula.
#[derive(Clone, Debug, PartialEq)]
pub enum Cost {
    /// Milliseconds a step and rank.
    Ms(Formula),
    /// Bytes a step and rank, over the speed of the stage's lane.
    Bytes(Formula),
}

/// Samples of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Batch {
    /// On each rank.
    PerRank(f64),
    /// Over all ranks.
    Global(f64),
}

impl Batch {
    /// Samples on each of `ranks` ranks.
    #[must_use]
    pub fn per_rank(self, ranks: usize) -> f64 {
        match self {
            Self::PerRank(samples) => samples,
            Self::Global(samples) => samples / ranks as f64,
        }
    }
}

/// `[model]`: costs are estimated from the tables and the network.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// A table set.
    pub tables: PathBuf,
    /// Columns of tables whose file does not tell.
    pub dim: usize,
    /// Optimizer whose state the tables keep.
    pub optimizer: String,
    /// Column of the file that holds the rows.
    pub rows_column: Option<String>,
    /// Multiplications and additions to train the towers on one sample.
    pub flops_per_sample: f64,
    /// Parameters of the towers.
    pub dense_parameters: f64,
    /// Bytes of a sample as it is read: ids, dense values, label.
    pub sample_bytes: f64,
}

/// `[imbalance]`: ranks whose part of the tables is used more than the mean.
#[derive(Clone, Debug, PartialEq)]
pub struct Imbalance {
    /// Ranks.
    pub ranks: Formula,
    /// How many times the mean.
    pub factor: Formula,
}

/// `[memory]`: bytes of a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// What it has.
    pub capacity: Formula,
    /// Tables with their state.
    pub tables: Formula,
    /// Buffers of batches in flight; they grow with `[imbalance]`.
    pub buffers: Formula,
    /// Towers and the rest.
    pub reserve: Formula,
}

/// `[[scenario]]`: one way to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// Name, unique.
    pub name: String,
    /// What may overlap.
    pub mode: Mode,
    /// Parts of a batch.
    pub micro_batches: usize,
    /// Batches read ahead at the most.
    pub depth: usize,
    /// Batches between two stages.
    pub queue: usize,
    /// Groups that each hold all tables.
    pub replicas: Formula,
    /// Steps between synchronisations.
    pub sync_every: usize,
    /// How ranks are dealt to groups.
    pub placement: Placement,
    /// Numbers of ranks.
    pub ranks: Vec<usize>,
}

/// What a target is about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quantity {
    /// Milliseconds a step; held within percents.
    StepMs(f64),
    /// Samples a second; held within percents.
    SamplesPerS(f64),
    /// Percent of the throughput per rank at so many ranks; held within points.
    Efficiency {
        /// Percent.
        percent: f64,
        /// Ranks of the run that it is compared with.
        from: usize,
    },
    /// Whether memory runs out.
    OutOfMemory(bool),
}

/// `[[target]]`: a published figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// Name of the scenario.
    pub scenario: String,
    /// Ranks.
    pub ranks: usize,
    /// The figure.
    pub quantity: Quantity,
    /// How far the simulation may be from it: percents or points.
    pub within: f64,
    /// Whether the free parameters were chosen to meet it.
    pub fitted: bool,
}

/// A simulation file.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// What is simulated.
    pub title: String,
    /// Where its figures come from.
    pub source: Option<String>,
    /// Samples of a step.
    pub batch: Batch,
    /// Steps that count.
    pub steps: usize,
    /// Parts in which dense gradients are added up.
    pub buckets: usize,
    /// Share of a batch's rows that the step before touches too.
    pub seen_share: Formula,
    /// Free parameters: what was chosen, not known.
    pub parameters: Values,
    /// Costs that are given.
    pub costs: Vec<(Stage, Cost)>,
    /// Speeds and memory, with the shares of them that are reached.
    pub topology: Topology,
    /// 10^12 multiplications and additions a second of a device, as reached.
    pub tflops: f64,
    /// Costs that are estimated.
    pub model: Option<Model>,
    /// Hot ranks.
    pub imbalance: Option<Imbalance>,
    /// Memory.
    pub memory: Option<Memory>,
    /// Ways to run.
    pub scenarios: Vec<Scenario>,
    /// Published figures.
    pub targets: Vec<Target>,
}
