//! Streams: epochs, shuffle, resume from every position, prefetch; over every format and across
//! the borders of files.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tessera_data::{
    Batch, BatchStream, DataError, DataMetrics, Event, Format, OnNanDense, Position, Prefetch,
    Shuffle, SourceSpec, StreamOptions, SyntheticSpec, convert, open,
};

use crate::common::{assert_same, plain_batch, schema, write};

/// Samples of the sources below.
const SAMPLES: u64 = 21;

/// The same 21 samples in three files of every format, and as many generated ones.
fn sources(dir: &std::path::Path) -> Vec<SourceSpec> {
    let schema = schema(2, 3);
    let mut sources = Vec::new();
    for format in [Format::CriteoTsv, Format::MlperfNpy, Format::Raw, Format::Parquet] {
        let mut files = Vec::new();
        for (i, (first, samples)) in [(0, 7), (7, 5), (12, 9)].into_iter().enumerate() {
            // criteo-tsv: one file of each compression.
            let extension = ["", ".gz", ".zst"][i];
            let path = dir.join(format!("{format}-{i}{extension}"));
            write(format, &path, &schema, &[plain_batch(&schema, first, samples)]);
            files.push(path);
        }
        sources.push(SourceSpec::files(format, files, schema.clone()));
    }
    let settings = SyntheticSpec { samples: SAMPLES, ..SyntheticSpec::default() };
    sources.push(SourceSpec::synthetic(schema, settings));
    sources
}

fn options(batch_size: usize, window: Option<u64>) -> StreamOptions {
    StreamOptions {
        batch_size,
        epochs: Some(2),
        shuffle: window.map(|window_samples| Shuffle { window_samples, seed: 11 }),
        start: Position::default(),
    }
}

fn events(spec: &SourceSpec, options: StreamOptions) -> Vec<Event> {
    let mut stream = BatchStream::new(spec.clone(), options, DataMetrics::unregistered()).unwrap();
    std::iter::from_fn(|| stream.next_event().unwrap()).collect()
}

/// Places of all samples of an epoch, in order.
fn places(events: &[Event], wanted: u64) -> Vec<String> {
    let mut places = Vec::new();
    for event in events {
        if let Event::Batch { batch, epoch, .. } = event
            && *epoch == wanted
        {
            places.extend((0..batch.samples()).map(|i| batch.place(i).to_string()));
        }
    }
    places
}

fn sizes(events: &[Event]) -> Vec<usize> {
    let size = |event: &Event| match event {
        Event::Batch { batch, .. } => batch.samples(),
        Event::EpochEnd { .. } => 0,
    };
    events.iter().map(size).collect()
}

#[test]
fn batches_run_across_files_and_the_last_one_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    for spec in sources(dir.path()) {
        let events = events(&spec, options(8, None));
        assert_eq!(sizes(&events), [8, 8, 5, 0, 8, 8, 5, 0], "{}", spec.format);
        let first = places(&events, 0);
        assert_eq!(first, places(&events, 1));
        let whole = open(&spec).unwrap().read(21).unwrap();
        let in_order: Vec<String> = (0..21).map(|i| whole.place(i).to_string()).collect();
        assert_eq!(first, in_order);
        let exact = self::events(&spec, options(7, None));
        assert_eq!(sizes(&exact), [7, 7, 7, 0, 7, 7, 7, 0]);
        assert!(matches!(
            exact[3],
            Event::EpochEnd { epoch: 0, after: Position { epoch: 1, sample: 0 } }
        ));
    }
}

#[test]
fn every_format_gives_the_same_batches() {
    let dir = tempfile::tempdir().unwrap();
    let mut sources = sources(dir.path());
    sources.pop();
    for spec in &mut sources {
        spec.values = tessera_data::Values::Verbatim;
    }
    for window in [None, Some(6)] {
        let expected = events(&sources[0], options(4, window));
        for spec in &sources[1..] {
            let found = events(spec, options(4, window));
            assert_eq!(found.len(), expected.len());
            for pair in expected.iter().zip(&found) {
                match pair {
                    (Event::Batch { batch: a, .. }, Event::Batch { batch: b, .. }) => {
                        assert_same(a, b);
                    }
                    (a, b) => assert_eq!(a, b),
                }
            }
        }
    }
}

#[test]
fn a_stream_started_at_any_position_gives_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    for spec in sources(dir.path()) {
        for (size, window) in
            [(4, None), (100, None), (1, Some(1)), (4, Some(6)), (5, Some(100)), (21, Some(7))]
        {
            let options = options(size, window);
            let all = events(&spec, options);
            for (i, event) in all.iter().enumerate() {
                let (Event::Batch { after, .. } | Event::EpochEnd { after, .. }) = event;
                let rest = events(&spec, StreamOptions { start: *after, ..options });
                assert_eq!(rest, all[i + 1..], "{} {size} {window:?} {after:?}", spec.format);
            }
        }
        // Positions that no batch of that size ends at: the sequence of samples goes on from there.
        for window in [None, Some(6)] {
            let whole = places(&events(&spec, options(1, window)), 1);
            for sample in 0..=SAMPLES {
                let start = Position { epoch: 1, sample };
                let rest = events(&spec, StreamOptions { start, ..options(4, window) });
                assert_eq!(places(&rest, 1), whole[sample as usize..]);
            }
        }
    }
}

#[test]
fn a_shuffle_reorders_inside_windows_by_seed_and_epoch_alone() {
    let dir = tempfile::tempdir().unwrap();
    let spec = sources(dir.path()).remove(2);
    let plain = places(&events(&spec, options(21, None)), 0);
    let shuffled = events(&spec, options(4, Some(6)));
    let (first, second) = (places(&shuffled, 0), places(&shuffled, 1));
    assert_ne!(first, second, "epochs differ");
    assert_ne!(first, plain);
    for epoch in [&first, &second] {
        for (window, original) in epoch.chunks(6).zip(plain.chunks(6)) {
            let (mut window, mut original) = (window.to_vec(), original.to_vec());
            window.sort_unstable();
            original.sort_unstable();
            assert_eq!(window, original);
        }
    }
    for size in [1, 5, 21, 50] {
        assert_eq!(places(&events(&spec, options(size, Some(6))), 0), first);
    }
    let other = Shuffle { window_samples: 6, seed: 12 };
    let other = StreamOptions { shuffle: Some(other), ..options(4, None) };
    assert_ne!(places(&events(&spec, other), 0), first, "seeds differ");
    assert_eq!(places(&events(&spec, options(4, Some(1))), 0), plain);
}

/// A window of more samples than are read at once.
#[test]
fn large_windows_are_read_in_pieces() {
    let settings = SyntheticSpec { samples: 20_000, ..SyntheticSpec::default() };
    let spec = SourceSpec::synthetic(schema(1, 1), settings);
    let mut options = options(3000, Some(17_000));
    options.epochs = Some(1);
    let events = events(&spec, options);
    assert_eq!(sizes(&events), [3000, 3000, 3000, 3000, 3000, 3000, 2000, 0]);
    let mut rows = Vec::new();
    for event in &events {
        if let Event::Batch { batch, .. } = event {
            rows.extend((0..batch.samples()).map(|i| batch.place(i).row));
        }
    }
    assert!(rows[..17_000].iter().all(|row| *row < 17_000));
    rows.sort_unstable();
    assert_eq!(rows, (0..20_000).collect::<Vec<u64>>());
}

#[test]
fn skipping_is_reading_without_looking() {
    let dir = tempfile::tempdir().unwrap();
    for spec in sources(dir.path()) {
        let whole = open(&spec).unwrap().read(21).unwrap();
        for first in 0..=21 {
            for step in [1, 2, 21] {
                let mut reader = open(&spec).unwrap();
                assert_eq!(reader.skip(first).unwrap(), first);
                let mut at = first as usize;
                while at < 21 {
                    let batch = reader.read(1).unwrap();
                    assert_eq!(batch, whole.slice(at..at + 1), "{}", spec.format);
                    at += 1;
                    at += reader.skip(step).unwrap() as usize;
                }
                assert_eq!(reader.skip(5).unwrap(), 0);
                assert_eq!(reader.read(5).unwrap().samples(), 0);
            }
        }
        assert_eq!(open(&spec).unwrap().skip(100).unwrap(), 21);
    }
}

#[test]
fn prefetch_gives_the_events_of_the_stream() {
    let dir = tempfile::tempdir().unwrap();
    for spec in sources(dir.path()) {
        for window in [None, Some(6)] {
            for depth in [1, 3, 100] {
                let metrics = DataMetrics::unregistered();
                let stream =
                    BatchStream::new(spec.clone(), options(4, window), metrics.clone()).unwrap();
                let depth = NonZeroUsize::new(depth).unwrap();
                let mut prefetch = Prefetch::new(stream, depth, metrics.clone()).unwrap();
                let ahead: Vec<Event> =
                    std::iter::from_fn(|| prefetch.next_event().unwrap()).collect();
                assert_eq!(ahead, events(&spec, options(4, window)));
                assert_eq!(metrics.samples.get(), 42);
                assert_eq!(metrics.bytes.get() > 0, spec.format != Format::Synthetic);
                assert!(metrics.wait_seconds.get() > 0.0);
                assert_eq!(metrics.queued.get(), 0);
            }
        }
    }
}

/// An endless stream ends when its consumer lets go, even while a huge window is being read.
#[test]
fn prefetch_stops_when_dropped() {
    let settings = SyntheticSpec { samples: 1 << 40, ..SyntheticSpec::default() };
    let spec = SourceSpec::synthetic(schema(1, 1), settings);
    let mut options = options(4, Some(1 << 40));
    options.epochs = None;
    let metrics = DataMetrics::unregistered();
    let stream = BatchStream::new(spec, options, metrics.clone()).unwrap();
    let prefetch = Prefetch::new(stream, NonZeroUsize::MIN, metrics).unwrap();
    let began = std::time::Instant::now();
    drop(prefetch);
    assert!(began.elapsed().as_secs() < 30);
}

/// A flag ends a huge window, a huge batch, and the way to a start position far in a compressed
/// file, each of which would take minutes.
#[test]
fn a_flag_stops_reading_in_the_middle() {
    let settings = SyntheticSpec { samples: 1 << 40, ..SyntheticSpec::default() };
    let spec = SourceSpec::synthetic(schema(1, 1), settings);
    let metrics = DataMetrics::unregistered();
    let flag_in_a_moment = || {
        let flag = Arc::new(AtomicBool::new(false));
        let setter = Arc::clone(&flag);
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            setter.store(true, Ordering::Relaxed);
        });
        (flag, thread)
    };
    for (size, window) in [(4, Some(1 << 40)), (1 << 40, None)] {
        let mut stream =
            BatchStream::new(spec.clone(), options(size, window), metrics.clone()).unwrap();
        let (flag, thread) = flag_in_a_moment();
        // Flags add up: the one that is never set does not take the place of the other.
        stream.cancel_with(flag);
        stream.cancel_with(Arc::new(AtomicBool::new(false)));
        assert!(matches!(stream.next_event(), Err(DataError::Cancelled)));
        assert!(matches!(stream.next_event(), Err(DataError::Stopped { .. })));
        assert_eq!(stream.position(), Position::default());
        thread.join().unwrap();
    }

    // 640 million lines in 640 frames, of which no more than a moment's worth is to be decoded.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long.tsv.zst");
    let line = format!("1{}\n", "\t".repeat(39));
    let member = zstd::encode_all(line.repeat(1_000_000).as_bytes(), 1).unwrap();
    std::fs::write(&path, member.repeat(640)).unwrap();
    let spec = SourceSpec::files(Format::CriteoTsv, vec![path], schema(1, 1));
    let start = Position { epoch: 0, sample: 639_000_000 };
    for window in [None, Some(1000)] {
        let options = StreamOptions { start, ..options(4, window) };
        let (flag, thread) = flag_in_a_moment();
        let began = std::time::Instant::now();
        let stream = BatchStream::new_cancellable(spec.clone(), options, metrics.clone(), flag);
        assert!(matches!(stream.err(), Some(DataError::Cancelled)));
        assert!(began.elapsed() < Duration::from_secs(3));
        thread.join().unwrap();
    }
}

#[test]
fn errors_come_through_prefetch_after_what_was_good() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.raw");
    let schema = schema(1, 0);
    let mut bytes = Vec::new();
    for value in [1.0, 2.0, f32::NAN, 4.0f32] {
        bytes.extend_from_slice(&0i32.to_le_bytes());
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    std::fs::write(&path, bytes).unwrap();
    let mut spec = SourceSpec::files(Format::Raw, vec![path], schema);
    let metrics = DataMetrics::unregistered();
    let stream = BatchStream::new(spec.clone(), options(2, None), metrics.clone()).unwrap();
    let mut prefetch = Prefetch::new(stream, NonZeroUsize::MIN, metrics.clone()).unwrap();
    assert!(matches!(prefetch.next_event(), Ok(Some(Event::Batch { .. }))));
    let error = prefetch.next_event().unwrap_err();
    assert!(matches!(error, DataError::NonFiniteDense { .. }), "{error}");
    assert!(matches!(prefetch.next_event(), Err(DataError::Stopped { .. })));
    assert_eq!(metrics.dense_not_finite("error").get(), 1);

    spec.on_nan_dense = OnNanDense::Zero;
    let mut stream = BatchStream::new(spec, options(9, None), metrics.clone()).unwrap();
    let Some(Event::Batch { batch, .. }) = stream.next_event().unwrap() else { panic!() };
    assert_eq!(batch.dense(), [1.0, 2.0, 0.0, 4.0]);
    assert_eq!(metrics.dense_not_finite("zero").get(), 1);
}

#[test]
fn positions_beyond_the_data_and_empty_sources_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let start = |spec: &SourceSpec, sample, window| {
        let start = Position { epoch: 1, sample };
        let options = StreamOptions { start, ..options(4, window) };
        BatchStream::new(spec.clone(), options, DataMetrics::unregistered())
    };
    let sources = sources(dir.path());
    for spec in &sources {
        for window in [None, Some(6), Some(11), Some(100)] {
            assert!(start(spec, SAMPLES, window).is_ok());
            for beyond in [SAMPLES + 1, SAMPLES + 3, 1000, u64::MAX] {
                let error = start(spec, beyond, window).err().unwrap().to_string();
                let expected = format!("epoch 1, sample {beyond} is beyond the data, which has 21");
                assert!(error.contains(&expected), "{} {window:?}: {error}", spec.format);
            }
        }
    }
    let settings = SyntheticSpec { samples: 0, ..SyntheticSpec::default() };
    let empty = SourceSpec::synthetic(schema(1, 1), settings);
    let metrics = DataMetrics::unregistered();
    let mut stream = BatchStream::new(empty, options(4, None), metrics.clone()).unwrap();
    assert!(matches!(stream.next_event(), Err(DataError::NoSamples { .. })));
    assert!(BatchStream::new(sources[0].clone(), options(0, None), metrics.clone()).is_err());
    assert!(BatchStream::new(sources[0].clone(), options(1, Some(0)), metrics).is_err());
}

#[test]
fn a_stream_past_its_last_epoch_has_nothing() {
    let settings = SyntheticSpec { samples: 5, ..SyntheticSpec::default() };
    let spec = SourceSpec::synthetic(schema(1, 1), settings);
    let start = Position { epoch: 2, sample: 0 };
    assert!(events(&spec, StreamOptions { start, ..options(4, None) }).is_empty());
    let endless = StreamOptions { epochs: None, ..options(4, None) };
    let metrics = DataMetrics::unregistered();
    let mut stream = BatchStream::new(spec, endless, metrics).unwrap();
    assert_eq!(stream.epoch_samples(), Some(5));
    for _ in 0..30 {
        assert!(stream.next_event().unwrap().is_some());
    }
    assert_eq!(stream.position(), Position { epoch: 10, sample: 0 });
}

/// The position is all that a checkpoint keeps.
#[test]
fn positions_are_kept_as_json() {
    let position = Position { epoch: 3, sample: u64::MAX };
    let text = serde_json::to_string(&position).unwrap();
    assert_eq!(serde_json::from_str::<Position>(&text).unwrap(), position);
}

/// Generated train and eval ranges are drawn by one law and never overlap.
#[test]
fn generated_ranges_follow_each_other() {
    let mut schema = schema(2, 3);
    schema.features[2].weighted = true;
    let train = SyntheticSpec { samples: 30, hots_spread: 1, ..SyntheticSpec::default() };
    let whole = SyntheticSpec { samples: 50, ..train.clone() };
    let read = |settings: SyntheticSpec| -> Batch {
        open(&SourceSpec::synthetic(schema.clone(), settings)).unwrap().read(1000).unwrap()
    };
    let all = read(whole);
    assert_eq!(read(train.clone()), all.slice(0..30));
    assert_eq!(read(train.following(20)), all.slice(30..50));
    let weights = all.features()[2].weights().unwrap();
    assert!(weights.iter().all(|weight| (0.5..1.5).contains(weight)));
    assert!(all.features()[0].weights().is_none());
    let empty = (0..50).filter(|i| all.features()[0].bag(*i).is_empty()).count();
    assert!((5..30).contains(&empty), "a third of the bags is empty: {empty}");
}

/// What convert writes is the whole stream, files of it one after the other.
#[test]
fn conversion_joins_files() {
    let dir = tempfile::tempdir().unwrap();
    let source = sources(dir.path()).remove(2);
    let path = dir.path().join("joined");
    assert_eq!(convert(&source, Format::Parquet, &path, |_| ()).unwrap(), SAMPLES);
    let joined = SourceSpec::files(Format::Parquet, vec![path], source.schema.clone());
    let whole = plain_batch(&source.schema, 0, 21);
    assert_same(&open(&joined).unwrap().read(99).unwrap(), &whole);
}
