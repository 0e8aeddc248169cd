//! Two connected ends on GPUs, random data, comparison.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use tcpx::{Auth, Connection, Endpoint, Gpu, Options, Region, UnpackMethod};
use tcpx_net::{Network, PluginMemory, PluginNetwork, PluginOptions, TcpNetwork};
use tcpx_tests::pair::new_key;

use crate::user::User;

/// What a check found: a summary, or what differs.
pub(crate) type Outcome = Result<String, String>;

pub(crate) const POISON: u8 = 0xA5;
/// Bytes behind each destination that nothing may touch.
pub(crate) const GUARD: usize = 4096;
const LONG: Duration = Duration::from_secs(30);

pub(crate) struct Bench {
    /// The sending end's GPU.
    pub(crate) from: Gpu,
    /// The receiving end's GPU.
    pub(crate) to: Gpu,
    pub(crate) large: bool,
    /// The checks to make; none: all.
    pub(crate) only: Vec<String>,
    network: Arc<dyn Network>,
    plugin: bool,
    user: [OnceLock<User>; 2],
}

pub(crate) fn text(error: impl ToString) -> String {
    error.to_string()
}

impl Bench {
    pub(crate) fn from_arguments(
        mut arguments: impl Iterator<Item = String>,
    ) -> Result<Self, String> {
        let (mut file, mut gpus, mut large, mut only) = (None, (0, 0), false, Vec::new());
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--plugin" => file = arguments.next().map(PathBuf::from),
                "--large" => large = true,
                "--only" => only.extend(arguments.next()),
                "--gpus" => {
                    let pair = arguments.next().unwrap_or_default();
                    let (from, to) = pair.split_once(',').ok_or("--gpus takes A,B")?;
                    gpus = (from.parse().map_err(text)?, to.parse().map_err(text)?);
                }
                other => return Err(format!("unknown argument {other}")),
            }
        }
        let from = Gpu::open(gpus.0).map_err(text)?;
        // One process has one instance of a plugin, with one GPU.
        let to = match &file {
            Some(_) => from.clone(),
            None => Gpu::open(gpus.1).map_err(text)?,
        };
        let network: Arc<dyn Network> = match &file {
            None => Arc::new(TcpNetwork::default()),
            Some(path) => {
                let options = PluginOptions {
                    path: path.clone(),
                    abi: None,
                    device: 0,
                    memory: PluginMemory::Gpu(from.clone()),
                };
                Arc::new(PluginNetwork::load(options).map_err(text)?)
            }
        };
        Ok(Self {
            from,
            to,
            large,
            only,
            network,
            plugin: file.is_some(),
            user: [OnceLock::new(), OnceLock::new()],
        })
    }

    pub(crate) fn describe(&self) -> String {
        let pool = std::env::var(tcpx_tests::double::POOL_VARIABLE).unwrap_or_default();
        format!(
            "{} {pool} GPU {} -> GPU {}",
            self.network.features(0).name,
            self.from.ordinal(),
            self.to.ordinal()
        )
    }

    /// The ways of unpacking that make a difference on this network.
    pub(crate) fn methods(&self) -> &'static [Option<UnpackMethod>] {
        if self.plugin {
            &[
                None,
                Some(UnpackMethod::Host),
                Some(UnpackMethod::D2d),
                Some(UnpackMethod::Kernel),
            ]
        } else {
            &[None]
        }
    }

    /// The program on the sending (0) or the receiving (1) GPU.
    pub(crate) fn user(&self, end: usize) -> Result<&User, String> {
        let slot = &self.user[end];
        if slot.get().is_none() {
            let gpu = if end == 0 { &self.from } else { &self.to };
            slot.set(User::create(gpu)?).ok();
        }
        slot.get().ok_or_else(|| "no user".to_owned())
    }

    /// A sending and a receiving connection.
    pub(crate) fn pair(
        &self,
        channels: u16,
        unpack: Option<UnpackMethod>,
    ) -> Result<(Connection, Connection), String> {
        self.pair_on(channels, unpack, true)
    }

    /// As [`Self::pair`], on the GPUs or for host memory alone.
    pub(crate) fn pair_on(
        &self,
        channels: u16,
        unpack: Option<UnpackMethod>,
        gpus: bool,
    ) -> Result<(Connection, Connection), String> {
        let key = new_key();
        let options = |gpu: &Gpu| {
            let mut options = Options::new(Arc::clone(&self.network), Auth::Key(key.clone()));
            options.gpu = gpus.then(|| gpu.clone());
            options.channels = channels;
            options.unpack = unpack;
            options
        };
        let address = "127.0.0.1:0".parse().map_err(text)?;
        let server = Endpoint::listen(address, options(&self.to)).map_err(text)?;
        let (address, client) = (server.local_addr(), options(&self.from));
        let client = thread::spawn(move || Endpoint::connect(address, &client));
        let receiving = server.accept(LONG).map_err(text);
        let sending = client
            .join()
            .map_err(|_| "the client panicked")?
            .map_err(text)?;
        Ok((sending, receiving?))
    }
}

/// Ends both sides in order.
pub(crate) fn close(sending: Connection, receiving: Connection) -> Result<(), String> {
    let other = thread::spawn(move || receiving.close(LONG));
    sending.close(LONG).map_err(text)?;
    other
        .join()
        .map_err(|_| "the receiver panicked")?
        .map_err(text)
}

pub(crate) fn random(len: usize) -> Vec<u8> {
    let mut seed = [0u8; 8];
    getrandom::fill(&mut seed).expect("randomness");
    let mut state = u64::from_ne_bytes(seed) | 1;
    let mut bytes = vec![0; len.next_multiple_of(8)];
    for word in bytes.as_chunks_mut::<8>().0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *word = state.to_ne_bytes();
    }
    bytes.truncate(len);
    bytes
}

/// GPU (or host, without one) memory with these bytes.
pub(crate) fn region(gpu: Option<&Gpu>, bytes: &[u8]) -> Result<Region, String> {
    let region = match gpu {
        Some(gpu) => Region::cuda(gpu, bytes.len()),
        None => Region::host(bytes.len()),
    };
    let region = region.map_err(text)?;
    region.write_from(0, bytes).map_err(text)?;
    Ok(region)
}

/// A poisoned destination of `len` bytes and the guard.
pub(crate) fn poisoned(gpu: Option<&Gpu>, len: usize) -> Result<Region, String> {
    region(gpu, &vec![POISON; len + GUARD])
}

/// Compares a destination with what was sent, and its guard with the poison.
pub(crate) fn compare(destination: &Region, expected: &[u8]) -> Result<(), String> {
    let mut got = vec![0; destination.len()];
    destination.read_to(0, &mut got).map_err(text)?;
    let (data, guard) = got.split_at(expected.len());
    if let Some(at) = data.iter().zip(expected).position(|(a, b)| a != b) {
        return Err(format!(
            "byte {at} of {} is {:#04x}, expected {:#04x}",
            expected.len(),
            data[at],
            expected[at]
        ));
    }
    match guard.iter().position(|byte| *byte != POISON) {
        Some(at) => Err(format!("wrote {at} bytes past the end")),
        None => Ok(()),
    }
}
