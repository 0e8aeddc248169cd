//! What a send comm hears from its receiver.

use std::sync::atomic::Ordering;

use nccl_net::ResultCode;
use nccl_net::export::NetError;
use tcpx_lanes::socket_calls::Moved;

use super::State;
use crate::error;
use crate::header::{FROM_RECEIVER, HEADER_BYTES, Header, Record};
use crate::link::is_forged;

impl State {
    /// Reads the other direction, where a receiver grants, or says that it cannot take a message.
    pub(super) fn read_back(&mut self) -> Result<(), NetError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let failure = loop {
            if self.resume.is_lost() {
                return Ok(());
            }
            let moved = self
                .answers
                .receive_bytes(&mut self.record[self.record_bytes..]);
            match moved {
                Ok(Moved::WouldBlock) => return Ok(()),
                Ok(Moved::Bytes(bytes)) => {
                    self.record_bytes += bytes;
                    if self.record_bytes < HEADER_BYTES {
                        return Ok(());
                    }
                    self.record_bytes = 0;
                    match self.answered() {
                        None => {}
                        Some(failure) => break failure,
                    }
                }
                Err(error) => {
                    self.lose(error.to_string());
                    self.forged
                        .fetch_add(u64::from(is_forged(&error)), Ordering::Relaxed);
                    return Ok(());
                }
                // A receiver that has everything may close before its lanes' answers are heard.
                Ok(Moved::End) if self.is_with_lanes() => return Ok(()),
                Ok(Moved::End) => break self.closed("end of stream".to_owned()),
            }
        };
        self.failure = Some(failure.clone());
        Err(failure)
    }

    /// Whether the receiver has closed, for a comm that closes too.
    pub(super) fn peer_has_closed(&mut self) -> bool {
        self.read_back().is_err()
    }

    /// A whole record came back; gives the failure that it means, if one.
    pub(super) fn answered(&mut self) -> Option<NetError> {
        let decoded = Header::decode(&FROM_RECEIVER, &self.record);
        let is_positioning = self.resume.is_positioning();
        match decoded {
            Ok((Record::Read, read)) => self.heard(read.sequence, read.size != 0).err(),
            Ok((record, _)) if is_positioning => {
                let expected = "how far the receiver has read";
                Some(error::protocol(
                    &self.name,
                    expected,
                    format_args!("{record:?}"),
                ))
            }
            Ok((Record::Grant, grant)) => {
                self.granted = self.granted.max(grant.sequence);
                self.granting = grant.size != 0;
                if self.granting {
                    self.stream_number = grant.size;
                }
                None
            }
            Ok((_, refusal)) => {
                let (sequence, capacity) = (refusal.sequence, refusal.size);
                // While the sender still knows.
                let message = self.ring.by_sequence(sequence);
                let size =
                    message.map_or_else(String::new, |one| format!(" of {} bytes", one.size));
                let why = format!(
                    "{}: the receiver refused message {sequence}{size}, it had posted {capacity} bytes; post \
                     receives at least as large as the sends",
                    self.name
                );
                Some(NetError::new(ResultCode::RemoteError, why))
            }
            Err((expected, arrived)) => Some(error::protocol(&self.name, expected, arrived)),
        }
    }

    pub(super) fn closed(&mut self, why: String) -> NetError {
        let (done, total) = self.ring.by_sequence(self.next).map_or((0, 0), |request| {
            let done = request.written.saturating_sub(HEADER_BYTES);
            (done as u64, request.size as u64)
        });
        error::peer_closed(&self.name, &why, self.next, done, total)
    }
}
