//! Nothing of a comm touches its host's memory once its close has returned, whoever looks at the
//! comm meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nccl_net::export::{NetComm, NetRecv, NetSend};
use tcpx_status::{ask_process, processes};

use crate::common::{
    MIB, Pair, Registered, has, lane_config, pair, plugin, posted, random, transfer, until,
};

/// Closes receive comms amid their messages, beside two who ask for the status all the time; the
/// memory of each is its host's again when the close has returned.
fn closes_beside_scrapes(rounds: usize) {
    const LARGE: usize = 2 * MIB;
    let plugin = plugin(lane_config());
    // While it is there so is the thread that answers, which waits for this comm's lock again and
    // again.
    let Pair {
        send: stays,
        receive: busy,
        ..
    } = pair(&plugin);
    let mut waits = Registered::new(&busy, vec![0; 64], false);
    let waiting = posted(busy.irecv(waits.buffer(0, 64), 0, &waits.memory));
    let is_over = Arc::new(AtomicBool::new(false));
    let poller = {
        let is_over = Arc::clone(&is_over);
        std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                assert_eq!(busy.test(waiting).unwrap(), None);
            }
            drop((stays, busy, waits));
        })
    };
    let scrapers = [(); 2].map(|()| {
        let is_over = Arc::clone(&is_over);
        std::thread::spawn(move || {
            let (own, mut answers) = (std::process::id(), 0);
            while !is_over.load(Ordering::Relaxed) {
                let sockets = processes().found;
                if let Some((pid, socket)) = sockets.iter().find(|(pid, _)| *pid == own) {
                    answers += usize::from(ask_process(*pid, socket).is_ok());
                }
            }
            answers
        })
    });
    let mut closed_amid = 0;
    for (round, tests) in random(rounds, 11).into_iter().enumerate() {
        let pair = pair(&plugin);
        let mut from = Registered::new(&pair.send, vec![3; 4 * LARGE], false);
        let mut to = Registered::new(&pair.receive, vec![0; 4 * LARGE], false);
        for _ in 0..3 {
            transfer(&pair, &mut from, &mut to, MIB, MIB);
        }
        let Pair { send, receive, .. } = pair;
        let (mut receives, mut sends) = (Vec::new(), Vec::new());
        for part in 0..4 {
            let buffer = to.buffer(part * LARGE, LARGE);
            receives.push(posted(receive.irecv(buffer, 0, &to.memory)));
            let buffer = from.buffer(part * LARGE, LARGE);
            sends.push(posted(send.isend(buffer, 0, &from.memory)));
        }
        for _ in 0..tests {
            receives.retain(|request| receive.test(*request).unwrap().is_none());
            sends.retain(|request| send.test(*request).unwrap().is_none());
        }
        closed_amid += usize::from(!receives.is_empty());
        drop(receive);
        to.bytes.fill(0xee);
        // What was under way ends at the sender, one way or the other: nothing comes any more then.
        until("the sends' end", || {
            sends.retain(|request| matches!(send.test(*request), Ok(None)));
            sends.is_empty().then_some(())
        });
        let written = (0..4 * LARGE)
            .filter(|at| !has(&to.bytes, *at, 0xee))
            .count();
        assert_eq!(written, 0, "bytes written after the close of round {round}");
    }
    is_over.store(true, Ordering::Relaxed);
    let answers: usize = scrapers.map(|scraper| scraper.join().unwrap()).iter().sum();
    assert!(
        answers > 0 && closed_amid > 0,
        "{answers} answers, {closed_amid} closes"
    );
    poller.join().unwrap();
}

#[test]
fn a_closed_comm_is_quiet_while_its_process_is_scraped() {
    closes_beside_scrapes(12);
}

#[test]
#[ignore = "a minute"]
fn closed_comms_are_quiet_whatever_a_scrape_is_at() {
    closes_beside_scrapes(300);
}
