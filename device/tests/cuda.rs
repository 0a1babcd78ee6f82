//! What is special to GPUs: kernels, memory pools, options, what is refused. Every test needs a GPU
//! or the stand-in of tests/emu, and says that it was skipped where there is neither.

use tessera_device::cuda::{
    Call, CudaBuffer, CudaOptions, CudaStream, Kernel, KernelSource, Launch, testing,
};
use tessera_device::{Cuda, Device, DeviceError, Philox};

const SOURCE: KernelSource = KernelSource {
    name: "device_test",
    text: include_str!("kernels/device_test.cu"),
    headers: &[],
};

fn kernel(cuda: &Cuda, function: &str) -> Kernel {
    cuda.kernel(&SOURCE, function).unwrap()
}

/// Launches with a thread for each of `n` items.
fn run(call: Call<'_>, n: u64) {
    // SAFETY: the tests give the arguments of the kernel they name; its threads check their number.
    unsafe { call.launch(Launch::for_items(n, 64)) }.unwrap();
}

fn download<T: bytemuck::Pod + Send + Sync>(
    cuda: &Cuda,
    stream: &CudaStream,
    buffer: &CudaBuffer<T>,
) -> Vec<T> {
    let mut all = vec![T::zeroed(); buffer.len()];
    cuda.download(stream, buffer, 0, &mut all).unwrap();
    all
}

/// Whether this is the stand-in, whose orders are drawn by chance.
fn stand_in(cuda: &Cuda) -> bool {
    cuda.info().name.contains("stand-in")
}

#[test]
fn kernels_run_with_their_arguments() {
    let Some(cuda) = testing::cuda() else { return };
    let stream = cuda.stream().unwrap();
    for n in [0usize, 1, 63, 64, 65, 1000] {
        let mut out = cuda.alloc::<u32>(n).unwrap();
        let counted = kernel(&cuda, "count_up");
        run(counted.on(&stream).write(&mut out).value(5u32).value(n as u64), n as u64);
        let wanted: Vec<u32> = (5..5 + n as u32).collect();
        assert_eq!(download(&cuda, &stream, &out), wanted);
    }
    let mut out = cuda.alloc::<u32>(10).unwrap();
    let counted = kernel(&cuda, "count_up");
    run(counted.on(&stream).write_from(&mut out, 6).value(1u32).value(4u64), 4);
    assert_eq!(download(&cuda, &stream, &out), [0, 0, 0, 0, 0, 0, 1, 2, 3, 4]);
    let mut sum = cuda.alloc::<u32>(4).unwrap();
    let added = kernel(&cuda, "add_to_each");
    let call = added.on(&stream).read_from(&out, 6).write(&mut sum).value(7u32).value(4u64);
    run(call, 4);
    assert_eq!(download(&cuda, &stream, &sum), [8, 9, 10, 11]);
}

#[test]
fn shared_memory_and_structs_arrive() {
    let Some(cuda) = testing::cuda() else { return };
    let stream = cuda.stream().unwrap();
    let mut input = cuda.alloc::<u32>(10_000).unwrap();
    let values: Vec<u32> = (0..10_000).map(|i| i * 977 % 1000).collect();
    cuda.upload(&stream, &values, &mut input, 0).unwrap();
    let mut out = cuda.alloc::<u64>(1).unwrap();
    let sum = kernel(&cuda, "sum_of_block");
    // The second needs more than a kernel gets without asking.
    for shared_bytes in [256 * 8, 100 << 10] {
        let launch = Launch { shared_bytes, ..Launch::blocks(1, 256) };
        let call = sum.on(&stream).read(&input).write(&mut out).value(10_000u64);
        // SAFETY: the kernel's arguments; one block, with a word of shared memory a thread.
        unsafe { call.launch(launch) }.unwrap();
        assert_eq!(download(&cuda, &stream, &out), [values.iter().map(|&x| u64::from(x)).sum()]);
    }

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Three {
        a: u64,
        b: u32,
        c: u32,
    }
    let mut out = cuda.alloc::<u64>(3).unwrap();
    let write = kernel(&cuda, "write_three");
    let call = write.on(&stream).value(Three { a: u64::MAX - 1, b: 2, c: 3 }).write(&mut out);
    // SAFETY: the kernel's arguments; it writes three words.
    unsafe { call.launch(Launch::blocks(1, 32)) }.unwrap();
    assert_eq!(download(&cuda, &stream, &out), [u64::MAX - 1, 2, 3]);
}

#[test]
fn the_generator_has_the_hosts_bits() {
    let Some(cuda) = testing::cuda() else { return };
    let stream = cuda.stream().unwrap();
    let n = 300u64;
    let (key, high) = (0x299F_31D0_A409_3822, 0x0370_7344_1319_8A2E);
    let mut out = cuda.alloc::<u32>(4 * n as usize).unwrap();
    let words = kernel(&cuda, "philox_words");
    run(words.on(&stream).value(key).value(high).write(&mut out).value(n), n);
    let wanted: Vec<u32> = (0..n).flat_map(|i| Philox::new(key).block(i, high)).collect();
    assert_eq!(download(&cuda, &stream, &out), wanted);
}

#[test]
fn floats_round_as_on_the_host() {
    let Some(cuda) = testing::cuda() else { return };
    let stream = cuda.stream().unwrap();
    let mut out = cuda.alloc::<f32>(4).unwrap();
    let arithmetic = kernel(&cuda, "arithmetic");
    let generator = Philox::new(3);
    for i in 0..50 {
        let [a, b, c, _] = generator.block(i, 0).map(|word| 0.1 + 3.0 * Philox::unit(word));
        let tiny = f32::MIN_POSITIVE * a;
        let call = arithmetic.on(&stream).value(a).value(b).value(-c).value(tiny);
        // SAFETY: the kernel's arguments; it writes four numbers.
        unsafe { call.write(&mut out).launch(Launch::blocks(1, 1)) }.unwrap();
        let wanted = [a * b + -c, tiny * 0.5, a / b, a.sqrt()];
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&download(&cuda, &stream, &out)), bits(&wanted), "{a} {b} {c} {tiny}");
    }
}

#[test]
fn arguments_and_shapes_that_do_not_fit_are_refused() {
    let Some(cuda) = testing::cuda() else { return };
    let stream = cuda.stream().unwrap();
    let mut out = cuda.alloc::<u32>(64).unwrap();
    let count = kernel(&cuda, "count_up");
    let refused = |call: Call<'_>, launch: Launch, words: &str| {
        // SAFETY: it is refused.
        let error = unsafe { call.launch(launch) }.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let fits = Launch::blocks(1, 64);
    refused(count.on(&stream).write(&mut out).value(0u32), fits, "2 arguments are given, it has 3");
    let call = count.on(&stream).write(&mut out).value(0u64).value(64u64);
    refused(call, fits, "argument 1 has 4 bytes, 8 are given");
    let call = count.on(&stream).write_from(&mut out, 65).value(0u32).value(64u64);
    refused(call, fits, "of a buffer of 64");
    for (launch, words) in [
        (Launch::blocks(1, 1025), "a block of [1025, 1, 1] threads"),
        (Launch::blocks(1, 0), "a block of [0, 1, 1] threads"),
        (Launch::blocks(1 << 31, 32), "a grid of [2147483648, 1, 1] blocks"),
        (Launch { grid: [1, 65536, 1], ..fits }, "a grid of [1, 65536, 1] blocks"),
        (Launch { shared_bytes: 1 << 20, ..fits }, "1048576 bytes of shared memory"),
    ] {
        refused(count.on(&stream).write(&mut out).value(0u32).value(64u64), launch, words);
    }
    assert!(download(&cuda, &stream, &out).iter().all(|&x| x == 0));
    assert_eq!(Launch::for_items(u64::MAX, 64).grid[0], u32::MAX);
}

#[test]
fn what_belongs_to_another_device_is_refused() {
    let (Some(cuda), Some(other)) = (testing::cuda(), testing::cuda()) else { return };
    let (stream, others) = (cuda.stream().unwrap(), other.stream().unwrap());
    let mut buffer = cuda.alloc::<u32>(4).unwrap();
    let foreign = |error: DeviceError| {
        assert!(matches!(error, DeviceError::Foreign { ordinal: 0, .. }), "{error}");
    };
    foreign(cuda.upload(&others, &[1], &mut buffer, 0).unwrap_err());
    foreign(other.upload(&others, &[1], &mut buffer, 0).unwrap_err());
    foreign(other.download(&others, &buffer, 0, &mut [0]).unwrap_err());
    foreign(other.record(&stream).unwrap_err());
    foreign(other.wait(&others, &cuda.record(&stream).unwrap()).unwrap_err());
    foreign(other.synchronize(&stream).unwrap_err());
    let count = kernel(&cuda, "count_up");
    let call = count.on(&others).value(0u64).value(0u32).value(0u64);
    // SAFETY: it is refused.
    foreign(unsafe { call.launch(Launch::blocks(1, 1)) }.unwrap_err());
}

#[test]
fn sources_that_do_not_compile_and_missing_functions_are_errors() {
    let Some(cuda) = testing::cuda() else { return };
    let error = cuda.kernel(&SOURCE, "no_such_kernel").unwrap_err();
    let words = "cuda: the kernels of device_test have no function no_such_kernel";
    assert_eq!(error.to_string(), words);
    let bad = KernelSource { name: "bad", text: "#error this is on purpose\n", headers: &[] };
    let error = cuda.kernel(&bad, "any").unwrap_err();
    let DeviceError::Compile { source_name: "bad", log, .. } = &error else { panic!("{error}") };
    assert!(log.contains("this is on purpose"), "{log}");
}

#[test]
fn compiled_kernels_are_kept_on_disk_and_compiled_again_when_damaged() {
    let folder = std::env::temp_dir().join(format!("tessera-kernels-{}", std::process::id()));
    let counts = || {
        let mut options = CudaOptions::default();
        options.cubin_dir = Some(folder.clone());
        let cuda = testing::cuda_with(options)?;
        let stream = cuda.stream().unwrap();
        let mut out = cuda.alloc::<u32>(3).unwrap();
        let count = kernel(&cuda, "count_up");
        run(count.on(&stream).write(&mut out).value(1u32).value(3u64), 3);
        assert_eq!(download(&cuda, &stream, &out), [1, 2, 3]);
        kernel(&cuda, "add_to_each");
        let stats = cuda.stats();
        Some((stats.kernels_compiled, stats.kernels_from_disk))
    };
    let Some(first) = counts() else { return };
    assert_eq!(first, (1, 0));
    assert_eq!(counts(), Some((0, 1)));
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|f| f.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let mut bytes = std::fs::read(&files[0]).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&files[0], bytes).unwrap();
    assert_eq!(counts(), Some((1, 0)));
    assert_eq!(counts(), Some((0, 1)));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn memory_that_is_not_there_is_an_error_with_the_numbers() {
    let Some(cuda) = testing::cuda_with(CudaOptions::default()) else { return };
    let (_, total) = cuda.memory_bytes().unwrap();
    let half = total as usize / 2;
    // What is kept for later is given back when it is needed.
    for _ in 0..3 {
        drop(cuda.alloc::<u8>(half).unwrap());
        drop(cuda.alloc::<u8>(half + (64 << 20)).unwrap());
    }
    let held = cuda.alloc::<u8>(half).unwrap();
    let error = cuda.alloc::<u8>(half + 1).unwrap_err();
    let DeviceError::OutOfMemory { device: "cuda", bytes, reason } = &error else {
        panic!("{error}")
    };
    assert_eq!(*bytes, half as u128 + 1);
    assert!(reason.contains(&format!("of {total} bytes free")), "{reason}");
    drop(held);
    cuda.alloc::<u8>(half + 1).unwrap();
}

#[test]
fn blocks_are_used_again_and_bounded() {
    let mut options = CudaOptions::default();
    options.cached_bytes_max = 1 << 20;
    let Some(cuda) = testing::cuda_with(options) else { return };
    let stream = cuda.stream().unwrap();
    let use_once = |len: usize| {
        let mut buffer = cuda.alloc::<u32>(len).unwrap();
        cuda.upload(&stream, &vec![1; len], &mut buffer, 0).unwrap();
        drop(buffer);
        cuda.synchronize(&stream).unwrap();
    };
    use_once(1000);
    let before = cuda.stats();
    for len in 990..1010 {
        use_once(len);
    }
    let after = cuda.stats();
    assert_eq!(after.allocations, before.allocations, "{after:?}");
    assert_eq!(after.reuses, before.reuses + 20);
    assert_eq!(after.live_bytes, 0);
    for len in 1..200 {
        use_once(len * 1000);
    }
    let stats = cuda.stats();
    assert!(stats.cached_bytes <= 1 << 20, "{stats:?}");
    assert!(stats.live_bytes_peak >= 199_000 * 4 && stats.live_bytes == 0, "{stats:?}");
}

#[test]
fn streams_are_bounded() {
    let Some(cuda) = testing::cuda() else { return };
    let streams: Vec<_> = std::iter::repeat_with(|| cuda.stream()).take(63).collect();
    assert!(streams.iter().all(Result::is_ok));
    let error = cuda.stream().unwrap_err();
    assert!(matches!(error, DeviceError::TooManyStreams { most: 63, .. }), "{error}");
    drop(streams);
    cuda.stream().unwrap();
}

#[test]
fn pinned_bytes_wait_for_the_work_that_uses_them() {
    let Some(cuda) = testing::cuda() else { return };
    let stream = cuda.stream().unwrap();
    let count = kernel(&cuda, "count_up");
    let mut pinned = cuda.pinned(400).unwrap();
    for round in 0..30u32 {
        let call = count.on(&stream).write_pinned(&mut pinned, 0).value(round).value(100u64);
        run(call, 100);
        let values: &[u32] = bytemuck::cast_slice(pinned.host().unwrap());
        assert!(values.iter().zip(round..).all(|(&a, b)| a == b), "round {round}");
        pinned.host().unwrap().fill(0xee);
    }
    // With a mark, what the stream is given afterwards is not awaited.
    let mut later = cuda.alloc::<u32>(100).unwrap();
    for round in 0..30u32 {
        let call = count.on(&stream).write_pinned(&mut pinned, 0).value(round).value(100u64);
        run(call, 100);
        pinned.mark(&stream).unwrap();
        run(count.on(&stream).write(&mut later).value(round).value(100u64), 100);
        let values: &[u32] = bytemuck::cast_slice(pinned.host().unwrap());
        assert!(values.iter().zip(round..).all(|(&a, b)| a == b), "round {round}");
    }
    // Dropped while a kernel is to write to it.
    for _ in 0..30 {
        let mut pinned = cuda.pinned(4000).unwrap();
        let call = count.on(&stream).write_pinned(&mut pinned, 0).value(1u32).value(1000u64);
        run(call, 1000);
        drop(pinned);
        let mut other = cuda.pinned(4000).unwrap();
        other.host().unwrap().fill(7);
        assert!(other.host().unwrap().iter().all(|&byte| byte == 7));
    }
}

/// A writer and a reader on two streams, with or without the event between them: how often the
/// reader saw other values than the writer's.
fn wrong_values(cuda: &Cuda, with_event: bool) -> usize {
    let (writer, reader) = (cuda.stream().unwrap(), cuda.stream().unwrap());
    let (count, add) = (kernel(cuda, "count_up"), kernel(cuda, "add_to_each"));
    let mut wrong = 0;
    for round in 0..60u32 {
        let mut buffer = cuda.alloc::<u32>(128).unwrap();
        let mut out = cuda.alloc::<u32>(128).unwrap();
        run(count.on(&writer).write(&mut buffer).value(round).value(128u64), 128);
        if with_event {
            cuda.wait(&reader, &cuda.record(&writer).unwrap()).unwrap();
        }
        run(add.on(&reader).read(&buffer).write(&mut out).value(1u32).value(128u64), 128);
        let wanted: Vec<u32> = (round + 1..round + 129).collect();
        wrong += usize::from(download(cuda, &reader, &out) != wanted);
    }
    wrong
}

#[test]
fn a_forgotten_event_gives_wrong_values() {
    let Some(cuda) = testing::cuda() else { return };
    assert_eq!(wrong_values(&cuda, true), 0);
    // What a GPU does without the event is not defined; the stand-in draws an order.
    if stand_in(&cuda) {
        let wrong = wrong_values(&cuda, false);
        assert!(wrong > 0, "the order of streams without an event was right 60 times");
    }
}

#[test]
fn several_gpus_are_devices_of_their_own() {
    let Some(first) = testing::cuda() else { return };
    let Ok(second) = Cuda::new(1) else {
        let error = Cuda::new(1).unwrap_err().to_string();
        assert!(error.contains("there is no GPU 1: the driver shows 1"), "{error}");
        return;
    };
    assert_eq!((first.ordinal(), second.ordinal()), (0, 1));
    let mut pairs = Vec::new();
    for cuda in [&first, &second] {
        let stream = cuda.stream().unwrap();
        let mut out = cuda.alloc::<u32>(50).unwrap();
        run(
            kernel(cuda, "count_up").on(&stream).write(&mut out).value(cuda.ordinal()).value(50u64),
            50,
        );
        pairs.push((cuda, stream, out));
    }
    for (cuda, stream, out) in pairs {
        let wanted: Vec<u32> = (cuda.ordinal()..cuda.ordinal() + 50).collect();
        assert_eq!(download(cuda, &stream, &out), wanted);
    }
}
