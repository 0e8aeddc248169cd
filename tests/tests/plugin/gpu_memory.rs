//! GPU memory over the double of Google's plugin: it scatters payload over a pool in memory of the
//! GPU, or in pinned memory that the GPU reads, and we unpack it. A CUDA driver in this process's
//! memory takes the GPU's place. Processes of their own, as that driver and what the plugin was
//! started for are the process's.

use std::sync::Arc;

use tcpx::{Connection, Gpu, Level, Region, RegionSlice, UnpackMethod};
use tcpx_memory::fake_driver;
use tcpx_net::PluginMemory;
use tcpx_tests::child;
use tcpx_tests::double::{self, PoolPlace};
use tcpx_tests::pair::{Listening, close, double_network_of};
use tcpx_tests::support::random;

const POISON: u8 = 0xA5;
/// Bytes behind each destination that nothing may touch.
const GUARD: usize = 4096;

fn gpu() -> Gpu {
    fake_driver::install();
    double::set_driver(fake_driver::function);
    Gpu::open(0).expect("the fake")
}

fn pair(gpu: &Gpu, channels: u16, method: UnpackMethod) -> (Connection, Connection) {
    let configure = |options: &mut tcpx::Options| {
        options.gpu = Some(gpu.clone());
        options.channels = channels;
        options.unpack = Some(method);
        options.eager_limit = 0;
    };
    let network = double_network_of(PluginMemory::Gpu(gpu.clone()));
    Listening::new(network, configure, configure).connect()
}

/// Memory of the GPU, or of the host without one.
fn region(gpu: Option<&Gpu>, bytes: &[u8]) -> Region {
    let region = match gpu {
        Some(gpu) => Region::cuda(gpu, bytes.len()),
        None => Region::host(bytes.len()),
    };
    let region = region.expect("memory");
    region.write_from(0, bytes).expect("it is free");
    region
}

fn poisoned(gpu: Option<&Gpu>, len: usize) -> Region {
    region(gpu, &vec![POISON; len + GUARD])
}

#[track_caller]
fn check(destination: &Region, expected: &[u8]) {
    let mut bytes = vec![0; destination.len()];
    destination.read_to(0, &mut bytes).expect("it is free");
    let (data, guard) = bytes.split_at(expected.len());
    assert!(data == expected, "{} bytes differ", expected.len());
    assert!(guard.iter().all(|byte| *byte == POISON), "past the end");
}

fn transfer(to: &Connection, from: &Connection, into: RegionSlice, of: RegionSlice) -> u64 {
    let receive = to.receive(into, 7).start().expect("room");
    let send = from.send(of, 7).level(Level::Verified).start();
    send.expect("room").wait().expect("it is sent");
    receive.wait().expect("it arrives").fragments
}

#[test]
fn every_unpacker_gathers_from_pinned_and_gpu_pools() {
    child::run(&[], || {
        let gpu = gpu();
        for place in [PoolPlace::Pinned, PoolPlace::Gpu] {
            double::set_pool_place(place);
            for method in [UnpackMethod::Host, UnpackMethod::D2d, UnpackMethod::Kernel] {
                let (server, client) = pair(&gpu, 2, method);
                for len in [1, 23, 4096, 4097, (512 << 10) + 1, 5 << 20] {
                    let bytes = random(len);
                    let source = region(Some(&gpu), &bytes);
                    let destination = poisoned(Some(&gpu), len);
                    let to = destination.slice(..len).expect("inside");
                    let fragments = transfer(&server, &client, to, source.all());
                    assert!(
                        fragments >= len.div_ceil(4096) as u64,
                        "{place:?}, {len} bytes"
                    );
                    check(&destination, &bytes);
                }
                close(server, client);
            }
        }
    });
}

#[test]
fn host_memory_beside_a_gpu_is_moved_as_it_lies() {
    child::run(&[], || {
        let gpu = gpu();
        double::set_pool_place(PoolPlace::Gpu);
        let (server, client) = pair(&gpu, 1, UnpackMethod::Kernel);
        for (from, to) in [(None, Some(&gpu)), (Some(&gpu), None)] {
            for len in [5, 16 << 10, 3 << 20] {
                let bytes = random(len);
                let (source, destination) = (region(from, &bytes), poisoned(to, len));
                let slice = destination.slice(..len).expect("inside");
                transfer(&server, &client, slice, source.all());
                check(&destination, &bytes);
            }
        }
        close(server, client);
    });
}

#[test]
fn gpu_memory_off_a_page_is_refused_by_the_plugin() {
    child::run(&[], || {
        let gpu = gpu();
        double::set_pool_place(PoolPlace::Gpu);
        let (server, client) = pair(&gpu, 1, UnpackMethod::Kernel);
        let whole = Arc::new(region(Some(&gpu), &random(8192)));
        let address = whole.all().device_address().expect("on the GPU") + 256;
        // SAFETY: 4,096 bytes within the region, which lives as long and nobody else uses.
        let odd = unsafe { Region::from_cuda_raw(&gpu, address, 4096, whole) };
        let receive = server.receive(poisoned(Some(&gpu), 4096).all(), 7).start();
        let send = client.send(odd.all(), 7).start().expect("room");
        let error = send.wait().expect_err("no page").to_string();
        assert!(error.contains("regMr"), "{error}");
        drop(receive.expect("room").wait());
        drop((server, client));
    });
}
