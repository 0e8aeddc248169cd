//! Sets up device memory on a real kernel and says whether everything went as it must. Runs in the
//! machine of `cargo xtask devmem-vm`, as root:
//!
//! ```text
//! devmem_setup hold IFACE QUEUE PORT    bind and steer, say so, undo at the end of standard input
//! devmem_setup refusals IFACE           each refusal of the kernel is its own error
//! devmem_setup refused IFACE KIND       binding is refused with an error of that kind
//! devmem_setup cycles IFACE COUNT       bind, steer and undo, so often; nothing may be left
//! devmem_setup bound IFACE              print each queue that the kernel says is bound
//! devmem_setup threshold IFACE [BYTES]  print the header split's threshold, or set it
//! ```

#[path = "devmem_setup/threshold.rs"]
mod threshold;
#[path = "devmem_setup/xdp.rs"]
mod xdp;

use std::io::Read;
use std::net::Ipv4Addr;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use tcpx_devmem::kernel::{Kernel, Linux};
use tcpx_devmem::{Adjust, Devmem, DevmemError, Flow, ReceiveOptions, Why};
use tcpx_memory::DmaBuf;

/// The receiver's address in the machine.
const LOCAL: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const POOL_BYTES: usize = 1 << 20;

fn main() -> Result<ExitCode> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .init();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["hold", interface, queue, port] => hold(interface, queue.parse()?, port.parse()?)?,
        ["refusals", interface] => refusals(interface)?,
        ["refused", interface, kind] => refused(interface, kind)?,
        ["cycles", interface, count] => cycles(interface, count.parse()?)?,
        ["bound", interface] => bound(interface)?,
        ["threshold", interface] => println!("hds-thresh {}", threshold::read(interface)?),
        ["threshold", interface, bytes] => threshold::set(interface, bytes.parse()?)?,
        _ => bail!("see the top of the source for what to say"),
    }
    Ok(ExitCode::SUCCESS)
}

fn options(interface: &str, queue: Option<u32>, adjust: Adjust) -> Result<ReceiveOptions> {
    Ok(ReceiveOptions {
        interface: interface.to_owned(),
        queue,
        memory: DmaBuf::host(POOL_BYTES)?,
        adjust,
    })
}

fn flow(port: u16) -> Flow {
    Flow {
        local: (LOCAL, port).into(),
        remote: None,
    }
}

fn hold(interface: &str, queue: u32, port: u16) -> Result<()> {
    let bound =
        Devmem::system().bind_receive(&options(interface, Some(queue), Adjust::Settings)?)?;
    let _rule = bound.steer(flow(port))?;
    println!("bound {} to queue {}", bound.dmabuf_id, bound.queue);
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// By the kernel's word, whoever bound them.
fn bound(interface: &str) -> Result<()> {
    for (queue, used) in Devmem::system().capability(interface)?.used {
        println!("bound: queue {queue} of {interface}: {used:?}");
    }
    Ok(())
}

/// The error's name, as `refused` takes it.
fn kind(error: &DevmemError) -> String {
    format!("{:?}", error.why())
}

fn expect(
    interface: &str,
    queue: Option<u32>,
    adjust: Adjust,
    wanted: &str,
) -> Result<DevmemError> {
    match Devmem::system().bind_receive(&options(interface, queue, adjust)?) {
        Ok(_) => bail!("expected {wanted}, and it was bound"),
        Err(error) => {
            println!("{wanted}: {error}");
            ensure!(kind(&error) == wanted, "expected {wanted}, got {error:?}");
            Ok(error)
        }
    }
}

fn refused(interface: &str, wanted: &str) -> Result<()> {
    expect(interface, None, Adjust::Settings, wanted)?;
    Ok(())
}

fn refusals(interface: &str) -> Result<()> {
    let devmem = Devmem::system();
    // As the card comes up, its headers are not split; then the threshold is in the way.
    expect(interface, Some(1), Adjust::Nothing, "HeaderSplitOff")?;
    {
        // A program for packets in one piece already keeps the split from being turned on.
        let _program = xdp::Program::attach(Linux.interface_index(interface)?, xdp::Frames::Whole)?;
        expect(interface, Some(1), Adjust::Settings, "Xdp")?;
    }
    ethtool(&["-G", interface, "tcp-data-split", "on"])?;
    threshold::set(interface, 64)?;
    expect(interface, Some(1), Adjust::Nothing, "HeaderThreshold")?;
    threshold::set(interface, 0)?;
    {
        let _program = xdp::Program::attach(Linux.interface_index(interface)?, xdp::Frames::Split)?;
        expect(interface, Some(1), Adjust::Settings, "Xdp")?;
    }
    {
        let _socket = xdp::Socket::bind(Linux.interface_index(interface)?, 1)?;
        expect(interface, Some(1), Adjust::Settings, "AfXdp")?;
        let other = devmem.bind_receive(&options(interface, None, Adjust::Settings)?)?;
        ensure!(other.queue == 3, "{other:?}");
    }
    expect(interface, Some(4), Adjust::Settings, "QueueOutOfRange")?;
    expect(
        interface,
        Some(u32::MAX),
        Adjust::Settings,
        "QueueOutOfRange",
    )?;
    expect("lo", None, Adjust::Settings, "NoDriver")?;
    expect("nosuch", None, Adjust::Settings, "NoInterface")?;
    let bound = devmem.bind_receive(&options(interface, Some(1), Adjust::Settings)?)?;
    expect(interface, Some(1), Adjust::Settings, "QueueTaken")?;
    // Somebody whose records lie elsewhere is a foreign program; the kernel itself refuses then.
    let foreign = tempfile::tempdir()?;
    let foreign = Devmem::new(std::sync::Arc::new(Linux), foreign.path().to_owned());
    match foreign.bind_receive(&options(interface, Some(1), Adjust::Nothing)?) {
        Err(error) if error.why() == Why::QueueTaken => println!("QueueTaken: {error}"),
        other => bail!("expected the kernel's refusal of a bound queue, got {other:?}"),
    }
    let first = bound.steer(flow(7000))?;
    match bound.steer(flow(7000)) {
        Err(error) if error.why() == Why::FlowTaken => println!("FlowTaken: {error}"),
        other => bail!("expected FlowTaken, got {other:?}"),
    }
    let mut rules = vec![first];
    let full = (7001..8000).find_map(|port| match bound.steer(flow(port)) {
        Ok(rule) => {
            rules.push(rule);
            None
        }
        Err(error) => Some(error),
    });
    match full {
        Some(error) if error.why() == Why::RulesFull => println!("RulesFull: {error}"),
        other => bail!("expected RulesFull, got {other:?}"),
    }
    drop(rules);
    match devmem.bind_send("lo", &DmaBuf::host(POOL_BYTES)?) {
        Err(error) if error.why() == Why::NoSend => println!("NoSend: {error}"),
        other => bail!("expected NoSend, got {other:?}"),
    }
    let path = devmem.bind_send(interface, &DmaBuf::host(POOL_BYTES)?)?;
    println!("bound {} for sending", path.dmabuf_id);
    drop((path, bound));
    without_rights(interface)
}

/// As a user without rights; this process does not get them back.
fn without_rights(interface: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let devmem = Devmem::new(std::sync::Arc::new(Linux), folder.path().to_owned());
    let options = options(interface, Some(1), Adjust::Nothing)?;
    rustix::fs::chown(folder.path(), Some(rustix::fs::Uid::from_raw(65534)), None)?;
    // SAFETY: a plain system call; this process has one thread.
    ensure!(unsafe { libc::setuid(65534) } == 0, "setuid");
    match devmem.bind_receive(&options) {
        Err(error) if error.why() == Why::NoPermission => println!("NoPermission: {error}"),
        other => bail!("expected NoPermission, got {other:?}"),
    }
    match Devmem::system().bind_receive(&options) {
        Err(error) if error.why() == Why::State => println!("State: {error}"),
        other => bail!("expected State, got {other:?}"),
    }
    Ok(())
}

/// The setting that a foreign program would make: not through our code.
fn ethtool(arguments: &[&str]) -> Result<()> {
    let status = std::process::Command::new("ethtool")
        .args(arguments)
        .status()
        .context("ethtool")?;
    ensure!(status.success(), "ethtool {arguments:?}: {status}");
    Ok(())
}

fn cycles(interface: &str, count: u32) -> Result<()> {
    let devmem = Devmem::system();
    let descriptors = || -> Result<usize> { Ok(std::fs::read_dir("/proc/self/fd")?.count()) };
    let before = descriptors()?;
    for cycle in 0..count {
        let bound = devmem.bind_receive(&options(interface, None, Adjust::Settings)?)?;
        let rules: Vec<_> = (0..4)
            .map(|port| bound.steer(flow(6000 + port)))
            .collect::<Result<_, _>>()?;
        let path = devmem.bind_send(interface, &DmaBuf::host(4096)?)?;
        ensure!(Linux.rules(interface)?.rules.len() == 4, "cycle {cycle}");
        drop((rules, path, bound));
    }
    ensure!(Linux.rules(interface)?.rules.is_empty(), "rules are left");
    ensure!(devmem.status()?.is_empty(), "records are left");
    let after = descriptors()?;
    ensure!(
        after == before,
        "{before} descriptors before, {after} after"
    );
    println!("{count} cycles, {after} descriptors before and after");
    Ok(())
}
