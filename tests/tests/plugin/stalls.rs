//! The historic stall: chunks arrive, nothing gives their pool space back, the pool runs dry.

use std::time::Duration;

use tcpx::{Deadlines, Error};
use tcpx_tests::buffers::{Destination, Source};
use tcpx_tests::content::Content;
use tcpx_tests::double;
use tcpx_tests::pair::{LONG, Listening, double_network};
use tcpx_tests::withholding::Withholding;
use tcpx_wire::session::EndCause;

const CHUNK: u64 = 512 << 10;
/// Chunks that are consumed before that is withheld.
const CONSUMED: u64 = 3;
/// Longer than a busy machine keeps the chunks before it from coming.
const STALL: Duration = Duration::from_secs(4);

#[test]
fn withheld_consumption_ends_in_a_stall_with_its_chunk() {
    let _serial = double::serial();
    double::set_pool_bytes(2 << 20);
    let withholding = Withholding::after_consumes(double_network(), CONSUMED as usize);
    for bytes in [4 << 20, 64 << 20] {
        let listening = Listening::new(
            double_network(),
            |server| server.network = withholding.clone(),
            |_| {},
        );
        let (server, client) = listening.connect();
        let content = Content::new(bytes, 0);
        let source = Source::new(content, bytes, 0);
        let destination = Destination::new(bytes, 0);
        let patience = |stall| Deadlines { stall, total: None };
        let receive = server
            .receive(destination.slice(), 5)
            .deadlines(patience(STALL))
            .start()
            .expect("room");
        let send = client
            .send(source.slice(), 5)
            .deadlines(patience(LONG))
            .start()
            .expect("room");
        let error = receive
            .wait_timeout(STALL * 10)
            .expect("its deadline bounds it")
            .expect_err("nothing is consumed");
        let Error::Operation { error: cause, .. } = &error else {
            panic!("{error}");
        };
        let EndCause::Stalled(report) = &cause.cause else {
            panic!("{error}");
        };
        let (chunk, offset) = (CONSUMED as u32, CONSUMED * CHUNK);
        assert_eq!((report.chunk, report.offset), (Some(chunk), offset));
        assert_eq!((report.bytes_done, report.bytes_total), (offset, bytes));
        let place = format!(
            "receive tag 5 transfer 0 chunk {chunk} channel 0 offset {offset}: {offset} of {bytes} bytes done"
        );
        let debt = "this side must unpack and consume the arrived chunk";
        let error = error.to_string();
        assert!(error.contains(&place) && error.contains(debt), "{error}");
        let error = send
            .wait_timeout(STALL * 10)
            .expect("the receiver tells it")
            .expect_err("the receiver gave up")
            .to_string();
        assert!(error.contains("tag 5"), "{error}");
        assert!(error.contains(&place) && error.contains(debt), "{error}");
        // Nothing of this can be taken back from a plugin, so the connection is lost: both know.
        let error = server.close(LONG).expect_err("its channels are lost");
        assert!(error.to_string().contains("cannot cancel"), "{error}");
        client.close(LONG).expect_err("its channels are lost");
    }
}
