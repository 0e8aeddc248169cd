//! What the fake kernel answers to netlink requests.

use std::collections::BTreeMap;

use crate::netlink::{Answer, Request, attributes, messages};

use super::World;

const CONTROL: u16 = 16;
const NETDEV: u16 = 34;
const ETHTOOL: u16 = 21;
/// The group that hears of changed settings.
pub(super) const MONITOR: u32 = 9;

/// A number, and words.
type Refusal = (i32, &'static str);

/// The messages that answer one request.
pub(super) fn to(world: &mut World, socket: u32, request: &[u8]) -> Vec<Vec<u8>> {
    let message = messages(request).next().unwrap().unwrap();
    let Answer::Object {
        family,
        attributes: inside,
        ..
    } = message.answer
    else {
        panic!("a request is no error");
    };
    let mut fields = BTreeMap::new();
    for one in attributes(inside) {
        let one = one.unwrap();
        fields.insert(one.kind, one.bytes);
    }
    let outcome = match (family, request[16]) {
        (CONTROL, 3) => look_up(world, fields[&2]),
        (NETDEV, 10) => queue(world, number(fields[&2]), number(fields[&1])),
        (NETDEV, 13) => bind(world, socket, &fields),
        (NETDEV, 15) => bind_send(world, socket, number(fields[&1])),
        (ETHTOOL, 15) => rings(world, header(fields[&1])),
        (ETHTOOL, 16) => set_rings(world, header(fields[&1]), &fields).map(|changed| {
            // Told to all who listen, this socket too; the number may be one that answers have.
            let notice = changed && world.listening.contains(&socket);
            notice.then(|| Request::new(ETHTOOL, 17).bytes(1, fields[&1]))
        }),
        other => panic!("no such command: {other:?}"),
    };
    let end = |(errno, words): Refusal| error(message.sequence, errno, words);
    match outcome {
        Ok(Some(answer)) => vec![answer.encode(message.sequence), end((0, ""))],
        Ok(None) => vec![end((0, ""))],
        Err(refusal) => vec![end(refusal)],
    }
}

fn look_up(world: &World, name: &[u8]) -> Result<Option<Request>, Refusal> {
    let id: u16 = match name {
        b"netdev\0" => NETDEV,
        b"ethtool\0" => ETHTOOL,
        _ => return Err((libc::ENOENT, "")),
    };
    // The number has two bytes, which no request of ours has.
    let low = id.to_ne_bytes();
    let mut answer = Request::new(CONTROL, 1).bytes(1, &low);
    if id == NETDEV {
        answer = answer.nested(6, |mut list| {
            for (index, operation) in world.operations.iter().enumerate() {
                list = list.nested(index as u16 + 1, |one| one.u32(1, *operation));
            }
            list
        });
    } else {
        answer = answer.nested(7, |list| {
            list.nested(1, |one| one.text(1, "monitor").u32(2, MONITOR))
        });
    }
    Ok(Some(answer))
}

fn queue(world: &mut World, ifindex: u32, queue: u32) -> Result<Option<Request>, Refusal> {
    let card = world.card_at(ifindex).ok_or((libc::ENODEV, ""))?;
    if queue >= card.queues {
        return Err((libc::EINVAL, ""));
    }
    let answer = Request::new(NETDEV, 10).u32(1, queue).u32(2, ifindex);
    Ok(Some(match card.bound.get(&queue) {
        Some((_, id)) => answer.u32(5, *id),
        None => answer,
    }))
}

fn bind(
    world: &mut World,
    socket: u32,
    fields: &BTreeMap<u16, &[u8]>,
) -> Result<Option<Request>, Refusal> {
    let mut queue = None;
    for one in attributes(fields[&2]) {
        let one = one.unwrap();
        if one.kind == 1 {
            queue = one.u32().ok();
        }
    }
    let queue = queue.unwrap();
    let id = world.number();
    world.changes.push("bind");
    let card = world
        .card_at(number(fields[&1]))
        .ok_or((libc::ENODEV, ""))?;
    if let Some(refusal) = card.refuses {
        return Err(refusal);
    }
    if queue >= card.queues {
        return Err((libc::ERANGE, "rx queue index out of range"));
    }
    if card.split != Some(2) {
        return Err((libc::EINVAL, "tcp-data-split is disabled"));
    }
    if card.threshold.is_some_and(|threshold| threshold != 0) {
        return Err((libc::EINVAL, "hds-thresh is not zero"));
    }
    if card.bound.contains_key(&queue) {
        return Err((
            libc::EEXIST,
            "designated queue already memory provider bound",
        ));
    }
    card.bound.insert(queue, (socket, id));
    Ok(Some(Request::new(NETDEV, 13).u32(4, id)))
}

fn bind_send(world: &mut World, socket: u32, ifindex: u32) -> Result<Option<Request>, Refusal> {
    let id = world.number();
    let card = world.card_at(ifindex).ok_or((libc::ENODEV, ""))?;
    if let Some(refusal) = card.refuses_send {
        return Err(refusal);
    }
    world.sends.insert((socket, id));
    Ok(Some(Request::new(NETDEV, 15).u32(4, id)))
}

fn rings(world: &mut World, ifindex: u32) -> Result<Option<Request>, Refusal> {
    let card = world.card_at(ifindex).ok_or((libc::ENODEV, ""))?;
    let mut answer =
        Request::new(ETHTOOL, 16).nested(1, |header| header.u32(1, ifindex).text(2, "dm1"));
    if let Some(split) = card.split {
        answer = answer.u8(11, split);
    }
    if let Some(threshold) = card.threshold {
        answer = answer.u32(17, threshold).u32(18, 1024);
    }
    Ok(Some(answer))
}

fn set_rings(
    world: &mut World,
    ifindex: u32,
    fields: &BTreeMap<u16, &[u8]>,
) -> Result<bool, Refusal> {
    world.changes.push("rings");
    if let Some(errno) = world.failing.get("rings") {
        return Err((*errno, ""));
    }
    let card = world.card_at(ifindex).ok_or((libc::ENODEV, ""))?;
    let before = (card.split_setting, card.threshold);
    if let Some(split) = fields
        .get(&11)
        .filter(|split| split[0] != card.split_setting)
    {
        if card.refuses_split == Some(split[0]) {
            return Err((libc::EINVAL, "the driver does not"));
        }
        if split[0] != 2 && !card.bound.is_empty() {
            let words = "can't disable tcp-data-split while device has memory provider enabled";
            return Err((libc::EINVAL, words));
        }
        card.split_setting = split[0];
        card.split = Some(split[0].max(1));
    }
    if let Some(threshold) = fields.get(&17) {
        card.threshold = Some(number(threshold));
    }
    Ok(before != (card.split_setting, card.threshold))
}

fn header(bytes: &[u8]) -> u32 {
    attributes(bytes).next().unwrap().unwrap().u32().unwrap()
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_ne_bytes(bytes.try_into().unwrap())
}

/// The end of a request, as the kernel writes it with extended acknowledgements.
fn error(sequence: u32, errno: i32, words: &str) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    bytes.extend(2u16.to_ne_bytes());
    bytes.extend(0x300u16.to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend((-errno).to_ne_bytes());
    bytes.extend([0; 16]);
    if !words.is_empty() {
        bytes.extend(&Request::new(0, 0).text(1, words).encode(0)[20..]);
    }
    let length = bytes.len() as u32;
    bytes[..4].copy_from_slice(&length.to_ne_bytes());
    bytes
}
