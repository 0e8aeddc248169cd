/* Closes of a plugin that do not return, against the double of Google's plugin: each close of tcpx_plugin.h comes back,
 * names the call, holds nothing else up, and can be made again.
 *
 *   plugin_hangs PLUGIN
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tcpx_plugin.h"

#define FINE TCPX_SUCCESS
#define WORDS tcpx_last_error
#include "check.h"

/* As in the double. */
enum { CALL_DEREG_MR = 7, CALL_TEST = 10, CALL_CLOSE_SEND = 12, CALL_CLOSE_RECV = 13, CALL_CLOSE_LISTEN = 14 };
enum { HANG = -1, BYTES = 4096, BOUND_S = 50 };
#define LIMIT_MS 20000u

static void (*fault)(int call, int code, unsigned after);

struct pair {
    tcpx_listen_comm *listener;
    tcpx_send_comm *sender;
    tcpx_recv_comm *receiver;
    tcpx_memory *from, *to;
};
static unsigned char source[BYTES], target[BYTES];

static void pair_open(struct pair *pair)
{
    tcpx_handle handle;
    memset(pair, 0, sizeof *pair);
    WORKS(tcpx_listen(0, &handle, &pair->listener));
    WORKS(tcpx_connect_v5(0, &handle, &pair->sender, NULL));
    while (!pair->receiver)
        WORKS(tcpx_accept_v5(pair->listener, &pair->receiver, NULL));
    WORKS(tcpx_reg_mr(pair->sender, source, BYTES, TCPX_PTR_HOST, &pair->from));
    WORKS(tcpx_reg_mr(pair->receiver, target, BYTES, TCPX_PTR_HOST, &pair->to));
}

static tcpx_request *receive(struct pair *pair)
{
    void *data = target;
    int size = BYTES, tag = 1;
    tcpx_request *request;
    WORKS(tcpx_irecv(pair->receiver, 1, &data, &size, &tag, &pair->to, &request));
    return request;
}

static void pair_moves(struct pair *pair)
{
    tcpx_request *to = receive(pair), *from;
    for (int at = 0; at < BYTES; at++)
        source[at] = (unsigned char)rand();
    WORKS(tcpx_isend(pair->sender, source, BYTES, 1, pair->from, &from));
    WORKS(tcpx_wait_request(from, LIMIT_MS, NULL));
    WORKS(tcpx_wait_request(to, LIMIT_MS, NULL));
    WORKS(tcpx_irecv_consumed(pair->receiver, 1, to));
    HOLDS(!memcmp(source, target, BYTES));
}

static int close_as(struct pair *pair, int call)
{
    switch (call) {
    case CALL_CLOSE_LISTEN:
        return tcpx_close_listen(pair->listener);
    case CALL_CLOSE_SEND:
        return tcpx_close_send(pair->sender);
    default:
        return tcpx_close_recv(pair->receiver);
    }
}

static void *tests(void *request)
{
    int done;
    HOLDS(tcpx_test(request, &done, NULL) == TCPX_SUCCESS && !done);
    return NULL;
}

static void hangs(int call, const char *named)
{
    struct pair pair, other;
    struct timespec start, end;
    pthread_t thread;
    int (*hanging)(void);
    void *symbol = dlsym(RTLD_DEFAULT, "tcpx_double_hangs");
    memcpy(&hanging, &symbol, sizeof hanging);
    pair_open(&pair);
    pair_open(&other);
    tcpx_request *request = call == CALL_TEST ? receive(&pair) : NULL;
    fault(call, HANG, 0);
    if (request) {
        HOLDS(!pthread_create(&thread, NULL, tests, request));
        while (!hanging())
            usleep(1000);
    }
    clock_gettime(CLOCK_MONOTONIC, &start);
    HOLDS(close_as(&pair, call) == TCPX_TIMEOUT);
    clock_gettime(CLOCK_MONOTONIC, &end);
    HOLDS(end.tv_sec - start.tv_sec < BOUND_S);
    HOLDS(hanging() && strstr(tcpx_last_error(), named) && strstr(tcpx_last_error(), "leave that memory in place"));

    if (call != CALL_TEST) {
        /* The comm takes nothing more, and others know nothing of it. */
        if (call == CALL_CLOSE_SEND)
            HOLDS(tcpx_isend(pair.sender, source, 8, 1, pair.from, &request) == TCPX_BAD_HANDLE);
        if (call == CALL_CLOSE_RECV)
            HOLDS(tcpx_dereg_mr(pair.receiver, pair.to) == TCPX_BAD_HANDLE);
        pair_moves(&other);
    }
    fault(0, 0, 0);
    WORKS(close_as(&pair, call));
    HOLDS(close_as(&pair, call) == TCPX_BAD_HANDLE);
    if (call == CALL_TEST)
        HOLDS(!pthread_join(thread, NULL));
    for (int each = CALL_CLOSE_SEND; each <= CALL_CLOSE_LISTEN; each++) {
        WORKS(close_as(&other, each));
        int code = close_as(&pair, each);
        HOLDS(code == TCPX_SUCCESS || code == TCPX_BAD_HANDLE);
    }
}

int main(int count, char **words)
{
    HOLDS(count == 2);
    void *library = dlopen(words[1], RTLD_NOW | RTLD_GLOBAL), *symbol;
    HOLDS(library && (symbol = dlsym(library, "tcpx_double_fault")));
    memcpy(&fault, &symbol, sizeof fault);
    WORKS(tcpx_load_plugin(words[1]));
    hangs(CALL_CLOSE_SEND, "deregMr or closeSend");
    hangs(CALL_CLOSE_RECV, "deregMr or closeRecv");
    hangs(CALL_CLOSE_LISTEN, "closeListen");
    hangs(CALL_DEREG_MR, "deregMr or closeRecv");
    hangs(CALL_TEST, "another call on this comm");
    puts("PASSED");
    return 0;
}
