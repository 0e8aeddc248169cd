//! ethtool's ioctls: layouts of linux/ethtool.h, and the calls.

use std::io;
use std::mem::{offset_of, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::RuleTable;
use crate::rule::Rule;

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

pub(super) fn driver(interface: &str) -> io::Result<String> {
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

pub(super) fn receive_queues(interface: &str) -> io::Result<u32> {
    let mut count = Classification::new(GET_RINGS);
    classify(interface, &mut count)?;
    Ok(u32::try_from(count.data).unwrap_or(u32::MAX))
}

pub(super) fn flow_rules_on(interface: &str) -> io::Result<bool> {
    Ok(flags(interface)? & FLOW_RULES != 0)
}

pub(super) fn turn_flow_rules(interface: &str, on: bool) -> io::Result<()> {
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

fn flags(interface: &str) -> io::Result<u32> {
    let mut value = Value {
        command: GET_FLAGS,
        data: 0,
    };
    // SAFETY: the structure is the one of this command.
    unsafe { ioctl(interface, (&raw mut value).cast()) }?;
    Ok(value.data)
}

pub(super) fn indirection(interface: &str) -> io::Result<Vec<u32>> {
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

pub(super) fn set_indirection(interface: &str, table: &[u32]) -> io::Result<()> {
    let size = u32::try_from(table.len()).map_err(io::Error::other)?;
    let mut words = [&[SET_INDIRECTION, size], table].concat();
    // SAFETY: the kernel reads as many entries as the second word says, which there are.
    unsafe { ioctl(interface, words.as_mut_ptr().cast()) }
}

pub(super) fn rules(interface: &str) -> io::Result<RuleTable> {
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
    // SAFETY: the kernel writes the structure and as many places as it was told there is room for.
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

pub(super) fn insert_rule(interface: &str, rule: &Rule, at: Option<u32>) -> io::Result<u32> {
    let mut insert = Classification::new(INSERT_RULE);
    insert.spec = encode(rule);
    insert.spec.location = at.unwrap_or(ANYWHERE);
    classify(interface, &mut insert)?;
    Ok(insert.spec.location)
}

pub(super) fn delete_rule(interface: &str, at: u32) -> io::Result<()> {
    let mut delete = Classification::new(DELETE_RULE);
    delete.spec.location = at;
    classify(interface, &mut delete)
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

/// # Safety
/// `data` must point at the structure of the command in its first word, with room for all that the
/// kernel writes to it.
unsafe fn ioctl(interface: &str, data: *mut libc::c_char) -> io::Result<()> {
    let socket: OwnedFd = socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
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
            assert_eq!(driver(name).unwrap_err().raw_os_error(), Some(libc::ENODEV));
        }
    }
}
