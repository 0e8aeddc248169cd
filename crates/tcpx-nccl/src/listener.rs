//! A listening comm: accepts connections, lets only holders of the handle in.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use nccl_net::export::{NetError, NetListen, PeerHandle};
use tcpx_lanes::{Congestion, SocketError, lock, protocols, socket};
use tcpx_wire::Key;

use crate::admission::Admission;
use crate::error;
use crate::handle::Handle;
use crate::held::Listener;
use crate::interfaces::Interface;
use crate::plugin::{ProcessState, random};
use crate::receive::RecvComm;

/// A listening comm.
#[derive(Debug)]
pub struct ListenComm {
    shared: Arc<ProcessState>,
    name: String,
    admission: Mutex<Admission>,
}

impl ListenComm {
    pub(crate) fn bind(
        shared: &Arc<ProcessState>,
        interface: &Interface,
    ) -> Result<(PeerHandle, Self), NetError> {
        let socket = bind(shared, interface.address)?;
        let address = socket
            .local_addr()
            .map_err(|error| error::system("reading the listening address", &error, "retry"))?;
        let secret = random::<{ Key::BYTES }>()?;
        let listen_id = shared.number();
        let runtime = shared.runtime()?;
        let door = runtime.door(shared, interface.address)?;
        let (key, check) = shared.config.handshake_key(&secret);
        let handle = Handle {
            address,
            secret,
            listen_id,
            door,
            check,
            build: *protocols::own_build(),
        };
        let key = (&key, shared.config.protection());
        let comm = Self {
            shared: shared.clone(),
            name: format!("listen comm {listen_id} on {address}"),
            // The process's door stays open from the first listen on.
            admission: Mutex::new(Admission::new(socket, key, Some(runtime))),
        };
        Ok((handle.encode(), comm))
    }
}

impl NetListen for ListenComm {
    type Recv = RecvComm;

    fn accept(&self) -> Result<Option<RecvComm>, NetError> {
        let mut admission = lock(&self.admission);
        let Some(admitted) = admission.next(&self.shared.log, &self.name)? else {
            return Ok(None);
        };
        let number = self.shared.number();
        let name = format!("receive comm {number} from {}", admitted.peer);
        RecvComm::new(self.shared.clone(), admitted, number, name).map(Some)
    }
}

pub(crate) fn bind(shared: &ProcessState, address: IpAddr) -> Result<Listener, NetError> {
    let Some(ports) = shared.config.ports.clone() else {
        return listen_on(SocketAddr::new(address, 0)).map_err(|error| {
            let operation = format!("listening on {}", address);
            error::system(operation, &error, "check that the interface is up")
        });
    };
    // Listeners of one process start looking at different places.
    let span = u64::from(ports.end() - ports.start()) + 1;
    let first = shared.number() % span;
    let mut last = None;
    for step in 0..span {
        // Below the end of the range.
        let port = ports.start() + ((first + step) % span) as u16;
        match listen_on(SocketAddr::new(address, port)) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = Some(error),
        }
    }
    Err(error::system(
        format!(
            "listening on {} ports {}-{} (TCPX_PORT_RANGE)",
            address,
            ports.start(),
            ports.end()
        ),
        last.map_or_else(String::new, |error| error.to_string()),
        "widen the range or free its ports",
    ))
}

pub(crate) fn listen_on(address: SocketAddr) -> Result<Listener, SocketError> {
    socket::listen(address, &Congestion::Automatic).map(Listener::new)
}
