//! `tcpx devmem self-test`: each step that device memory needs, tried on one card.

use std::net::{SocketAddr, TcpListener};

use tcpx::Gpu;
use tcpx_devmem::{
    Adjust, Devmem, Flow, Landed, QueueUse, ReceiveOptions, ReceiveQueue, watch_landing,
};
use tcpx_memory::{DmaBuf, MemoryKind};
use tcpx_net::interfaces;

use super::refused;
use crate::args::devmem::SelfTestArgs;
use crate::error::Error;
use crate::output::say::say;
use crate::sizes::Limit;

/// Bytes of the pool: enough for a window of TCP in fragments of one packet to a page.
const POOL_BYTES: usize = 32 << 20;
/// What the other host sends, again and again.
const PATTERN: &[u8] = b"tcpx\n";

pub(super) fn run(args: &SelfTestArgs) -> Result<(), Error> {
    let devmem = Devmem::system();
    let interface = args.interface.as_str();
    let kernel = devmem.kernel_capability().map_err(refused)?;
    say!(
        "kernel: receives into device memory: {}, sends from it: {}",
        yes(kernel.receive),
        yes(kernel.send)
    );
    let card = devmem.capability(interface).map_err(refused)?;
    say!(
        "card: {interface}, driver {}, {} receive queues",
        card.driver,
        card.queues
    );
    for missing in card.missing() {
        say!("  missing: {missing}");
    }
    let before = devmem.card_state(interface).map_err(refused)?;
    let gpu = args
        .gpu
        .map(Gpu::open)
        .transpose()
        .map_err(|error| Error::gpu(error.to_string(), "leave --gpu out to use host memory"))?;
    let memory = memory(gpu.as_ref())?;
    say!(
        "memory: {} bytes of {} exported as a dma-buf",
        memory.len(),
        memory.kind()
    );
    let outcome = with_queue(args, &devmem, gpu.as_ref(), &memory);
    let after = devmem.card_state(interface).map_err(refused)?;
    outcome?;
    if before != after {
        return Err(Error::failed(
            format!("the card is not as it was: {before:?} before, {after:?} now"),
            "if no other program changed it meanwhile, put it back with ethtool, and report this",
        ));
    }
    say!("undone: every setting of the card is as it was");
    Ok(())
}

fn memory(gpu: Option<&Gpu>) -> Result<DmaBuf, Error> {
    let made = match gpu {
        Some(gpu) => DmaBuf::cuda(gpu, POOL_BYTES),
        None => DmaBuf::host(POOL_BYTES),
    };
    made.map_err(|error| {
        Error::failed(
            error.to_string(),
            "leave --gpu out to use host memory, or look at what the error asks for",
        )
    })
}

fn with_queue(
    args: &SelfTestArgs,
    devmem: &Devmem,
    gpu: Option<&Gpu>,
    memory: &DmaBuf,
) -> Result<(), Error> {
    let interface = args.interface.as_str();
    let queue = devmem
        .bind_receive(&ReceiveOptions {
            interface: interface.to_owned(),
            queue: args.queue,
            memory: memory.clone(),
            adjust: Adjust::Settings,
        })
        .map_err(refused)?;
    let used = devmem.capability(interface).map_err(refused)?.used;
    let expected = (queue.queue, QueueUse::DmaBuf(queue.dmabuf_id));
    if !used.contains(&expected) {
        return Err(Error::failed(
            format!("the kernel does not show the binding: {used:?}, not {expected:?}"),
            "report this with `uname -a`",
        ));
    }
    say!("bound: queue {} to memory {}", queue.queue, queue.dmabuf_id);
    send(devmem, interface, memory)?;
    let address = address(interface, args.port)?;
    let rule = queue
        .steer(Flow {
            local: address,
            remote: None,
        })
        .map_err(refused)?;
    say!("steered: {}", rule.flow());
    match args.wait {
        Some(Limit(limit)) => land(&queue, gpu, address, limit),
        None => {
            say!("not tried: whether bytes land there; give --wait 60s and send from another host");
            Ok(())
        }
    }
}

fn send(devmem: &Devmem, interface: &str, memory: &DmaBuf) -> Result<(), Error> {
    match devmem.bind_send(interface, memory) {
        Ok(path) => say!("bound for sending: memory {}", path.dmabuf_id),
        // Receiving works without.
        Err(error) if error.leaves_staging() => {
            say!("not bound for sending: {error}");
        }
        Err(error) => return Err(refused(error)),
    }
    Ok(())
}

fn land(
    queue: &ReceiveQueue,
    gpu: Option<&Gpu>,
    address: SocketAddr,
    limit: std::time::Duration,
) -> Result<(), Error> {
    let listener = TcpListener::bind(address)
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
        .map_err(Error::process("listen on the card's address"))?;
    say!("now run this on another host, through this card:");
    say!(
        "  yes tcpx | head -c 10000000 | nc -N {} {}",
        address.ip(),
        address.port()
    );
    let landed = watch_landing(queue, gpu, &listener, PATTERN, limit).map_err(|error| {
        let text = error.to_string();
        let (what, hint) = crate::advice::split(&text);
        Error::failed(what, hint)
    })?;
    judge(queue.pool.kind(), &landed)
}

fn judge(kind: MemoryKind, landed: &Landed) -> Result<(), Error> {
    say!(
        "landed: {} bytes in {kind} ({} fragments), {} beside it, {} as ordinary data",
        landed.device,
        landed.fragments,
        landed.linear,
        landed.plain
    );
    if let Some(at) = landed.wrong {
        return Err(Error::failed(
            format!("byte {at} is not what `yes tcpx` sends"),
            "send exactly what the command above says; if it was that, do not use this card",
        ));
    }
    if landed.device == 0 {
        return Err(Error::failed(
            "no byte landed in device memory",
            "the card does not follow its flow rule, or the sender came another way: compare `ethtool -S` of its queues",
        ));
    }
    say!("every byte is right");
    Ok(())
}

fn address(interface: &str, port: u16) -> Result<SocketAddr, Error> {
    let found = interfaces::interfaces()
        .map_err(|error| tcpx::Error::from(tcpx::NetworkError::from(error)))?;
    let address = found
        .iter()
        .find(|one| one.name == interface)
        .and_then(|one| {
            let is_usable = |address: &&std::net::IpAddr| match address {
                std::net::IpAddr::V4(_) => true,
                // Link-local addresses are no use without a scope.
                std::net::IpAddr::V6(address) => !address.is_unicast_link_local(),
            };
            let mut usable = one.addresses.iter().filter(is_usable);
            usable.next().copied()
        });
    address
        .map(|address| SocketAddr::new(address, port))
        .ok_or_else(|| {
            Error::failed(
                format!("{interface} has no address"),
                "give it one: `ip addr add ADDRESS dev INTERFACE`",
            )
        })
}

fn yes(can: bool) -> &'static str {
    if can { "yes" } else { "no" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn landed(device: u64, plain: u64, wrong: Option<u64>) -> Landed {
        Landed {
            device,
            plain,
            wrong,
            ..Landed::default()
        }
    }

    #[test]
    fn only_right_bytes_in_device_memory_are_a_success() {
        assert!(judge(MemoryKind::Host, &landed(10, 5, None)).is_ok());
        assert!(judge(MemoryKind::Host, &landed(0, 5, None)).is_err());
        assert!(judge(MemoryKind::Host, &landed(10, 0, Some(3))).is_err());
    }
}
