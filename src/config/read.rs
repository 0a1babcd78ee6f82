//! Reads each section of a configuration into its type.

use std::collections::HashSet;
use std::num::NonZeroUsize;

use tessera_data::{DenseTransform, Format, OnNanDense, SyntheticDense, SyntheticSpec};
use tessera_dense::{DenseOptimizer, Interaction, Loss, ModelSpec};
use tessera_embedding::{BadIdPolicy, MICRO_BATCHES_MAX};

use super::parallel::{parallel, uneven};
use super::section::Section;
use super::table::{Shared, table};
use super::tiers::tiers;
use super::{
    ClipConfig, Cluster, ColdFormat, Config, DataConfig, EarlyStop, ModelConfig, OnNonfinite,
    PipelineConfig, PipelineMode, Read, StopMetric, SyntheticConfig, TableConfig, TrainConfig,
    optimizer,
};

/// Most worker threads: more than any one machine has cores, few enough to start at once.
const THREADS_MAX: usize = 4096;

/// Most batches read ahead.
const DEPTH_MAX: usize = 1024;

/// Micro-batches of a batch in mode nested, where the configuration says nothing.
const NESTED_MICRO_BATCHES: usize = 4;

/// Reads the whole configuration. Only without a fault may the result be used.
pub(super) fn config(mut root: Section<'_>) -> Config {
    let seed = root.or("seed", 0u64);
    let threads = root.optional::<usize>("threads");
    if threads.is_some_and(|threads| !(1..=THREADS_MAX).contains(&threads)) {
        root.fault(
            "threads",
            format!("must be from 1 to {THREADS_MAX} (leave it out for all cores)"),
        );
    }
    let mut parallel_section = root.section("parallel");
    let mut parallel = parallel(&mut parallel_section);
    let replicas = parallel.replicas;
    let pipeline = pipeline(root.section("pipeline"), parallel.ranks);
    let tiers = tiers(root.section("tiers"));

    let mut optimizers = root.section("optimizer");
    let sparse = optimizers.section("sparse");
    let sparse_entries = sparse.entries().clone();
    // The shared section may be left out when every table has its own.
    let faults_before = root.faults_so_far();
    let sparse_optimizer =
        (!sparse.is_empty()).then(|| optimizer::sparse(sparse, replicas)).flatten();
    let faulty = root.faults_so_far() > faults_before;
    let dense_optimizer =
        optimizer::dense(optimizers.section("dense")).unwrap_or(DenseOptimizer::Sgd { lr: 0.0 });
    let schedule = optimizer::schedule(optimizers.section("schedule"));
    let clip = optimizer::clip(&mut optimizers);
    if replicas > 1 && matches!(clip, ClipConfig::Value(_)) {
        optimizers.fault(
            "clip_value",
            "clips the gradient of the whole batch, which no group of parallel.replicas has: use \
             clip_norm",
        );
    }
    optimizers.finish(None);

    let mut model_section = root.section("model");
    let model = model(&mut model_section);
    let mut data_section = root.section("data");
    let data = data(&mut data_section, &model);
    parallel.uneven = uneven(&mut parallel_section, data.read);
    parallel_section.finish(None);
    if data.read == Read::Own && (1..parallel.ranks).contains(&data.batch_size) {
        let (samples, ranks) = (data.batch_size, parallel.ranks);
        data_section.fault(
            "batch_size",
            format!(
                "of {samples} leaves some of {ranks} ranks no sample a step of the files that they \
                 alone read (data.read = \"own\"); at least {ranks}"
            ),
        );
    }
    let shared = Shared { entries: &sparse_entries, optimizer: sparse_optimizer, faulty, replicas };
    let tables: Vec<TableConfig> =
        root.sections("table").into_iter().map(|section| table(section, &data, &shared)).collect();
    if tables.is_empty() {
        root.fault("table", "at least one [[table]] is needed");
    }
    unique(&root, &tables, model.wide);
    if data.format == Format::CriteoTsv {
        criteo_names(&data_section, &root, &data, &tables);
    }
    data_section.finish(None);
    widths(&model_section, &model, &tables);
    model_section.finish(None);

    let train = train(root.section("train"), &data);
    let mut metrics = root.section("metrics");
    let listen = metrics.optional::<String>("listen");
    if let Some(address) = &listen
        && address.parse::<std::net::SocketAddr>().is_err()
    {
        metrics.fault("listen", format!("`{address}` is not an address like 127.0.0.1:9464"));
    }
    metrics.finish(None);
    root.finish(None);
    Config {
        seed,
        threads: threads.and_then(NonZeroUsize::new),
        parallel,
        tiers,
        data,
        model,
        tables,
        dense_optimizer,
        schedule,
        clip,
        pipeline,
        train,
        listen,
        resolved: toml::Table::new(),
    }
}

fn pipeline(mut section: Section<'_>, ranks: usize) -> PipelineConfig {
    let modes = [
        ("prefetch", PipelineMode::Prefetch),
        ("serial", PipelineMode::Serial),
        ("nested", PipelineMode::Nested),
    ];
    let mode = section.choice("mode", &modes);
    let depth = match mode {
        PipelineMode::Serial => {
            section.refuse("depth", "mode serial prepares nothing ahead");
            Some(NonZeroUsize::MIN)
        }
        PipelineMode::Prefetch | PipelineMode::Nested => {
            let depth = section.optional::<usize>("depth");
            if depth == Some(0) {
                section.fault("depth", "must be at least 1");
            }
            section.at_most("depth", depth.unwrap_or(1), DEPTH_MAX);
            depth.and_then(NonZeroUsize::new)
        }
    };
    // Nothing overlaps inside a batch that is whole, or has nobody to wait for.
    let overlaps = mode == PipelineMode::Nested && ranks > 1;
    let usual = if overlaps { NESTED_MICRO_BATCHES } else { 1 };
    let micro_batches = section.at_least_one("micro_batches", usual);
    section.at_most("micro_batches", micro_batches, MICRO_BATCHES_MAX);
    let micro_batches = NonZeroUsize::new(micro_batches).unwrap_or(NonZeroUsize::MIN);
    let cluster = section.choice("cluster", &[("none", Cluster::None), ("keys", Cluster::Keys)]);
    section.finish(None);
    PipelineConfig { mode, depth, micro_batches, cluster }
}

fn model(section: &mut Section<'_>) -> ModelConfig {
    #[derive(Clone, Copy, PartialEq)]
    enum Kind {
        Dot,
        Concat,
        Dcn,
    }
    let dense_features = section.required("dense_features", 0usize);
    let bottom_mlp = section.or("bottom_mlp", Vec::<usize>::new());
    let top_mlp = section.required("top_mlp", vec![1usize]);
    let kinds = [("dot", Kind::Dot), ("dcn", Kind::Dcn), ("concat", Kind::Concat)];
    let known = section.required_choice("interaction", &kinds);
    if known.is_none() {
        section.ignore(&["dcn"]);
    }
    let kind = known.unwrap_or(Kind::Concat);
    let mut dcn = section.section("dcn");
    let interaction = match kind {
        Kind::Dot => Interaction::Dot,
        Kind::Concat => Interaction::Concat,
        Kind::Dcn => {
            let layers = dcn.required_at_least_one("layers");
            let rank = dcn.required_at_least_one("rank");
            Interaction::Dcn { layers, rank }
        }
    };
    dcn.finish((kind != Kind::Dcn).then_some("an interaction other than dcn"));
    let wide = section.or("wide", false);
    let loss = section.choice("loss", &[("bce", Loss::Bce), ("mse", Loss::Mse)]);
    ModelConfig { dense_features, bottom_mlp, interaction, top_mlp, wide, loss }
}

const FORMATS: &[(&str, Format)] = &[
    ("criteo-tsv", Format::CriteoTsv),
    ("mlperf-npy", Format::MlperfNpy),
    ("raw", Format::Raw),
    ("parquet", Format::Parquet),
    ("synthetic", Format::Synthetic),
];

fn data(section: &mut Section<'_>, model: &ModelConfig) -> DataConfig {
    let known = section.required_choice("format", FORMATS);
    if known.is_none() {
        // Which of these have a meaning nobody can tell.
        section.ignore(&["train", "eval", "synthetic", "dense", "label", "sample_weight", "group"]);
    }
    let format = known.unwrap_or(Format::Synthetic);
    let batch_size = section.required_at_least_one("batch_size");
    let eval_batch_size = section.at_least_one("eval_batch_size", batch_size.max(1));
    let mut data = DataConfig {
        format,
        train: Vec::new(),
        eval: Vec::new(),
        read: section.choice("read", &[("all", Read::All), ("own", Read::Own)]),
        batch_size,
        eval_batch_size,
        dense: Vec::new(),
        label: "label".into(),
        sample_weight: None,
        group: None,
        dense_transform: DenseTransform::None,
        on_nan_dense: section
            .choice("on_nan_dense", &[("error", OnNanDense::Error), ("zero", OnNanDense::Zero)]),
        on_bad_id: section.choice(
            "on_bad_id",
            &[
                ("error", BadIdPolicy::Error),
                ("drop", BadIdPolicy::Drop),
                ("default_row", BadIdPolicy::DefaultRow),
            ],
        ),
        shuffle_window: section.or("shuffle_window", 0u64),
        synthetic: None,
    };
    let transforms = [("none", DenseTransform::None), ("log1p", DenseTransform::Log1p)];
    if format == Format::CriteoTsv {
        // The format's own transform: naming it again is harmless, another one is refused.
        data.dense_transform = section.choice("dense_transform", &transforms[1..]);
    } else {
        data.dense_transform = section.choice("dense_transform", &transforms);
    }
    if format == Format::Synthetic {
        data.synthetic = Some(synthetic(section.section("synthetic")));
        for key in ["train", "eval"] {
            section.refuse(key, "format synthetic reads no files; its size is in [data.synthetic]");
        }
        if known.is_some() && data.read == Read::Own {
            section.fault("read", "format synthetic reads no files that ranks could share out");
        }
    } else {
        section.refuse("synthetic", "only format synthetic has these settings");
        let given = section.has("train");
        let train = section.paths("train");
        if !given || train.as_ref().is_some_and(Vec::is_empty) {
            section.fault("train", "missing; it lists the files to train on");
        }
        data.train = train.unwrap_or_default();
        data.eval = section.paths("eval").unwrap_or_default();
    }
    let count = model.dense_features;
    if format == Format::Parquet {
        data.label = section.or("label", data.label);
        data.sample_weight = section.optional("sample_weight");
        data.group = section.optional("group");
    } else {
        for key in ["label", "sample_weight", "group"] {
            section.refuse(key, "only format parquet has such a column");
        }
    }
    data.dense = match format {
        Format::Parquet => section.strings_or("dense", Vec::new()),
        Format::CriteoTsv => section.strings_or("dense", numbered("i", count)),
        Format::MlperfNpy | Format::Raw | Format::Synthetic => {
            section.refuse("dense", "only formats parquet and criteo-tsv name their columns");
            numbered("dense", count)
        }
    };
    if data.dense.len() != count {
        section.fault(
            "dense",
            format!("{} columns, but model.dense_features is {count}", data.dense.len()),
        );
    }
    data
}

/// `prefix1`, `prefix2`, ...
fn numbered(prefix: &str, count: usize) -> Vec<String> {
    (1..=count).map(|i| format!("{prefix}{i}")).collect()
}

/// `[data.synthetic]`: what is drawn, and how many samples after the training ones to evaluate on.
fn synthetic(mut section: Section<'_>) -> SyntheticConfig {
    let default = SyntheticSpec::default();
    let within = |low: f64, high: f64| move |x: f64| (low..=high).contains(&x);
    let config = SyntheticConfig {
        spec: SyntheticSpec {
            samples: section.at_least_one("samples", default.samples),
            first_sample: 0,
            seed: section.or("seed", default.seed),
            alpha: section.number("alpha", default.alpha, within(0.0, 20.0), "from 0 to 20"),
            hots_spread: section.or("hots_spread", default.hots_spread),
            dense: section.choice(
                "dense",
                &[("normal", SyntheticDense::Normal), ("counts", SyntheticDense::Counts)],
            ),
            base_rate: section.number(
                "base_rate",
                default.base_rate,
                within(1e-6, 1.0 - 1e-6),
                "from 0.000001 to 0.999999",
            ),
            strength: section.number(
                "strength",
                default.strength,
                within(0.0, 100.0),
                "from 0 to 100",
            ),
            interactions: section.number(
                "interactions",
                default.interactions,
                within(0.0, 1.0),
                "from 0 to 1",
            ),
        },
        eval_samples: section.or("eval_samples", default.samples / 10),
    };
    section.finish(None);
    config
}

/// Names of tables and of features are each used once. With a wide part, `x.wide` is the name of
/// the wide part of `x`.
fn unique(root: &Section<'_>, tables: &[TableConfig], wide: bool) {
    let mut names = HashSet::new();
    let mut features = HashSet::new();
    for (index, table) in tables.iter().enumerate() {
        if !names.insert(table.name.as_str()) {
            root.fault(&format!("table.{index}.name"), format!("`{}` is used twice", table.name));
        }
        for feature in &table.features {
            if !features.insert(feature.as_str()) {
                let key = format!("table.{index}.features");
                root.fault(&key, format!("feature `{feature}` is used twice"));
            }
        }
    }
    let taken = |name: &str, names: &HashSet<&str>| {
        wide && name.strip_suffix(".wide").is_some_and(|of| names.contains(of))
    };
    for (index, table) in tables.iter().enumerate() {
        if taken(&table.name, &names) {
            let message = format!("model.wide gives `{}` to a wide part", table.name);
            root.fault(&format!("table.{index}.name"), message);
        }
        for feature in table.features.iter().filter(|feature| taken(feature, &features)) {
            let message = format!("model.wide gives `{feature}` to a wide part");
            root.fault(&format!("table.{index}.features"), message);
        }
    }
}

/// criteo-tsv has fixed names.
fn criteo_names(
    section: &Section<'_>,
    root: &Section<'_>,
    data: &DataConfig,
    tables: &[TableConfig],
) {
    let known = |name: &str, prefix: &str, last: usize| {
        name.strip_prefix(prefix)
            .and_then(|number| number.parse::<usize>().ok().filter(|n| n.to_string() == number))
            .is_some_and(|number| (1..=last).contains(&number))
    };
    for name in data.dense.iter().filter(|name| !known(name, "i", 13)) {
        section.fault("dense", format!("criteo-tsv has i1 to i13, not `{name}`"));
    }
    for (index, table) in tables.iter().enumerate() {
        for name in table.features.iter().filter(|name| !known(name, "c", 26)) {
            let key = format!("table.{index}.features");
            root.fault(&key, format!("criteo-tsv has c1 to c26, not `{name}`"));
        }
    }
}

/// The network with the widths that its tables give it.
pub(super) fn model_spec(model: &ModelConfig, tables: &[TableConfig]) -> ModelSpec {
    let dims = |table: &TableConfig| std::iter::repeat_n(table.dim, table.features.len());
    ModelSpec {
        dense_features: model.dense_features,
        bottom: model.bottom_mlp.clone(),
        interaction: model.interaction.clone(),
        features: tables.iter().flat_map(dims).collect(),
        top: model.top_mlp.clone(),
        wide: model.wide,
        loss: model.loss,
    }
}

/// The network's widths fit each other.
fn widths(section: &Section<'_>, model: &ModelConfig, tables: &[TableConfig]) {
    let faults = model_spec(model, tables).validate().err().unwrap_or_default();
    // These have been looked at where they were read.
    let told = ["table.dim", "dcn"];
    for fault in faults.into_iter().filter(|fault| !told.contains(&fault.key)) {
        section.fault(fault.key, fault.message);
    }
}

fn train(mut section: Section<'_>, data: &DataConfig) -> TrainConfig {
    let has_eval = !data.eval.is_empty()
        || data.synthetic.as_ref().is_some_and(|synthetic| synthetic.eval_samples > 0);
    let never_zero = |section: &mut Section<'_>, key: &str| {
        let steps = section.optional::<u64>(key);
        if steps == Some(0) {
            section.fault(key, "must be at least 1 (leave it out for never)");
        }
        steps
    };
    let epochs = section.at_least_one("epochs", 1u64);
    let max_steps = section.optional::<u64>("max_steps");
    let eval_every = never_zero(&mut section, "eval_every");
    if eval_every.is_some() && !has_eval {
        section.fault("eval_every", "there is no data.eval");
    }
    let log_every = section.at_least_one("log_every", 100u64);
    let checkpoint_every = never_zero(&mut section, "checkpoint_every");
    let checkpoint_full_every = section.at_least_one("checkpoint_full_every", 1u64);
    let formats =
        [("auto", ColdFormat::Auto), ("links", ColdFormat::Links), ("rows", ColdFormat::Rows)];
    let checkpoint_cold = section.choice("checkpoint_cold", &formats);
    let keep = section.at_least_one("keep", 2usize);
    let window_steps = section.at_least_one("window_steps", 100usize);
    let on_nonfinite = section
        .choice("on_nonfinite", &[("error", OnNonfinite::Error), ("skip", OnNonfinite::Skip)]);
    let early_stop = section.has("early_stop").then(|| {
        let mut stop = section.section("early_stop");
        let metrics =
            [StopMetric::Auc, StopMetric::Logloss, StopMetric::Ne, StopMetric::GroupedAuc]
                .map(|metric| (metric.name(), metric));
        let metric = stop.required_choice("metric", &metrics).unwrap_or(StopMetric::Auc);
        if !has_eval {
            stop.fault("metric", "there is no data.eval to measure it on");
        }
        if metric == StopMetric::GroupedAuc && data.group.is_none() {
            stop.fault("metric", "grouped_auc needs data.group");
        }
        let patience = stop.at_least_one("patience", 3u64);
        let min_delta = stop.number("min_delta", 0.0, |x| x >= 0.0, "at least 0");
        stop.finish(None);
        EarlyStop { metric, patience, min_delta }
    });
    section.finish(None);
    TrainConfig {
        epochs,
        max_steps,
        eval_every,
        log_every,
        checkpoint_every,
        checkpoint_full_every,
        checkpoint_cold,
        keep,
        window_steps,
        on_nonfinite,
        early_stop,
    }
}
