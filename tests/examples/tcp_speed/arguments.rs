//! The command line, which both processes read.

use std::path::PathBuf;
use std::str::FromStr;

use tcpx::After;
use tcpx_net::TcpOptions;

use crate::{Outcome, text};

/// What to time.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Case {
    Stream(Load),
    Both(Load),
    Ping {
        bytes: usize,
        count: usize,
    },
    Copies {
        bytes: usize,
        count: usize,
    },
    Plain {
        lanes: usize,
        call: usize,
        bytes: usize,
        set: usize,
    },
}

/// Transfers of one direction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) bytes: usize,
    pub(crate) depth: usize,
    pub(crate) count: usize,
}

impl FromStr for Case {
    type Err = String;

    fn from_str(word: &str) -> Outcome<Self> {
        let (kind, numbers) = word.split_once(':').unwrap_or((word, ""));
        let numbers: Vec<usize> = numbers
            .split(':')
            .map(|number| number.parse().map_err(text))
            .collect::<Outcome<_>>()?;
        if numbers.contains(&0) {
            return Err(format!("{word}: every number is at least 1"));
        }
        match (kind, numbers.as_slice()) {
            ("stream", &[bytes, depth, count]) => Ok(Self::Stream(Load {
                bytes,
                depth,
                count,
            })),
            ("both", &[bytes, depth, count]) => Ok(Self::Both(Load {
                bytes,
                depth,
                count,
            })),
            ("ping", &[bytes, count]) => Ok(Self::Ping { bytes, count }),
            ("copies", &[bytes, count]) => Ok(Self::Copies { bytes, count }),
            ("plain", &[lanes, call, bytes, set]) => Ok(Self::Plain {
                lanes,
                call,
                bytes,
                set,
            }),
            _ => Err(format!("{word} is no case")),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Arguments {
    pub(crate) child: bool,
    /// `None`: host memory.
    pub(crate) gpus: [Option<u32>; 2],
    pub(crate) rounds: u32,
    pub(crate) out: Option<PathBuf>,
    pub(crate) cases: Vec<(String, Case)>,
    pub(crate) chunk: Option<u32>,
    pub(crate) after: After,
    pub(crate) tcp: TcpOptions,
}

impl Arguments {
    pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Outcome<Self> {
        let mut parsed = Self {
            child: false,
            gpus: [None; 2],
            rounds: 1,
            out: None,
            cases: Vec::new(),
            chunk: None,
            after: After::DefaultStreams,
            tcp: TcpOptions::default(),
        };
        while let Some(flag) = words.next() {
            if flag == "--child" {
                parsed.child = true;
                continue;
            }
            if flag == "--no-splice" {
                parsed.tcp.splice = false;
                continue;
            }
            if flag == "--staged" {
                parsed.tcp.stage_host = true;
                continue;
            }
            if flag == "--no-resend" {
                parsed.tcp.resend = false;
                continue;
            }
            if flag == "--at-once" {
                parsed.after = After::Nothing;
                continue;
            }
            let value = words
                .next()
                .ok_or_else(|| format!("{flag} takes a value"))?;
            match flag.as_str() {
                "--from" => parsed.gpus[0] = place(&value)?,
                "--to" => parsed.gpus[1] = place(&value)?,
                "--rounds" => parsed.rounds = value.parse().map_err(text)?,
                "--out" => parsed.out = Some(value.into()),
                "--lanes" => parsed.tcp.lanes = value.parse().map_err(text)?,
                "--window" => parsed.tcp.window = value.parse().map_err(text)?,
                "--socket-buffer" => parsed.tcp.socket_buffer = value.parse().map_err(text)?,
                "--chunk" => parsed.chunk = Some(value.parse().map_err(text)?),
                "--case" => {
                    let (name, case) = value.split_once('=').ok_or("--case takes NAME=CASE")?;
                    parsed.cases.push((name.to_owned(), case.parse()?));
                }
                _ => return Err(format!("{flag} is not known")),
            }
        }
        Ok(parsed)
    }
}

fn place(word: &str) -> Outcome<Option<u32>> {
    if word == "host" {
        return Ok(None);
    }
    word.parse().map(Some).map_err(text)
}
