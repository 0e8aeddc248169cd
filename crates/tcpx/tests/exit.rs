//! A program that exits in the middle of transfers of GPU memory.

#[expect(dead_code, reason = "not every test needs all of it")]
#[path = "engine/common.rs"]
mod common;

use std::process::{Command, exit};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use common::pair;
use tcpx::{Connection, Error, Gpu, Region};
use tcpx_memory::fake_driver;

const NAME: &str = "a_process_exits_amid_transfers_without_a_signal";
const EXITS: &str = "TEST_EXITS";

/// Transfers that have ended.
static DONE: AtomicUsize = AtomicUsize::new(0);

fn transfers(sender: &Connection, receiver: &Connection, gpu: &Gpu) -> Result<(), Error> {
    let (from, to) = (Region::cuda(gpu, 2 << 20)?, Region::cuda(gpu, 2 << 20)?);
    for size in [100, 100_000, 2 << 20].into_iter().cycle() {
        let receive = receiver.receive(to.slice(..size)?, 1).start()?;
        sender.send(from.slice(..size)?, 1).start()?.wait()?;
        receive.wait()?;
        DONE.fetch_add(1, Ordering::SeqCst);
    }
    Ok(())
}

fn exit_amid_transfers() -> ! {
    fake_driver::install();
    let gpu = Gpu::open(0).expect("the fake");
    for _ in 0..3 {
        let gpu = gpu.clone();
        let (server, client) = pair(|_, options| options.gpu = Some(gpu.clone()));
        // Whatever it says when the process ends, nobody hears it.
        thread::spawn(move || drop(transfers(&server, &client, &gpu)));
    }
    while DONE.load(Ordering::SeqCst) < 20 {
        thread::yield_now();
    }
    exit(0)
}

#[test]
fn a_process_exits_amid_transfers_without_a_signal() {
    if std::env::var_os(EXITS).is_some() {
        exit_amid_transfers();
    }
    for round in 0..5 {
        let mut child = Command::new(std::env::current_exe().expect("it is there"));
        let child = child.args(["--exact", NAME, "--nocapture"]).env(EXITS, "1");
        let ended = child.output().expect("it starts");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(
            ended.status.success(),
            "round {round}: {}: {said}",
            ended.status
        );
    }
}
