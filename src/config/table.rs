//! `[[table]]` with its first values and its own optimizer.

use tessera_data::Format;
use tessera_embedding::plan::Sharding;
use tessera_embedding::{Init, Pooling, Precision, SparseOptimizer, TableKind};

use super::section::Section;
use super::{DataConfig, TableConfig, dynamic, optimizer};

/// Stands in for what could not be read, so that reading goes on to the other faults.
const PLACEHOLDER: SparseOptimizer = SparseOptimizer::Sgd { lr: 0.0 };

/// The default sparse optimizer and what a table's own may inherit from it.
pub(super) struct Shared<'t> {
    pub(super) entries: &'t toml::Table,
    pub(super) optimizer: Option<SparseOptimizer>,
    /// Whether the section was refused.
    pub(super) faulty: bool,
    pub(super) replicas: u64,
}

pub(super) fn table(
    mut section: Section<'_>,
    data: &DataConfig,
    shared: &Shared<'_>,
) -> TableConfig {
    // The stand-in is unique, so that it makes no fault of its own.
    let stand_in = section.name("name");
    let name = section.required("name", stand_in);
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if name.is_empty() || !name.chars().all(plain) {
        section.fault("name", "must be made of letters, digits, `_`, `-` and `.`");
    }
    let rows = section.required("rows", 0u64);
    let dim = section.required_at_least_one("dim");
    let features = section.strings_or("features", vec![name.clone()]);
    if features.is_empty() {
        section.fault("features", "no feature uses this table");
    }
    let pooling = section.choice(
        "pooling",
        &[("sum", Pooling::Sum), ("mean", Pooling::Mean), ("none", Pooling::None)],
    );
    if matches!(pooling, Pooling::None) {
        section.fault("pooling", "a DLRM needs one vector a bag: \"sum\" or \"mean\"");
    }
    let weighted = section.or("weighted", false);
    if weighted && matches!(pooling, Pooling::Mean) {
        section.fault("weighted", "weights are defined with pooling = \"sum\" only");
    }
    if weighted && !matches!(data.format, Format::Parquet | Format::Synthetic) {
        section.fault("weighted", format!("format {} has no weights", data.format));
    }
    let kind = dynamic::kind(&mut section, rows, shared.replicas);
    if data.format == Format::CriteoTsv && rows < 2 && kind == TableKind::Static {
        section.fault("rows", "criteo-tsv needs at least 2: row 0 is for missing values");
    }
    let hots = match data.format {
        Format::Raw | Format::Synthetic => hots(&mut section, features.len()),
        Format::CriteoTsv | Format::MlperfNpy | Format::Parquet => {
            section.refuse("hots", "only formats raw and synthetic have a fixed number of ids");
            vec![1; features.len()]
        }
    };
    let precision = section.choice(
        "precision",
        &[("fp32", Precision::Fp32), ("fp16", Precision::Fp16), ("bf16", Precision::Bf16)],
    );
    // On one rank every way of cutting a table is the whole table.
    let mut shardings = vec![("auto", None)];
    shardings.extend(Sharding::ALL.map(|sharding| (sharding.name(), Some(sharding))));
    let sharding = section.choice("sharding", &shardings);
    let init = init(section.section("init"));
    let own = section.section("optimizer");
    let optimizer = own_optimizer(&section, own, shared);
    section.finish(None);
    TableConfig {
        name,
        kind,
        rows,
        dim,
        features,
        hots,
        pooling,
        weighted,
        precision,
        sharding,
        init,
        optimizer,
    }
}

/// Most ids in a bag of a fixed number of ids: a batch of such bags must fit memory.
const HOTS_MAX: usize = 1 << 16;

/// `hots`: one number for all features of a table, or one each.
fn hots(section: &mut Section<'_>, features: usize) -> Vec<usize> {
    let is_list = section.entries().get("hots").is_some_and(toml::Value::is_array);
    let hots = if is_list {
        section.or("hots", Vec::new())
    } else {
        vec![section.or("hots", 1); features]
    };
    for &hots in &hots {
        section.at_most("hots", hots, HOTS_MAX);
    }
    if hots.len() != features {
        section.fault("hots", format!("{} numbers for {features} features", hots.len()));
        return vec![1; features];
    }
    hots
}

fn own_optimizer(
    section: &Section<'_>,
    mut own: Section<'_>,
    shared: &Shared<'_>,
) -> SparseOptimizer {
    if own.is_empty() {
        // The faults of the shared section are told there.
        if shared.entries.is_empty() {
            section.fault(
                "optimizer",
                "missing: give the table one, or all of them [optimizer.sparse]",
            );
        }
        return shared.optimizer.unwrap_or(PLACEHOLDER);
    }
    // A table that names another kind starts afresh; one that does not changes options only.
    let same_kind =
        own.entries().get("kind").is_none_or(|kind| Some(kind) == shared.entries.get("kind"));
    if same_kind {
        own.inherit(shared.entries, shared.faulty);
    }
    optimizer::sparse(own, shared.replicas).unwrap_or(PLACEHOLDER)
}

/// Rule of the numbers that first values are made of.
const FROM_ZERO: &str = "at least 0 and within float32";

fn from_zero(x: f64) -> bool {
    x >= 0.0 && optimizer::single(x)
}

fn init(mut section: Section<'_>) -> Init {
    #[derive(Clone, Copy)]
    enum Kind {
        Uniform,
        Normal,
        Zero,
    }
    let kinds = [("uniform", Kind::Uniform), ("normal", Kind::Normal), ("zero", Kind::Zero)];
    let kind = section.choice("kind", &kinds);
    let init = match kind {
        Kind::Uniform => {
            let scale = section.optional::<f64>("scale");
            if scale.is_some_and(|scale| !from_zero(scale)) {
                section.fault("scale", format!("must be {FROM_ZERO}"));
            }
            Init::Uniform { scale: scale.map(|scale| scale as f32) }
        }
        Kind::Normal => {
            let std = section.number("std", 0.01, from_zero, FROM_ZERO) as f32;
            Init::Normal { std }
        }
        Kind::Zero => Init::Zero,
    };
    section.finish(Some(&format!("init {}", kinds[kind as usize].0)));
    init
}
