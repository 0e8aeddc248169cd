//! A kernel with cards in memory. Its netlink answers are the real one's bytes.

mod answers;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use super::{Kernel, Namespaces, NetlinkSocket, RuleTable};
use crate::rule::Rule;

/// A card, its settings, and what it cannot do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Card {
    pub(crate) ifindex: u32,
    pub(crate) driver: Option<&'static str>,
    pub(crate) queues: u32,
    /// What the bind is refused with: a number and words.
    pub(crate) refuses: Option<(i32, &'static str)>,
    pub(crate) refuses_send: Option<(i32, &'static str)>,
    /// What it does: 1 off, 2 on.
    pub(crate) split: Option<u8>,
    /// What was set: 0 leaves it to the driver, whose choice is off.
    pub(crate) split_setting: u8,
    /// The driver refuses to have it set so.
    pub(crate) refuses_split: Option<u8>,
    pub(crate) threshold: Option<u32>,
    pub(crate) flow_rules: Option<bool>,
    pub(crate) table: Option<Vec<u32>>,
    pub(crate) places: u32,
    pub(crate) driver_places: bool,
    pub(crate) rules: BTreeMap<u32, Rule>,
    /// Queue: socket and memory.
    pub(crate) bound: BTreeMap<u32, (u32, u32)>,
}

impl Card {
    /// One that can do everything, as it comes up.
    pub(crate) fn new(ifindex: u32) -> Self {
        Self {
            ifindex,
            driver: Some("dmsim"),
            queues: 4,
            refuses: None,
            refuses_send: None,
            split: Some(1),
            split_setting: 0,
            refuses_split: None,
            threshold: Some(256),
            flow_rules: Some(false),
            table: Some((0..8).map(|entry| entry % 4).collect()),
            places: 16,
            driver_places: false,
            rules: BTreeMap::new(),
            bound: BTreeMap::new(),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct World {
    pub(crate) cards: BTreeMap<String, Card>,
    pub(crate) processes: BTreeMap<u32, u64>,
    /// Each open socket, and its process.
    pub(crate) sockets: BTreeMap<u32, u32>,
    pub(crate) sends: BTreeSet<(u32, u32)>,
    /// Those that hear of changes.
    pub(crate) listening: BTreeSet<u32>,
    /// The kernel's commands of the family netdev.
    pub(crate) operations: Vec<u32>,
    /// Calls that fail from now on, by name.
    pub(crate) failing: BTreeMap<&'static str, i32>,
    /// How often each call that changes something was made.
    pub(crate) changes: Vec<&'static str>,
    next: u32,
}

impl World {
    pub(crate) fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn card(&mut self, interface: &str) -> io::Result<&mut Card> {
        self.cards
            .get_mut(interface)
            .ok_or_else(|| errno(libc::ENODEV))
    }

    pub(crate) fn card_at(&mut self, ifindex: u32) -> Option<&mut Card> {
        self.cards.values_mut().find(|card| card.ifindex == ifindex)
    }

    fn change(&mut self, name: &'static str) -> io::Result<()> {
        self.changes.push(name);
        self.failing
            .get(name)
            .map_or(Ok(()), |code| Err(errno(*code)))
    }

    fn close(&mut self, socket: u32) {
        self.sockets.remove(&socket);
        self.listening.remove(&socket);
        self.sends.retain(|(of, _)| *of != socket);
        for card in self.cards.values_mut() {
            card.bound.retain(|_, (of, _)| *of != socket);
        }
    }
}

/// The kernel, as one of its processes sees it.
#[derive(Clone, Debug)]
pub(crate) struct Fake {
    world: Arc<Mutex<World>>,
    pid: u32,
}

impl Fake {
    /// One card, `dm1`, and this process, 100.
    pub(crate) fn new() -> Self {
        let world = World {
            cards: [("dm1".to_owned(), Card::new(5))].into(),
            processes: [(100, 7)].into(),
            operations: vec![10, 13, 15],
            ..World::default()
        };
        Self {
            world: Arc::new(Mutex::new(world)),
            pid: 100,
        }
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    /// The card `dm1`, changed and as it is then.
    pub(crate) fn card(&self, change: impl FnOnce(&mut Card)) -> Card {
        let mut world = self.world();
        let card = world.cards.get_mut("dm1").unwrap();
        change(card);
        card.clone()
    }

    /// Another process of the same host.
    pub(crate) fn process(&self, pid: u32) -> Self {
        self.world().processes.insert(pid, u64::from(pid) * 10);
        Self {
            world: Arc::clone(&self.world),
            pid,
        }
    }

    /// What `kill -9` does to this process.
    pub(crate) fn kill(&self) {
        let mut world = self.world();
        world.processes.remove(&self.pid);
        let own: Vec<_> = world
            .sockets
            .iter()
            .filter(|(_, pid)| **pid == self.pid)
            .map(|(socket, _)| *socket)
            .collect();
        own.into_iter().for_each(|socket| world.close(socket));
    }
}

fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

fn absent() -> io::Error {
    errno(libc::EOPNOTSUPP)
}

impl Kernel for Fake {
    fn netlink(&self) -> io::Result<Box<dyn NetlinkSocket>> {
        let mut world = self.world();
        let number = world.number();
        world.sockets.insert(number, self.pid);
        drop(world);
        Ok(Box::new(Socket {
            kernel: self.clone(),
            number,
            answers: Vec::new(),
        }))
    }

    fn interface_index(&self, interface: &str) -> io::Result<u32> {
        Ok(self.world().card(interface)?.ifindex)
    }

    fn interface_name(&self, ifindex: u32) -> io::Result<Option<String>> {
        let world = self.world();
        let found = world.cards.iter().find(|(_, card)| card.ifindex == ifindex);
        Ok(found.map(|(name, _)| name.clone()))
    }

    fn driver(&self, interface: &str) -> io::Result<String> {
        let driver = self.world().card(interface)?.driver;
        driver.map(str::to_owned).ok_or_else(absent)
    }

    fn receive_queues(&self, interface: &str) -> io::Result<u32> {
        Ok(self.world().card(interface)?.queues)
    }

    fn flow_rules_on(&self, interface: &str) -> io::Result<bool> {
        self.world().card(interface)?.flow_rules.ok_or_else(absent)
    }

    fn turn_flow_rules(&self, interface: &str, on: bool) -> io::Result<()> {
        let mut world = self.world();
        world.change("flow rules")?;
        world.card(interface)?.flow_rules = Some(on);
        Ok(())
    }

    fn indirection(&self, interface: &str) -> io::Result<Vec<u32>> {
        self.world()
            .card(interface)?
            .table
            .clone()
            .ok_or_else(absent)
    }

    fn set_indirection(&self, interface: &str, table: &[u32]) -> io::Result<()> {
        let mut world = self.world();
        world.change("indirection")?;
        let card = world.card(interface)?;
        let size = card.table.as_ref().ok_or_else(absent)?.len() as u32;
        card.table = Some(match table {
            [] => (0..size).map(|entry| entry % card.queues).collect(),
            table => table.to_vec(),
        });
        Ok(())
    }

    fn rules(&self, interface: &str) -> io::Result<RuleTable> {
        let mut world = self.world();
        let card = world.card(interface)?;
        Ok(RuleTable {
            places: card.places,
            driver_places: card.driver_places,
            rules: card
                .rules
                .iter()
                .map(|(at, rule)| (*at, Some(*rule)))
                .collect(),
        })
    }

    fn insert_rule(&self, interface: &str, rule: &Rule, at: Option<u32>) -> io::Result<u32> {
        let mut world = self.world();
        world.change("insert rule")?;
        let card = world.card(interface)?;
        let at = match at {
            Some(at) if !card.driver_places => at,
            None if card.driver_places => {
                let free = (0..card.places).find(|at| !card.rules.contains_key(at));
                free.ok_or_else(|| errno(libc::ENOSPC))?
            }
            _ => return Err(errno(libc::EINVAL)),
        };
        card.rules.insert(at, *rule);
        Ok(at)
    }

    fn delete_rule(&self, interface: &str, at: u32) -> io::Result<()> {
        let mut world = self.world();
        world.change("delete rule")?;
        let gone = world.card(interface)?.rules.remove(&at);
        gone.map(drop).ok_or_else(|| errno(libc::ENOENT))
    }

    fn process_start(&self, pid: u32) -> io::Result<Option<u64>> {
        Ok(self.world().processes.get(&pid).copied())
    }

    fn place(&self) -> io::Result<Namespaces> {
        Ok(Namespaces {
            boot: "boot".to_owned(),
            network: 1,
            processes: 2,
            pid: self.pid,
        })
    }
}

#[derive(Debug)]
struct Socket {
    kernel: Fake,
    number: u32,
    answers: Vec<Vec<u8>>,
}

impl NetlinkSocket for Socket {
    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        self.answers = answers::to(&mut self.kernel.world(), self.number, message);
        self.answers.reverse();
        Ok(())
    }

    fn join(&mut self, group: u32) -> io::Result<()> {
        assert_eq!(group, answers::MONITOR);
        self.kernel.world().listening.insert(self.number);
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let answer = self.answers.pop().ok_or(io::ErrorKind::WouldBlock)?;
        buffer[..answer.len()].copy_from_slice(&answer);
        Ok(answer.len())
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.kernel.world().close(self.number);
    }
}
