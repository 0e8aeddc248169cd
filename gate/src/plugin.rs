//! Cases through the tables of an NCCL plugin file, driven as NCCL drives them: each end polls its
//! requests in one thread.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libloading::os::unix::Library;
use nccl_net::device::RawDeviceHandle;
use nccl_net::tables::NetV8;

use crate::OtherEnd;
use crate::case::{Answer, Case, Figures, Kind, Part, PluginPart};
use crate::facts::{facts, percentiles};

/// The plugin file.
const VARIABLE: &str = "TCPX_GATE_PLUGIN";
const HANDLE_BYTES: usize = 128;
const TAG: c_int = 1;
const HOST: c_int = 1;
/// Bytes of the piece that fills a comm's memory, over and over.
const PIECE_BYTES: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(60);

type Opaque = *mut c_void;

/// The table, whose library stays loaded.
#[derive(Clone, Copy)]
struct Table(&'static NetV8);

macro_rules! call {
    ($table:expr, $function:ident ( $($argument:expr),* )) => {{
        let function = $table.0.$function.context(concat!(stringify!($function), " is missing"))?;
        // SAFETY: a function of the plugin's table with the arguments that NCCL passes: comms and memory of ours
        // that live, and out pointers of this frame.
        let code = unsafe { function($($argument),*) };
        ensure!(code == 0, "{} answered {code}", stringify!($function));
    }};
}

impl Table {
    fn load() -> Result<Self> {
        let path = std::env::var_os(VARIABLE).with_context(|| format!("{VARIABLE} is not set"))?;
        // SAFETY: the constructors of our own plugin, which the gate has just built.
        let library = unsafe { Library::open(Some(&path), libloading::os::unix::RTLD_NOW) }
            .with_context(|| format!("cannot load {}", path.display()))?;
        // SAFETY: the symbol of this name is a table of this version, and the library is never unloaded.
        let table = unsafe { library.get::<*const NetV8>(b"ncclNetPlugin_v8\0") }?;
        let table = table.as_raw_ptr().cast::<NetV8>();
        std::mem::forget(library);
        // SAFETY: as above.
        let table = Self(unsafe { table.as_ref() }.context("a null table")?);
        call!(table, init(None));
        let mut devices = 0;
        call!(table, devices(&raw mut devices));
        ensure!(devices > 0, "the plugin has no devices");
        Ok(table)
    }
}

/// A comm with registered memory, and the place in it for each message in flight, as NCCL has them.
struct Comm {
    comm: Opaque,
    memory: Opaque,
    data: Vec<u8>,
    posted: usize,
}

impl Comm {
    fn register(table: Table, comm: Opaque, bytes: usize) -> Result<Self> {
        // Memory that was only read would be one page of zeros, whose lending says nothing.
        let mut piece = vec![0; PIECE_BYTES];
        getrandom::fill(&mut piece)?;
        let mut data: Vec<u8> = piece.iter().copied().cycle().take(bytes).collect();
        let mut memory = ptr::null_mut();
        call!(
            table,
            reg_mr(
                comm,
                data.as_mut_ptr().cast(),
                data.len(),
                HOST,
                &raw mut memory
            )
        );
        Ok(Self {
            comm,
            memory,
            data,
            posted: 0,
        })
    }

    /// Where the next message goes or comes from.
    fn place(&mut self, size: usize) -> *mut c_void {
        let places = (self.data.len() / size.max(1)).max(1);
        let at = self.posted % places * size;
        self.data[at..].as_mut_ptr().cast()
    }

    fn isend(&mut self, table: Table, size: usize) -> Result<Option<Opaque>> {
        let mut request = ptr::null_mut();
        let data = self.place(size);
        call!(
            table,
            isend(
                self.comm,
                data,
                c_int::try_from(size)?,
                TAG,
                self.memory,
                &raw mut request
            )
        );
        self.posted += usize::from(!request.is_null());
        Ok((!request.is_null()).then_some(request))
    }

    fn irecv(&mut self, table: Table, size: usize) -> Result<Option<Opaque>> {
        let mut request = ptr::null_mut();
        let (mut data, mut size, mut tag) = (self.place(size), c_int::try_from(size)?, TAG);
        let mut memory = self.memory;
        call!(
            table,
            irecv(
                self.comm,
                1,
                &raw mut data,
                &raw mut size,
                &raw mut tag,
                &raw mut memory,
                &raw mut request
            )
        );
        self.posted += usize::from(!request.is_null());
        Ok((!request.is_null()).then_some(request))
    }
}

fn is_done(table: Table, request: Opaque) -> Result<bool> {
    let (mut done, mut size) = (0, 0);
    call!(table, test(request, &raw mut done, &raw mut size));
    Ok(done != 0)
}

/// One pair of comms between the ends.
struct Pair {
    out: Comm,
    back: Comm,
}

#[derive(Default)]
struct End {
    table: Option<Table>,
    listens: Vec<Opaque>,
    pairs: Vec<Pair>,
}

impl End {
    fn table(&mut self) -> Result<Table> {
        if self.table.is_none() {
            self.table = Some(Table::load()?);
        }
        self.table.context("no table")
    }

    fn listen(&mut self, comms: usize) -> Result<Vec<Vec<u8>>> {
        let table = self.table()?;
        let mut handles = Vec::new();
        for _ in 0..comms {
            let (mut handle, mut listen) = ([0u8; HANDLE_BYTES], ptr::null_mut());
            call!(
                table,
                listen(0, handle.as_mut_ptr().cast(), &raw mut listen)
            );
            self.listens.push(listen);
            handles.push(handle.to_vec());
        }
        Ok(handles)
    }

    /// Connects through the peer's handles and accepts on our own, both polled until they are done.
    fn connect(&mut self, handles: &[Vec<u8>], bytes: usize) -> Result<()> {
        let table = self.table()?;
        let deadline = Instant::now() + PATIENCE;
        for (handle, listen) in handles.iter().zip(std::mem::take(&mut self.listens)) {
            let mut handle: [u8; HANDLE_BYTES] = handle.as_slice().try_into()?;
            let (mut send, mut receive): (Opaque, Opaque) = (ptr::null_mut(), ptr::null_mut());
            while send.is_null() || receive.is_null() {
                ensure!(Instant::now() < deadline, "the comms do not connect");
                let mut device: *mut RawDeviceHandle = ptr::null_mut();
                if send.is_null() {
                    call!(
                        table,
                        connect(
                            0,
                            handle.as_mut_ptr().cast(),
                            &raw mut send,
                            &raw mut device
                        )
                    );
                }
                let mut device: *mut RawDeviceHandle = ptr::null_mut();
                if receive.is_null() {
                    call!(table, accept(listen, &raw mut receive, &raw mut device));
                }
            }
            call!(table, close_listen(listen));
            let out = Comm::register(table, send, bytes)?;
            let back = Comm::register(table, receive, bytes)?;
            self.pairs.push(Pair { out, back });
        }
        Ok(())
    }

    fn close(&mut self) -> Result<()> {
        let table = self.table()?;
        for pair in self.pairs.drain(..) {
            call!(table, dereg_mr(pair.out.comm, pair.out.memory));
            call!(table, dereg_mr(pair.back.comm, pair.back.memory));
            call!(table, close_send(pair.out.comm));
            call!(table, close_recv(pair.back.comm));
        }
        Ok(())
    }

    /// Every comm moves `count` messages one way, `window` of them in flight.
    fn stream(&mut self, size: usize, window: usize, count: usize, sends: bool) -> Result<()> {
        let table = self.table()?;
        let mut deadline = Instant::now() + PATIENCE;
        let mut running: Vec<std::collections::VecDeque<Opaque>> =
            self.pairs.iter().map(|_| [].into()).collect();
        let mut left: Vec<usize> = vec![count; self.pairs.len()];
        while left.iter().any(|left| *left > 0) || running.iter().any(|one| !one.is_empty()) {
            let mut moved = false;
            for (at, pair) in self.pairs.iter_mut().enumerate() {
                while left[at] > 0 && running[at].len() < window {
                    let request = match sends {
                        true => pair.out.isend(table, size)?,
                        false => pair.back.irecv(table, size)?,
                    };
                    let Some(request) = request else { break };
                    running[at].push_back(request);
                    left[at] -= 1;
                    moved = true;
                }
                while let Some(oldest) = running[at].front()
                    && is_done(table, *oldest)?
                {
                    running[at].pop_front();
                    moved = true;
                }
            }
            if moved {
                deadline = Instant::now() + PATIENCE;
            } else {
                ensure!(Instant::now() < deadline, "nothing moves");
                // The other end needs a core too.
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// A message of every comm one way, and one back.
    fn turn(&mut self, size: usize, begins: bool) -> Result<()> {
        self.stream(size, 1, 1, begins)?;
        self.stream(size, 1, 1, !begins)
    }
}

/// The end that measures.
#[derive(Default)]
pub(crate) struct Client(End);

impl Client {
    pub(crate) fn run(&mut self, case: &Case, other: &mut OtherEnd) -> Result<Figures> {
        let Kind::Plugin {
            size,
            comms,
            window,
        } = case.kind
        else {
            bail!("not a case of the plugin");
        };
        self.open(other, comms, (size * window.max(1)).max(4096))?;
        let limit = Duration::from_millis(case.ms);
        let figures = match window {
            0 => self.round_trips(other, size, limit),
            _ => self.rate(other, size, window, limit),
        }?;
        tell(other, PluginPart::Close)?;
        self.0.close()?;
        done(other)?;
        Ok(figures)
    }

    fn open(&mut self, other: &mut OtherEnd, comms: usize, bytes: usize) -> Result<()> {
        tell(other, PluginPart::Listen { comms })?;
        let Answer::Handles(theirs) = other.hear()? else {
            bail!("the other end does not listen");
        };
        let back = self.0.listen(comms)?;
        tell(other, PluginPart::Accept { back, bytes })?;
        self.0.connect(&theirs, bytes)?;
        done(other)
    }

    fn round_trips(
        &mut self,
        other: &mut OtherEnd,
        size: usize,
        limit: Duration,
    ) -> Result<Figures> {
        let mut some = |count: usize| -> Result<Vec<f64>> {
            tell(
                other,
                PluginPart::Measure {
                    size,
                    window: 0,
                    count,
                },
            )?;
            let mut samples = Vec::with_capacity(count);
            for _ in 0..count {
                let started = Instant::now();
                self.0.turn(size, true)?;
                samples.push(started.elapsed().as_secs_f64() * 1e6);
            }
            done(other)?;
            Ok(samples)
        };
        let mut first = some(20)?;
        first.sort_by(f64::total_cmp);
        let count = (limit.as_secs_f64() * 1e6 / first[10]) as usize;
        Ok(percentiles(&mut some(count.clamp(50, 50_000))?))
    }

    fn rate(
        &mut self,
        other: &mut OtherEnd,
        size: usize,
        window: usize,
        limit: Duration,
    ) -> Result<Figures> {
        let mut some = |count: usize| -> Result<f64> {
            tell(
                other,
                PluginPart::Measure {
                    size,
                    window,
                    count,
                },
            )?;
            let started = Instant::now();
            self.0.stream(size, window, count, true)?;
            done(other)?;
            Ok(started.elapsed().as_secs_f64())
        };
        let few = 4 * window;
        let each = some(few)? / few as f64;
        let count = ((limit.as_secs_f64() / each) as usize).clamp(few, 100_000);
        let before = facts()?.cpu_seconds;
        let seconds = some(count)?;
        let bytes = (size * count * self.0.pairs.len()) as f64;
        // Both ends poll for all of the time, so that one end's time says it.
        let cpu = (facts()?.cpu_seconds - before) / (bytes / 1e9);
        Ok([("rate", bytes / seconds), ("cpu", cpu)].into())
    }
}

fn tell(other: &mut OtherEnd, part: PluginPart) -> Result<()> {
    other.tell(&Part::Plugin(part))
}

fn done(other: &mut OtherEnd) -> Result<()> {
    match other.hear()? {
        Answer::Done => Ok(()),
        Answer::Failed(why) => bail!("the other end: {why}"),
        answer => bail!("the other end said {answer:?}"),
    }
}

/// The other end.
#[derive(Default)]
pub(crate) struct Server {
    end: End,
}

impl Server {
    pub(crate) fn run(&mut self, part: PluginPart) -> Result<Answer> {
        match part {
            PluginPart::Listen { comms } => return Ok(Answer::Handles(self.end.listen(comms)?)),
            PluginPart::Accept { back, bytes } => self.end.connect(&back, bytes)?,
            PluginPart::Measure {
                size,
                window: 0,
                count,
            } => {
                for _ in 0..count {
                    self.end.turn(size, false)?;
                }
            }
            PluginPart::Measure {
                size,
                window,
                count,
            } => self.end.stream(size, window, count, false)?,
            PluginPart::Close => self.end.close()?,
        }
        Ok(Answer::Done)
    }
}
