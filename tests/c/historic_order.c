/* A historic program's order of calls, in one thread: it connects once, before anybody accepts; posts a receive before
 * the send, and gives up after a few tries; tests both in turn. With `alone` nobody ever accepts.
 *
 *   UCCL_TCPX_PLUGIN_PATH=PLUGIN historic_order [alone]
 */
#define TCPX_UNTYPED
#define _GNU_SOURCE
#include "tcpx_plugin.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FINE TCPX_SUCCESS
#define WORDS tcpx_last_error
#include "check.h"

enum { BYTES = 61441, ACCEPTS = 500, POSTS = 512, TESTS = 20000, PAUSE_US = 1000 };

static unsigned char source[BYTES], target[BYTES];

/* What did not work is tried again, a few times. */
static void *received(void *comm, void *memory)
{
    void *data[1] = {target}, *memories[1] = {memory}, *request = NULL;
    int sizes[1] = {BYTES}, tags[1] = {42};
    for (int tries = 0; !request && tries < POSTS; tries++) {
        if (tcpx_irecv(comm, 1, data, sizes, tags, memories, &request))
            break;
        usleep(5);
    }
    return request;
}

int main(int count, char **words)
{
    void *listen_comm = NULL, *send_comm = NULL, *recv_comm = NULL, *from = NULL, *to = NULL;
    void *send_dev = NULL, *recv_dev = NULL, *sending = NULL, *receiving;
    tcpx_handle handle;
    int sent = 0, arrived = 0, size = 0;

    HOLDS(tcpx_get_device_count() > 0);
    WORKS(tcpx_listen(0, &handle, &listen_comm));
    WORKS(tcpx_connect_v5(0, &handle, &send_comm, &send_dev));
    HOLDS(send_comm);
    if (count == 2 && !strcmp(words[1], "alone")) {
        HOLDS(tcpx_reg_mr(send_comm, source, BYTES, TCPX_PTR_HOST, &from) == TCPX_TIMEOUT);
        HOLDS(strstr(tcpx_last_error(), "not connected after 10 s"));
        WORKS(tcpx_close_send(send_comm));
        WORKS(tcpx_close_listen(listen_comm));
        puts("PASSED");
        return 0;
    }
    for (int tries = 0; !recv_comm && tries < ACCEPTS; tries++) {
        WORKS(tcpx_accept_v5(listen_comm, &recv_comm, &recv_dev));
        usleep(PAUSE_US);
    }
    HOLDS(recv_comm);
    WORKS(tcpx_reg_mr(send_comm, source, BYTES, TCPX_PTR_HOST, &from));
    WORKS(tcpx_reg_mr(recv_comm, target, BYTES, TCPX_PTR_HOST, &to));
    for (int at = 0; at < BYTES; at++)
        source[at] = (unsigned char)(at * 31 + at / 251);

    HOLDS((receiving = received(recv_comm, to)));
    WORKS(tcpx_isend(send_comm, source, BYTES, 42, from, &sending));
    HOLDS(sending);
    for (int tries = 0; (!sent || !arrived) && tries < TESTS; tries++) {
        if (!sent)
            WORKS(tcpx_test(sending, &sent, &size));
        if (!arrived)
            WORKS(tcpx_test(receiving, &arrived, &size));
        usleep(PAUSE_US);
    }
    HOLDS(sent && arrived);
    WORKS(tcpx_irecv_consumed(recv_comm, 1, receiving));
    HOLDS(!memcmp(source, target, BYTES));
    WORKS(tcpx_dereg_mr(send_comm, from));
    WORKS(tcpx_dereg_mr(recv_comm, to));
    WORKS(tcpx_close_send(send_comm));
    WORKS(tcpx_close_recv(recv_comm));
    WORKS(tcpx_close_listen(listen_comm));
    puts("PASSED");
    return 0;
}
