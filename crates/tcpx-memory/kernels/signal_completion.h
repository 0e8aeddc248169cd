/* How a launch signals to the host that all its blocks have ended. */
#ifndef TCPX_SIGNAL_COMPLETION_H
#define TCPX_SIGNAL_COMPLETION_H

#include "unpack_lane.h"

/*
 * Called by one thread of each block, behind a barrier of the block. `ended` counts blocks and is zero
 * before and after; `flag`, in mapped host memory, becomes `value` once what all blocks have stored is
 * visible to everyone.
 *
 * Each block releases its stores to the GPU and the last one, which has seen all counts, releases them
 * to the system. Fences that also order all fences among each other cost more and are not needed.
 */
TCPX_INLINE void tcpx_signal_completion(tcpx_u32 *ended, volatile tcpx_u32 *flag, tcpx_u32 value) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    if (atomicAdd(ended, 1u) == gridDim.x - 1u) {
        *ended = 0;
        asm volatile("fence.acq_rel.sys;" ::: "memory");
        asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
    }
}

#endif
