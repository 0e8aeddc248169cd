//! Export and host side against each other, in every version.

use std::ffi::c_void;
use std::ptr;
use std::sync::Mutex;

use crate::export::Export;
use crate::loopback::{Loopback, TAG_THAT_PANICS, load, plugin};
use crate::tables::NetV7;
use crate::{
    AbiVersion, CallError, CallReport, DeviceOffload, Handle128, HostError, LoadOptions,
    MemoryType, Plugin, PostOutcome, RecvComm, ResultCode, SendComm,
};

fn pair(plugin: &Plugin) -> (SendComm, RecvComm) {
    let (handle, listener) = plugin.listen(0).unwrap();
    let mut connecting = plugin.connect(1, handle).unwrap();
    let mut accepting = listener.accept();
    assert!(accepting.poll().unwrap().is_none());
    assert!(connecting.poll().unwrap().is_none());
    assert!(connecting.poll().unwrap().is_none());
    let sender = connecting.poll().unwrap().unwrap();
    assert_eq!(connecting.poll().unwrap_err(), HostError::SetupEnded);
    let receiver = accepting.poll().unwrap().unwrap();
    assert_eq!(accepting.poll().unwrap_err(), HostError::SetupEnded);
    (sender, receiver)
}

#[test]
fn every_version_carries_properties_connections_and_data() {
    for version in AbiVersion::ALL {
        let plugin = plugin(version);
        assert_eq!(plugin.devices().unwrap_err(), HostError::NotInitialised);
        plugin.init().unwrap();
        assert_eq!(plugin.init().unwrap_err(), HostError::AlreadyInitialised);
        assert_eq!((plugin.name(), plugin.devices().unwrap()), ("loopback", 2));

        let properties = plugin.properties(1).unwrap();
        assert_eq!(properties.name, "mem1");
        assert_eq!(properties.pci_path.as_deref(), Some("/sys/devices/x"));
        assert_eq!(plugin.properties(0).unwrap().pci_path, None);
        assert_eq!((properties.guid, properties.speed_mbps), (77, 12_345));
        assert_eq!((properties.latency_us, properties.max_comms), (1.5, 9));
        assert_eq!(properties.offload, DeviceOffload::None);
        let since = |first: AbiVersion| version >= first;
        assert_eq!(properties.reg_is_global.is_some(), since(AbiVersion::V8));
        assert_eq!(
            properties.max_p2p_bytes,
            since(AbiVersion::V9).then_some(1 << 40)
        );
        assert_eq!(
            properties.virtual_devices,
            since(AbiVersion::V9).then(|| vec![1])
        );
        assert_eq!(properties.rail_id, since(AbiVersion::V12).then_some(3));
        assert_eq!(
            plugin.properties(2).unwrap_err(),
            HostError::NoSuchDevice { dev: 2, count: 2 }
        );

        let (mut sender, mut receiver) = pair(&plugin);
        assert_eq!(receiver.device_handle(), None);
        let mut source: Vec<u8> = (0..1000_u32).map(|n| (n % 251) as u8).collect();
        let mut target = vec![0_u8; 4000];
        // SAFETY: both vectors outlive the comms.
        let (from, to) = unsafe {
            (
                sender
                    .register(source.as_mut_ptr(), source.len(), MemoryType::Host)
                    .unwrap(),
                receiver
                    .register(target.as_mut_ptr(), target.len(), MemoryType::Host)
                    .unwrap(),
            )
        };
        for n in 0..4 {
            let outcome = sender.isend(&from, n, 1000 - n, 1).unwrap();
            assert!(matches!(outcome, PostOutcome::Posted(ticket) if ticket.0 == n as u64));
            let outcome = receiver.irecv(&to, n * 1000, 1000, 1).unwrap();
            assert!(matches!(outcome, PostOutcome::Posted(_)));
        }
        // The plugin holds four, and says "not now" with a NULL request.
        assert_eq!(sender.isend(&from, 0, 1, 1).unwrap(), PostOutcome::Full);
        assert_eq!(receiver.irecv(&to, 0, 1, 1).unwrap(), PostOutcome::Full);
        for n in 0..4 {
            let done = receiver.test_head().unwrap().unwrap();
            assert_eq!((done.ticket.0, done.bytes), (n as u64, Some(1000 - n)));
            assert!(sender.test_head().unwrap().is_some());
        }
        assert_eq!(receiver.test_head().unwrap(), None);
        // A registration ends before its comm or with it, whichever the host chooses.
        drop(from);
        receiver.close().unwrap();
        drop(to);
        drop(sender);
        for n in 0..4 {
            assert_eq!(target[n * 1000..n * 1000 + 1000 - n], source[n..]);
        }
    }
}

#[test]
fn an_observer_hears_of_every_call_but_not_of_empty_tests() {
    static HEARD: Mutex<Vec<CallReport>> = Mutex::new(Vec::new());
    let options = LoadOptions::new("in memory")
        .with_observer(|report: &CallReport| HEARD.lock().unwrap().push(*report));
    let plugin = load::<Loopback>(AbiVersion::V6, options);
    plugin.init().unwrap();
    let (sender, mut receiver) = pair(&plugin);
    let mut bytes = [0_u8; 8];
    // SAFETY: the array outlives the comm.
    let memory = unsafe { receiver.register(bytes.as_mut_ptr(), 8, MemoryType::Host) }.unwrap();
    let _ = receiver.irecv(&memory, 0, 8, 0).unwrap();
    for _ in 0..100 {
        assert_eq!(receiver.test_head().unwrap(), None);
    }
    // SAFETY: never accessed: the plugin refuses the kind.
    let refused = unsafe { receiver.register(bytes.as_mut_ptr(), 8, MemoryType::Cuda) };
    assert!(refused.is_err());
    drop((receiver, sender));
    let heard = HEARD.lock().unwrap();
    let names: Vec<&str> = heard.iter().map(|report| report.call).collect();
    assert_eq!(
        names,
        [
            "init",
            "devices",
            "getProperties",
            "listen",
            "accept",
            "connect",
            "connect",
            "connect",
            "accept",
            "closeListen",
            "regMr",
            "irecv",
            "regMr",
            "closeRecv",
            "closeSend",
        ]
    );
    let failed: Vec<_> = heard
        .iter()
        .filter(|report| report.rc != ResultCode::Success)
        .collect();
    assert_eq!(failed.len(), 1);
    assert_eq!(
        (failed[0].call, failed[0].rc),
        ("regMr", ResultCode::InternalError)
    );
}

#[test]
fn misuse_is_refused_before_it_reaches_the_plugin() {
    let plugin = plugin(AbiVersion::V7);
    plugin.init().unwrap();
    let (mut sender, mut receiver) = pair(&plugin);
    let mut bytes = vec![0_u8; 64];
    // SAFETY: the vector outlives the comms.
    let (from, to) = unsafe {
        (
            sender
                .register(bytes.as_mut_ptr(), 64, MemoryType::Host)
                .unwrap(),
            receiver
                .register(bytes.as_mut_ptr(), 64, MemoryType::Host)
                .unwrap(),
        )
    };
    assert_eq!(
        sender.isend(&to, 0, 1, 0).unwrap_err(),
        HostError::ForeignMemory
    );
    for (offset, len) in [(0, 65), (64, 1), (usize::MAX, 2)] {
        assert!(matches!(
            sender.isend(&from, offset, len, 0).unwrap_err(),
            HostError::OutOfRange { registered: 64, .. }
        ));
    }
    assert!(matches!(
        receiver.irecv(&to, 0, usize::MAX, 0).unwrap_err(),
        HostError::TooLarge { .. }
    ));
    let posts = (0..20).map(|_| sender.isend(&from, 64, 0, 0).unwrap());
    let posted = posts.filter(|post| *post != PostOutcome::Full).count();
    assert!((1..=16).contains(&posted), "{posted}");
    // SAFETY: never accessed: the plugin refuses the kind.
    let error = unsafe { receiver.register(bytes.as_mut_ptr(), 64, MemoryType::Cuda) };
    let HostError::Call(CallError { call, rc, hint }) = error.unwrap_err() else {
        panic!("expected the plugin's refusal");
    };
    assert_eq!((call, rc), ("regMr", ResultCode::InternalError));
    assert!(hint.contains("4096"));
}

#[test]
fn a_handle_of_a_peer_never_reaches_another_connect() {
    let plugin = plugin(AbiVersion::V8);
    plugin.init().unwrap();
    let mut hostile = [0xFF; 128];
    hostile[..8].copy_from_slice(&1_u64.to_ne_bytes());
    let mut connecting = plugin.connect(0, Handle128(hostile)).unwrap();
    let HostError::Call(error) = connecting.poll().unwrap_err() else {
        panic!("expected the plugin's refusal");
    };
    assert_eq!(error.rc, ResultCode::InvalidArgument);
}

#[test]
fn a_plugin_panic_is_an_internal_error() {
    let plugin = plugin(AbiVersion::V9);
    plugin.init().unwrap();
    let (mut sender, _receiver) = pair(&plugin);
    let mut bytes = vec![0_u8; 8];
    // SAFETY: the vector outlives the comm.
    let memory = unsafe { sender.register(bytes.as_mut_ptr(), 8, MemoryType::Host) }.unwrap();
    let HostError::Call(error) = sender.isend(&memory, 0, 8, TAG_THAT_PANICS).unwrap_err() else {
        panic!("expected an error of the call");
    };
    assert_eq!(error.rc, ResultCode::InternalError);
    assert!(matches!(
        sender.isend(&memory, 0, 8, 1).unwrap(),
        PostOutcome::Posted(_)
    ));
}

#[test]
fn null_and_foreign_pointers_are_not_followed() {
    let table = <NetV7 as Export<Loopback>>::TABLE;
    let invalid = ResultCode::InvalidArgument.to_raw();
    let mut foreign = [0_u64; 64];
    let foreign: *mut c_void = foreign.as_mut_ptr().cast();
    let mut out = ptr::null_mut();
    let (mut done, mut size) = (7, 7);
    // SAFETY: NULL, or readable memory that is no comm and no request: what the checks are for.
    unsafe {
        assert_eq!(table.init.unwrap()(None), 0);
        assert_eq!(table.init.unwrap()(None), 0);
        assert_eq!(table.devices.unwrap()(ptr::null_mut()), invalid);
        assert_eq!(table.get_properties.unwrap()(-1, ptr::null_mut()), invalid);
        assert_eq!(table.get_properties.unwrap()(0, ptr::null_mut()), invalid);
        assert_eq!(
            table.listen.unwrap()(0, ptr::null_mut(), &raw mut out),
            invalid
        );
        assert_eq!(table.listen.unwrap()(0, foreign, ptr::null_mut()), invalid);
        for comm in [ptr::null_mut(), foreign] {
            out = ptr::without_provenance_mut(1);
            let rc = table.isend.unwrap()(comm, ptr::null_mut(), 0, 0, foreign, &raw mut out);
            assert_eq!((rc, out), (invalid, ptr::null_mut()));
            assert_eq!(table.close_send.unwrap()(comm), invalid);
            assert_eq!(table.dereg_mr.unwrap()(comm, foreign), invalid);
            let rc = table.accept.unwrap()(comm, &raw mut out, ptr::null_mut());
            assert_eq!(rc, invalid);
            let rc = table.test.unwrap()(comm, &raw mut done, &raw mut size);
            assert_eq!((rc, done, size), (invalid, 0, 7));
        }
        assert!(table.irecv_consumed.is_none() && table.get_device_mr.is_none());
    }
}

#[test]
fn comms_can_move_to_other_threads() {
    fn sendable<T: Send>() {}
    fn shareable<T: Send + Sync>() {}
    sendable::<SendComm>();
    sendable::<RecvComm>();
    sendable::<crate::Connecting>();
    sendable::<crate::Accepting>();
    shareable::<Plugin>();
    shareable::<crate::MemoryHandle>();
}

#[test]
fn the_last_share_of_a_plugin_finalizes_it() {
    for (version, finalizes) in [(AbiVersion::V10, 0), (AbiVersion::V12, 1)] {
        static CALLS: Mutex<usize> = Mutex::new(0);
        *CALLS.lock().unwrap() = 0;
        let options = LoadOptions::new("in memory").with_observer(|report: &CallReport| {
            let ended = report.call == "finalize" && report.rc == ResultCode::Success;
            *CALLS.lock().unwrap() += usize::from(ended);
        });
        drop(load::<Loopback>(version, options.clone()));
        let plugin = load::<Loopback>(version, options);
        plugin.init().unwrap();
        let comms = pair(&plugin);
        drop(plugin);
        assert_eq!(*CALLS.lock().unwrap(), 0);
        drop(comms);
        assert_eq!(*CALLS.lock().unwrap(), finalizes);
    }
}
