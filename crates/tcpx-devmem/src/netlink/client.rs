//! Requests over one netlink socket, and the kernel's words when it refuses.

use std::io;

use super::{Answer, Attribute, CONTROL_FAMILY, NetlinkError, Request, attributes, messages};

use crate::error::{DevmemError, Refusal};
use crate::kernel::{Kernel, NetlinkSocket};

/// Room for one receive; the kernel sends no more than this at a time.
const RECEIVE_BYTES: usize = 64 << 10;
/// Receives until a request must have ended: a dump of thousands of queues takes a few dozen.
const MOST_RECEIVES: usize = 1024;

const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
const FAMILY_OPERATIONS: u16 = 6;
const OPERATION_ID: u16 = 1;
const FAMILY_GROUPS: u16 = 7;
const GROUP_NAME: u16 = 1;
const GROUP_ID: u16 = 2;

/// Why a request did not succeed.
#[derive(Debug)]
pub(crate) enum CallError {
    /// The kernel said no.
    Refused(Refusal),
    /// There is no socket, or no such family.
    Failed(DevmemError),
    /// The socket failed.
    System(io::Error),
    /// The answer makes no sense: what was expected, and what came.
    Answer(&'static str, String),
}

impl From<NetlinkError> for CallError {
    fn from(error: NetlinkError) -> Self {
        Self::Answer("whole netlink messages", error.to_string())
    }
}

impl From<DevmemError> for CallError {
    fn from(error: DevmemError) -> Self {
        Self::Failed(error)
    }
}

impl CallError {
    /// An answer that lacks something.
    pub(crate) fn missing(what: &'static str) -> Self {
        Self::Answer(what, "an answer without it".to_owned())
    }

    /// The kernel's answer, if it gave one.
    pub(crate) fn refusal(self, operation: &'static str) -> Result<Refusal, DevmemError> {
        let hint = "look at the kernel's log (dmesg) and the limit of open files";
        Err(match self {
            Self::Refused(refusal) => return Ok(refusal),
            Self::Failed(error) => error,
            Self::System(cause) => DevmemError::system(operation, cause, hint),
            Self::Answer(expected, arrived) => {
                DevmemError::bad_answer(operation, expected, &arrived)
            }
        })
    }
}

/// A netlink socket. What is bound through it lives as long as it does.
#[derive(Debug)]
pub(crate) struct Client {
    socket: Box<dyn NetlinkSocket>,
    sequence: u32,
    buffer: Vec<u8>,
}

/// A family's number, and the commands that this kernel has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Family {
    pub(crate) id: u16,
    pub(crate) operations: Vec<u32>,
    /// Who wants to hear what changes joins one of these: name and number.
    pub(crate) groups: Vec<(String, u32)>,
}

impl Client {
    pub(crate) fn open(kernel: &dyn Kernel) -> Result<Self, DevmemError> {
        let hint = "raise the limit of open files (ulimit -n), or allow AF_NETLINK in the sandbox";
        let failed = |cause| DevmemError::system("opening a netlink socket", cause, hint);
        let socket = kernel.netlink().map_err(failed)?;
        Ok(Self {
            socket,
            sequence: 0,
            buffer: vec![0; RECEIVE_BYTES],
        })
    }

    /// Looks a family up.
    pub(crate) fn family(&mut self, name: &'static str) -> Result<Family, DevmemError> {
        let request = Request::new(CONTROL_FAMILY, GET_FAMILY).text(FAMILY_NAME, name);
        let mut id = None;
        let mut operations = Vec::new();
        let mut groups = Vec::new();
        let outcome = self.send_request(&request, CONTROL_FAMILY, |attribute| {
            match attribute.kind {
                FAMILY_ID => id = Some(attribute.u16()?),
                FAMILY_OPERATIONS => {
                    for one in attributes(attribute.bytes) {
                        for inside in attributes(one?.bytes) {
                            let inside = inside?;
                            if inside.kind == OPERATION_ID {
                                operations.push(inside.u32()?);
                            }
                        }
                    }
                }
                FAMILY_GROUPS => {
                    for one in attributes(attribute.bytes) {
                        groups.extend(group(one?.bytes)?);
                    }
                }
                _ => {}
            }
            Ok(())
        });
        let operation = "looking up a netlink family";
        if let Err(error) = outcome {
            let refusal = error.refusal(operation)?;
            let what = format!("netlink family {name}");
            return Err(DevmemError::old_kernel(&what, &refusal));
        }
        let id = id.ok_or_else(|| {
            DevmemError::bad_answer(operation, "the family's number", "an answer without it")
        })?;
        Ok(Family {
            id,
            operations,
            groups,
        })
    }

    /// Hears from now on what is told to this group.
    pub(crate) fn join(&mut self, group: u32) -> Result<(), CallError> {
        self.socket.join(group).map_err(CallError::System)
    }

    /// Sends a request and hands each attribute of each object in the answer to `each`, until the
    /// kernel says that it has ended.
    pub(crate) fn send_request(
        &mut self,
        request: &Request,
        family: u16,
        each: impl FnMut(Attribute<'_>) -> Result<(), NetlinkError>,
    ) -> Result<(), CallError> {
        self.call_and_hear(request, family, each, |_, _| Ok(()))
    }

    /// As [`Self::send_request`]; every object of the family goes to `hear` as well, with its
    /// command, whether it answers the request or tells a group what changed.
    pub(crate) fn call_and_hear(
        &mut self,
        request: &Request,
        family: u16,
        mut each: impl FnMut(Attribute<'_>) -> Result<(), NetlinkError>,
        mut hear: impl FnMut(u8, &[u8]) -> Result<(), NetlinkError>,
    ) -> Result<(), CallError> {
        self.sequence = self.sequence.wrapping_add(1);
        let sequence = self.sequence;
        self.socket
            .send(&request.encode(sequence))
            .map_err(CallError::System)?;
        for _ in 0..MOST_RECEIVES {
            let length = self
                .socket
                .receive(&mut self.buffer)
                .map_err(CallError::System)?;
            for message in messages(&self.buffer[..length]) {
                let message = message?;
                if let Answer::Object {
                    family: from,
                    command,
                    attributes: inside,
                } = message.answer
                    && from == family
                {
                    hear(command, inside)?;
                }
                // Answers to a request that was given up.
                if message.sequence != sequence {
                    continue;
                }
                match message.answer {
                    Answer::End { errno: 0, .. } => return Ok(()),
                    Answer::End { errno, words } => {
                        return Err(CallError::Refused(Refusal {
                            errno,
                            words: words.map(str::to_owned),
                        }));
                    }
                    Answer::Object {
                        family: from,
                        attributes: inside,
                        ..
                    } if from == family => {
                        for attribute in attributes(inside) {
                            each(attribute?)?;
                        }
                    }
                    Answer::Object { .. } => {}
                }
            }
        }
        Err(CallError::Answer("an end of the answer", "none".to_owned()))
    }
}

/// A group's name and number, where it has both.
fn group(bytes: &[u8]) -> Result<Option<(String, u32)>, NetlinkError> {
    let (mut name, mut id) = (None, None);
    for one in attributes(bytes) {
        let one = one?;
        match one.kind {
            GROUP_NAME => name = one.text().map(str::to_owned),
            GROUP_ID => id = Some(one.u32()?),
            _ => {}
        }
    }
    Ok(name.zip(id))
}
