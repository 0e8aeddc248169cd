/* The checksum kernel's threads on the CPU, one after the other. */
#include "crc32c_lane.h"

tcpx_u32 tcpx_crc32c_host(const tcpx_crc_tables *tables, tcpx_address block, tcpx_address block_end,
                          tcpx_address start, tcpx_address end) {
    tcpx_u32 thread, sum = 0;
    for (thread = 0; thread < TCPX_CRC_THREADS; thread++) {
        sum ^= tcpx_crc_lane(thread, &tables->row[0][0], tables->place, block, block_end, start, end);
    }
    return sum;
}

void tcpx_crc32c_prepare_host(tcpx_crc_tables *tables) {
    tcpx_u32 thread;
    for (thread = 0; thread < TCPX_CRC_THREADS; thread++) {
        tcpx_crc_prepare(thread, tables);
    }
}
