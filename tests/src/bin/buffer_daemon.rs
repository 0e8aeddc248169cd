//! The stand-in for the buffer daemon as a program: `buffer_daemon FOLDER BEHAVIOUR PCI...`, until its standard input ends.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use tcpx_tests::buffer_daemon::{Behaviour, BufferDaemon};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, behaviour, gpus @ ..] = &arguments[..] else {
        anyhow::bail!("usage: buffer_daemon FOLDER good|silent|garbage|closes|half|full PCI...");
    };
    let (_, behaviour) = Behaviour::ALL
        .into_iter()
        .find(|(name, _)| name == behaviour)
        .with_context(|| format!("no behaviour is called {behaviour}"))?;
    let gpus: Vec<&str> = gpus.iter().map(String::as_str).collect();
    let daemon = BufferDaemon::start(Path::new(folder), &gpus, 1 << 20, behaviour)
        .with_context(|| format!("cannot serve from {folder}"))?;
    println!("serving {} GPUs from {folder}", gpus.len());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    for asked in daemon.asked() {
        println!("{}: {:?}", asked.socket, asked.message);
    }
    Ok(())
}
