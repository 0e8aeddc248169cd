/* A historic program at work: what it calls, how often and with which storage. It connects in one call, while its peer
 * polls the accept with pauses; hands zeroed storage to both for device handles; keeps a window of receives and sends;
 * tests the oldest only; and consumes every receive.
 *
 *   UCCL_TCPX_PLUGIN_PATH=PLUGIN historic_run
 */
#define TCPX_UNTYPED
#define _GNU_SOURCE
#if __has_include("tcpx_plugin.h")
#include "tcpx_plugin.h"
#else
#include "tcpx.h"
#endif
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WINDOW = 12, MESSAGES = 100, BYTES = 61441, ACCEPTS = 1000, PAUSE_US = 10000, BUSY = 3 };

struct net_handle {
    char data[128];
};

static unsigned char source[WINDOW][BYTES], target[WINDOW][BYTES];

#define WORKS(call) \
    do { \
        int code = (call); \
        if (code) { \
            fprintf(stderr, "line %d: %s gave %d: %s\n", __LINE__, #call, code, tcpx_last_error()); \
            return 1; \
        } \
    } while (0)

static void fill(int message)
{
    for (int at = 0; at < BYTES; at++)
        source[message % WINDOW][at] = (unsigned char)(at * 31 + at / 251 + message);
}

/* Done, still running, or an error; "busy" is no error. */
static int is_done(void *request, int *done)
{
    int size = 0, code = tcpx_test(request, done, &size);
    return code == BUSY ? 0 : code;
}

/* The other process's part: asks now and then whether somebody has connected. */
static void *accepts(void *listen_comm)
{
    static long double recv_storage[32];
    void *recv_dev = recv_storage, *recv_comm = NULL;
    for (int tries = 0; tries < ACCEPTS; tries++) {
        if (tcpx_accept_v5(listen_comm, &recv_comm, &recv_dev) || recv_comm)
            break;
        usleep(PAUSE_US);
    }
    return recv_comm;
}

int main(void)
{
    static long double send_storage[32];
    void *send_dev = send_storage;
    void *listen_comm = NULL, *send_comm = NULL, *recv_comm = NULL, *from = NULL, *to = NULL;
    pthread_t server;
    void *sends[WINDOW] = {NULL}, *receives[WINDOW] = {NULL};
    struct net_handle handle, theirs;

    if (tcpx_get_device_count() < 1) {
        fprintf(stderr, "no devices: %s\n", tcpx_last_error());
        return 1;
    }
    memset(&handle, 0, sizeof handle);
    WORKS(tcpx_listen(0, &handle, &listen_comm));
    memcpy(&theirs, &handle, sizeof theirs);
    if (pthread_create(&server, NULL, accepts, listen_comm))
        return 1;
    WORKS(tcpx_connect_v5(0, &theirs, &send_comm, &send_dev));
    if (!send_comm) {
        fprintf(stderr, "one call did not connect\n");
        return 1;
    }
    if (pthread_join(server, &recv_comm) || !recv_comm) {
        fprintf(stderr, "nobody was accepted\n");
        return 1;
    }
    WORKS(tcpx_reg_mr(send_comm, source, sizeof source, TCPX_PTR_HOST, &from));
    WORKS(tcpx_reg_mr(recv_comm, target, sizeof target, TCPX_PTR_HOST, &to));

    int posted = 0, sent = 0, sending = 0, received = 0;
    while (received < MESSAGES || sent < MESSAGES) {
        int done = 0;
        while (posted < MESSAGES && posted - received < WINDOW) {
            void *data[1] = {target[posted % WINDOW]}, *memories[1] = {to};
            int sizes[1] = {BYTES}, tags[1] = {42};
            void **request = &receives[posted % WINDOW];
            WORKS(tcpx_irecv(recv_comm, 1, data, sizes, tags, memories, request));
            if (!*request)
                break;
            posted++;
        }
        while (sending < MESSAGES && sending - sent < WINDOW && sending < received + WINDOW) {
            void **request = &sends[sending % WINDOW];
            fill(sending);
            WORKS(tcpx_isend(send_comm, source[sending % WINDOW], BYTES, 42, from, request));
            if (!*request)
                break;
            sending++;
        }
        if (received < posted) {
            void *request = receives[received % WINDOW];
            WORKS(is_done(request, &done));
            if (done) {
                WORKS(tcpx_irecv_consumed(recv_comm, 1, request));
                for (int at = 0; at < BYTES; at++) {
                    if (target[received % WINDOW][at] !=
                        (unsigned char)(at * 31 + at / 251 + received)) {
                        fprintf(stderr, "message %d differs at byte %d\n", received, at);
                        return 1;
                    }
                }
                received++;
            }
        }
        done = 0;
        if (sent < sending) {
            WORKS(is_done(sends[sent % WINDOW], &done));
            sent += done;
        }
    }
    WORKS(tcpx_dereg_mr(send_comm, from));
    WORKS(tcpx_dereg_mr(recv_comm, to));
    WORKS(tcpx_close_send(send_comm));
    WORKS(tcpx_close_recv(recv_comm));
    WORKS(tcpx_close_listen(listen_comm));
    puts("PASSED");
    return 0;
}
