//! Binding: from a free queue to one whose payload lands in our memory, and back.

use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use tcpx_memory::DmaBuf;

use super::bound::ReceiveQueue;
use super::bound::SendPath;
use super::bound::{Flow, Steering};
use super::error::{DevmemError, Refusal, Why};
use super::holders;
use super::kernel::{Kernel, Linux, Namespaces};
use super::netlink::Netdev;
use super::record::{Hold, Record};
use super::refusals::Subject;
use super::rule::Rule;
use super::state::{Folder, Records, STATE_FOLDER};
use super::steering;

/// Whether the card's settings may be changed for a binding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Adjust {
    /// Header split, its threshold, the spread of packets and the switch of flow rules are set as
    /// they must be, and put back at the end.
    #[default]
    Settings,
    /// Nothing is changed; what is not as it must be is an error with the command that mends it.
    Nothing,
}

/// Which queue to bind.
#[derive(Clone, Debug)]
pub struct ReceiveOptions {
    /// The card's interface.
    pub interface: String,
    /// The queue, from 0; `None` takes the last one that is free.
    pub queue: Option<u32>,
    /// Where payload is to land, as a whole.
    pub memory: DmaBuf,
    /// Whether settings may be changed.
    pub adjust: Adjust,
}

/// Sets up device memory on this host's cards.
#[derive(Clone, Debug)]
pub struct Devmem {
    pub(super) kernel: Arc<dyn Kernel>,
    pub(super) folder: Folder,
}

impl Devmem {
    /// On this host's kernel, with records in [`STATE_FOLDER`].
    pub fn system() -> Self {
        Self::new(Arc::new(Linux), STATE_FOLDER.into())
    }

    /// On any kernel, with records in any folder.
    pub fn new(kernel: Arc<dyn Kernel>, folder: PathBuf) -> Self {
        Self {
            kernel,
            folder: Folder::new(folder),
        }
    }

    /// Binds memory to a receive queue. What dead processes left on the interface is cleaned up
    /// before.
    ///
    /// # Errors
    /// The kernel's refusal, typed; then everything is as it was. [`Why::State`] when changes
    /// could not be recorded, and nothing was changed.
    pub fn bind_receive(&self, options: &ReceiveOptions) -> Result<ReceiveQueue, DevmemError> {
        let interface = options.interface.as_str();
        let ifindex = self.ifindex(interface)?;
        let subject = self.subject(interface, ifindex);
        let mut netdev = Netdev::open(&*self.kernel)?;
        if !netdev.can_bind_receive() {
            let what = "command to bind memory to a receive queue";
            return Err(DevmemError::old_kernel(
                what,
                &Refusal::of(libc::EOPNOTSUPP),
            ));
        }
        let place = self.place()?;
        let records = self.folder.lock()?;
        let mut record = records
            .read(place.network, ifindex)
            .unwrap_or_else(|| Record::new(&place, interface, ifindex));
        // What could not be undone stays recorded, and does not keep us from binding.
        for error in holders::clean(&*self.kernel, &place, &mut record) {
            tracing::warn!(%error, interface, "what a dead process left could not all be undone");
        }
        let queue = self.choose(&mut netdev, &record, options)?;
        record.holds.push(self.own_hold(&place, queue)?);
        records.write(&record)?;
        let bound = self.bind_held(&mut netdev, &records, &mut record, options, queue);
        let (dmabuf_id, pool) = match bound {
            Ok(bound) => bound,
            Err(error) => {
                drop(netdev);
                end_hold(&subject, &records, &mut record, queue);
                return Err(error);
            }
        };
        drop(records);
        let bound = BoundQueue {
            devmem: self.clone(),
            netdev: Mutex::new(Some(netdev)),
            _memory: options.memory.clone(),
            place,
            interface: interface.to_owned(),
            ifindex,
            queue,
        };
        Ok(ReceiveQueue::new(
            pool,
            dmabuf_id,
            interface.to_owned(),
            ifindex,
            queue,
            Arc::new(bound),
        ))
    }

    fn bind_held(
        &self,
        netdev: &mut Netdev,
        records: &Records,
        record: &mut Record,
        options: &ReceiveOptions,
        queue: u32,
    ) -> Result<(u32, Arc<tcpx_memory::BouncePool>), DevmemError> {
        let interface = options.interface.as_str();
        let pool = options.memory.bounce_pool().map_err(|cause| {
            DevmemError::new(Why::Memory, format!("memory for {interface}: {cause}"))
        })?;
        let subject = self.subject(interface, record.ifindex);
        let objection = match options.adjust {
            Adjust::Settings => subject.prepare(record, queue, &|record| records.write(record))?,
            Adjust::Nothing => None,
        };
        let fd = options.memory.as_fd().as_raw_fd().cast_unsigned();
        let id = match netdev.bind_receive(record.ifindex, queue, fd) {
            Ok(id) => id,
            Err(error) => {
                let refusal = error.refusal("binding memory to a receive queue")?;
                return Err(subject.bind_receive(queue, refusal));
            }
        };
        if let Some(objection) = objection {
            return Err(objection);
        }
        if let Some(hold) = record.hold(queue) {
            hold.dmabuf_id = Some(id);
        }
        records.write(record)?;
        tracing::info!(
            interface,
            queue,
            dmabuf = id,
            "payload lands in device memory"
        );
        Ok((id, Arc::new(pool)))
    }

    /// The queue asked for, or the last one that nobody has.
    fn choose(
        &self,
        netdev: &mut Netdev,
        record: &Record,
        options: &ReceiveOptions,
    ) -> Result<u32, DevmemError> {
        let interface = options.interface.as_str();
        let subject = self.subject(interface, record.ifindex);
        let holder = |queue| record.holds.iter().find(|hold| hold.queue == queue);
        if let Some(queue) = options.queue {
            return match holder(queue) {
                None => Ok(queue),
                Some(hold) => {
                    let by = format!("process {} ({})", hold.pid, hold.program);
                    Err(subject.queue_taken(queue, &by, Refusal::of(libc::EBUSY)))
                }
            };
        }
        // An interface that does not tell has one queue, and binding will say what is wrong with
        // it.
        let queues = self.kernel.receive_queues(interface).unwrap_or(1).max(1);
        for queue in (0..queues).rev() {
            let used = netdev.queue_use(record.ifindex, queue);
            let is_free = !used.is_ok_and(|used| used != super::QueueUse::Free);
            if is_free && holder(queue).is_none() {
                return Ok(queue);
            }
        }
        let by = "others, as are all the rest";
        Err(subject.queue_taken(queues - 1, by, Refusal::of(libc::EBUSY)))
    }

    fn own_hold(&self, place: &Namespaces, queue: u32) -> Result<Hold, DevmemError> {
        let operation = "reading when this process was started";
        let failed = |cause| DevmemError::system(operation, cause, "mount /proc");
        let started = self
            .kernel
            .process_start(place.pid)
            .and_then(|start| start.ok_or_else(|| std::io::ErrorKind::NotFound.into()))
            .map_err(failed)?;
        let program = std::env::current_exe().ok();
        let program = program
            .as_deref()
            .and_then(std::path::Path::file_name)
            .map(|name| name.to_string_lossy().into_owned());
        Ok(Hold {
            pid: place.pid,
            started,
            processes: place.processes,
            program: program.unwrap_or_else(|| "unknown".to_owned()),
            queue,
            dmabuf_id: None,
            rules: Vec::new(),
        })
    }

    /// Binds memory for sending from it. Needs no privilege.
    ///
    /// # Errors
    /// [`Why::NoSend`] when the card cannot, [`Why::OldKernel`] when the kernel cannot,
    /// or another refusal of the kernel.
    pub fn bind_send(&self, interface: &str, memory: &DmaBuf) -> Result<SendPath, DevmemError> {
        let ifindex = self.ifindex(interface)?;
        let mut netdev = Netdev::open(&*self.kernel)?;
        if !netdev.can_bind_send() {
            let what = "command to bind memory for sending";
            return Err(DevmemError::old_kernel(
                what,
                &Refusal::of(libc::EOPNOTSUPP),
            ));
        }
        let fd = memory.as_fd().as_raw_fd().cast_unsigned();
        let id = match netdev.bind_send(ifindex, fd) {
            Ok(id) => id,
            Err(error) => {
                let refusal = error.refusal("binding memory for sending")?;
                return Err(self.subject(interface, ifindex).bind_send(refusal));
            }
        };
        let binding = Arc::new(Mutex::new(netdev));
        Ok(SendPath::new(
            memory.clone(),
            id,
            interface.to_owned(),
            ifindex,
            binding,
        ))
    }

    pub(super) fn ifindex(&self, interface: &str) -> Result<u32, DevmemError> {
        self.kernel
            .interface_index(interface)
            .map_err(|_| DevmemError::no_interface(interface))
    }

    pub(super) fn place(&self) -> Result<Namespaces, DevmemError> {
        let operation = "reading this process's namespaces";
        let place = self.kernel.place();
        place.map_err(|cause| DevmemError::system(operation, cause, "mount /proc"))
    }

    pub(super) fn subject<'a>(&'a self, interface: &'a str, ifindex: u32) -> Subject<'a> {
        Subject {
            kernel: &*self.kernel,
            interface,
            ifindex,
        }
    }
}

/// A bound queue. Dropping it unbinds, removes what rules are left, and puts the settings back when
/// nobody else holds a queue of the interface.
#[derive(Debug)]
struct BoundQueue {
    devmem: Devmem,
    /// The binding lives as long as this socket.
    netdev: Mutex<Option<Netdev>>,
    _memory: DmaBuf,
    place: Namespaces,
    interface: String,
    ifindex: u32,
    queue: u32,
}

impl BoundQueue {
    /// Calls `change` with the record, under the lock.
    fn with_record<R>(
        &self,
        change: impl FnOnce(&Records, &mut Record) -> Result<R, DevmemError>,
    ) -> Result<R, DevmemError> {
        let records = self.devmem.folder.lock()?;
        let mut record = records
            .read(self.place.network, self.ifindex)
            .unwrap_or_else(|| Record::new(&self.place, &self.interface, self.ifindex));
        change(&records, &mut record)
    }
}

impl Steering for BoundQueue {
    fn insert(&self, flow: Flow) -> Result<u32, DevmemError> {
        let rule = Rule::new(flow, self.queue)?;
        let subject = self.devmem.subject(&self.interface, self.ifindex);
        self.with_record(|records, record| steering::insert(&subject, records, record, rule))
    }

    fn remove(&self, at: u32) {
        let subject = self.devmem.subject(&self.interface, self.ifindex);
        let outcome = self.with_record(|records, record| {
            let Some(hold) = record.hold(self.queue) else {
                return Ok(());
            };
            let Some(index) = hold.rules.iter().position(|held| held.at == Some(at)) else {
                return Ok(());
            };
            steering::remove(&subject, &steering::table(&subject)?, &hold.rules[index])?;
            hold.rules.remove(index);
            records.write(record)
        });
        if let Err(error) = outcome {
            tracing::warn!(%error, rule = at, "a flow rule stays behind");
        }
    }
}

impl Drop for BoundQueue {
    fn drop(&mut self) {
        let netdev = self.netdev.get_mut();
        drop(netdev.unwrap_or_else(PoisonError::into_inner).take());
        let subject = self.devmem.subject(&self.interface, self.ifindex);
        let outcome = self.with_record(|records, record| {
            end_hold(&subject, records, record, self.queue);
            Ok(())
        });
        if let Err(error) = outcome {
            tracing::warn!(%error, interface = %self.interface, "settings of the card stay changed");
        }
    }
}

/// Takes a hold out of the record and undoes what nobody needs any more. Failures are logged; what
/// they concern stays recorded.
fn end_hold(subject: &Subject<'_>, records: &Records, record: &mut Record, queue: u32) {
    let failed = holders::end(subject.kernel, record, |hold| hold.queue == queue);
    for error in failed {
        tracing::warn!(%error, interface = subject.interface, "not all could be undone");
    }
    if let Err(error) = records.write(record) {
        tracing::warn!(%error, interface = subject.interface, "the record is out of date");
    }
}
