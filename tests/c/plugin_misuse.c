/* Every wrong use of tcpx_plugin.h that can be detected, against the double of Google's plugin: each gives
 * a code and a text, and what was right before still works after it.
 *
 *   plugin_misuse PLUGIN
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tcpx_plugin.h"

#define FINE TCPX_SUCCESS
#define WORDS tcpx_last_error
#include "check.h"

#define BYTES 4096
#define LIMIT_MS 20000u

/* The call fails with this code and says this. */
#define FAILS(code, part, call)                                                                    \
    do {                                                                                           \
        int rc = (call);                                                                           \
        if (rc != (code) || !strstr(tcpx_last_error(), part)) {                                    \
            fprintf(stderr, "%d: %s: returned %d, said \"%s\"; expected %d and \"%s\"\n",          \
                    __LINE__, #call, rc, tcpx_last_error(), code, part);                           \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

struct pair {
    tcpx_listen_comm *listener;
    tcpx_send_comm *sender;
    tcpx_recv_comm *receiver;
    tcpx_memory *from, *to;
    unsigned char *source, *target;
};

static unsigned char *page(void)
{
    void *memory = NULL;
    HOLDS(posix_memalign(&memory, 4096, BYTES) == 0);
    memset(memory, 0xEE, BYTES);
    return memory;
}

static void pair_open(struct pair *pair, int type)
{
    tcpx_handle handle;
    void *device = NULL;
    memset(pair, 0, sizeof *pair);
    WORKS(tcpx_listen(0, &handle, &pair->listener));
    WORKS(tcpx_connect_v5(0, &handle, &pair->sender, NULL));
    while (!pair->receiver)
        WORKS(tcpx_accept_v5(pair->listener, &pair->receiver, &device));
    HOLDS(device && ((tcpx_device_handle *)device)->net_device_version == 7);
    pair->source = page();
    pair->target = page();
    WORKS(tcpx_reg_mr(pair->sender, pair->source, BYTES, type, &pair->from));
    WORKS(tcpx_reg_mr(pair->receiver, pair->target, BYTES, type, &pair->to));
}

static tcpx_request *send_piece(struct pair *pair, int offset, int size)
{
    tcpx_request *request;
    WORKS(tcpx_isend(pair->sender, pair->source + offset, size, 1, pair->from, &request));
    return request;
}

static tcpx_request *receive_piece(struct pair *pair, int offset, int size)
{
    void *data = pair->target + offset;
    int tag = 1;
    tcpx_request *request;
    WORKS(tcpx_irecv(pair->receiver, 1, &data, &size, &tag, &pair->to, &request));
    return request;
}

static void pair_close(struct pair *pair)
{
    WORKS(tcpx_close_send(pair->sender));
    WORKS(tcpx_close_recv(pair->receiver));
    WORKS(tcpx_close_listen(pair->listener));
    free(pair->source);
    free(pair->target);
}

static void before_loading(const char *plugin)
{
    tcpx_handle handle;
    tcpx_listen_comm *listener;
    tcpx_net_properties properties;
    HOLDS(*tcpx_last_error() == 0);
    FAILS(TCPX_NOT_LOADED, "tcpx_load_plugin", tcpx_listen(0, &handle, &listener));
    FAILS(TCPX_LOAD_FAILED, "UCCL_TCPX_PLUGIN_PATH", tcpx_load_plugin("/nonexistent/plugin.so"));
    FAILS(TCPX_LOAD_FAILED, "ncclNetPlugin_v12", tcpx_load_plugin("libc.so.6"));
    WORKS(tcpx_load_plugin(plugin));
    WORKS(tcpx_load_plugin(plugin));
    FAILS(TCPX_INVALID_USAGE, "one plugin", tcpx_load_plugin("/another.so"));
    HOLDS(tcpx_get_device_count() == 1);
    FAILS(TCPX_INVALID_ARGUMENT, "props is NULL", tcpx_get_properties(0, NULL));
    FAILS(TCPX_INVALID_ARGUMENT, "there are 1", tcpx_get_properties(1, &properties));
    FAILS(TCPX_INVALID_ARGUMENT, "counted from 0", tcpx_get_properties(-1, &properties));
    WORKS(tcpx_get_properties(0, &properties));
    HOLDS(!strcmp(properties.name, "lo") && !properties.pci_path);
}

static void setting_up(void)
{
    tcpx_handle handle;
    tcpx_listen_comm *listener;
    tcpx_send_comm *sender;
    tcpx_recv_comm *receiver = NULL;
    int somewhere = 0;
    FAILS(TCPX_INVALID_ARGUMENT, "handle is NULL", tcpx_listen(0, NULL, &listener));
    FAILS(TCPX_INVALID_ARGUMENT, "listen_comm is NULL", tcpx_listen(0, &handle, NULL));
    FAILS(TCPX_INVALID_ARGUMENT, "handle is NULL", tcpx_connect_v5(0, NULL, &sender, NULL));
    FAILS(TCPX_INVALID_ARGUMENT, "listen_comm is NULL", tcpx_accept_v5(NULL, &receiver, NULL));
    FAILS(TCPX_BAD_HANDLE, "did not give out",
          tcpx_accept_v5((tcpx_listen_comm *)&somewhere, &receiver, NULL));
    WORKS(tcpx_listen(0, &handle, &listener));

    /* One call connects to a peer that answers. */
    WORKS(tcpx_connect_v5(0, &handle, &sender, NULL));
    HOLDS(sender);
    WORKS(tcpx_close_send(sender));

    /* A peer whose backlog is full does not answer: its comm can be given up. The double's handles begin with its
     * address. */
    struct sockaddr_in full = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof full;
    int silent = socket(AF_INET, SOCK_STREAM, 0), first = socket(AF_INET, SOCK_STREAM, 0);
    HOLDS(!bind(silent, (struct sockaddr *)&full, len) && !listen(silent, 0));
    HOLDS(!getsockname(silent, (struct sockaddr *)&full, &len));
    HOLDS(!connect(first, (struct sockaddr *)&full, len));
    memcpy(&handle, &full, sizeof full);
    WORKS(tcpx_connect_v5(0, &handle, &sender, NULL));
    HOLDS(sender);
    WORKS(tcpx_close_send(sender));
    FAILS(TCPX_BAD_HANDLE, "has ended", tcpx_close_send(sender));
    close(first);
    close(silent);
    WORKS(tcpx_close_listen(listener));
    FAILS(TCPX_BAD_HANDLE, "has ended", tcpx_close_listen(listener));
    FAILS(TCPX_BAD_HANDLE, "has ended", tcpx_accept_v5(listener, &receiver, NULL));
    HOLDS(!receiver);
}

static void ending_twice(void)
{
    struct pair pair;
    tcpx_recv_comm *second = NULL;
    tcpx_request *request = NULL;
    pair_open(&pair, TCPX_PTR_HOST);
    FAILS(TCPX_INVALID_USAGE, "one connection", tcpx_accept_v5(pair.listener, &second, NULL));
    FAILS(TCPX_BAD_HANDLE, "is a send comm", tcpx_close_recv((tcpx_recv_comm *)pair.sender));
    FAILS(TCPX_BAD_HANDLE, "is registered memory", tcpx_close_send((tcpx_send_comm *)pair.from));
    WORKS(tcpx_dereg_mr(pair.sender, pair.from));
    FAILS(TCPX_BAD_HANDLE, "has ended", tcpx_dereg_mr(pair.sender, pair.from));
    FAILS(TCPX_BAD_HANDLE, "has ended",
          tcpx_isend(pair.sender, pair.source, 8, 0, pair.from, &request));
    FAILS(TCPX_INVALID_ARGUMENT, "another comm", tcpx_dereg_mr(pair.sender, pair.to));
    FAILS(TCPX_INVALID_ARGUMENT, "another comm",
          tcpx_isend(pair.sender, pair.target, 8, 0, pair.to, &request));
    WORKS(tcpx_reg_mr(pair.sender, pair.source, BYTES, TCPX_PTR_HOST, &pair.from));

    /* Requests and memory end with their comm. */
    request = receive_piece(&pair, 0, 8);
    WORKS(tcpx_close_recv(pair.receiver));
    int done = 7;
    FAILS(TCPX_BAD_HANDLE, "has ended", tcpx_close_recv(pair.receiver));
    FAILS(TCPX_BAD_HANDLE, "has ended", tcpx_test(request, &done, NULL));
    HOLDS(done == 0);
    FAILS(TCPX_BAD_HANDLE, "has ended", tcpx_wait_request(request, 0, NULL));
    FAILS(TCPX_BAD_HANDLE, "has ended", tcpx_dereg_mr(pair.sender, pair.to));
    WORKS(tcpx_close_send(pair.sender));
    FAILS(TCPX_BAD_HANDLE, "has ended", tcpx_close_send(pair.sender));
    FAILS(TCPX_BAD_HANDLE, "has ended",
          tcpx_reg_mr(pair.sender, pair.source, BYTES, TCPX_PTR_HOST, &pair.from));
    WORKS(tcpx_close_listen(pair.listener));
    free(pair.source);
    free(pair.target);
}

static void wrong_arguments(void)
{
    struct pair pair;
    tcpx_request *request;
    tcpx_memory *memory;
    pair_open(&pair, TCPX_PTR_HOST);
    FAILS(TCPX_INVALID_ARGUMENT, "type is 3",
          tcpx_reg_mr(pair.sender, pair.source, BYTES, 3, &memory));
    FAILS(TCPX_INVALID_ARGUMENT, "is NULL",
          tcpx_reg_mr(pair.sender, NULL, BYTES, TCPX_PTR_HOST, &memory));
    FAILS(TCPX_INTERNAL_ERROR, "4096",
          tcpx_reg_mr(pair.sender, pair.source + 1, 8, TCPX_PTR_CUDA, &memory));
    FAILS(TCPX_INVALID_ARGUMENT, "do not lie",
          tcpx_isend(pair.sender, pair.source + 1, BYTES, 0, pair.from, &request));
    FAILS(TCPX_INVALID_ARGUMENT, "do not lie",
          tcpx_isend(pair.sender, pair.source - 1, 1, 0, pair.from, &request));
    FAILS(TCPX_INVALID_ARGUMENT, "negative",
          tcpx_isend(pair.sender, pair.source, -1, 0, pair.from, &request));
    HOLDS(!request);
    FAILS(TCPX_INVALID_ARGUMENT, "mhandle is NULL",
          tcpx_isend(pair.sender, pair.source, 8, 0, NULL, &request));
    void *data[2] = {pair.target, pair.target};
    int sizes[2] = {8, 8}, tags[2] = {0, 0};
    tcpx_memory *memories[2] = {pair.to, pair.to};
    FAILS(TCPX_INVALID_ARGUMENT, "n is 2",
          tcpx_irecv(pair.receiver, 2, data, sizes, tags, memories, &request));
    FAILS(TCPX_INVALID_ARGUMENT, "one element",
          tcpx_irecv(pair.receiver, 1, data, NULL, tags, memories, &request));
    FAILS(TCPX_INVALID_ARGUMENT, "request is NULL", tcpx_wait_request(NULL, 0, NULL));
    pair_close(&pair);
}

static void requests_out_of_order(void)
{
    struct pair pair;
    tcpx_request *sends[TCPX_MAX_REQUESTS], *receives[TCPX_MAX_REQUESTS];
    tcpx_completion done;
    int flag = 0, size = 0;
    pair_open(&pair, TCPX_PTR_CUDA);
    for (int i = 0; i < BYTES; i++)
        pair.source[i] = (unsigned char)(i * 131 >> 3);
    for (int i = 0; i < TCPX_MAX_REQUESTS; i++) {
        receives[i] = receive_piece(&pair, 256 * i, 256);
        HOLDS(receives[i]);
    }
    HOLDS(!receive_piece(&pair, 0, 8));
    FAILS(TCPX_TIMEOUT, getenv("TCPX_DOUBLE_SHOW_REQUESTS") ? "256 of 256 bytes have not moved" : "wait again",
          tcpx_wait_request(receives[0], 1, &done));
    FAILS(TCPX_INVALID_USAGE, "in flight", tcpx_dereg_mr(pair.receiver, pair.to));
    FAILS(TCPX_INVALID_USAGE, "not done", tcpx_irecv_consumed(pair.receiver, 1, receives[0]));
    FAILS(TCPX_INVALID_USAGE, "not done", tcpx_get_completion(receives[0], &done));
    for (int i = 0; i < TCPX_MAX_REQUESTS; i++) {
        sends[i] = send_piece(&pair, 256 * i, 256);
        HOLDS(sends[i]);
    }
    HOLDS(!send_piece(&pair, 0, 8));
    /* Any order of asking. */
    for (int i = TCPX_MAX_REQUESTS - 1; i >= 0; i--) {
        WORKS(tcpx_wait_request(sends[i], LIMIT_MS, &done));
        HOLDS(done.size == 256 && done.count == 0);
        FAILS(TCPX_BAD_HANDLE, "has ended", tcpx_test(sends[i], &flag, &size));
    }
    for (int i = TCPX_MAX_REQUESTS - 1; i >= 0; i--) {
        while (!flag)
            WORKS(tcpx_test(receives[i], &flag, &size));
        HOLDS(size == 256);
        flag = 0;
        FAILS(TCPX_INVALID_USAGE, "done before", tcpx_test(receives[i], &flag, &size));
        FAILS(TCPX_INVALID_USAGE, "done before", tcpx_wait_request(receives[i], 0, NULL));
        WORKS(tcpx_get_completion(receives[i], &done));
        HOLDS(done.size == 256 && done.count > 0 && done.pool);
        for (size_t piece = 0; piece < done.count; piece++) {
            const tcpx_descriptor *from = &done.descriptors[piece];
            HOLDS(from->src_off + from->len <= done.pool_bytes);
            memcpy(pair.target + 256 * i + from->dst_off,
                   (const unsigned char *)done.pool + from->src_off, from->len);
        }
    }
    HOLDS(!memcmp(pair.source, pair.target, BYTES));
    FAILS(TCPX_INVALID_USAGE, "order", tcpx_irecv_consumed(pair.receiver, 1, receives[1]));
    FAILS(TCPX_INVALID_USAGE, "not consumed", tcpx_dereg_mr(pair.receiver, pair.to));
    FAILS(TCPX_INVALID_ARGUMENT, "n is 0", tcpx_irecv_consumed(pair.receiver, 0, receives[0]));
    HOLDS(!receive_piece(&pair, 0, 8));
    for (int i = 0; i < TCPX_MAX_REQUESTS; i++) {
        WORKS(tcpx_irecv_consumed(pair.receiver, 1, receives[i]));
        FAILS(TCPX_BAD_HANDLE, "has ended", tcpx_irecv_consumed(pair.receiver, 1, receives[i]));
    }
    WORKS(tcpx_dereg_mr(pair.receiver, pair.to));
    WORKS(tcpx_dereg_mr(pair.sender, pair.from));
    pair_close(&pair);
}

static void a_lost_peer(void)
{
    struct pair pair;
    pair_open(&pair, TCPX_PTR_HOST);
    tcpx_request *first = receive_piece(&pair, 0, 8), *second = receive_piece(&pair, 8, 8), *none;
    void *data = pair.target;
    int size = 8, tag = 0;
    WORKS(tcpx_close_send(pair.sender));
    FAILS(TCPX_SYSTEM_ERROR, "connect afresh", tcpx_wait_request(second, LIMIT_MS, NULL));
    FAILS(TCPX_SYSTEM_ERROR, "connect afresh", tcpx_wait_request(first, LIMIT_MS, NULL));
    FAILS(TCPX_SYSTEM_ERROR, "connect afresh",
          tcpx_irecv(pair.receiver, 1, &data, &size, &tag, &pair.to, &none));
    WORKS(tcpx_close_recv(pair.receiver));
    WORKS(tcpx_close_listen(pair.listener));
    free(pair.source);
    free(pair.target);
}

/* More than the queue describes is refused; more than the pool holds waits, and the wait says why. */
static void receives_too_large(void)
{
    enum { LARGE = 5 << 20, BEYOND_POOL = 3 << 20 };
    struct pair pair;
    unsigned char *large = NULL;
    tcpx_memory *from, *to;
    tcpx_request *send, *receive;
    int size = LARGE, tag = 1;
    pair_open(&pair, TCPX_PTR_CUDA);
    HOLDS(posix_memalign((void **)&large, 4096, LARGE) == 0);
    WORKS(tcpx_reg_mr(pair.sender, large, LARGE, TCPX_PTR_CUDA, &from));
    WORKS(tcpx_reg_mr(pair.receiver, large, LARGE, TCPX_PTR_CUDA, &to));
    FAILS(TCPX_INVALID_ARGUMENT, "at most 4194304 a request",
          tcpx_irecv(pair.receiver, 1, (void **)&large, &size, &tag, &to, &receive));
    size = BEYOND_POOL;
    WORKS(tcpx_irecv(pair.receiver, 1, (void **)&large, &size, &tag, &to, &receive));
    WORKS(tcpx_isend(pair.sender, large, size, tag, from, &send));
    FAILS(TCPX_TIMEOUT, "may take 3145728 bytes and the plugin's pool has 2097152: send in smaller pieces",
          tcpx_wait_request(receive, 50, NULL));
    pair_close(&pair);
    free(large);
}

static void *wait_long(void *request)
{
    HOLDS(tcpx_wait_request((tcpx_request *)request, 600000, NULL) == TCPX_BAD_HANDLE);
    return NULL;
}

static void closed_under_a_wait(void)
{
    struct pair pair;
    pthread_t thread;
    tcpx_request *request, *other;
    pair_open(&pair, TCPX_PTR_HOST);
    request = receive_piece(&pair, 0, 8);
    other = receive_piece(&pair, 8, 8);
    HOLDS(pthread_create(&thread, NULL, wait_long, request) == 0);
    /* The other thread is in its wait before this one has seen 50 ms go by, or comes too late and
     * finds the handle ended; both are codes, and either way it ends. */
    FAILS(TCPX_TIMEOUT, "wait again", tcpx_wait_request(other, 50, NULL));
    WORKS(tcpx_close_recv(pair.receiver));
    HOLDS(pthread_join(thread, NULL) == 0);
    WORKS(tcpx_close_send(pair.sender));
    WORKS(tcpx_close_listen(pair.listener));
    free(pair.source);
    free(pair.target);
}

/* A plugin that lies: a code, or a size that is not the one sent; never a full receive. */
static void lies(const char *plugin)
{
    void *library = dlopen(plugin, RTLD_NOW | RTLD_NOLOAD), *symbol;
    void (*lie_next)(int);
    HOLDS(library && (symbol = dlsym(library, "tcpx_double_lie_next")));
    memcpy(&lie_next, &symbol, sizeof symbol);
    for (int lie = 1; lie <= 12; lie++) {
        struct pair pair;
        tcpx_completion done;
        pair_open(&pair, TCPX_PTR_CUDA);
        /* Every slot has held as many bytes before. */
        for (int i = 0; i <= TCPX_MAX_REQUESTS; i++) {
            tcpx_request *receive = receive_piece(&pair, 0, BYTES);
            tcpx_request *send = send_piece(&pair, 0, BYTES);
            if (i == TCPX_MAX_REQUESTS)
                lie_next(lie);
            WORKS(tcpx_wait_request(send, LIMIT_MS, NULL));
            int rc = tcpx_wait_request(receive, LIMIT_MS, &done);
            if (i == TCPX_MAX_REQUESTS) {
                HOLDS(rc == TCPX_PLUGIN_FAULT || (rc == TCPX_SUCCESS && done.size < BYTES));
                break;
            }
            HOLDS(rc == TCPX_SUCCESS && done.size == BYTES);
            WORKS(tcpx_irecv_consumed(pair.receiver, 1, receive));
        }
        pair_close(&pair);
    }
    HOLDS(dlclose(library) == 0);
}

int main(int count, char **words)
{
    HOLDS(count == 2);
    before_loading(words[1]);
    setting_up();
    ending_twice();
    wrong_arguments();
    requests_out_of_order();
    receives_too_large();
    a_lost_peer();
    closed_under_a_wait();
    lies(words[1]);

    void *library = dlopen(words[1], RTLD_NOW | RTLD_NOLOAD);
    HOLDS(library);
    void *symbol = dlsym(library, "tcpx_double_stats");
    uint64_t stats[7];
    HOLDS(symbol);
    memcpy(stats, symbol, sizeof stats);
    HOLDS(stats[4] == 0); /* second accepts */
    HOLDS(stats[5] == 0); /* open comms */
    /* Registrations: comms were closed with requests in flight, and plugins take no memory back from a closed comm:
     * one memory of each of three, and the two memories of both ends of the one that was too large. */
    HOLDS(stats[6] == 7);
    puts("PASSED");
    return 0;
}
