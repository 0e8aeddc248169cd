/* CRC32C of device memory: one sum a block, put together by the host. */
#include "crc32c_lane.h"
#include "signal_completion.h"

/* Fills the tables, once; a launch of one block. */
extern "C" __global__ void __launch_bounds__(TCPX_CRC_THREADS)
tcpx_crc32c_prepare(tcpx_crc_tables *tables) {
    tcpx_crc_prepare(threadIdx.x, tables);
}

/*
 * Blocks of `rows` rows lie back to back and end at the aligned address `blocks_end`, so that all but the
 * first, which may begin before `start`, are full. `sums` has one place a block.
 */
extern "C" __global__ void __launch_bounds__(TCPX_CRC_THREADS)
tcpx_crc32c(const tcpx_crc_tables *tables, tcpx_u64 blocks_end, tcpx_u32 rows, tcpx_u64 start,
            tcpx_u64 end, tcpx_u32 *sums, tcpx_u32 *ended, volatile tcpx_u32 *flag, tcpx_u32 value) {
    __shared__ tcpx_u32 row[1024];
    __shared__ tcpx_u32 sum;
    tcpx_u32 index, mine, step;
    tcpx_u64 block = blocks_end - (tcpx_u64)(gridDim.x - blockIdx.x) * rows * TCPX_CRC_ROW;
    for (index = threadIdx.x; index < 1024u; index += TCPX_CRC_THREADS) {
        row[index] = ((const tcpx_u32 *)tables->row)[index];
    }
    if (threadIdx.x == 0) {
        sum = 0;
    }
    __syncthreads();
    mine = tcpx_crc_lane(threadIdx.x, row, tables->place, block,
                         block + (tcpx_u64)rows * TCPX_CRC_ROW, start, end);
    for (step = 16; step > 0; step /= 2) {
        mine ^= __shfl_xor_sync(~0u, mine, step);
    }
    if (threadIdx.x % 32u == 0) {
        atomicXor(&sum, mine);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
        if (ended != 0) {
            tcpx_signal_completion(ended, flag, value);
        }
    }
}
