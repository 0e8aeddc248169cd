/* Both ends take two of each of the other one at a time: the rest waits, and all of it ends well.
 *
 *   limits
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tcpx.h"

#define FINE TCPX_OK
#define WORDS tcpx_error_text
#include "check.h"

#define LONG 60000u
#define SIZE 66000u
#define COUNT 20

struct dial {
    char address[128], key[TCPX_KEY_MAX];
    tcpx_connection *made;
};

static tcpx_options two_of_each(void)
{
    tcpx_options options;
    memset(&options, 0, sizeof options);
    options.limits.puts = options.limits.notifications = options.limits.gets = 2;
    options.limits.asks = options.limits.windows = options.limits.tags = 2;
    options.limits.pieces = options.limits.list_windows = 2;
    return options;
}

static void *connect_there(void *word)
{
    struct dial *dial = word;
    tcpx_options options = two_of_each();
    options.key = dial->key;
    WORKS(tcpx_connect(dial->address, &options, &dial->made));
    return NULL;
}

static void all_end(tcpx_transfer *transfers[], int count)
{
    for (int i = 0; i < count; i++) {
        WORKS(tcpx_transfer_wait(transfers[i], LONG, NULL));
        WORKS(tcpx_transfer_release(transfers[i]));
    }
}

int main(void)
{
    struct dial dial;
    tcpx_options options = two_of_each();
    tcpx_endpoint *endpoint;
    tcpx_connection *owner, *user;
    tcpx_region *memory, *source, *target, *received;
    tcpx_window *window;
    tcpx_transfer *running[4 * COUNT], *batch = NULL;
    tcpx_piece pieces[3];
    pthread_t thread;
    unsigned char key[TCPX_WINDOW_KEY_MAX], told;
    size_t key_bytes, bytes;
    char *sent = malloc(COUNT * SIZE), *arrived = malloc(COUNT * SIZE);
    HOLDS(sent && arrived);
    for (size_t i = 0; i < COUNT * SIZE; i++)
        sent[i] = (char)(i * 2654435761u >> 13);
    memset(&dial, 0, sizeof dial);
    WORKS(tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint));
    WORKS(tcpx_endpoint_address(endpoint, dial.address, sizeof dial.address, NULL));
    WORKS(tcpx_endpoint_key(endpoint, dial.key, sizeof dial.key, NULL));
    HOLDS(pthread_create(&thread, NULL, connect_there, &dial) == 0);
    WORKS(tcpx_endpoint_accept(endpoint, LONG, &owner));
    HOLDS(pthread_join(thread, NULL) == 0);
    user = dial.made;
    WORKS(tcpx_region_host(COUNT * SIZE, &memory));
    WORKS(tcpx_region_host(COUNT * SIZE, &source));
    WORKS(tcpx_region_host(COUNT * SIZE, &target));
    WORKS(tcpx_region_host(COUNT * SIZE, &received));
    WORKS(tcpx_region_write(source, 0, sent, COUNT * SIZE));
    WORKS(tcpx_expose(owner, memory, 0, COUNT * SIZE, TCPX_RIGHT_GET | TCPX_RIGHT_PUT, &window));
    WORKS(tcpx_window_key(window, key, sizeof key, &key_bytes));
    for (size_t i = 0; i < COUNT; i++)
        WORKS(tcpx_put(user, source, i * SIZE, SIZE, key, key_bytes, i * SIZE, NULL, &running[i]));
    all_end(running, COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        unsigned char word = (unsigned char)i;
        tcpx_transfer **these = &running[4 * i];
        WORKS(tcpx_get(user, target, i * SIZE, SIZE, key, key_bytes, i * SIZE, NULL, &these[0]));
        WORKS(tcpx_send(user, source, i * SIZE, SIZE, i % 7, NULL, &these[1]));
        WORKS(tcpx_notify(user, &word, 1, &these[2]));
        WORKS(tcpx_receive(owner, received, i * SIZE, SIZE, i % 7, NULL, &these[3]));
    }
    for (size_t i = 0; i < COUNT; i++) {
        WORKS(tcpx_notification(owner, LONG, &told, 1, &bytes));
        HOLDS(bytes == 1 && told == i);
    }
    all_end(running, 4 * COUNT);
    WORKS(tcpx_region_read(target, 0, arrived, COUNT * SIZE));
    HOLDS(!memcmp(sent, arrived, COUNT * SIZE));
    WORKS(tcpx_region_read(received, 0, arrived, COUNT * SIZE));
    HOLDS(!memcmp(sent, arrived, COUNT * SIZE));
    /* What can never fit is refused. */
    memset(pieces, 0, sizeof pieces);
    for (size_t i = 0; i < 3; i++) {
        pieces[i].operation = TCPX_PUT;
        pieces[i].region = source;
        pieces[i].offset = i * SIZE;
        pieces[i].bytes = SIZE;
        pieces[i].key = key;
        pieces[i].key_bytes = key_bytes;
        pieces[i].window_offset = 2 * i * SIZE;
    }
    HOLDS(tcpx_batch(user, pieces, 3, NULL, &batch) != TCPX_OK);
    HOLDS(strstr(tcpx_error_text(), "lists of 2 pieces") != NULL);
    WORKS(tcpx_window_revoke(window, LONG));
    WORKS(tcpx_connection_close(owner, 0));
    WORKS(tcpx_connection_close(user, LONG));
    WORKS(tcpx_region_release(memory));
    WORKS(tcpx_region_release(source));
    WORKS(tcpx_region_release(target));
    WORKS(tcpx_region_release(received));
    WORKS(tcpx_endpoint_close(endpoint));
    free(sent);
    free(arrived);
    puts("PASSED");
    return 0;
}
