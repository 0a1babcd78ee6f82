//! Configurations without a fault, drawn from a seed.

use std::fmt::Write;

/// Samples that reach every format, kind and option.
const SAMPLES: u64 = 600;

pub(super) const SPARSE_KINDS: [&str; 9] = [
    "sgd",
    "adagrad",
    "rowwise_adagrad",
    "adam",
    "partial_rowwise_adam",
    "lamb",
    "partial_rowwise_lamb",
    "lars_sgd",
    "ftrl",
];

/// Draws configurations without a fault: every option is there in some, absent in others.
pub(super) struct Draw(pub(super) u64);

impl Draw {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn coin(&mut self) -> bool {
        self.word() & 1 == 1
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[(self.word() % choices.len() as u64) as usize]
    }

    /// Adds each of `lines` or leaves it out.
    fn some(&mut self, out: &mut String, lines: &[&str]) {
        for line in lines {
            if self.coin() {
                writeln!(out, "{line}").unwrap();
            }
        }
    }

    /// Options of a sparse optimizer; `lr` may be left out when it is inherited.
    fn sparse(&mut self, out: &mut String, kind: &str, lr: bool) {
        if lr {
            writeln!(out, "lr = {}", self.pick(&["0.1", "1", "1e-3"])).unwrap();
        }
        match kind {
            "sgd" => {}
            "adagrad" | "rowwise_adagrad" => {
                self.some(out, &["eps = 1e-10"]);
                let decays = [
                    "",
                    "weight_decay = 0\nweight_decay_mode = \"none\"",
                    "weight_decay = 0.5\nweight_decay_mode = \"l2\"",
                    "weight_decay = 0.0\nweight_decay_mode = \"decouple\"",
                ];
                writeln!(out, "{}", self.pick(&decays)).unwrap();
                if kind == "rowwise_adagrad" {
                    self.some(out, &["moment_scale = 2"]);
                }
            }
            "lars_sgd" => {
                self.some(out, &["eta = 0.01", "momentum = 0", "weight_decay = 1e-4"]);
            }
            "ftrl" => self.some(out, &["beta = 0.5", "l1 = 0.1", "l2 = 0.2"]),
            _ => self
                .some(out, &["eps = 1e-6", "beta1 = 0.8", "beta2 = 0.99", "weight_decay = 0.01"]),
        }
    }

    /// Gives whether ranks read files of their own.
    fn data(&mut self, out: &mut String, format: &str) -> bool {
        writeln!(out, "[data]\nformat = \"{format}\"\nbatch_size = 64").unwrap();
        let transform =
            if format == "criteo-tsv" { "log1p" } else { self.pick(&["none", "log1p"]) };
        self.some(
            out,
            &[
                "eval_batch_size = 32",
                "on_nan_dense = \"zero\"",
                "on_bad_id = \"drop\"",
                "shuffle_window = 1000",
                &format!("dense_transform = \"{transform}\""),
            ],
        );
        if format == "synthetic" {
            writeln!(out, "[data.synthetic]").unwrap();
            self.some(
                out,
                &[
                    "samples = 1000",
                    "eval_samples = 7",
                    "seed = 5",
                    "alpha = 0",
                    "hots_spread = 1",
                    "dense = \"counts\"",
                    "base_rate = 0.5",
                    "strength = 3",
                    "interactions = 1",
                ],
            );
            return false;
        }
        let read = self.pick(&["", "read = \"all\"", "read = \"own\""]);
        writeln!(out, "{read}").unwrap();
        let paths = ["\"one\"", "[\"a\", \"/b/c\"]", "[\"${TESSERA_NO_SUCH_NAME:-../x}/./y\"]"];
        writeln!(out, "train = {}\neval = {}", self.pick(&paths), self.pick(&paths)).unwrap();
        if format == "parquet" {
            writeln!(out, "dense = [\"d1\", \"d2\", \"d3\"]\ngroup = \"g\"").unwrap();
            self.some(out, &["label = \"click\"", "sample_weight = \"w\""]);
        } else if format == "criteo-tsv" {
            self.some(out, &["dense = [\"i5\", \"i13\", \"i1\"]"]);
        }
        read.contains("own")
    }

    fn table(&mut self, out: &mut String, index: usize, format: &str, shared: Option<&str>) {
        let first = 2 * index + 1;
        if self.coin() {
            writeln!(out, "[[table]]\nname = \"c{first}\"").unwrap();
        } else {
            writeln!(out, "[[table]]\nname = \"t.{index}\"").unwrap();
            let one = format!("\"c{first}\"");
            let two = format!("[\"c{first}\", \"c{}\"]", first + 1);
            writeln!(out, "features = {}", if self.coin() { one } else { two }).unwrap();
        }
        writeln!(out, "rows = 100\ndim = 4").unwrap();
        if matches!(format, "raw" | "synthetic") {
            self.some(out, &["hots = 3"]);
        }
        if matches!(format, "parquet" | "synthetic") && self.coin() {
            writeln!(out, "weighted = true").unwrap();
        } else {
            self.some(out, &["weighted = false", "pooling = \"mean\""]);
        }
        self.some(out, &["precision = \"bf16\"", "sharding = \"row_wise\""]);
        if self.coin() {
            self.dynamic(out);
        } else {
            self.some(out, &["kind = \"static\""]);
        }
        let inits = [
            "",
            "kind = \"uniform\"",
            "kind = \"uniform\"\nscale = 0.25",
            "kind = \"normal\"",
            "kind = \"normal\"\nstd = 1",
            "kind = \"zero\"",
        ];
        writeln!(out, "[table.init]\n{}", self.pick(&inits)).unwrap();
        match shared {
            Some(kind) if self.coin() => {
                if self.coin() {
                    writeln!(out, "[table.optimizer]").unwrap();
                    if self.coin() {
                        writeln!(out, "kind = \"{kind}\"").unwrap();
                    }
                    let lr = self.coin();
                    self.sparse(out, kind, lr);
                }
            }
            _ => {
                let kind = self.pick(&SPARSE_KINDS);
                writeln!(out, "[table.optimizer]\nkind = \"{kind}\"").unwrap();
                self.sparse(out, kind, true);
            }
        }
    }

    fn dynamic(&mut self, out: &mut String) {
        writeln!(out, "kind = \"dynamic\"").unwrap();
        match self.pick(&["", "always", "count", "probability"]) {
            "" => {}
            "count" => {
                writeln!(out, "[table.admission]\nkind = \"count\"").unwrap();
                let options =
                    ["n = 3", "sketch_ids = 1000", "sketch_delta = 0.01", "halve_every = 5000"];
                self.some(out, &options);
            }
            "probability" => {
                writeln!(out, "[table.admission]\nkind = \"probability\"\np = 0.25").unwrap();
            }
            kind => writeln!(out, "[table.admission]\nkind = \"{kind}\"").unwrap(),
        }
        match self.pick(&["", "lru", "lfu", "age", "none"]) {
            "" => {}
            "lfu" => {
                writeln!(out, "[table.eviction]\nkind = \"lfu\"").unwrap();
                self.some(out, &["halve_every = 100"]);
            }
            "age" => writeln!(out, "[table.eviction]\nkind = \"age\"\nsteps = 20").unwrap(),
            kind => writeln!(out, "[table.eviction]\nkind = \"{kind}\"").unwrap(),
        }
    }

    pub(super) fn config(&mut self) -> String {
        let mut out = String::new();
        self.some(&mut out, &["seed = 12", "threads = 3"]);
        let format = self.pick(&["criteo-tsv", "mlperf-npy", "raw", "parquet", "synthetic"]);
        let own = self.data(&mut out, format);
        let interaction = self.pick(&["dot", "dcn", "concat"]);
        writeln!(
            out,
            "[model]\ndense_features = 3\ninteraction = \"{interaction}\"\ntop_mlp = [5, 1]"
        )
        .unwrap();
        if interaction == "dot" || self.coin() {
            writeln!(out, "bottom_mlp = [6, 4]").unwrap();
        }
        self.some(&mut out, &["wide = true", "loss = \"mse\""]);
        if interaction == "dcn" {
            writeln!(out, "dcn = {{ layers = 2, rank = 3 }}").unwrap();
        }
        let shared = self.coin().then(|| self.pick(&SPARSE_KINDS));
        for index in 0..1 + self.pick(&[0, 1, 2]) {
            self.table(&mut out, index, format, shared);
        }
        writeln!(out, "[optimizer]").unwrap();
        writeln!(out, "{}", self.pick(&["", "clip_norm = 1", "clip_value = 0.5"])).unwrap();
        if let Some(kind) = shared {
            writeln!(out, "[optimizer.sparse]\nkind = \"{kind}\"").unwrap();
            self.sparse(&mut out, kind, true);
        }
        let dense = self.pick(&["sgd", "adagrad", "adam"]);
        writeln!(out, "[optimizer.dense]\nkind = \"{dense}\"\nlr = 0.5").unwrap();
        if dense != "sgd" {
            self.some(&mut out, &["eps = 1e-6"]);
        }
        if dense == "adam" {
            self.some(&mut out, &["beta1 = 0.5", "beta2 = 0.75"]);
        }
        writeln!(out, "[optimizer.schedule]").unwrap();
        self.some(&mut out, &["warmup_steps = 10"]);
        let decay = self.pick(&["constant", "linear", "cosine", "poly"]);
        if decay != "constant" || self.coin() {
            writeln!(out, "decay = \"{decay}\"").unwrap();
        }
        if decay != "constant" {
            writeln!(out, "decay_steps = 100").unwrap();
            self.some(&mut out, &["decay_start = 20", "end_ratio = 0.5"]);
        }
        if decay == "poly" {
            self.some(&mut out, &["power = 3"]);
        }
        writeln!(out, "[parallel]").unwrap();
        self.some(
            &mut out,
            &[
                "ranks = 1",
                "comm = \"single\"",
                "replicas = 1",
                "sync_every = 4",
                "placement = \"contiguous\"",
                "plan = \"auto\"",
                "route = \"auto\"",
                "codec_forward = \"fp32\"",
                "codec_backward = \"fp32\"",
                "time_limit_s = 30",
            ],
        );
        if own {
            self.some(&mut out, &["uneven = \"pad\""]);
        }
        writeln!(out, "[pipeline]").unwrap();
        self.some(&mut out, &["micro_batches = 2", "cluster = \"keys\""]);
        let modes = [
            "",
            "mode = \"serial\"",
            "mode = \"prefetch\"\ndepth = 9",
            "mode = \"nested\"\ndepth = 2",
        ];
        writeln!(out, "{}", self.pick(&modes)).unwrap();
        writeln!(out, "[train]").unwrap();
        self.some(
            &mut out,
            &[
                "epochs = 3",
                "max_steps = 9",
                "eval_every = 4",
                "log_every = 5",
                "checkpoint_every = 6",
                "checkpoint_full_every = 3",
                "checkpoint_cold = \"rows\"",
                "keep = 7",
                "window_steps = 8",
                "on_nonfinite = \"skip\"",
            ],
        );
        if self.coin() {
            let metrics: &[&str] = match format {
                "parquet" => &["auc", "logloss", "ne", "grouped_auc"],
                _ => &["auc", "logloss", "ne"],
            };
            writeln!(out, "[train.early_stop]\nmetric = \"{}\"", self.pick(metrics)).unwrap();
            self.some(&mut out, &["patience = 2", "min_delta = 0.001"]);
        }
        if self.coin() {
            writeln!(out, "[tiers]\ndevice_bytes = 1000000").unwrap();
            self.some(&mut out, &["host_bytes = 2000000"]);
            if self.coin() {
                writeln!(out, "ssd_dir = \"ssd\"").unwrap();
                self.some(&mut out, &["ssd_bytes = 900000000"]);
                let reader = self.pick(&["auto", "mmap", "io_uring"]);
                self.some(&mut out, &[&format!("ssd_reader = \"{reader}\"")]);
            }
            self.some(&mut out, &["policy = \"lfu\""]);
        }
        self.some(&mut out, &["[metrics]\nlisten = \"127.0.0.1:9464\""]);
        out
    }
}

/// Configurations that together hold every key.
pub(super) fn samples() -> impl Iterator<Item = String> {
    (0..SAMPLES).map(|seed| Draw(seed).config())
}
