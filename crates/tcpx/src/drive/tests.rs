//! Ends of sends that a thread has left behind what it waited for, and who tells of them.

use std::net::TcpStream;

use super::*;
use crate::connection::Connection;
use crate::core::tests::Scene;
use crate::transfer::Transfer;

/// Such a send; the thread does the engine's work still, and no other one ever does. The peer has closed.
fn left() -> Transfer {
    left_with_peer().0
}

/// As [`left`], with a peer that lives.
fn left_with_peer() -> (Transfer, TcpStream) {
    let (mut scene, sent) = Scene::with_an_end_left();
    // It answers each message at once, so that nothing is said before.
    for _ in 0..8 {
        let now = Instant::now();
        scene.core.pace.leaves(now);
        scene.core.pace.calls(now);
    }
    let (transfer, peer) = scene.into_transfer(sent);
    let owner = &transfer.connection.0.progress_owner;
    owner.taken.store(true, Ordering::SeqCst);
    (transfer, peer)
}

#[test]
fn a_program_that_asks_for_an_end_that_was_left_gets_it() {
    let transfer = left();
    transfer.connection.0.release(Leaves::Served, false);
    assert!(!transfer.state.has_ended(), "this is not about it");
    assert!(transfer.test().is_some());
}

#[test]
fn a_program_that_waits_no_moment_for_an_end_that_was_left_gets_it() {
    let transfer = left();
    transfer.connection.0.release(Leaves::Served, false);
    assert!(transfer.wait_timeout(Duration::ZERO).is_some());
}

#[test]
fn memory_of_a_send_whose_answer_has_come_may_be_used_again() {
    let transfer = left();
    let shared = &transfer.connection.0;
    shared.release(Leaves::Served, false);
    let region = {
        let core = shared.lock();
        let operation = core.operations.get(&transfer.only_operation()).unwrap();
        operation.lease.region().clone()
    };
    let connection = Connection::of(&transfer);
    let again = connection.receive(region.all(), 3).start();
    assert!(again.is_ok(), "{again:?}");
}

#[test]
fn the_engine_tells_of_an_end_that_was_left_when_nobody_comes_back() {
    let transfer = left();
    let shared = &transfer.connection.0;
    shared.release(Leaves::Served, false);
    let until = shared.progress_owner.due(shared.lock().origin).unwrap();
    while Instant::now() < until {}
    crate::driver::Driven::progress(&**shared);
    assert!(transfer.state.has_ended());
}

#[test]
fn an_end_that_another_thread_looks_for_is_not_left() {
    let transfer = left();
    let shared = &transfer.connection.0;
    let _looker = Looker::begin(&shared.progress_owner.lookers);
    shared.release(Leaves::Served, false);
    assert!(transfer.state.has_ended());
}

#[test]
fn who_has_looked_looks_no_more() {
    let lookers = AtomicUsize::new(0);
    let looker = Looker::begin(&lookers);
    assert_eq!(lookers.load(Ordering::Relaxed), 1);
    drop(looker);
    assert_eq!(lookers.load(Ordering::Relaxed), 0);
}

#[test]
fn a_lease_lasts_as_long_as_any_other() {
    let transfer = left();
    let shared = &transfer.connection.0;
    shared.release(Leaves::Served, false);
    let released = shared.lock().ticked();
    let until = shared.since_origin(released + PROGRESS_LEASE);
    assert_eq!(shared.progress_owner.lease.lasts_until(), Some(until));
}

#[test]
fn a_thread_that_polls_keeps_the_connection_until_a_task_waits() {
    let (transfer, _peer) = left_with_peer();
    let shared = &transfer.connection.0;
    shared.release(Leaves::Served, false);
    shared.end_lease(&mut shared.lock());
    shared.drive_once(|| false);
    assert!(shared.progress_owner.lease.lasts_until().is_some());
    assert!(shared.comes_back(&shared.lock()));
    let watch = shared.watch();
    shared.drive_once(|| false);
    assert_eq!(shared.progress_owner.lease.lasts_until(), None);
    assert!(!shared.comes_back(&shared.lock()));
    drop(watch);
}

#[test]
fn a_thread_that_polls_leaves_the_work_to_one_that_waits() {
    let transfer = left();
    let shared = &transfer.connection.0;
    shared.drive_once(|| false);
    assert_eq!(shared.progress_owner.lease.lasts_until(), None);
    assert!(shared.progress_owner.is_taken());
}

#[test]
fn a_budget_spent_in_vain_pauses_busy_polling() {
    let transfer = left();
    let shared = &transfer.connection.0;
    assert!(shared.may_busy_poll());
    shared.pause_busy_poll(Duration::from_secs(60));
    assert!(!shared.may_busy_poll());
    shared.pause_busy_poll(Duration::ZERO);
    assert!(shared.may_busy_poll());
    assert!(shared.may_busy_poll(), "a pause that is over stays over");
}
