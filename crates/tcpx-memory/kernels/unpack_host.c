/* The unpack kernel on the CPU: every part of a fragment, and every lane of a warp, in turn. */
#include <stddef.h>

#include "unpack_lane.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the shifted copy is written for little-endian machines"
#endif

/* As wide as a warp, so that the CPU walks the very same paths as a GPU. */
#define TCPX_LANES 32u

void tcpx_unpack_host(const tcpx_descriptor *descriptors, size_t count, const tcpx_u8 *pool,
                      tcpx_u8 *destination, tcpx_u32 batch, tcpx_u32 split) {
    size_t index;
    tcpx_u32 lane, part;
    for (index = 0; index < count; index++) {
        const tcpx_descriptor *one = &descriptors[index];
        for (part = 0; part < 1u << split; part++) {
            for (lane = 0; lane < TCPX_LANES; lane++) {
                tcpx_unpack_part(lane, TCPX_LANES, batch, part, split, pool + one->source,
                                 destination + one->destination, one->length);
            }
        }
    }
}
