/* Layouts of the ncclNet v7 ABI and of the real plugin's requests: all that a host may look at. */
#ifndef TCPX_DOUBLE_LAYOUTS_H
#define TCPX_DOUBLE_LAYOUTS_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { OK = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3 };
enum { PTR_HOST = 1, PTR_CUDA = 2 };
enum { LEVEL_WARN = 2, LEVEL_INFO = 3, SUBSYSTEM_NET = 16 };
enum { DEVICE_UNPACK = 1, UNPACK_VERSION = 7 };

#define SLOTS 16            /* requests of a comm, and slots of its queue */
#define ENTRIES 2048        /* fragments of a slot */
#define PAGE 4096u
#define MAX_QUEUED (4u << 20) /* bytes of one receive through the queue */
#define DEFAULT_POOL (2u << 20)
#define PROGRESS_BYTES (8u << 20) /* most bytes moved by one call of test */

struct load_meta {
    uint32_t src_off;
    uint32_t len;
    uint64_t dst_off;
} __attribute__((aligned(16)));

struct unpack_meta {
    struct load_meta mem[SLOTS][ENTRIES];
    uint64_t cnt[SLOTS];
};

struct unpack_device_handle {
    struct unpack_meta *meta;
    void *bounce_buf;
    uint64_t head;
};

struct unpack_slot {
    bool active;
    uint64_t idx;
    struct load_meta *mem;
    uint64_t *cnt;
    uint64_t cnt_cache;
    size_t *fds_cnt;
    size_t *pgtok_cnts;
    int *fds;
    void *pgtoks;
};

struct request {
    void *comm;
    void *data;
    int op;
    int mem_type;
    int next_sock_id;
    int next_size;
    int offset;
    int size;
    int size_pending;
    int gpu_mem_fd;
    int gpu_mem_off;
    struct unpack_slot unpack_slot;
};

struct device_handle {
    int type;
    int version;
    void *handle;
    size_t size;
    int needs_proxy_progress;
};

_Static_assert(sizeof(struct load_meta) == 16, "load_meta");
_Static_assert(sizeof(struct unpack_meta) == 524416, "unpack_meta");
_Static_assert(offsetof(struct unpack_meta, cnt) == 524288, "unpack_meta.cnt");
_Static_assert(sizeof(struct unpack_device_handle) == 24, "unpack_device_handle");
_Static_assert(sizeof(struct unpack_slot) == 72, "unpack_slot");
_Static_assert(offsetof(struct unpack_slot, idx) == 8, "unpack_slot.idx");
_Static_assert(offsetof(struct unpack_slot, mem) == 16, "unpack_slot.mem");
_Static_assert(offsetof(struct unpack_slot, cnt) == 24, "unpack_slot.cnt");
_Static_assert(offsetof(struct unpack_slot, cnt_cache) == 32, "unpack_slot.cnt_cache");
_Static_assert(offsetof(struct unpack_slot, pgtoks) == 64, "unpack_slot.pgtoks");
_Static_assert(sizeof(struct request) == 128, "request");
_Static_assert(offsetof(struct request, op) == 16, "request.op");
_Static_assert(offsetof(struct request, size) == 36, "request.size");
_Static_assert(offsetof(struct request, unpack_slot) == 56, "request.unpack_slot");
_Static_assert(sizeof(struct device_handle) == 32, "device_handle");

struct properties {
    const char *name;
    const char *pci_path;
    uint64_t guid;
    int ptr_support;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    int device_type;
    int device_version;
};
_Static_assert(sizeof(struct properties) == 56, "properties v7");

/* The 128 bytes between listen and connect; 88 of them are in use. */
struct wire_handle {
    struct sockaddr_in address;
    char unused[64];
    struct connect_state *connect; /* of the process that connects: written into its copy */
};
_Static_assert(offsetof(struct wire_handle, connect) == 80, "handle.connect");
_Static_assert(sizeof(struct wire_handle) == 88, "handle");

#endif
