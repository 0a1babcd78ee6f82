//! What every device must do: one body, run on the host and on a GPU or its stand-in.

use proptest::prelude::*;
use tessera_device::cuda::{CudaOptions, testing};
use tessera_device::{Cpu, Device, DeviceBuffer, DeviceError};

/// Runs a body on every device that there is.
macro_rules! on_every_device {
    ($($name:ident),* $(,)?) => {
        mod cpu {
            $(#[test] fn $name() {
                super::$name(&tessera_device::Cpu::new(std::num::NonZeroUsize::new(2)).unwrap());
            })*
        }
        mod cuda_exact {
            $(#[test] fn $name() {
                if let Some(cuda) = super::testing::cuda() {
                    super::$name(&cuda);
                }
            })*
        }
        mod cuda_pooled {
            $(#[test] fn $name() {
                let options = super::CudaOptions::default();
                if let Some(cuda) = super::testing::cuda_with(options) {
                    super::$name(&cuda);
                }
            })*
        }
    };
}

on_every_device!(
    fresh_buffers_are_zero_whoever_had_the_memory_before,
    copies_go_where_they_are_told_and_nowhere_else,
    copies_out_of_bounds_are_errors_with_the_numbers,
    a_source_may_change_after_an_upload,
    large_copies_come_in_pieces,
    a_stream_keeps_its_order,
    an_event_orders_two_streams,
    a_buffer_may_be_dropped_while_work_on_it_is_queued,
    several_threads_use_one_device,
    a_size_beyond_the_address_space_is_an_error,
    streams_are_used_again,
);

fn download<D: Device, T: bytemuck::Pod + Send + Sync>(
    device: &D,
    stream: &D::Stream,
    buffer: &D::Buffer<T>,
) -> Vec<T> {
    let mut all = vec![T::zeroed(); buffer.len()];
    device.download(stream, buffer, 0, &mut all).unwrap();
    all
}

fn fresh_buffers_are_zero_whoever_had_the_memory_before<D: Device>(device: &D) {
    let stream = device.stream().unwrap();
    for len in [0usize, 1, 3, 127, 128, 129, 4096, 100_000] {
        for _ in 0..4 {
            let mut buffer = device.alloc::<u32>(len).unwrap();
            assert_eq!((buffer.len(), buffer.is_empty()), (len, len == 0));
            assert!(download(device, &stream, &buffer).iter().all(|&x| x == 0), "{len}");
            device.upload(&stream, &vec![u32::MAX; len], &mut buffer, 0).unwrap();
        }
    }
}

fn copies_go_where_they_are_told_and_nowhere_else<D: Device>(device: &D) {
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(40));
    let sizes = (0usize..300, any::<(prop::sample::Index, prop::sample::Index)>());
    runner
        .run(&sizes, |(len, (a, b))| {
            let stream = device.stream().unwrap();
            let (a, b) = (a.index(len + 1), b.index(len + 1));
            let (from, to) = (a.min(b), a.max(b));
            let mut buffer = device.alloc::<u16>(len).unwrap();
            let values: Vec<u16> = (from..to).map(|i| 1 + i as u16).collect();
            device.upload(&stream, &values, &mut buffer, from).unwrap();
            let wanted: Vec<u16> =
                (0..len).map(|i| if (from..to).contains(&i) { 1 + i as u16 } else { 0 }).collect();
            prop_assert_eq!(download(device, &stream, &buffer), wanted);
            let mut part = vec![9; to - from];
            device.download(&stream, &buffer, from, &mut part).unwrap();
            prop_assert_eq!(part, values);
            Ok(())
        })
        .unwrap();
}

fn copies_out_of_bounds_are_errors_with_the_numbers<D: Device>(device: &D) {
    let stream = device.stream().unwrap();
    let mut buffer = device.alloc::<u32>(5).unwrap();
    for at in [3, 5, usize::MAX] {
        let error = device.upload(&stream, &[7, 7, 7], &mut buffer, at).unwrap_err();
        assert!(matches!(error, DeviceError::CopyOutOfBounds { len: 5, .. }), "{error}");
        let error = device.download(&stream, &buffer, at, &mut [0; 3]).unwrap_err();
        assert!(matches!(error, DeviceError::CopyOutOfBounds { len: 5, .. }), "{error}");
    }
    device.upload(&stream, &[], &mut buffer, 5).unwrap();
    device.download(&stream, &buffer, 5, &mut []).unwrap();
    assert_eq!(download(device, &stream, &buffer), [0; 5]);
}

fn a_source_may_change_after_an_upload<D: Device>(device: &D) {
    let stream = device.stream().unwrap();
    let mut buffer = device.alloc::<u64>(1000).unwrap();
    let mut source = vec![1u64; 1000];
    for round in 1..20u64 {
        source.fill(round);
        device.upload(&stream, &source, &mut buffer, 0).unwrap();
        source.fill(u64::MAX);
    }
    assert_eq!(download(device, &stream, &buffer), [19; 1000]);
}

fn large_copies_come_in_pieces<D: Device>(device: &D) {
    let stream = device.stream().unwrap();
    let len = (5 << 20) / 8 + 3;
    let values: Vec<u64> = (0..len as u64).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
    let mut buffer = device.alloc::<u64>(len + 2).unwrap();
    device.upload(&stream, &values, &mut buffer, 1).unwrap();
    let all = download(device, &stream, &buffer);
    assert!(all[1..=len] == values && all[0] == 0 && all[len + 1] == 0);
}

fn a_stream_keeps_its_order<D: Device>(device: &D) {
    let stream = device.stream().unwrap();
    let mut buffer = device.alloc::<u32>(64).unwrap();
    for round in 0..50 {
        device.upload(&stream, &[round; 64], &mut buffer, 0).unwrap();
        device.upload(&stream, &[round + 1], &mut buffer, 7).unwrap();
    }
    device.synchronize(&stream).unwrap();
    let mut wanted = [49; 64];
    wanted[7] = 50;
    assert_eq!(download(device, &stream, &buffer), wanted);
}

fn an_event_orders_two_streams<D: Device>(device: &D) {
    let (writer, reader) = (device.stream().unwrap(), device.stream().unwrap());
    let mut buffer = device.alloc::<u32>(256).unwrap();
    for round in 0..50 {
        device.upload(&writer, &[round; 256], &mut buffer, 0).unwrap();
        let written = device.record(&writer).unwrap();
        device.wait(&reader, &written).unwrap();
        assert_eq!(download(device, &reader, &buffer), [round; 256]);
    }
}

fn a_buffer_may_be_dropped_while_work_on_it_is_queued<D: Device>(device: &D) {
    let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
    for round in 0..100u32 {
        let mut buffer = device.alloc::<u32>(500).unwrap();
        device.upload(&one, &[round; 500], &mut buffer, 0).unwrap();
        let uploaded = device.record(&one).unwrap();
        device.wait(&two, &uploaded).unwrap();
        device.upload(&two, &[round + 1; 100], &mut buffer, 100).unwrap();
        drop(buffer);
        let fresh = device.alloc::<u32>(500).unwrap();
        assert_eq!(download(device, &two, &fresh), [0; 500], "round {round}");
    }
    device.synchronize(&one).unwrap();
    device.synchronize(&two).unwrap();
}

fn several_threads_use_one_device<D: Device>(device: &D) {
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let device = device.clone();
            scope.spawn(move || {
                let stream = device.stream().unwrap();
                for round in 0..20 {
                    let mut buffer = device.alloc::<u32>(300).unwrap();
                    let value = thread * 1000 + round;
                    device.upload(&stream, &[value; 200], &mut buffer, 50).unwrap();
                    let all = download(&device, &stream, &buffer);
                    let wanted = |i| if (50..250).contains(&i) { value } else { 0 };
                    assert!(all.iter().enumerate().all(|(i, &x)| x == wanted(i)));
                }
            });
        }
    });
    // A buffer may be made, used and dropped by different threads.
    let stream = device.stream().unwrap();
    let buffer = std::thread::scope(|scope| {
        scope.spawn(|| device.alloc::<u32>(10).unwrap()).join().unwrap()
    });
    assert_eq!(download(device, &stream, &buffer), [0; 10]);
    std::thread::scope(|scope| scope.spawn(move || drop(buffer)).join().unwrap());
}

fn a_size_beyond_the_address_space_is_an_error<D: Device>(device: &D) {
    for len in [usize::MAX, usize::MAX / 8, 1 << 60] {
        let Err(error) = device.alloc::<u64>(len) else { panic!("{len} numbers were made") };
        let DeviceError::OutOfMemory { bytes, .. } = error else { panic!("{error}") };
        assert_eq!(bytes, len as u128 * 8);
    }
}

fn streams_are_used_again<D: Device>(device: &D) {
    let mut buffer = device.alloc::<u32>(8).unwrap();
    for round in 0..300 {
        let stream = device.stream().unwrap();
        device.upload(&stream, &[round; 8], &mut buffer, 0).unwrap();
        assert_eq!(download(device, &stream, &buffer), [round; 8]);
    }
}

#[test]
fn devices_say_what_they_are() {
    let info = Cpu::new(None).unwrap().info();
    assert!(info.kind == "cpu" && info.parallelism > 0 && !info.name.is_empty());
    if let Some(cuda) = testing::cuda() {
        let info = cuda.info();
        assert!(info.kind == "cuda" && info.parallelism > 0 && !info.name.is_empty());
    }
}
