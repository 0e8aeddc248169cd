//! What is chosen on hosts of several kinds.

use std::path::PathBuf;

use tcpx_net::interfaces::InterfaceKind;

use super::settings::{
    CHUNK, CONTROL_INTERFACE, DATA_INTERFACES, DMA_BUF, ENABLE, GPU_CLIENT, NCCL_INTERFACE,
    SOCKET_FOLDER, STEERING, STEERING_WAIT, ZERO_COPY,
};
use super::*;
use crate::host::tests::FakeHost;

fn value(settings: &[Setting], name: &str) -> Option<String> {
    let found = settings.iter().find(|setting| setting.name == name)?;
    Some(found.value.clone())
}

fn socket(host: &mut FakeHost, path: &str) {
    host.sockets.insert(PathBuf::from(path), true);
}

#[test]
fn an_a3_hosts_default_route_is_for_control_alone() {
    let mut host = FakeHost::a3();
    socket(&mut host, "/run/tcpx/rx_rule_manager");
    socket(&mut host, "/run/tcpx/get_gpu_fd_0000:04:00.0");
    let settings = for_google(&host);
    let value = |name| value(&settings, name).unwrap_or_default();
    assert_eq!(value(DATA_INTERFACES), "eth1,eth2,eth3,eth4");
    assert_eq!(value(CONTROL_INTERFACE), "eth0");
    assert_eq!(value(NCCL_INTERFACE), "eth0");
    assert_eq!(value(SOCKET_FOLDER), "/run/tcpx");
    assert_eq!(value(GPU_CLIENT), "1");
    assert_eq!(value(CHUNK), "524288");
    assert_ne!(value(STEERING_WAIT), "0");
    assert!(settings.iter().all(|setting| setting.trouble.is_none()));
}

#[test]
fn sends_avoid_copies_only_where_a_card_carries_them() {
    let zero_copy = |host: &FakeHost| value(&for_google(host), ZERO_COPY);
    let mut host = FakeHost::a3();
    assert_eq!(zero_copy(&host).as_deref(), Some("4096"));
    host.set(DATA_INTERFACES, "lo");
    assert_eq!(zero_copy(&host).as_deref(), Some("0"));
    host.set(ZERO_COPY, "8192");
    assert_eq!(zero_copy(&host).as_deref(), Some("8192"));
    let mut host = FakeHost::default();
    host.interface("lo", InterfaceKind::Loopback, "127.0.0.1");
    assert_eq!(zero_copy(&host).as_deref(), Some("0"));
}

#[test]
fn other_cards_are_left_alone_where_google_s_are() {
    let mut host = FakeHost::a3();
    host.interface("ens9", InterfaceKind::Physical, "192.168.0.9");
    let settings = for_google(&host);
    assert_eq!(
        value(&settings, DATA_INTERFACES).as_deref(),
        Some("eth1,eth2,eth3,eth4")
    );
}

#[test]
fn a_name_that_begins_another_asks_for_whole_names() {
    let mut host = FakeHost::default();
    host.interface("eth1", InterfaceKind::Physical, "10.0.0.1");
    host.interface("eth10", InterfaceKind::Physical, "fe80::1");
    let settings = for_google(&host);
    assert_eq!(value(&settings, DATA_INTERFACES).as_deref(), Some("=eth1"));
}

#[test]
fn one_card_serves_both_and_no_control_interface_is_set() {
    let mut host = FakeHost::default();
    host.interface("ens5", InterfaceKind::Physical, "10.1.0.4");
    host.interface("docker0", InterfaceKind::Bridge, "172.17.0.1");
    host.interface("lo", InterfaceKind::Loopback, "127.0.0.1");
    let settings = for_google(&host);
    assert_eq!(value(&settings, DATA_INTERFACES).as_deref(), Some("ens5"));
    assert_eq!(value(&settings, NCCL_INTERFACE).as_deref(), Some("ens5"));
    assert_eq!(value(&settings, CONTROL_INTERFACE), None);
}

#[test]
fn container_interfaces_serve_then_loopback() {
    let mut host = FakeHost::default();
    host.interface("lo", InterfaceKind::Loopback, "127.0.0.1");
    assert_eq!(
        value(&for_google(&host), DATA_INTERFACES).as_deref(),
        Some("lo")
    );
    host.interface("eth0", InterfaceKind::Veth, "10.4.0.7");
    assert_eq!(
        value(&for_google(&host), DATA_INTERFACES).as_deref(),
        Some("eth0")
    );
    host.interfaces.clear();
    assert_eq!(value(&for_google(&host), DATA_INTERFACES), None);
}

#[test]
fn interfaces_that_are_down_or_have_no_address_are_not_chosen() {
    let mut host = FakeHost::a3();
    host.interfaces[2].up = false;
    host.interfaces[3].addresses.clear();
    host.interfaces[4].addresses = vec!["169.254.1.1".parse().expect("an address")];
    assert_eq!(
        value(&for_google(&host), DATA_INTERFACES).as_deref(),
        Some("eth1")
    );
}

#[test]
fn absent_sockets_are_not_asked_for_memory() {
    let mut host = FakeHost::a3();
    let settings = for_google(&host);
    assert_eq!(
        value(&settings, SOCKET_FOLDER).as_deref(),
        Some("/run/tcpx")
    );
    assert_eq!(value(&settings, GPU_CLIENT).as_deref(), Some("0"));
    socket(&mut host, "/tmp/get_gpu_fd_0000:04:00.0");
    let settings = for_google(&host);
    assert_eq!(value(&settings, SOCKET_FOLDER).as_deref(), Some("/tmp"));
    assert_eq!(value(&settings, GPU_CLIENT).as_deref(), Some("1"));
    host.set(SOCKET_FOLDER, "/elsewhere");
    assert_eq!(value(&for_google(&host), GPU_CLIENT).as_deref(), Some("0"));
}

#[test]
fn what_the_person_has_set_stays_and_is_named_as_theirs() {
    let mut host = FakeHost::a3();
    host.set(DATA_INTERFACES, "eth2");
    host.set(CHUNK, "131072");
    let settings = for_google(&host);
    for (name, expected) in [(DATA_INTERFACES, "eth2"), (CHUNK, "131072")] {
        let setting = settings.iter().find(|setting| setting.name == name);
        let setting = setting.expect("reported");
        assert_eq!(setting.value, expected);
        assert_eq!(setting.origin, Origin::Yours);
        assert_eq!(setting.trouble, None);
    }
}

#[test]
fn values_that_stop_the_plugin_are_reported_and_kept() {
    let mut host = FakeHost::a3();
    for (name, bad) in [
        (DATA_INTERFACES, "eth9"),
        (CHUNK, "0"),
        (STEERING_WAIT, "0"),
        (STEERING, "2"),
        (ENABLE, "0"),
        (DMA_BUF, "0"),
        // No socket of the daemon is there.
        (GPU_CLIENT, "1"),
    ] {
        host.set(name, bad);
        let settings = for_google(&host);
        let setting = settings.iter().find(|setting| setting.name == name);
        let setting = setting.unwrap_or_else(|| panic!("{name} is not reported"));
        assert_eq!(setting.value, bad);
        assert!(setting.trouble.is_some(), "{name}={bad}");
        host.variables.clear();
    }
    for (name, good) in [
        (DATA_INTERFACES, "^lo"),
        (DATA_INTERFACES, "=eth1"),
        (STEERING, "3"),
        (GPU_CLIENT, "0"),
    ] {
        assert_eq!(trouble(&host, name, good), None, "{name}={good}");
    }
}
