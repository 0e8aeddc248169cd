//! The kernel of this host: generic netlink, ethtool's ioctls with the layouts of linux/ethtool.h,
//! and what `/proc` says.

use std::mem::{offset_of, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;
use std::{fs, io};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netdevice, netlink, recv, send,
    socket_with,
};
use tcpx_lanes::socket::set_option;

use super::{Kernel, Namespaces, NetlinkSocket, RuleTable};
use crate::rule::Rule;

/// Restarting a queue of a busy card takes a while; an answer that takes longer than this never
/// comes.
const KERNEL_ANSWER_LIMIT: Duration = Duration::from_secs(20);
const SOL_NETLINK: i32 = 270;
/// `NETLINK_EXT_ACK`: errors come with words.
const EXTENDED: i32 = 11;
/// `NETLINK_CAP_ACK`: errors do not repeat the request.
const CAPPED: i32 = 10;
/// `NETLINK_ADD_MEMBERSHIP`.
const JOIN: i32 = 1;

const SIOCETHTOOL: libc::Ioctl = 0x8946;
const GET_DRIVER: u32 = 0x03;
const GET_FLAGS: u32 = 0x25;
const SET_FLAGS: u32 = 0x26;
const GET_RINGS: u32 = 0x2d;
const COUNT_RULES: u32 = 0x2e;
const GET_RULE: u32 = 0x2f;
const LIST_RULES: u32 = 0x30;
const DELETE_RULE: u32 = 0x31;
const INSERT_RULE: u32 = 0x32;
const GET_INDIRECTION: u32 = 0x38;
const SET_INDIRECTION: u32 = 0x39;

/// `ETH_FLAG_NTUPLE`.
const FLOW_RULES: u32 = 1 << 27;
const TCP_V4: u32 = 0x01;
const TCP_V6: u32 = 0x05;
/// `RX_CLS_LOC_SPECIAL`, in the count's data: the driver chooses places itself.
const SPECIAL: u64 = 0x8000_0000;
/// `RX_CLS_LOC_ANY`.
const ANYWHERE: u32 = u32::MAX;
/// Most entries of a table or rules of a card that we read: far above what cards have.
const MOST: u32 = 1 << 16;

#[repr(C)]
#[derive(Clone, Copy)]
struct Value {
    command: u32,
    data: u32,
}

/// `struct ethtool_drvinfo`.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [u8; 32],
    rest: [u8; 160],
}

/// `struct ethtool_rx_flow_spec`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FlowSpec {
    flow_type: u32,
    value: [u8; 52],
    value_extension: [u8; 20],
    mask: [u8; 52],
    mask_extension: [u8; 20],
    queue: u64,
    location: u32,
}

/// `struct ethtool_rxnfc`, without the places that may follow.
#[repr(C)]
#[derive(Clone, Copy)]
struct Classification {
    command: u32,
    flow_type: u32,
    data: u64,
    spec: FlowSpec,
    count: u32,
}

const _: () = {
    assert!(size_of::<DriverInfo>() == 196);
    assert!(size_of::<FlowSpec>() == 168);
    assert!(offset_of!(FlowSpec, queue) == 152 && offset_of!(FlowSpec, location) == 160);
    assert!(size_of::<Classification>() == 192);
    assert!(offset_of!(Classification, spec) == 16 && offset_of!(Classification, count) == 184);
};

/// Where the places start in the words of a list of rules.
const PLACES_AT: usize = 188 / 4;

impl Classification {
    fn new(command: u32) -> Self {
        Self {
            command,
            flow_type: 0,
            data: 0,
            spec: FlowSpec {
                flow_type: 0,
                value: [0; 52],
                value_extension: [0; 20],
                mask: [0; 52],
                mask_extension: [0; 20],
                queue: 0,
                location: 0,
            },
            count: 0,
        }
    }
}

/// The kernel of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct Linux;

impl Kernel for Linux {
    fn netlink(&self) -> io::Result<Box<dyn NetlinkSocket>> {
        Ok(Box::new(Socket::open()?))
    }

    fn interface_index(&self, interface: &str) -> io::Result<u32> {
        Ok(netdevice::name_to_index(datagrams()?, interface)?)
    }

    fn interface_name(&self, ifindex: u32) -> io::Result<Option<String>> {
        match netdevice::index_to_name(datagrams()?, ifindex) {
            Ok(name) => Ok(Some(name)),
            Err(Errno::NXIO | Errno::NODEV) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn driver(&self, interface: &str) -> io::Result<String> {
        let mut info = DriverInfo {
            command: GET_DRIVER,
            driver: [0; 32],
            rest: [0; 160],
        };
        // SAFETY: the structure is the one of this command.
        unsafe { ioctl(interface, (&raw mut info).cast()) }?;
        let name = info.driver.split(|byte| *byte == 0).next();
        Ok(name.unwrap_or_default().escape_ascii().to_string())
    }

    fn receive_queues(&self, interface: &str) -> io::Result<u32> {
        let mut count = Classification::new(GET_RINGS);
        classify(interface, &mut count)?;
        Ok(u32::try_from(count.data).unwrap_or(u32::MAX))
    }

    fn flow_rules_on(&self, interface: &str) -> io::Result<bool> {
        Ok(flags(interface)? & FLOW_RULES != 0)
    }

    fn turn_flow_rules(&self, interface: &str, on: bool) -> io::Result<()> {
        let now = flags(interface)?;
        let mut value = Value {
            command: SET_FLAGS,
            data: if on {
                now | FLOW_RULES
            } else {
                now & !FLOW_RULES
            },
        };
        // SAFETY: the structure is the one of this command.
        unsafe { ioctl(interface, (&raw mut value).cast()) }
    }

    fn indirection(&self, interface: &str) -> io::Result<Vec<u32>> {
        let mut size = Value {
            command: GET_INDIRECTION,
            data: 0,
        };
        // SAFETY: with a size of 0 the kernel writes the size alone.
        unsafe { ioctl(interface, (&raw mut size).cast()) }?;
        if size.data == 0 || size.data > MOST {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let mut words = vec![0; 2 + size.data as usize];
        words[..2].copy_from_slice(&[GET_INDIRECTION, size.data]);
        // SAFETY: the kernel writes as many entries as the second word says, which there are.
        unsafe { ioctl(interface, words.as_mut_ptr().cast()) }?;
        words.drain(..2);
        Ok(words)
    }

    fn set_indirection(&self, interface: &str, table: &[u32]) -> io::Result<()> {
        let size = u32::try_from(table.len()).map_err(io::Error::other)?;
        let mut words = [&[SET_INDIRECTION, size], table].concat();
        // SAFETY: the kernel reads as many entries as the second word says, which there are.
        unsafe { ioctl(interface, words.as_mut_ptr().cast()) }
    }

    fn rules(&self, interface: &str) -> io::Result<RuleTable> {
        let mut count = Classification::new(COUNT_RULES);
        classify(interface, &mut count)?;
        if count.count > MOST {
            return Err(io::Error::other("the card claims more rules than any has"));
        }
        let mut table = RuleTable {
            places: u32::try_from(count.data & !SPECIAL).unwrap_or(0).min(MOST),
            driver_places: count.data & SPECIAL != 0,
            rules: Vec::new(),
        };
        // Room for the structure's padding too, which lies where the first place does.
        let room = PLACES_AT + 1 + count.count as usize;
        // Words of eight bytes, which the structure's alignment asks for.
        let mut list = vec![0_u64; room.div_ceil(2)];
        let mut head = Classification::new(LIST_RULES);
        head.count = count.count;
        let start = list.as_mut_ptr().cast::<Classification>();
        // SAFETY: the list is longer than the structure, and aligned as it is.
        unsafe { start.write(head) };
        // SAFETY: the kernel writes the structure and as many places as it was told there is room
        // for.
        unsafe { ioctl(interface, start.cast()) }?;
        // SAFETY: written above and by the kernel; every bit pattern is a value.
        let listed = unsafe { start.read() }.count.min(count.count) as usize;
        for index in 0..listed {
            // SAFETY: the list has room for `count` places from here on.
            let place = unsafe { list.as_ptr().cast::<u32>().add(PLACES_AT + index).read() };
            if let Some(rule) = rule(interface, place)? {
                table.rules.push((place, rule));
            }
        }
        Ok(table)
    }

    fn insert_rule(&self, interface: &str, rule: &Rule, at: Option<u32>) -> io::Result<u32> {
        let mut insert = Classification::new(INSERT_RULE);
        insert.spec = encode(rule);
        insert.spec.location = at.unwrap_or(ANYWHERE);
        classify(interface, &mut insert)?;
        Ok(insert.spec.location)
    }

    fn delete_rule(&self, interface: &str, at: u32) -> io::Result<()> {
        let mut delete = Classification::new(DELETE_RULE);
        delete.spec.location = at;
        classify(interface, &mut delete)
    }

    fn process_start(&self, pid: u32) -> io::Result<Option<u64>> {
        match fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(text) => match state_and_start(&text) {
                // Ended, and not waited for yet: nothing of it is held any more.
                Some(('Z' | 'X', _)) => Ok(None),
                Some((_, start)) => Ok(Some(start)),
                None => Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "/proc/PID/stat has no start time",
                )),
            },
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    || error.raw_os_error() == Some(libc::ESRCH) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn place(&self) -> io::Result<Namespaces> {
        Ok(Namespaces {
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id")?
                .trim()
                .to_owned(),
            // A thread may have gone to another network namespace than its process.
            network: fs::metadata("/proc/thread-self/ns/net")?.ino(),
            processes: fs::metadata("/proc/self/ns/pid")?.ino(),
            pid: std::process::id(),
        })
    }
}

/// The 3rd and the 22nd field of `/proc/PID/stat`; the second is in parentheses and may have any
/// characters.
fn state_and_start(stat: &str) -> Option<(char, u64)> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

fn flags(interface: &str) -> io::Result<u32> {
    let mut value = Value {
        command: GET_FLAGS,
        data: 0,
    };
    // SAFETY: the structure is the one of this command.
    unsafe { ioctl(interface, (&raw mut value).cast()) }?;
    Ok(value.data)
}

/// The rule at a place; `None` when it has gone meanwhile, and inside, when it is of another kind.
fn rule(interface: &str, place: u32) -> io::Result<Option<Option<Rule>>> {
    let mut one = Classification::new(GET_RULE);
    one.spec.location = place;
    match classify(interface, &mut one) {
        Ok(()) => Ok(Some(decode(&one.spec))),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Places of source address, destination address, source port and destination port, and how long an
/// address is.
const fn fields(flow_type: u32) -> Option<([usize; 4], usize)> {
    match flow_type {
        TCP_V4 => Some(([0, 4, 8, 10], 4)),
        TCP_V6 => Some(([0, 16, 32, 34], 16)),
        _ => None,
    }
}

/// Packets come from `remote` and go to `local`; an address or port that is absent is masked out.
fn encode(rule: &Rule) -> FlowSpec {
    let mut spec = Classification::new(0).spec;
    spec.queue = rule.queue.into();
    spec.flow_type = if rule.local.is_ipv4() { TCP_V4 } else { TCP_V6 };
    let Some(([source, destination, source_port, destination_port], length)) =
        fields(spec.flow_type)
    else {
        return spec;
    };
    let mut put = |at: usize, bytes: &[u8]| {
        spec.value[at..at + bytes.len()].copy_from_slice(bytes);
        spec.mask[at..at + bytes.len()].fill(0xff);
    };
    if !rule.local.ip().is_unspecified() {
        put(destination, &octets(rule.local.ip())[..length]);
    }
    put(destination_port, &rule.local.port().to_be_bytes());
    if let Some(remote) = rule.remote {
        put(source, &octets(remote.ip())[..length]);
        put(source_port, &remote.port().to_be_bytes());
    }
    spec
}

fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&address.octets());
            bytes
        }
        IpAddr::V6(address) => address.octets(),
    }
}

/// The rule, if it is one that [`encode`] could have made.
fn decode(spec: &FlowSpec) -> Option<Rule> {
    let ([source, destination, source_port, destination_port], length) = fields(spec.flow_type)?;
    let address = |at: usize| {
        let bytes = &spec.value[at..at + length];
        match <[u8; 4]>::try_from(bytes) {
            Ok(four) => IpAddr::V4(Ipv4Addr::from(four)),
            Err(_) => IpAddr::V6(Ipv6Addr::from(
                <[u8; 16]>::try_from(bytes).unwrap_or_default(),
            )),
        }
    };
    let port = |at: usize| u16::from_be_bytes([spec.value[at], spec.value[at + 1]]);
    let rule = Rule {
        local: SocketAddr::new(address(destination), port(destination_port)),
        remote: (spec.mask[source_port] != 0)
            .then(|| SocketAddr::new(address(source), port(source_port))),
        queue: u32::try_from(spec.queue).ok()?,
    };
    let same = encode(&rule);
    (same.value == spec.value && same.mask == spec.mask && spec.mask_extension == [0; 20])
        .then_some(rule)
}

fn classify(interface: &str, request: &mut Classification) -> io::Result<()> {
    // SAFETY: the structure is the one of the classification commands; those whose answer is longer
    // do not come here.
    unsafe { ioctl(interface, std::ptr::from_mut(request).cast()) }
}

/// A socket to ask about interfaces.
fn datagrams() -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::INET, SocketType::DGRAM);
    Ok(socket_with(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// # Safety
/// `data` must point at the structure of the command in its first word, with room for all that the
/// kernel writes to it.
unsafe fn ioctl(interface: &str, data: *mut libc::c_char) -> io::Result<()> {
    let socket = datagrams()?;
    // SAFETY: all zero is a value of this structure of integers and pointers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if interface.is_empty() || interface.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request.ifr_ifru.ifru_data = data;
    // SAFETY: the request lives through the call, and the data is as the caller promises.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A generic netlink socket.
#[derive(Debug)]
struct Socket(OwnedFd);

impl Socket {
    fn open() -> io::Result<Self> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::GENERIC),
        )?;
        set_socket_timeout(&socket, Timeout::Recv, Some(KERNEL_ANSWER_LIMIT))?;
        for option in [EXTENDED, CAPPED] {
            set_option(&socket, SOL_NETLINK, option, 1)?;
        }
        Ok(Self(socket))
    }
}

impl NetlinkSocket for Socket {
    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let sent = send(&self.0, message, SendFlags::empty())?;
        if sent == message.len() {
            return Ok(());
        }
        Err(io::Error::other("the kernel took a part of the request"))
    }

    fn join(&mut self, group: u32) -> io::Result<()> {
        set_option(&self.0, SOL_NETLINK, JOIN, group.cast_signed())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            // With this flag the answer is the message's length, also when it did not fit.
            match recv(&self.0, &mut *buffer, RecvFlags::TRUNC) {
                Ok((_, length)) if length <= buffer.len() => return Ok(length),
                Ok(_) => return Err(io::ErrorKind::InvalidData.into()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(local: &str, remote: Option<&str>) -> Rule {
        Rule {
            local: local.parse().unwrap(),
            remote: remote.map(|remote| remote.parse().unwrap()),
            queue: 3,
        }
    }

    #[test]
    fn a_rule_reads_back_as_it_was_written() {
        for rule in [
            rule("10.0.0.2:5201", None),
            rule("0.0.0.0:5201", None),
            rule("10.0.0.2:5201", Some("10.0.0.1:40000")),
            rule("[fd00::2]:5201", Some("[fd00::1]:40000")),
            rule("[::]:1", None),
        ] {
            assert_eq!(decode(&encode(&rule)), Some(rule));
        }
    }

    #[test]
    fn ports_and_addresses_lie_where_the_kernel_looks() {
        let spec = encode(&rule("10.0.0.2:5201", Some("10.0.0.1:40000")));
        assert_eq!(
            spec.value[..12],
            [10, 0, 0, 1, 10, 0, 0, 2, 0x9c, 0x40, 0x14, 0x51]
        );
        assert_eq!(spec.mask[..12], [0xff; 12]);
        assert_eq!((spec.flow_type, spec.queue), (1, 3));
    }

    #[test]
    fn rules_of_others_are_not_taken_for_ours() {
        let mut masked = encode(&rule("10.0.0.2:5201", None));
        masked.mask[7] = 0;
        assert_eq!(decode(&masked), None);
        let mut type_of_service = encode(&rule("10.0.0.2:5201", None));
        type_of_service.mask[12] = 0xff;
        assert_eq!(decode(&type_of_service), None);
        let mut vlan = encode(&rule("10.0.0.2:5201", None));
        vlan.mask_extension[8] = 1;
        assert_eq!(decode(&vlan), None);
        let mut udp = encode(&rule("10.0.0.2:5201", None));
        udp.flow_type = 2;
        assert_eq!(decode(&udp), None);
        let mut drop = encode(&rule("10.0.0.2:5201", None));
        drop.queue = u64::MAX;
        assert_eq!(decode(&drop), None);
    }

    #[test]
    fn an_interface_that_cannot_be_is_no_device() {
        for name in ["", "a-name-that-is-too-long"] {
            assert_eq!(
                Linux.driver(name).unwrap_err().raw_os_error(),
                Some(libc::ENODEV)
            );
        }
    }

    #[test]
    fn a_strange_process_name_keeps_its_start_time() {
        let fields: Vec<_> = (4..=30).map(|number| number.to_string()).collect();
        let text = format!("12 (a ) b) S {}", fields.join(" "));
        assert_eq!(state_and_start(&text), Some(('S', 22)));
        assert_eq!(state_and_start("12 (a) S 1 2"), None);
        assert_eq!(state_and_start(""), None);
    }

    #[test]
    fn this_process_has_a_start_time_and_one_that_is_gone_has_none() {
        let own = Linux.process_start(std::process::id()).unwrap();
        assert!(own.is_some());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        // Not waited for yet, it may be a zombie; afterwards it is nothing at all.
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while Linux.process_start(child.id()).unwrap().is_some() {
            assert!(
                std::time::Instant::now() < deadline,
                "the child does not end"
            );
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert_eq!(Linux.process_start(child.id()).unwrap(), None);
    }

    #[test]
    fn interfaces_have_names_by_their_numbers() {
        let Ok(index) = Linux.interface_index("lo") else {
            eprintln!("skipped: interfaces_have_names_by_their_numbers: no loopback here");
            return;
        };
        assert_eq!(Linux.interface_name(index).unwrap().as_deref(), Some("lo"));
        assert_eq!(Linux.interface_name(u32::MAX - 1).unwrap(), None);
    }

    #[test]
    fn an_interface_that_is_not_there_has_no_number() {
        let error = Linux.interface_index("no-such-if").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    }
}
