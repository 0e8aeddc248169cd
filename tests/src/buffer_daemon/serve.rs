//! One socket of the daemon: its connections, questions and answers.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::message::{Message, decode, frame};
use super::{ALIGN, Asked, Behaviour, LONGEST, Shared};

/// Accepts until the daemon ends; each connection has a thread of its own.
pub(super) fn accept(listener: &UnixListener, name: &str, shared: &Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept() {
        if shared.stopping.load(Ordering::SeqCst) {
            return;
        }
        let (name, shared) = (name.to_owned(), Arc::clone(shared));
        // A client that goes away, or breaks the protocol, ends its own connection only.
        let serving = std::thread::Builder::new().spawn(move || serve(stream, &name, &shared));
        if serving.is_err() {
            return;
        }
    }
}

/// Answers questions until the client leaves.
fn serve(mut stream: UnixStream, name: &str, shared: &Shared) -> io::Result<()> {
    stream.set_read_timeout(Some(LONGEST))?;
    loop {
        let mut head = [0; 2];
        stream.read_exact(&mut head)?;
        let mut body = vec![0; usize::from(u16::from_be_bytes(head))];
        stream.read_exact(&mut body)?;
        let message = decode(&body).ok_or(io::ErrorKind::InvalidData)?;
        let mut asked = shared.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.push(Asked {
            socket: name.to_owned(),
            message: message.clone(),
        });
        drop(asked);
        match shared.behaviour {
            Behaviour::Good | Behaviour::Full => answer(&mut stream, name, &message, shared)?,
            // Until the client gives up.
            Behaviour::Silent => {}
            Behaviour::Closes => return Ok(()),
            Behaviour::Garbage => stream.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n")?,
            // A length, and less than that.
            Behaviour::Half => stream.write_all(&[0, 28, 0x0a])?,
        }
    }
}

fn answer(
    stream: &mut UnixStream,
    name: &str,
    message: &Message,
    shared: &Shared,
) -> io::Result<()> {
    if let Some(pci) = name.strip_prefix("get_gpu_fd_") {
        expect_pci(message, pci)?;
        return pass_memory(stream, shared);
    }
    let raw = if let Some(pci) = name.strip_prefix("get_gpu_metadata_") {
        expect_pci(message, pci)?;
        // An int and its padding, then two sizes.
        [3, shared.bytes, ALIGN].map(u64::to_ne_bytes).concat()
    } else {
        let fits = match name {
            "rxdm_application_registry" => matches!(message, Message::Register(_)),
            _ => matches!(message, Message::Rule(_)),
        };
        if !fits {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if shared.behaviour == Behaviour::Full && name == "rx_rule_manager" {
            b"No more rx rules available.".to_vec()
        } else {
            b"Ok.".to_vec()
        }
    };
    stream.write_all(&frame(&Message::Raw(raw)))
}

/// The question names the GPU of its socket.
fn expect_pci(message: &Message, pci: &str) -> io::Result<()> {
    if *message == Message::Raw(pci.as_bytes().to_vec()) {
        return Ok(());
    }
    Err(io::ErrorKind::InvalidData.into())
}

/// One byte, and the descriptor beside it.
fn pass_memory(stream: &UnixStream, shared: &Shared) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [shared.memory.as_fd()];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let bytes = [IoSlice::new(&[0])];
    rustix::net::sendmsg(stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}
