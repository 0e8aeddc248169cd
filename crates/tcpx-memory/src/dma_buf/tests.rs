use std::io::Write as _;
use std::os::fd::AsRawFd;

use super::*;

#[test]
fn gpu_memory_is_exported_in_whole_granules() {
    let gpu = Gpu::fake();
    let buffer = DmaBuf::cuda(&gpu, 1).unwrap();
    assert_eq!((buffer.len(), buffer.kind()), (2 << 20, gpu.kind()));
    assert!(buffer.as_fd().as_raw_fd() >= 0);
    assert_eq!(buffer.bounce_pool().unwrap().kind(), gpu.kind());
}

#[test]
fn parts_of_pages_and_host_memory_are_refused() {
    let refused = DmaBuf::export(&Region::cuda(&Gpu::fake(), 100).unwrap()).unwrap_err();
    assert!(
        matches!(refused, DmaBufError::NotWholePages { len: 100, .. }),
        "{refused}"
    );
    let refused = DmaBuf::export(&Region::host(4096).unwrap()).unwrap_err();
    assert_eq!(
        refused,
        DmaBufError::NotExportable {
            kind: MemoryKind::Host
        }
    );
}

#[test]
fn host_memory_is_one_pool_that_the_cpu_reads() {
    let buffer = match DmaBuf::host(10_000) {
        Ok(buffer) => buffer,
        Err(DmaBufError::NoUdmabuf { why }) => {
            let _ = writeln!(
                std::io::stderr(),
                "skipped: host_memory_is_one_pool_that_the_cpu_reads: no /dev/udmabuf here: {why}"
            );
            return;
        }
        Err(other) => panic!("{other}"),
    };
    assert_eq!(buffer.len() % 4096, 0);
    assert!(buffer.len() >= 10_000);
    buffer.region().write_from(9_999, &[7]).unwrap();
    let slice = buffer.region().slice(4096..5000).unwrap();
    assert_eq!(buffer.offset_of(&slice), Some(4096));
    assert_eq!(buffer.offset_of(&Region::host(1).unwrap().all()), None);
    let pool = buffer.bounce_pool().unwrap();
    assert!(matches!(
        buffer.bounce_pool(),
        Err(MemoryError::Busy { .. })
    ));
    drop(buffer);
    let mut back = [0];
    pool.slice()
        .slice(9_999..10_000)
        .unwrap()
        .read_to(&mut back)
        .unwrap();
    assert_eq!(back, [7]);
}

#[test]
fn more_host_memory_than_allowed_says_what_is() {
    match DmaBuf::host(usize::MAX) {
        Err(DmaBufError::NoUdmabuf { .. } | DmaBufError::Host { .. }) => {}
        other => panic!("{other:?}"),
    }
}
