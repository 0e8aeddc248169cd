/* A peer that is killed in the middle of its work ends everything once, with an error that says so;
 * a fresh connection to another one works.
 *
 *   lost_peer
 */
#define _POSIX_C_SOURCE 200809L
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tcpx.h"

#define FINE TCPX_OK
#define WORDS tcpx_error_text
#include "check.h"

#define LONG 60000u
#define BYTES 4096u

/* Where a peer listens, and its key behind that. */
struct place {
    char words[256];
};

struct peer {
    pid_t process;
    int told;
};

/* Receives what comes, and closes. */
static void serve(int tell)
{
    struct place place;
    size_t used;
    tcpx_endpoint *endpoint;
    tcpx_connection *connection;
    tcpx_region *region;
    tcpx_transfer *transfer;
    memset(&place, 0, sizeof place);
    WORKS(tcpx_endpoint_listen("127.0.0.1:0", NULL, &endpoint));
    WORKS(tcpx_endpoint_address(endpoint, place.words, sizeof place.words, &used));
    WORKS(tcpx_endpoint_key(endpoint, place.words + used, sizeof place.words - used, NULL));
    HOLDS(write(tell, &place, sizeof place) == (ssize_t)sizeof place);
    WORKS(tcpx_endpoint_accept(endpoint, LONG, &connection));
    WORKS(tcpx_region_host(BYTES, &region));
    WORKS(tcpx_receive(connection, region, 0, BYTES, 1, NULL, &transfer));
    WORKS(tcpx_transfer_wait(transfer, TCPX_FOREVER, NULL));
    WORKS(tcpx_transfer_release(transfer));
    WORKS(tcpx_connection_close(connection, LONG));
    WORKS(tcpx_region_release(region));
    WORKS(tcpx_endpoint_close(endpoint));
}

/* Begins before this process uses the library. */
static struct peer begin(void)
{
    struct peer peer;
    int ends[2];
    HOLDS(pipe(ends) == 0);
    peer.process = fork();
    HOLDS(peer.process >= 0);
    if (peer.process == 0) {
        close(ends[0]);
        serve(ends[1]);
        exit(0);
    }
    close(ends[1]);
    peer.told = ends[0];
    return peer;
}

static tcpx_connection *reach(const struct peer *peer)
{
    struct place place;
    tcpx_options options;
    tcpx_connection *connection;
    HOLDS(read(peer->told, &place, sizeof place) == (ssize_t)sizeof place);
    memset(&options, 0, sizeof options);
    options.key = place.words + strlen(place.words) + 1;
    WORKS(tcpx_connect(place.words, &options, &connection));
    return connection;
}

int main(void)
{
    struct peer killed = begin(), other = begin();
    tcpx_connection *connection = reach(&killed);
    tcpx_region *region;
    tcpx_transfer *receive, *late;
    tcpx_queue *queue;
    tcpx_completion_entry entry;
    uint64_t bytes = 1;
    size_t count = 0;
    int status = 0;

    WORKS(tcpx_region_host(BYTES, &region));
    WORKS(tcpx_queue_new(&queue));
    /* Nobody ever sends these. */
    WORKS(tcpx_receive(connection, region, 0, 8, 2, NULL, &receive));
    WORKS(tcpx_receive(connection, region, 8, 8, 3, NULL, &late));
    WORKS(tcpx_transfer_queue(late, queue, 3));
    WORKS(tcpx_transfer_release(late));
    HOLDS(kill(killed.process, SIGKILL) == 0);
    HOLDS(waitpid(killed.process, &status, 0) == killed.process && WIFSIGNALED(status));
    HOLDS(tcpx_transfer_wait(receive, LONG, NULL) == TCPX_ERR_CONNECTION_LOST);
    HOLDS(tcpx_error_delivered(&bytes) == TCPX_DELIVERED_NONE && bytes == 0);
    HOLDS(strstr(tcpx_error_text(), "127.0.0.1"));
    WORKS(tcpx_transfer_release(receive));
    WORKS(tcpx_queue_poll(queue, &entry, 1, LONG, &count));
    HOLDS(count == 1 && entry.key == 3 && entry.code == TCPX_ERR_CONNECTION_LOST);
    HOLDS(tcpx_send(connection, region, 0, 8, 1, NULL, &late) == TCPX_ERR_CONNECTION_LOST);
    HOLDS(tcpx_notification(connection, LONG, NULL, 0, &count) == TCPX_ERR_CONNECTION_LOST);
    HOLDS(tcpx_connection_close(connection, LONG) == TCPX_ERR_CONNECTION_LOST);
    HOLDS(tcpx_connection_close(connection, LONG) == TCPX_ERR_HANDLE);

    connection = reach(&other);
    WORKS(tcpx_send(connection, region, 0, BYTES, 1, NULL, &late));
    WORKS(tcpx_transfer_wait(late, TCPX_FOREVER, NULL));
    WORKS(tcpx_transfer_release(late));
    WORKS(tcpx_connection_close(connection, LONG));
    HOLDS(waitpid(other.process, &status, 0) == other.process && status == 0);
    WORKS(tcpx_region_release(region));
    WORKS(tcpx_queue_close(queue));
    puts("PASSED");
    return 0;
}
