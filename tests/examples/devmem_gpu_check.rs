//! Checks the network `devmem` with memory of a real GPU: `devmem_gpu_check [GPU]`.
//!
//! A fake kernel fills the pool, as there is no such card; pool, sources and destinations are the
//! GPU's. Prints one line a check; exit code 0 only if every check passed.

use std::process::ExitCode;
use std::time::Instant;

use tcpx::{Gpu, Region, UnpackMethod};
use tcpx_tests::content::Content;
use tcpx_tests::fake_kernel::{Counts, FakeKernel, FaultPlan};
use tcpx_tests::pair::{Listening, close};

const POOL: usize = 8 << 20;
/// Behind each destination, and nothing may touch it.
const GUARD: usize = 4096;
const POISON: u8 = 0xa5;

type Outcome = Result<String, String>;
type Check = (&'static str, fn(&Gpu) -> Outcome);

fn main() -> ExitCode {
    let ordinal = std::env::args().nth(1).map_or(Ok(0), |text| text.parse());
    let gpu = match ordinal
        .map_err(text)
        .and_then(|one| Gpu::open(one).map_err(text))
    {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("devmem_gpu_check: {error}");
            return ExitCode::from(2);
        }
    };
    println!(
        "{}; a flush before each unpack: {:?}",
        gpu.info().name,
        gpu.needs_flush()
    );
    let checks: [Check; 4] = [
        ("into a pool of the GPU, with each unpacker", into_pool),
        ("linear bytes, packed pages, a pool that starves", weathers),
        (
            "out of slots, and past them when a send is refused",
            out_of_slots,
        ),
        (
            "on over plain TCP in the middle of a chunk",
            onto_ordinary_lane,
        ),
    ];
    let mut failed = 0;
    for (name, check) in checks {
        let start = Instant::now();
        let outcome = check(&gpu);
        let seconds = start.elapsed().as_secs_f64();
        failed += u8::from(outcome.is_err());
        match outcome {
            Ok(words) => println!("ok     {name} ({seconds:.2} s): {words}"),
            Err(words) => println!("FAILED {name} ({seconds:.2} s): {words}"),
        }
    }
    drop(gpu);
    ExitCode::from(u8::from(failed > 0))
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

fn memory(gpu: &Gpu, bytes: &[u8]) -> Result<Region, String> {
    let region = Region::cuda(gpu, bytes.len()).map_err(text)?;
    region.write_from(0, bytes).map_err(text)?;
    Ok(region)
}

/// Both directions at once, all in flight together; what the kernel saw, and the path in the end.
fn run(
    gpu: &Gpu,
    pool: usize,
    fault_plan: FaultPlan,
    method: Option<UnpackMethod>,
    sizes: &[usize],
) -> Result<(Counts, String), String> {
    let pool = Region::cuda(gpu, pool).map_err(text)?;
    let (kernel, network) = FakeKernel::network_in(pool, fault_plan);
    let set = |options: &mut tcpx::Options| {
        options.gpu = Some(gpu.clone());
        options.unpack = method;
        options.channels = 2;
    };
    let listening = Listening::new(network, set, set);
    let (server, client) = listening.connect();
    let mut started = Vec::new();
    for (number, bytes) in (0u64..).zip(sizes) {
        for (seed, from, to) in [(1, &client, &server), (2, &server, &client)] {
            let content = Content::new(seed, number);
            let mut right = vec![0; *bytes];
            content.fill(0, &mut right);
            let source = memory(gpu, &right)?;
            let target = memory(gpu, &vec![POISON; bytes + GUARD])?;
            let into = target.slice(..*bytes).map_err(text)?;
            let receive = to.receive(into, number).start().map_err(text)?;
            let send = from.send(source.all(), number).start().map_err(text)?;
            started.push((send, receive, target, right));
        }
    }
    for (send, receive, target, right) in started {
        send.wait().map_err(text)?;
        receive.wait().map_err(text)?;
        let mut there = vec![0; target.len()];
        target.read_to(0, &mut there).map_err(text)?;
        let (bytes, guard) = there.split_at(right.len());
        if let Some(at) = bytes
            .iter()
            .zip(&right)
            .position(|(is, should)| is != should)
        {
            return Err(format!("byte {at} of {} is wrong", right.len()));
        }
        if guard.iter().any(|byte| *byte != POISON) {
            return Err(format!(
                "something was written behind {} bytes",
                right.len()
            ));
        }
    }
    let path = server.path().to_owned();
    close(server, client);
    Ok((kernel.counts(), path))
}

fn into_pool(gpu: &Gpu) -> Outcome {
    let methods = [
        None,
        Some(UnpackMethod::Host),
        Some(UnpackMethod::D2d),
        Some(UnpackMethod::Kernel),
    ];
    let mut fragments = 0;
    for method in methods {
        let sizes = [1, 4097, (3 << 20) + 5];
        let (counts, path) = run(gpu, POOL, FaultPlan::default(), method, &sizes)?;
        if counts.device_bytes != 2 * sizes.iter().sum::<usize>() as u64 {
            return Err(format!(
                "{method:?}: not all came through the pool: {counts:?}"
            ));
        }
        if !path.contains("queue 1 of lo") {
            return Err(path);
        }
        fragments += counts.fragments;
    }
    Ok(format!("{fragments} fragments"))
}

fn weathers(gpu: &Gpu) -> Outcome {
    let mixed = FaultPlan {
        linear_every: Some(3),
        packed: true,
        ..FaultPlan::default()
    };
    let (counts, _) = run(gpu, POOL, mixed, None, &[(2 << 20) + 1, 100_000])?;
    let (dry, _) = run(gpu, 256 << 10, FaultPlan::default(), None, &[2 << 20])?;
    if counts.linear_bytes == 0 || dry.dry == 0 {
        return Err(format!("it was not met: {counts:?}, {dry:?}"));
    }
    Ok(format!(
        "{} linear bytes, {} times dry",
        counts.linear_bytes, dry.dry
    ))
}

fn out_of_slots(gpu: &Gpu) -> Outcome {
    let sends = FaultPlan {
        sends: true,
        ..FaultPlan::default()
    };
    let sizes = [12 << 20, 5 << 20];
    let (counts, _) = run(gpu, POOL, sends.clone(), None, &sizes)?;
    let refused = FaultPlan {
        send_fails_at: Some((6, libc::EINVAL)),
        ..sends
    };
    let (_, path) = run(gpu, POOL, refused, None, &sizes)?;
    if !path.contains("over plain TCP") || counts.device_sends == 0 {
        return Err(format!("{path}, {counts:?}"));
    }
    Ok(format!("{} sends; then {path}", counts.device_sends))
}

fn onto_ordinary_lane(gpu: &Gpu) -> Outcome {
    let fails = FaultPlan {
        fails_at: Some((1_234_567, libc::ENODEV)),
        ..FaultPlan::default()
    };
    let (_, path) = run(gpu, POOL, fails, None, &[7 << 20, 3 << 20])?;
    if !path.contains("over plain TCP") {
        return Err(path);
    }
    Ok(path)
}
