//! What two peers do with each other. Both derive every size, tag and order from a seed.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::content::{Choices, Content};

/// The shortest sizes, those around the edges of a page and of a chunk, and the longest.
pub const fn sizes_up_to(longest: usize) -> [usize; 10] {
    const PAGE: usize = 4096;
    const CHUNK: usize = 512 << 10;
    [
        0,
        1,
        23,
        PAGE - 1,
        PAGE,
        PAGE + 1,
        CHUNK - 1,
        CHUNK,
        CHUNK + 1,
        longest,
    ]
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Side {
    /// It listens.
    Server,
    /// It connects.
    Client,
}

/// Which messages there are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Messages {
    /// One of each size, one after the other.
    Each(Vec<u64>),
    /// Random sizes and tags, all at once; receives are posted in another order than sends.
    Shuffled {
        /// How many.
        count: u32,
        /// Bytes of the largest.
        largest: u64,
    },
}

/// What two peers do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scenario {
    /// Contents, and everything random.
    pub seed: u64,
    /// The messages of each direction that is used.
    pub messages: Messages,
    /// The client sends.
    pub to_server: bool,
    /// The server sends.
    pub to_client: bool,
    /// Every other receive is one byte smaller than its send.
    pub short: bool,
    /// Behind a transfer that failed nothing more is started.
    pub gives_up: bool,
}

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its number in the scenario, over both directions.
    pub number: u64,
    /// What it matches on.
    pub tag: u64,
    /// Its length.
    pub bytes: u64,
    /// Checksums of both ends are compared.
    pub verified: bool,
    /// Its receive is one byte too small.
    pub short: bool,
}

/// The messages of one direction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// In the order of the sends.
    pub messages: Vec<Message>,
    /// Indices of `messages` in the order in which their receives are posted.
    pub receives: Vec<usize>,
}

/// Numbers of messages to the client start here.
const TO_CLIENT: u64 = 1 << 15;
/// Tags that shuffled messages share.
const TAGS: usize = 24;

impl Scenario {
    /// One of each size in both directions.
    pub fn each(seed: u64, sizes: &[u64]) -> Self {
        Self {
            seed,
            messages: Messages::Each(sizes.to_vec()),
            to_server: true,
            to_client: true,
            short: false,
            gives_up: false,
        }
    }

    /// The same, from the client to the server alone.
    pub fn to_server(seed: u64, sizes: &[u64]) -> Self {
        Self {
            to_client: false,
            ..Self::each(seed, sizes)
        }
    }

    /// Many random messages in both directions.
    pub fn shuffled(seed: u64, count: u32, largest: u64) -> Self {
        Self {
            messages: Messages::Shuffled { count, largest },
            ..Self::each(seed, &[])
        }
    }

    /// The tag of the first of [`Messages::Each`] to the server.
    pub const FIRST_TAG: u64 = 7000;

    /// What the message with this number holds.
    pub fn content(&self, number: u64) -> Content {
        Content::new(self.seed, number)
    }

    /// The messages that arrive at `side`.
    pub fn flow_to(&self, side: Side) -> Flow {
        let (used, first) = match side {
            Side::Server => (self.to_server, 0),
            Side::Client => (self.to_client, TO_CLIENT),
        };
        if !used {
            return Flow::default();
        }
        match &self.messages {
            Messages::Each(sizes) => {
                let numbered = (0u64..).zip(sizes);
                let messages = numbered.map(|(index, bytes)| Message {
                    number: first + index,
                    tag: Self::FIRST_TAG + index,
                    bytes: *bytes,
                    verified: false,
                    short: self.short && index % 2 == 0 && *bytes > 0,
                });
                Flow {
                    messages: messages.collect(),
                    receives: (0..sizes.len()).collect(),
                }
            }
            Messages::Shuffled { count, largest } => self.shuffle(first, *count, *largest),
        }
    }

    fn shuffle(&self, first: u64, count: u32, largest: u64) -> Flow {
        let mut choices = Choices::new(self.seed ^ first);
        let mut tags: Vec<u64> = (0..TAGS).map(|_| choices.any()).collect();
        tags.extend([0, u64::MAX]);
        let messages: Vec<Message> = (0..u64::from(count))
            .map(|index| Message {
                number: first + index,
                tag: tags[choices.below(tags.len() as u64) as usize],
                bytes: some_size(&mut choices, largest),
                verified: choices.below(8) == 0,
                short: false,
            })
            .collect();
        // Any order of tags will do; among equal tags the first receive takes the first send.
        let mut waiting: HashMap<u64, Vec<usize>> = HashMap::new();
        for (index, message) in messages.iter().enumerate().rev() {
            waiting.entry(message.tag).or_default().push(index);
        }
        let mut order: Vec<u64> = messages.iter().map(|message| message.tag).collect();
        choices.shuffle(&mut order);
        let receives = order
            .iter()
            .filter_map(|tag| waiting.get_mut(tag).and_then(Vec::pop))
            .collect();
        Flow { messages, receives }
    }
}

/// Every magnitude is as likely as any other; some are empty.
fn some_size(choices: &mut Choices, largest: u64) -> u64 {
    let magnitude = choices.below(u64::from(largest.ilog2()) + 2);
    choices.below(1 << magnitude).min(largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_derive_the_same_in_any_order() {
        let scenario = Scenario::shuffled(5, 1000, 1 << 20);
        let flow = scenario.flow_to(Side::Client);
        assert_eq!(flow, scenario.clone().flow_to(Side::Client));
        assert_ne!(flow.messages, scenario.flow_to(Side::Server).messages);
        let mut sorted = flow.receives.clone();
        assert!(!sorted.is_sorted());
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000));
        for tag in flow.messages.iter().map(|message| message.tag) {
            let of_tag = flow
                .receives
                .iter()
                .filter(|index| flow.messages[**index].tag == tag);
            assert!(of_tag.is_sorted(), "receives of one tag are in order");
        }
        assert!(flow.messages.iter().any(|message| message.bytes == 0));
        assert!(flow.messages.iter().any(|message| message.bytes > 1 << 19));
    }
}
