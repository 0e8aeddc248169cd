//! The messages, as far as they are known: protobuf, fields by their numbers.

/// A rule for a flow: which packets, and to which GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Ethtool's number: 1 is TCP over IPv4, 5 over IPv6.
    pub flow_type: u64,
    /// Address and port of the peer.
    pub source: (String, u64),
    /// Address and port on this host.
    pub destination: (String, u64),
    /// PCI address of the GPU.
    pub gpu: String,
}

/// A message between client and daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Field 1.
    Raw(Vec<u8>),
    /// Field 2.
    Rule(Flow),
    /// Field 6: whether the application comes or leaves.
    Register(bool),
    /// Anything else.
    Other,
}

/// A frame around a message.
///
/// # Panics
/// When the message has more than 65535 bytes.
pub fn frame(message: &Message) -> Vec<u8> {
    let body = encode(message);
    let length = u16::try_from(body.len()).expect("a short message");
    [&length.to_be_bytes()[..], &body].concat()
}

fn encode(message: &Message) -> Vec<u8> {
    match message {
        Message::Raw(bytes) => field(1, bytes),
        Message::Rule(flow) => {
            let end = |(address, port): &(String, u64)| {
                [field(1, address.as_bytes()), number(2, *port)].concat()
            };
            let tuple = [
                number(1, flow.flow_type),
                field(2, &end(&flow.source)),
                field(3, &end(&flow.destination)),
            ];
            let rule = [field(1, &tuple.concat()), field(3, flow.gpu.as_bytes())];
            field(2, &rule.concat())
        }
        Message::Register(comes) => field(6, &number(1, u64::from(*comes))),
        Message::Other => Vec::new(),
    }
}

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

fn number(field: u64, value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    varint(field << 3, &mut out);
    varint(value, &mut out);
    out
}

fn field(field: u64, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    varint(field << 3 | 2, &mut out);
    varint(bytes.len() as u64, &mut out);
    out.extend(bytes);
    out
}

/// A field's value.
#[derive(Clone, Copy)]
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// Decodes a frame's body; `None` when it is damaged.
pub(super) fn decode(body: &[u8]) -> Option<Message> {
    let fields = fields(body)?;
    let message = match fields.first() {
        Some((1, Value::Bytes(bytes))) => Message::Raw(bytes.to_vec()),
        Some((2, Value::Bytes(rule))) => Message::Rule(flow(rule)?),
        Some((6, Value::Bytes(request))) => Message::Register(matches!(
            self::fields(request)?.first(),
            Some((1, Value::Number(1)))
        )),
        _ => Message::Other,
    };
    Some(message)
}

fn flow(rule: &[u8]) -> Option<Flow> {
    let mut flow = Flow::default();
    for (field, value) in fields(rule)? {
        match (field, value) {
            (1, Value::Bytes(tuple)) => {
                for (field, value) in fields(tuple)? {
                    match (field, value) {
                        (1, Value::Number(kind)) => flow.flow_type = kind,
                        (2, Value::Bytes(bytes)) => flow.source = end(bytes)?,
                        (3, Value::Bytes(bytes)) => flow.destination = end(bytes)?,
                        _ => {}
                    }
                }
            }
            (3, Value::Bytes(gpu)) => flow.gpu = text(gpu)?,
            _ => {}
        }
    }
    Some(flow)
}

fn end(bytes: &[u8]) -> Option<(String, u64)> {
    let (mut address, mut port) = (String::new(), 0);
    for (field, value) in fields(bytes)? {
        match (field, value) {
            (1, Value::Bytes(bytes)) => address = text(bytes)?,
            (2, Value::Number(number)) => port = number,
            _ => {}
        }
    }
    Some((address, port))
}

fn text(bytes: &[u8]) -> Option<String> {
    String::from_utf8(bytes.to_vec()).ok()
}

fn fields(mut rest: &[u8]) -> Option<Vec<(u64, Value<'_>)>> {
    let mut found = Vec::new();
    while !rest.is_empty() {
        let key = take_varint(&mut rest)?;
        let value = match key & 7 {
            0 => Value::Number(take_varint(&mut rest)?),
            2 => {
                let length = usize::try_from(take_varint(&mut rest)?).ok()?;
                let (bytes, after) = rest.split_at_checked(length)?;
                rest = after;
                Value::Bytes(bytes)
            }
            _ => return None,
        };
        found.push((key >> 3, value));
    }
    Some(found)
}

fn take_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..63).step_by(7) {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_good_answer_has_the_seven_bytes_that_were_observed() {
        let answer = frame(&Message::Raw(b"Ok.".to_vec()));
        assert_eq!(answer, [0x00, 0x05, 0x0a, 0x03, b'O', b'k', b'.']);
    }

    #[test]
    fn messages_survive_the_way_and_damage_is_noticed() {
        let flow = Flow {
            flow_type: 1,
            source: ("10.0.0.2".into(), 50_000),
            destination: ("10.0.0.3".into(), 1),
            gpu: "0000:04:00.0".into(),
        };
        for message in [
            Message::Raw(vec![7; 300]),
            Message::Rule(flow),
            Message::Register(true),
            Message::Register(false),
        ] {
            let frame = frame(&message);
            assert_eq!(decode(&frame[2..]), Some(message));
            assert_eq!(decode(&frame[2..frame.len() - 1]), None);
        }
    }
}
