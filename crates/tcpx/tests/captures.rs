//! The program's graph captures, beside transfers of GPU memory: none is broken, and none takes a
//! transfer in.

#[expect(dead_code, reason = "not every test needs all of it")]
#[path = "engine/common.rs"]
mod common;

use std::time::Duration;

use common::{pair, random};
use tcpx::{After, Connection, CudaError, Error, Gpu, MemoryError, Region, Rights, Transfer};
use tcpx_memory::fake_driver;

const LONG: Duration = Duration::from_secs(300);

struct Ends {
    server: Connection,
    client: Connection,
    from: Region,
    to: Region,
    bytes: Vec<u8>,
}

impl Ends {
    fn open(gpu: &Gpu) -> Self {
        let (server, client) = pair(|_, options| options.gpu = Some(gpu.clone()));
        let bytes = random(300_000);
        let region = || Region::cuda(gpu, bytes.len()).expect("memory");
        let (from, to) = (region(), region());
        Self {
            server,
            client,
            from,
            to,
            bytes,
        }
    }

    /// A send, a receive, a put and a get, of few bytes and of many.
    fn each(&self, after: After, ended: impl Fn(Result<Transfer, Error>)) {
        let window = self
            .server
            .expose(self.to.all(), Rights::GetAndPut)
            .expect("a window");
        let key = window.key();
        for len in [100, 300_000] {
            let part = || self.from.slice(..len).expect("inside");
            ended(self.client.put(part(), &key, 0).after(after).start());
            ended(self.client.get(part(), &key, 0).after(after).start());
            let to = Region::host(len).expect("memory");
            let receive = self.server.receive(to.all(), 1).start();
            let send = self.client.send(part(), 1).after(after).start();
            let is_sent = send.is_ok();
            ended(send);
            let receive = receive.expect("host memory waits for nothing");
            match is_sent {
                true => receive.wait().map(drop).expect("it arrives"),
                false => receive.cancel(),
            }
        }
    }
}

fn refused(wanted: CudaError) -> impl Fn(Result<Transfer, Error>) {
    move |started| match started {
        Err(Error::Memory(MemoryError::Cuda(error))) => assert_eq!(error, wanted),
        other => panic!("{other:?}"),
    }
}

fn done(started: Result<Transfer, Error>) {
    started.expect("it starts").wait().expect("it ends");
}

#[test]
fn captures_survive_transfers_and_connections() {
    fake_driver::install();
    let gpu = Gpu::open(0).expect("the fake");
    let ends = Ends::open(&gpu);
    ends.from.write_from(0, &ends.bytes).expect("free");
    let device = 0;
    for blocking in [false, true] {
        let survived = fake_driver::while_capturing(blocking, |stream| {
            ends.each(stream, refused(CudaError::StreamCaptured { device }));
            ends.each(After::Nothing, done);
            match blocking {
                false => ends.each(After::DefaultStreams, done),
                true => {
                    let captured = CudaError::DefaultStreamsCaptured { device };
                    ends.each(After::DefaultStreams, refused(captured));
                }
            }
            // Others come and go.
            let others = Ends::open(&gpu);
            others.each(After::Nothing, done);
            others.client.close(LONG).expect("an end");
        });
        assert!(survived, "blocking: {blocking}");
        ends.each(After::DefaultStreams, done);
    }
}
