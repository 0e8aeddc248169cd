//! GPU memory through the embedded network. Without a GPU these skip themselves.

use std::sync::Arc;

use tcpx_lanes::sealing::Protection;
use tcpx_memory::{CopyWorker, Gpu, Region};
use tcpx_net::ChannelError;

use crate::support::*;

fn gpu(test: &str) -> Option<(Gpu, Arc<CopyWorker>)> {
    let opened = Gpu::open(0);
    match opened {
        Ok(gpu) => {
            let worker = CopyWorker::for_gpu(&gpu).unwrap();
            Some((gpu, worker))
        }
        Err(error) => {
            eprintln!("skipped: {test}: {error}");
            None
        }
    }
}

#[test]
fn gpu_memory_arrives_whole_at_any_alignment() {
    let Some((gpu, worker)) = gpu("gpu_memory_arrives_whole_at_any_alignment") else {
        return;
    };
    let workers = vec![worker];
    let make = |cuda: bool, length: usize| {
        if cuda {
            Region::cuda(&gpu, length)
        } else {
            Region::host(length)
        }
        .unwrap()
    };
    let plain = Protection::Headers;
    let cases = [
        (true, true, plain),
        (true, false, plain),
        (false, true, plain),
        (true, true, Protection::All),
        (false, true, Protection::All),
    ];
    for (from_gpu, to_gpu, protection) in cases {
        let mut pair = pair_with(
            3,
            options(false),
            options(false),
            workers.clone(),
            protection,
        );
        let length = (1 << 20) - 3;
        let count = 150;
        let (mut next_send, mut next_receive) = (0, 0);
        let source = make(from_gpu, 64 * length + 1);
        let destination = make(to_gpu, count * length + 1);
        let pieces: Vec<u8> = (0..64 * length + 1).map(|at| pattern(9, at)).collect();
        source.write_from(0, &pieces).unwrap();
        let mut ended = Vec::new();
        // Each was sent, begun, placed, and its window closed.
        while ended.len() < 4 * count {
            if next_receive < count {
                let start = next_receive * length + 1;
                let slice = destination.slice(start..start + length).unwrap();
                open_window(&mut *pair.server, next_receive as u64, slice);
                next_receive += 1;
            }
            if next_send < next_receive {
                let start = next_send % 64 * length + 1;
                let slice = source.slice(start..start + length).unwrap();
                let posted = pair
                    .client
                    .post_send(send_chunk(next_send as u64, slice))
                    .unwrap();
                next_send += usize::from(matches!(posted, tcpx_net::PostAnswer::Accepted));
            }
            let before = ended.len();
            pair.client.poll(&mut ended).unwrap();
            let sent = ended.len();
            pair.server.poll(&mut ended).unwrap();
            for news in &ended[sent..] {
                if let tcpx_net::Completion::Placed { token, .. } = news {
                    pair.client.placed(token - 1000).unwrap();
                }
            }
            if before == ended.len() && next_send == count && next_receive == count {
                wait_any(&[&*pair.client, &*pair.server]);
            }
        }
        let mut arrived = vec![0; count * length + 1];
        destination.read_to(0, &mut arrived).unwrap();
        for chunk in 0..count {
            let expected = &pieces[chunk % 64 * length + 1..][..length];
            let got = &arrived[chunk * length + 1..][..length];
            assert!(
                expected == got,
                "chunk {chunk}, from GPU: {from_gpu}, to GPU: {to_gpu}"
            );
        }
        assert!(close(&mut *pair.client).is_empty() && close(&mut *pair.server).is_empty());
    }
}

#[test]
fn gpu_memory_without_its_worker_is_refused() {
    let Some((gpu, _worker)) = gpu("gpu_memory_without_its_worker_is_refused") else {
        return;
    };
    let mut pair = pair(1, options(false), options(false));
    let slice = Region::cuda(&gpu, 100).unwrap().all();
    let error = pair.client.post_send(send_chunk(0, slice)).unwrap_err();
    assert!(
        matches!(error, ChannelError::BadRequest { .. }),
        "{error:?}"
    );
    assert!(error.to_string().contains("GPU 0"), "{error}");
}
