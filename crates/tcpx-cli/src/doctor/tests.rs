//! Each check on a host that is well and on one with its fault.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use nccl_net::AbiVersion;
use rustix::process::Rlimit;

use super::*;
use crate::host::tests::{FakeHost, no_driver};
use crate::plugin_file::contents::{Contents, ExportedTable, PluginKind};

const PLUGIN: &str = "/usr/local/tcpx/lib64/libnccl-net-tcpx.so";
const GPUS: [&str; 2] = ["0000:04:00.0", "0000:05:00.0"];

/// An A3 host on which everything works.
fn healthy() -> FakeHost {
    let mut host = FakeHost::a3();
    for (index, interface) in host.interfaces.iter_mut().enumerate().take(5) {
        interface.pci_path = vec![format!("0000:0{index}:00.0")];
    }
    host.file("/proc/sys/kernel/osrelease", "6.6.1-gke\n");
    host.mounted("/", true);
    host.contents.insert(PLUGIN.into(), google());
    for name in ["rx_rule_manager", "rx_rule_uninstall"] {
        socket(&mut host, name, true);
    }
    for gpu in GPUS {
        socket(&mut host, &format!("get_gpu_fd_{gpu}"), true);
    }
    host
}

fn google() -> Contents {
    Contents {
        kind: PluginKind::Google,
        tables: vec![ExportedTable {
            version: AbiVersion::V7,
            name: Some("GPUDirectTCPX_v7".into()),
        }],
        build_id: None,
    }
}

fn socket(host: &mut FakeHost, name: &str, listens: bool) {
    host.sockets
        .insert(Path::new("/run/tcpx").join(name), listens);
}

/// The ids of checks that find trouble.
fn troubles(host: &FakeHost) -> Vec<&'static str> {
    let context = Context::new(host, Some(PLUGIN.into()));
    let found = findings(&context);
    let troubles = found.iter().filter(|(_, finding)| finding.is_trouble());
    troubles.map(|(check, _)| check.id).collect()
}

fn finding(host: &FakeHost, id: &str) -> Finding {
    let check = catalogue::find(id).expect("a check");
    let context = Context::new(host, Some(PLUGIN.into()));
    check.measure.expect("it measures")(&context)
}

/// Has `fault` change a healthy host; check `id` alone must find it, and say `words`.
#[track_caller]
fn assert_finds(id: &str, verdict: Verdict, words: &str, fault: impl FnOnce(&mut FakeHost)) {
    let mut host = healthy();
    fault(&mut host);
    assert_eq!(troubles(&host), [id]);
    let found = finding(&host, id);
    assert_eq!(found.verdict, verdict, "{found:?}");
    assert!(found.measured.contains(words), "no `{words}` in {found:?}");
}

#[test]
fn a_healthy_host_has_no_trouble_and_no_error_check_blames_it() {
    let host = healthy();
    assert_eq!(troubles(&host), Vec::<&str>::new());
    for check in CATALOGUE
        .iter()
        .filter(|check| check.subject == Subject::Error)
    {
        if check.measure.is_some() {
            assert!(!finding(&host, check.id).is_trouble(), "{}", check.id);
        }
    }
}

#[test]
fn a_laptop_without_gpu_and_plugin_has_no_trouble() {
    let mut host = FakeHost::default();
    host.interface(
        "wlan0",
        tcpx_net::interfaces::InterfaceKind::Physical,
        "192.168.1.5",
    );
    host.file("/proc/sys/kernel/osrelease", "6.12.3\n");
    let found = findings(&Context::new(&host, None));
    assert!(found.len() > 10);
    assert!(
        found.iter().all(|(_, finding)| !finding.is_trouble()),
        "{found:?}"
    );
}

#[test]
fn ids_are_in_order_unique_and_found_in_any_writing() {
    let ids: Vec<&str> = CATALOGUE.iter().map(|check| check.id).collect();
    let unique: BTreeSet<&str> = ids.iter().copied().collect();
    assert_eq!(unique.into_iter().collect::<Vec<_>>(), ids);
    for id in ["TCPX-D012", "tcpx-d012", "d012", " D012 "] {
        assert_eq!(catalogue::find(id).map(|check| check.id), Some("TCPX-D012"));
    }
    assert!(catalogue::find("D999").is_none() && catalogue::find("").is_none());
}

#[test]
fn no_reachable_interface_blocks() {
    let mut host = FakeHost::default();
    host.interface(
        "lo",
        tcpx_net::interfaces::InterfaceKind::Loopback,
        "127.0.0.1",
    );
    let found = finding(&host, "D001");
    assert_eq!(found.verdict, Verdict::Blocks);
    assert!(found.measured.contains("lo"), "{found:?}");
    let mut routed = FakeHost::default();
    routed.interface(
        "eth0",
        tcpx_net::interfaces::InterfaceKind::Physical,
        "fe80::7",
    );
    let kind = tcpx_net::interfaces::InterfaceKind::Loopback;
    routed.interface("lo", kind, "10.255.0.1");
    assert_eq!(finding(&routed, "D001").verdict, Verdict::Fine);
    host.interface(
        "docker0",
        tcpx_net::interfaces::InterfaceKind::Bridge,
        "172.17.0.1",
    );
    assert_eq!(finding(&host, "D001").verdict, Verdict::Warning);
    for segment in ["fe80::7", "169.254.7.7"] {
        let mut host = FakeHost::default();
        let card = tcpx_net::interfaces::InterfaceKind::Physical;
        host.interface("eth0", card, segment);
        assert_eq!(finding(&host, "D001").verdict, Verdict::Blocks, "{segment}");
        host.interface("eth1", card, "fd00::1");
        let found = finding(&host, "D001");
        assert_eq!(found.measured, "eth1 up with an address");
    }
}

#[test]
fn a_small_limit_is_warned_of_and_raised_if_allowed() {
    let mut host = healthy();
    let bounds = Rlimit {
        current: Some(256),
        maximum: Some(4096),
    };
    assert_finds("TCPX-D003", Verdict::Warning, "256", |host| {
        host.open_files = bounds;
    });
    host.open_files = bounds;
    let fix = finding(&host, "D003").fix.expect("an exact fix");
    assert!(fix.contains("ulimit -n 4096"), "{fix}");
}

#[test]
fn unknown_kernels_are_warned_of() {
    assert_finds("TCPX-D004", Verdict::Warning, "not understood", |host| {
        host.file("/proc/sys/kernel/osrelease", "garbage");
    });
    let mut host = healthy();
    host.file("/proc/sys/kernel/osrelease", "6.12.0");
    assert!(finding(&host, "D004").measured.contains("device memory"));
}

#[test]
fn a_missing_driver_blocks_google_s_plugin_and_nothing_else() {
    assert_finds(
        "TCPX-D005",
        Verdict::Blocks,
        "2 GPUs, but no driver",
        |host| {
            host.driver = no_driver();
        },
    );
    let mut host = healthy();
    host.driver = no_driver();
    host.contents.clear();
    assert_eq!(finding(&host, "D005").verdict, Verdict::Warning);
}

#[test]
fn a_plugin_file_that_is_not_there_blocks() {
    let mut host = healthy();
    host.contents.clear();
    assert_eq!(finding(&host, "D010").verdict, Verdict::Blocks);
    assert_eq!(
        troubles(&host),
        ["TCPX-D010"],
        "one fault is told once, with its own fix"
    );
    let nowhere = RealHost::default();
    let context = Context::new(&nowhere, Some("/nonexistent/x.so".into()));
    let error = context.contents.as_ref().expect("asked for").as_ref();
    let hint = error.expect_err("it is not there");
    let hint = crate::advice::of_contents(hint).hint;
    assert!(hint.contains("that is there"), "{hint}");
}

#[test]
fn a_file_on_a_noexec_mount_blocks_and_the_fix_names_both() {
    assert_finds("TCPX-D012", Verdict::Blocks, "/usr/local/tcpx", |host| {
        host.mounted("/usr/local/tcpx", false);
    });
    let mut host = healthy();
    host.mounts.clear();
    host.mounted("/", false);
    let fix = finding(&host, "D012").fix.expect("an exact fix");
    assert!(
        fix.contains(PLUGIN) && fix.contains("remount,exec '/'"),
        "{fix}"
    );
}

#[test]
fn our_own_file_of_another_build_is_warned_of() {
    assert_finds("TCPX-D013", Verdict::Warning, "other sources", |host| {
        let contents = Contents {
            kind: PluginKind::Ours,
            build_id: Some("tcpx-nccl 0.0.1 other sources".into()),
            ..google()
        };
        host.contents.insert(PLUGIN.into(), contents);
    });
}

#[test]
fn damaged_and_foreign_files_block_by_what_they_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("text.so");
    std::fs::write(&path, "text").expect("written");
    let host = RealHost::default();
    let context = Context::new(&host, Some(path));
    let id_of = |id: &str| {
        catalogue::find(id)
            .expect("a check")
            .measure
            .expect("measured")
    };
    assert_eq!(id_of("D011")(&context).verdict, Verdict::Blocks);
    assert_eq!(id_of("D010")(&context).verdict, Verdict::Fine);
    let old = tcpx_tests::bad_plugin::old().to_owned();
    let context = Context::new(&host, Some(old));
    assert_eq!(id_of("D011")(&context).verdict, Verdict::Fine);
    assert_eq!(id_of("D013")(&context).verdict, Verdict::Blocks);
}

#[test]
fn a_daemon_that_is_absent_blocks() {
    assert_finds("TCPX-D021", Verdict::Blocks, "connection refused", |host| {
        socket(host, "rx_rule_uninstall", false);
    });
    let mut host = healthy();
    host.sockets.clear();
    assert!(troubles(&host).contains(&"TCPX-D021"));
    let fix = finding(&host, "D021").fix.expect("an exact fix");
    assert!(
        fix.contains("tcpgpudmarxd") && fix.contains("/run/tcpx"),
        "{fix}"
    );
}

#[test]
fn a_gpu_without_its_socket_blocks_registration() {
    assert_finds("TCPX-D022", Verdict::Blocks, GPUS[1], |host| {
        let socket = format!("/run/tcpx/get_gpu_fd_{}", GPUS[1]);
        host.sockets.remove(&PathBuf::from(socket));
    });
    let mut host = healthy();
    host.sockets
        .remove(&PathBuf::from(format!("/run/tcpx/get_gpu_fd_{}", GPUS[0])));
    assert_eq!(finding(&host, "D030").verdict, Verdict::Blocks);
    assert!(finding(&healthy(), "D030").measured.contains("4096"));
}

#[test]
fn an_iommu_between_card_and_gpu_is_named_for_wrong_contents() {
    let mut host = healthy();
    host.file("/sys/class/iommu/dmar0", "");
    let found = finding(&host, "D035");
    assert_eq!(found.verdict, Verdict::Warning);
    assert!(found.measured.contains("1 IOMMU"), "{found:?}");
}
