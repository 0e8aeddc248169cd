/* One thread makes the progress of both ends of an encrypted connection, and waits on their descriptors in between.
 *
 *   manual
 */
#define _POSIX_C_SOURCE 200809L
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tcpx.h"

#define FINE TCPX_OK
#define WORDS tcpx_error_text
#include "check.h"

#define LONG 60000u
#define BYTES (3u << 20)

struct dial {
    char address[128], key[TCPX_KEY_MAX];
    tcpx_connection *made;
};

static void *connect_there(void *word)
{
    struct dial *dial = word;
    tcpx_options options = {0};
    options.key = dial->key;
    options.encrypt = 1;
    options.progress = TCPX_PROGRESS_MANUAL;
    WORKS(tcpx_connect(dial->address, &options, &dial->made));
    return NULL;
}

/* Until the transfer has ended. */
static void progress_until_done(tcpx_connection *ends[2], tcpx_transfer *transfer)
{
    struct pollfd polled[2];
    int more, done = 0;
    for (;;) {
        /* The test makes progress on one end, too. */
        WORKS(tcpx_transfer_test(transfer, &done, NULL));
        if (done)
            return;
        more = 0;
        for (int i = 0; i < 2; i++) {
            int found;
            WORKS(tcpx_connection_progress(ends[i], &found));
            more |= found;
            WORKS(tcpx_connection_progress_descriptor(ends[i], &polled[i].fd));
            polled[i].events = POLLIN;
        }
        if (!more)
            HOLDS(poll(polled, 2, 1000) >= 0);
    }
}

int main(void)
{
    struct dial dial;
    tcpx_options options;
    tcpx_endpoint *endpoint;
    tcpx_connection *ends[2];
    tcpx_region *source, *target;
    tcpx_transfer *sent, *received;
    pthread_t thread;
    char *bytes = malloc(BYTES), *arrived = malloc(BYTES);
    memset(&options, 0, sizeof options);
    memset(&dial, 0, sizeof dial);
    HOLDS(bytes && arrived);
    for (size_t i = 0; i < BYTES; i++)
        bytes[i] = (char)(i * 2654435761u >> 13);
    options.progress = TCPX_PROGRESS_MANUAL;
    options.encrypt = 1;
    WORKS(tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint));
    WORKS(tcpx_endpoint_address(endpoint, dial.address, sizeof dial.address, NULL));
    WORKS(tcpx_endpoint_key(endpoint, dial.key, sizeof dial.key, NULL));
    HOLDS(pthread_create(&thread, NULL, connect_there, &dial) == 0);
    WORKS(tcpx_endpoint_accept(endpoint, LONG, &ends[0]));
    HOLDS(pthread_join(thread, NULL) == 0);
    ends[1] = dial.made;
    WORKS(tcpx_region_host(BYTES, &source));
    WORKS(tcpx_region_host(BYTES, &target));
    WORKS(tcpx_region_write(source, 0, bytes, BYTES));
    for (size_t size = 8; size <= BYTES; size *= 8) {
        WORKS(tcpx_receive(ends[0], target, 0, size, 1, NULL, &received));
        WORKS(tcpx_send(ends[1], source, 0, size, 1, NULL, &sent));
        progress_until_done(ends, sent);
        progress_until_done(ends, received);
        WORKS(tcpx_transfer_wait(sent, 0, NULL));
        WORKS(tcpx_transfer_wait(received, 0, NULL));
        WORKS(tcpx_transfer_release(sent));
        WORKS(tcpx_transfer_release(received));
        WORKS(tcpx_region_read(target, 0, arrived, size));
        HOLDS(!memcmp(bytes, arrived, size));
    }
    /* The library's thread finishes what is closed. */
    WORKS(tcpx_connection_close(ends[0], 0));
    WORKS(tcpx_connection_close(ends[1], LONG));
    WORKS(tcpx_region_release(source));
    WORKS(tcpx_region_release(target));
    WORKS(tcpx_endpoint_close(endpoint));
    free(bytes);
    free(arrived);
    puts("PASSED");
    return 0;
}
