/* Every wrong use of tcpx.h that can be detected: each gives a code and a text, and what was right
 * before still works after it.
 *
 *   misuse
 */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tcpx.h"

#define FINE TCPX_OK
#define WORDS tcpx_error_text
#include "check.h"

#define BYTES 4096u
#define LONG 20000u
/* Not the thread's own time but the library's: nobody is kept waiting by it. */
#define SHORT 20u

/* The call fails with this code and says this. */
#define FAILS(expected, part, call)                                                                \
    do {                                                                                           \
        int rc = (call);                                                                           \
        if (rc != (expected) || tcpx_error_code() != rc || !strstr(tcpx_error_text(), part)) {     \
            fprintf(stderr, "%d: %s: returned %d, said \"%s\"; expected %d and \"%s\"\n",          \
                    __LINE__, #call, rc, tcpx_error_text(), expected, part);                       \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define NONE(type) ((type *)NULL)
/* Addresses and numbers that are no handles. */
static int somewhere;
#define FOREIGN(type) ((type *)&somewhere)
#define WILD(type) ((type *)(uintptr_t)0xdeadbeefdeadbee0u)

struct pair {
    tcpx_endpoint *endpoint;
    tcpx_connection *server, *client;
    /* For one message, and for receives that nobody sends to. */
    tcpx_region *source, *target, *spare;
};

struct dial {
    char address[128], key[TCPX_KEY_MAX];
    tcpx_connection *made;
};

static void *connect_there(void *word)
{
    struct dial *dial = word;
    tcpx_options options = {0};
    options.key = dial->key;
    WORKS(tcpx_connect(dial->address, &options, &dial->made));
    return NULL;
}

static void pair_open(struct pair *pair)
{
    struct dial dial;
    pthread_t thread;
    memset(pair, 0, sizeof *pair);
    WORKS(tcpx_endpoint_listen("127.0.0.1:0", NULL, &pair->endpoint));
    WORKS(tcpx_endpoint_address(pair->endpoint, dial.address, sizeof dial.address, NULL));
    WORKS(tcpx_endpoint_key(pair->endpoint, dial.key, sizeof dial.key, NULL));
    HOLDS(pthread_create(&thread, NULL, connect_there, &dial) == 0);
    WORKS(tcpx_endpoint_accept(pair->endpoint, LONG, &pair->server));
    HOLDS(pthread_join(thread, NULL) == 0);
    pair->client = dial.made;
    WORKS(tcpx_region_host(BYTES, &pair->source));
    WORKS(tcpx_region_host(BYTES, &pair->target));
    WORKS(tcpx_region_host(BYTES, &pair->spare));
}

static void pair_close(struct pair *pair)
{
    WORKS(tcpx_connection_close(pair->client, 0));
    WORKS(tcpx_connection_close(pair->server, LONG));
    WORKS(tcpx_endpoint_close(pair->endpoint));
    WORKS(tcpx_region_release(pair->source));
    WORKS(tcpx_region_release(pair->target));
    WORKS(tcpx_region_release(pair->spare));
}

/* Ends a transfer that succeeds. */
static void finish(tcpx_transfer *transfer)
{
    WORKS(tcpx_transfer_wait(transfer, LONG, NULL));
    WORKS(tcpx_transfer_release(transfer));
}

/* One message goes through: the pair is in order. */
static void in_order(struct pair *pair)
{
    tcpx_transfer *send, *receive;
    tcpx_report report;
    WORKS(tcpx_receive(pair->server, pair->target, 0, BYTES, 7, NULL, &receive));
    WORKS(tcpx_send(pair->client, pair->source, 0, BYTES, 7, NULL, &send));
    finish(send);
    WORKS(tcpx_transfer_wait(receive, LONG, &report));
    HOLDS(report.bytes == BYTES && report.level == TCPX_LEVEL_PLACED && !report.has_digest);
    WORKS(tcpx_transfer_release(receive));
}

static void versions(void)
{
    char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", TCPX_VERSION_MAJOR, TCPX_VERSION_MINOR,
             TCPX_VERSION_PATCH);
    HOLDS(!strcmp(text, tcpx_version()) && tcpx_abi() == TCPX_ABI);
    HOLDS(!*tcpx_error_text() && tcpx_error_code() == 0 && !tcpx_error_check());
    HOLDS(tcpx_error_delivered(NULL) == TCPX_DELIVERED_NO_TRANSFER);
    HOLDS(!strcmp(tcpx_error_name(TCPX_ERR_TIMED_OUT), "TIMED_OUT"));
    HOLDS(*tcpx_error_advice(TCPX_ERR_HANDLE) && *tcpx_error_advice(12345));
}

/* Each handle of each kind in the place of each other, each NULL, and each after its end. */
static void handles(void)
{
    struct pair pair;
    tcpx_transfer *transfer, *out = NULL;
    tcpx_queue *queue;
    tcpx_window *window, *opened = NULL;
    tcpx_connection *connection = NULL;
    tcpx_piece piece;
    tcpx_completion_entry entry;
    tcpx_statistics statistics;
    size_t n = 0;
    int number = 0;
    char text[256];
    unsigned char key[TCPX_WINDOW_KEY_MAX];
    pair_open(&pair);
    WORKS(tcpx_queue_new(&queue));
    WORKS(tcpx_expose(pair.server, pair.target, 0, BYTES, TCPX_RIGHT_PUT, &window));
    WORKS(tcpx_window_key(window, key, sizeof key, &n));
    WORKS(tcpx_receive(pair.server, pair.spare, 0, 8, 1, NULL, &transfer));
    memset(&piece, 0, sizeof piece);

#define HANDLE_CALL(type, other, call)                                                             \
    do {                                                                                           \
        type *handle = NONE(type);                                                                 \
        FAILS(TCPX_ERR_ARGUMENT, " is NULL", call);                                                \
        handle = FOREIGN(type);                                                                    \
        FAILS(TCPX_ERR_HANDLE, "did not give out", call);                                          \
        handle = WILD(type);                                                                       \
        FAILS(TCPX_ERR_HANDLE, "", call);                                                          \
        handle = (type *)(other);                                                                  \
        FAILS(TCPX_ERR_HANDLE, "pass a", call);                                                    \
    } while (0)

    HANDLE_CALL(tcpx_endpoint, queue, tcpx_endpoint_address(handle, text, sizeof text, NULL));
    HANDLE_CALL(tcpx_endpoint, queue, tcpx_endpoint_key(handle, text, sizeof text, NULL));
    HANDLE_CALL(tcpx_endpoint, queue, tcpx_endpoint_accept(handle, 0, &connection));
    HANDLE_CALL(tcpx_endpoint, queue, tcpx_endpoint_connect(handle, "127.0.0.1:1", &connection));
    HANDLE_CALL(tcpx_endpoint, queue, tcpx_endpoint_close(handle));
    HANDLE_CALL(tcpx_connection, pair.source,
                tcpx_connection_peer(handle, text, sizeof text, NULL));
    HANDLE_CALL(tcpx_connection, pair.source,
                tcpx_connection_path(handle, text, sizeof text, NULL));
    HANDLE_CALL(tcpx_connection, pair.source, tcpx_connection_statistics(handle, &statistics));
    HANDLE_CALL(tcpx_connection, pair.source, tcpx_connection_progress(handle, &number));
    HANDLE_CALL(tcpx_connection, pair.source, tcpx_connection_progress_descriptor(handle, &number));
    HANDLE_CALL(tcpx_connection, pair.source, tcpx_notification(handle, 0, text, sizeof text, &n));
    HANDLE_CALL(tcpx_connection, pair.source, tcpx_notify(handle, "", 0, &out));
    HANDLE_CALL(tcpx_connection, pair.source, tcpx_connection_close(handle, 0));
    HANDLE_CALL(tcpx_connection, pair.source,
                tcpx_send(handle, pair.source, 0, 1, 0, NULL, &out));
    HANDLE_CALL(tcpx_connection, pair.source,
                tcpx_receive(handle, pair.source, 0, 1, 0, NULL, &out));
    HANDLE_CALL(tcpx_region, pair.client, tcpx_send(pair.client, handle, 0, 1, 0, NULL, &out));
    HANDLE_CALL(tcpx_region, pair.client, tcpx_receive(pair.client, handle, 0, 1, 0, NULL, &out));
    HANDLE_CALL(tcpx_region, pair.client,
                tcpx_put(pair.client, handle, 0, 1, key, n, 0, NULL, &out));
    HANDLE_CALL(tcpx_region, pair.client,
                tcpx_get(pair.client, handle, 0, 1, key, n, 0, NULL, &out));
    HANDLE_CALL(tcpx_region, pair.client,
                tcpx_expose(pair.client, handle, 0, 1, TCPX_RIGHT_GET, &opened));
    HANDLE_CALL(tcpx_connection, pair.source,
                tcpx_expose(handle, pair.source, 0, 1, TCPX_RIGHT_GET, &opened));
    HANDLE_CALL(tcpx_connection, pair.source,
                tcpx_put(handle, pair.source, 0, 1, key, n, 0, NULL, &out));
    HANDLE_CALL(tcpx_connection, pair.source,
                tcpx_get(handle, pair.source, 0, 1, key, n, 0, NULL, &out));
    HANDLE_CALL(tcpx_connection, pair.source, tcpx_batch(handle, &piece, 1, NULL, &out));

    HANDLE_CALL(tcpx_region, pair.client, tcpx_region_address(handle, NULL, NULL));
    HANDLE_CALL(tcpx_region, pair.client, tcpx_region_read(handle, 0, text, 1));
    HANDLE_CALL(tcpx_region, pair.client, tcpx_region_write(handle, 0, text, 1));
    HANDLE_CALL(tcpx_region, pair.client, tcpx_region_release(handle));
    HANDLE_CALL(tcpx_window, transfer, tcpx_window_key(handle, key, sizeof key, &n));
    HANDLE_CALL(tcpx_window, transfer, tcpx_window_revoke(handle, 0));
    HANDLE_CALL(tcpx_transfer, window, tcpx_transfer_test(handle, &number, NULL));
    HANDLE_CALL(tcpx_transfer, window, tcpx_transfer_wait(handle, 0, NULL));
    HANDLE_CALL(tcpx_transfer, window, tcpx_transfer_cancel(handle));
    HANDLE_CALL(tcpx_transfer, window, tcpx_transfer_progress(handle, NULL, NULL));
    HANDLE_CALL(tcpx_transfer, window, tcpx_transfer_queue(handle, queue, 0));
    HANDLE_CALL(tcpx_transfer, window, tcpx_transfer_release(handle));
    HANDLE_CALL(tcpx_queue, window, tcpx_transfer_queue(transfer, handle, 0));
    HANDLE_CALL(tcpx_queue, window, tcpx_queue_poll(handle, &entry, 1, 0, &n));
    HANDLE_CALL(tcpx_queue, window, tcpx_queue_descriptor(handle, &number));
    HANDLE_CALL(tcpx_queue, window, tcpx_queue_close(handle));
    HOLDS(!out && !connection && !opened);

    in_order(&pair);
    WORKS(tcpx_window_revoke(window, LONG));
    FAILS(TCPX_ERR_HANDLE, "has ended", tcpx_window_revoke(window, LONG));
    FAILS(TCPX_ERR_HANDLE, "has ended", tcpx_window_key(window, key, sizeof key, &n));
    WORKS(tcpx_transfer_release(transfer));
    FAILS(TCPX_ERR_HANDLE, "has ended", tcpx_transfer_release(transfer));
    FAILS(TCPX_ERR_HANDLE, "has ended", tcpx_transfer_wait(transfer, 0, NULL));
    WORKS(tcpx_queue_close(queue));
    FAILS(TCPX_ERR_HANDLE, "has ended", tcpx_queue_close(queue));
    FAILS(TCPX_ERR_HANDLE, "has ended", tcpx_queue_poll(queue, &entry, 1, 0, &n));
    pair_close(&pair);
    FAILS(TCPX_ERR_HANDLE, "has ended", tcpx_endpoint_close(pair.endpoint));
    FAILS(TCPX_ERR_HANDLE, "has ended", tcpx_endpoint_accept(pair.endpoint, LONG, &connection));
    FAILS(TCPX_ERR_HANDLE, "has ended", tcpx_connection_close(pair.client, 0));
    FAILS(TCPX_ERR_HANDLE, "has ended", tcpx_connection_peer(pair.client, text, sizeof text, NULL));
    FAILS(TCPX_ERR_HANDLE, "has ended", tcpx_region_release(pair.source));
    FAILS(TCPX_ERR_HANDLE, "has ended", tcpx_region_address(pair.source, NULL, NULL));
}

static void where_answers_go(void)
{
    struct pair pair;
    tcpx_transfer *transfer;
    tcpx_queue *queue;
    tcpx_window *window;
    tcpx_completion_entry entry;
    tcpx_piece piece;
    size_t n;
    int number;
    char text[8];
    unsigned char key[TCPX_WINDOW_KEY_MAX];
    memset(&piece, 0, sizeof piece);
    pair_open(&pair);
    WORKS(tcpx_queue_new(&queue));
    WORKS(tcpx_expose(pair.server, pair.target, 0, BYTES, TCPX_RIGHT_PUT, &window));
    WORKS(tcpx_receive(pair.server, pair.spare, 0, 8, 1, NULL, &transfer));
    FAILS(TCPX_ERR_ARGUMENT, "endpoint is NULL", tcpx_endpoint_listen("127.0.0.1:0", NULL, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "connection is NULL", tcpx_connect("127.0.0.1:1", NULL, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "connection is NULL", tcpx_endpoint_accept(pair.endpoint, 0, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "connection is NULL",
          tcpx_endpoint_connect(pair.endpoint, "127.0.0.1:1", NULL));
    FAILS(TCPX_ERR_ARGUMENT, "region is NULL", tcpx_region_host(1, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "region is NULL", tcpx_region_cuda(0, 1, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "region is NULL",
          tcpx_region_wrap(text, 1, TCPX_MEMORY_HOST, 0, NULL, NULL, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "transfer is NULL",
          tcpx_send(pair.client, pair.source, 0, 1, 0, NULL, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "transfer is NULL",
          tcpx_receive(pair.client, pair.source, 0, 1, 0, NULL, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "transfer is NULL",
          tcpx_put(pair.client, pair.source, 0, 1, key, 37, 0, NULL, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "transfer is NULL",
          tcpx_get(pair.client, pair.source, 0, 1, key, 37, 0, NULL, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "transfer is NULL", tcpx_batch(pair.client, &piece, 1, NULL, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "transfer is NULL", tcpx_notify(pair.client, "", 0, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "window is NULL",
          tcpx_expose(pair.server, pair.target, 0, 1, TCPX_RIGHT_GET, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "bytes is NULL", tcpx_window_key(window, key, sizeof key, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "bytes is NULL", tcpx_notification(pair.client, 0, key, 1, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "statistics is NULL", tcpx_connection_statistics(pair.client, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "descriptor is NULL",
          tcpx_connection_progress_descriptor(pair.client, NULL));
    /* Its progress is made in the background. */
    FAILS(TCPX_ERR_SETTING, "Manual", tcpx_connection_progress_descriptor(pair.client, &number));
    WORKS(tcpx_connection_progress(pair.client, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "done is NULL", tcpx_transfer_test(transfer, NULL, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "queue is NULL", tcpx_queue_new(NULL));
    FAILS(TCPX_ERR_ARGUMENT, "descriptor is NULL", tcpx_queue_descriptor(queue, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "count is NULL", tcpx_queue_poll(queue, &entry, 1, 0, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "entries is NULL", tcpx_queue_poll(queue, NULL, 1, 0, &n));
    FAILS(TCPX_ERR_ARGUMENT, "room is 0", tcpx_queue_poll(queue, &entry, 0, 0, &n));

    /* Texts and bytes that do not fit. */
    memset(text, 'x', sizeof text);
    FAILS(TCPX_ERR_ARGUMENT, "do not fit", tcpx_endpoint_key(pair.endpoint, text, 8, &n));
    HOLDS(n > 8 && n <= TCPX_KEY_MAX && text[0] == 'x');
    FAILS(TCPX_ERR_ARGUMENT, "do not fit", tcpx_key_generate(text, 8, &n));
    FAILS(TCPX_ERR_ARGUMENT, "do not fit", tcpx_key_generate(NULL, 0, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "do not fit", tcpx_endpoint_address(pair.endpoint, text, 2, &n));
    FAILS(TCPX_ERR_ARGUMENT, "do not fit", tcpx_connection_peer(pair.client, NULL, 100, &n));
    FAILS(TCPX_ERR_ARGUMENT, "do not fit", tcpx_connection_path(pair.client, text, 1, NULL));
    FAILS(TCPX_ERR_ARGUMENT, "do not fit", tcpx_window_key(window, key, 36, &n));
    HOLDS(n == 37 && text[0] == 'x');

    WORKS(tcpx_transfer_release(transfer));
    WORKS(tcpx_window_revoke(window, LONG));
    WORKS(tcpx_queue_close(queue));
    in_order(&pair);
    pair_close(&pair);
}

static void settings(void)
{
    tcpx_endpoint *endpoint = NULL;
    tcpx_connection *connection = NULL;
    tcpx_options options = {0};
    char key[TCPX_KEY_MAX], address[128];
    const char bad[] = {'1', (char)0xff, 0};
    FAILS(TCPX_ERR_ARGUMENT, "address is NULL", tcpx_endpoint_listen(NULL, NULL, &endpoint));
    FAILS(TCPX_ERR_ARGUMENT, "UTF-8", tcpx_endpoint_listen(bad, NULL, &endpoint));
    FAILS(TCPX_ERR_SETTING, "HOST:PORT", tcpx_endpoint_listen("12345", NULL, &endpoint));
    FAILS(TCPX_ERR_ARGUMENT, "address is NULL", tcpx_connect(NULL, NULL, &connection));
    FAILS(TCPX_ERR_SETTING, "key is NULL", tcpx_connect("127.0.0.1:1", NULL, &connection));
    FAILS(TCPX_ERR_SETTING, "key is NULL", tcpx_connect("127.0.0.1:1", &options, &connection));
    options.key = "SHORT";
    FAILS(TCPX_ERR_SETTING, "key: ", tcpx_connect("127.0.0.1:1", &options, &connection));
    WORKS(tcpx_key_generate(key, sizeof key, NULL));
    options.key = key;
    options.insecure = 1;
    FAILS(TCPX_ERR_SETTING, "insecure takes no key",
          tcpx_connect("127.0.0.1:1", &options, &connection));
    options.insecure = 0;
    FAILS(TCPX_ERR_CONNECT, "HOST:PORT", tcpx_connect("nowhere", &options, &connection));
    FAILS(TCPX_ERR_CONNECT, "127.0.0.1:1", tcpx_connect("127.0.0.1:1", &options, &connection));
    HOLDS(tcpx_error_check() && !strncmp(tcpx_error_check(), "TCPX-D", 6));
    options.lanes = 65536;
    FAILS(TCPX_ERR_SETTING, "65536 lanes",
          tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint));
    options.lanes = 0;
    options.memory = 9;
    FAILS(TCPX_ERR_ARGUMENT, "memory is 9",
          tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint));
    options.memory = TCPX_MEMORY_CUDA;
    options.device = 4096;
    FAILS(TCPX_ERR_MEMORY, "", tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint));
    options.memory = 0;
    options.reserved[2] = 1;
    FAILS(TCPX_ERR_ARGUMENT, "zeros", tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint));
    options.reserved[2] = 0;
    options.key_file = "/nowhere";
    FAILS(TCPX_ERR_SETTING, "key_file", tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint));
    options.key = NULL;
    FAILS(TCPX_ERR_SETTING, "/nowhere", tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint));
    options.key_file = bad;
    FAILS(TCPX_ERR_ARGUMENT, "UTF-8", tcpx_connect("127.0.0.1:1", &options, &connection));
    options.key_file = NULL;
    options.key = key;
    options.progress = 2;
    FAILS(TCPX_ERR_ARGUMENT, "progress is 2",
          tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint));
    options.progress = 0;
    HOLDS(!endpoint && !connection);

    /* Nobody comes; and one comes with another key. */
    WORKS(tcpx_endpoint_listen("127.0.0.1:0", NULL, &endpoint));
    FAILS(TCPX_AGAIN, "call again", tcpx_endpoint_accept(endpoint, 0, &connection));
    FAILS(TCPX_AGAIN, "call again", tcpx_endpoint_accept(endpoint, SHORT, &connection));
    WORKS(tcpx_endpoint_address(endpoint, address, sizeof address, NULL));
    FAILS(TCPX_ERR_CONNECT, "key", tcpx_connect(address, &options, &connection));
    FAILS(TCPX_ERR_CONNECT, "127.0.0.1:1",
          tcpx_endpoint_connect(endpoint, "127.0.0.1:1", &connection));
    FAILS(TCPX_ERR_ARGUMENT, "address is NULL",
          tcpx_endpoint_connect(endpoint, NULL, &connection));
    HOLDS(!connection);
    WORKS(tcpx_endpoint_close(endpoint));
}

static sem_t released;
static int releases;

static void give_back(void *user)
{
    /* The library may be called from here. */
    HOLDS(tcpx_version() && *(int *)user == 5);
    __atomic_fetch_add(&releases, 1, __ATOMIC_ACQ_REL);
    sem_post(&released);
}

static void memory(void)
{
    struct pair pair;
    tcpx_region *region = NULL;
    tcpx_transfer *transfer = NULL, *other = NULL;
    unsigned char bytes[64];
    int five = 5;
    void *address;
    size_t n;
    pair_open(&pair);
    sem_init(&released, 0, 0);
    FAILS(TCPX_ERR_MEMORY, "allocate", tcpx_region_host(SIZE_MAX / 2, &region));
    FAILS(TCPX_ERR_MEMORY, "allocate", tcpx_region_host(SIZE_MAX, &region));
    FAILS(TCPX_ERR_MEMORY, "", tcpx_region_cuda(4096, 1, &region));
    FAILS(TCPX_ERR_ARGUMENT, "data is NULL",
          tcpx_region_wrap(NULL, 1, TCPX_MEMORY_HOST, 0, give_back, &five, &region));
    FAILS(TCPX_ERR_ARGUMENT, "memory is 7",
          tcpx_region_wrap(bytes, 1, 7, 0, give_back, &five, &region));
    FAILS(TCPX_ERR_MEMORY, "",
          tcpx_region_wrap(bytes, 1, TCPX_MEMORY_CUDA, 4096, give_back, &five, &region));
    FAILS(TCPX_ERR_MEMORY, "not all of that is readable memory",
          tcpx_region_wrap(bytes, SIZE_MAX, TCPX_MEMORY_HOST, 0, give_back, &five, &region));
    HOLDS(!region && __atomic_load_n(&releases, __ATOMIC_ACQUIRE) == 0);
    WORKS(tcpx_region_wrap(NULL, 0, TCPX_MEMORY_HOST, 0, NULL, NULL, &region));
    WORKS(tcpx_region_release(region));

    FAILS(TCPX_ERR_ARGUMENT, "do not lie", tcpx_region_write(pair.source, 1, bytes, BYTES));
    FAILS(TCPX_ERR_ARGUMENT, "do not lie", tcpx_region_read(pair.source, BYTES, bytes, 1));
    FAILS(TCPX_ERR_ARGUMENT, "do not lie", tcpx_region_read(pair.source, SIZE_MAX, bytes, 2));
    FAILS(TCPX_ERR_ARGUMENT, "source is NULL", tcpx_region_write(pair.source, 0, NULL, 1));
    FAILS(TCPX_ERR_ARGUMENT, "destination is NULL", tcpx_region_read(pair.source, 0, NULL, 1));
    WORKS(tcpx_region_read(pair.source, BYTES, NULL, 0));
    FAILS(TCPX_ERR_ARGUMENT, "do not lie",
          tcpx_send(pair.client, pair.source, 1, BYTES, 0, NULL, &transfer));
    FAILS(TCPX_ERR_ARGUMENT, "do not lie",
          tcpx_receive(pair.client, pair.source, BYTES + 1, 0, 0, NULL, &transfer));

    /* The memory of a running transfer is in use, outlives its handle, and is given back once. */
    WORKS(tcpx_region_wrap(bytes, sizeof bytes, TCPX_MEMORY_HOST, 0, give_back, &five, &region));
    WORKS(tcpx_region_address(region, &address, &n));
    HOLDS(address == bytes && n == sizeof bytes);
    WORKS(tcpx_receive(pair.server, region, 0, 32, 5, NULL, &transfer));
    FAILS(TCPX_ERR_MEMORY, "held", tcpx_receive(pair.server, region, 16, 32, 5, NULL, &other));
    FAILS(TCPX_ERR_MEMORY, "held", tcpx_region_write(region, 31, bytes, 1));
    WORKS(tcpx_region_write(region, 32, "x", 1));
    WORKS(tcpx_region_release(region));
    HOLDS(__atomic_load_n(&releases, __ATOMIC_ACQUIRE) == 0);
    WORKS(tcpx_region_write(pair.source, 0, "hello", 5));
    WORKS(tcpx_send(pair.client, pair.source, 0, 5, 5, NULL, &other));
    finish(other);
    finish(transfer);
    HOLDS(sem_wait(&released) == 0);
    HOLDS(__atomic_load_n(&releases, __ATOMIC_ACQUIRE) == 1);
    HOLDS(!memcmp(bytes, "hello", 5) && bytes[32] == 'x');
    in_order(&pair);
    pair_close(&pair);
}

static void transfers(void)
{
    struct pair pair;
    tcpx_transfer *transfer, *other;
    tcpx_transfer_options options = {0};
    tcpx_report report;
    uint64_t done, total, placed = 9;
    int ended = 9;
    pair_open(&pair);
    options.level = 3;
    FAILS(TCPX_ERR_ARGUMENT, "level is 3",
          tcpx_send(pair.client, pair.source, 0, 1, 0, &options, &transfer));
    options.level = 0;
    options.after = 4;
    FAILS(TCPX_ERR_ARGUMENT, "after is 4",
          tcpx_send(pair.client, pair.source, 0, 1, 0, &options, &transfer));
    options.after = TCPX_AFTER_EVENT;
    options.stream = &somewhere;
    FAILS(TCPX_ERR_SETTING, "host memory",
          tcpx_receive(pair.client, pair.source, 0, 1, 0, &options, &transfer));
    options.after = 0;
    options.reserved[0] = 1;
    FAILS(TCPX_ERR_ARGUMENT, "zeros",
          tcpx_receive(pair.client, pair.source, 0, 1, 0, &options, &transfer));
    options.reserved[0] = 0;
    options.notification = "";
    FAILS(TCPX_ERR_ARGUMENT, "tcpx_notify",
          tcpx_send(pair.client, pair.source, 0, 1, 0, &options, &transfer));
    options.notification = NULL;

    /* Deadlines, waits that run out, cancels. */
    options.timeout_ms = 1;
    WORKS(tcpx_receive(pair.server, pair.spare, 0, 8, 1, &options, &transfer));
    FAILS(TCPX_ERR_TIMED_OUT, "nothing was delivered",
          tcpx_transfer_wait(transfer, TCPX_FOREVER, &report));
    HOLDS(tcpx_error_delivered(&placed) == TCPX_DELIVERED_NONE && placed == 0);
    HOLDS(tcpx_error_check());
    FAILS(TCPX_ERR_TIMED_OUT, "", tcpx_transfer_test(transfer, &ended, NULL));
    HOLDS(ended == 1);
    WORKS(tcpx_transfer_release(transfer));
    WORKS(tcpx_receive(pair.server, pair.spare, 0, 8, 2, NULL, &transfer));
    FAILS(TCPX_AGAIN, "still runs", tcpx_transfer_wait(transfer, 0, NULL));
    FAILS(TCPX_AGAIN, "still runs", tcpx_transfer_wait(transfer, SHORT, NULL));
    WORKS(tcpx_transfer_test(transfer, &ended, &report));
    HOLDS(ended == 0);
    WORKS(tcpx_transfer_progress(transfer, &done, &total));
    HOLDS(done == 0);
    WORKS(tcpx_transfer_cancel(transfer));
    FAILS(TCPX_ERR_CANCELLED, "cancelled", tcpx_transfer_wait(transfer, LONG, NULL));
    WORKS(tcpx_transfer_cancel(transfer));
    WORKS(tcpx_transfer_release(transfer));

    /* Too large for its receive: both ends say so. */
    WORKS(tcpx_receive(pair.server, pair.spare, 0, 4, 3, NULL, &transfer));
    WORKS(tcpx_send(pair.client, pair.source, 0, 5, 3, NULL, &other));
    FAILS(TCPX_ERR_TOO_LARGE, "room for 4", tcpx_transfer_wait(transfer, LONG, NULL));
    FAILS(TCPX_ERR_TOO_LARGE, "room for 4", tcpx_transfer_wait(other, LONG, NULL));
    WORKS(tcpx_transfer_release(transfer));
    WORKS(tcpx_transfer_release(other));

    in_order(&pair);
    pair_close(&pair);
}

static void queues(void)
{
    struct pair pair;
    tcpx_queue *queue;
    tcpx_transfer *receive, *send, *late;
    tcpx_completion_entry entries[4];
    size_t count = 9;
    int descriptor = -1, round;
    struct pollfd polled = {0};
    pair_open(&pair);
    WORKS(tcpx_queue_new(&queue));
    WORKS(tcpx_queue_descriptor(queue, &descriptor));
    polled.fd = descriptor;
    polled.events = POLLIN;
    HOLDS(poll(&polled, 1, 0) == 0);
    WORKS(tcpx_queue_poll(queue, entries, 4, 0, &count));
    HOLDS(count == 0);
    WORKS(tcpx_queue_poll(queue, entries, 4, SHORT, &count));
    HOLDS(count == 0);

    WORKS(tcpx_receive(pair.server, pair.spare, 0, 4, 1, NULL, &receive));
    WORKS(tcpx_transfer_queue(receive, queue, 77));
    FAILS(TCPX_ERR_USAGE, "reports to a queue", tcpx_transfer_queue(receive, queue, 78));
    /* The handle is given up; the transfer runs on. */
    WORKS(tcpx_receive(pair.server, pair.spare, 8, 8, 2, NULL, &late));
    WORKS(tcpx_transfer_queue(late, queue, 88));
    WORKS(tcpx_transfer_release(late));
    WORKS(tcpx_send(pair.client, pair.source, 0, 5, 1, NULL, &send));
    FAILS(TCPX_ERR_TOO_LARGE, "", tcpx_transfer_wait(send, LONG, NULL));
    WORKS(tcpx_transfer_release(send));
    WORKS(tcpx_send(pair.client, pair.source, 0, 8, 2, NULL, &send));
    finish(send);
    for (round = 0; round < 2; round++) {
        HOLDS(poll(&polled, 1, (int)LONG) == 1 && polled.revents == POLLIN);
        WORKS(tcpx_queue_poll(queue, entries + round, 1, LONG, &count));
        HOLDS(count == 1);
    }
    HOLDS(poll(&polled, 1, 0) == 0);
    round = entries[0].key == 88;
    HOLDS(entries[round].key == 77 && entries[round].code == TCPX_ERR_TOO_LARGE);
    HOLDS(entries[!round].key == 88 && entries[!round].code == TCPX_OK);
    HOLDS(entries[!round].report.bytes == 8 && entries[!round].reserved == 0);
    FAILS(TCPX_ERR_TOO_LARGE, "room for 4", tcpx_transfer_wait(receive, 0, NULL));
    WORKS(tcpx_transfer_release(receive));
    WORKS(tcpx_queue_close(queue));
    in_order(&pair);
    pair_close(&pair);
}

static void one_sided(void)
{
    struct pair pair;
    tcpx_window *put, *get, *none = NULL;
    tcpx_transfer *transfer = NULL;
    tcpx_transfer_options options = {0};
    tcpx_piece pieces[2];
    unsigned char key[TCPX_WINDOW_KEY_MAX], read_key[TCPX_WINDOW_KEY_MAX], bad[37] = {0};
    unsigned char heard[16];
    size_t n, m;
    pair_open(&pair);
    FAILS(TCPX_ERR_ARGUMENT, "rights are 0", tcpx_expose(pair.server, pair.target, 0, 1, 0, &none));
    FAILS(TCPX_ERR_ARGUMENT, "do not lie",
          tcpx_expose(pair.server, pair.target, BYTES, 1, TCPX_RIGHT_GET, &none));
    HOLDS(!none);
    WORKS(tcpx_expose(pair.server, pair.target, 0, 1024, TCPX_RIGHT_PUT, &put));
    WORKS(tcpx_expose(pair.server, pair.target, 1024, 1024, TCPX_RIGHT_GET, &get));
    WORKS(tcpx_window_key(put, key, sizeof key, &n));
    WORKS(tcpx_window_key(get, read_key, sizeof read_key, &m));
    HOLDS(n == m && n <= TCPX_WINDOW_KEY_MAX && memcmp(key, read_key, n));

    FAILS(TCPX_ERR_ARGUMENT, "key is NULL",
          tcpx_put(pair.client, pair.source, 0, 8, NULL, n, 0, NULL, &transfer));
    FAILS(TCPX_ERR_SETTING, "window key",
          tcpx_put(pair.client, pair.source, 0, 8, key, n - 1, 0, NULL, &transfer));
    FAILS(TCPX_ERR_SETTING, "window key",
          tcpx_put(pair.client, pair.source, 0, 8, bad, sizeof bad, 0, NULL, &transfer));
    FAILS(TCPX_ERR_SETTING, "right",
          tcpx_get(pair.client, pair.source, 0, 8, key, n, 0, NULL, &transfer));
    FAILS(TCPX_ERR_SETTING, "right",
          tcpx_put(pair.client, pair.source, 0, 8, read_key, n, 0, NULL, &transfer));
    FAILS(TCPX_ERR_SETTING, "1024",
          tcpx_put(pair.client, pair.source, 0, 8, key, n, 1017, NULL, &transfer));
    FAILS(TCPX_ERR_SETTING, "1024",
          tcpx_put(pair.client, pair.source, 0, 8, key, n, UINT64_MAX, NULL, &transfer));
    memset(pieces, 0, sizeof pieces);
    pieces[0].operation = TCPX_PUT;
    pieces[0].region = pair.source;
    pieces[0].bytes = 8;
    pieces[0].key = key;
    pieces[0].key_bytes = n;
    pieces[1] = pieces[0];
    FAILS(TCPX_ERR_ARGUMENT, "count is 0", tcpx_batch(pair.client, pieces, 0, NULL, &transfer));
    FAILS(TCPX_ERR_ARGUMENT, "pieces is NULL", tcpx_batch(pair.client, NULL, 2, NULL, &transfer));
    pieces[1].operation = 3;
    FAILS(TCPX_ERR_ARGUMENT, "piece 1: operation is 3",
          tcpx_batch(pair.client, pieces, 2, NULL, &transfer));
    pieces[1] = pieces[0];
    pieces[1].region = (tcpx_region *)pair.client;
    FAILS(TCPX_ERR_HANDLE, "piece 1", tcpx_batch(pair.client, pieces, 2, NULL, &transfer));
    pieces[1] = pieces[0];
    pieces[1].offset = BYTES;
    FAILS(TCPX_ERR_ARGUMENT, "piece 1", tcpx_batch(pair.client, pieces, 2, NULL, &transfer));
    pieces[1].offset = 0;
    static unsigned char large[TCPX_NOTIFICATION_MAX + 1];
    options.notification = large;
    options.notification_bytes = sizeof large;
    FAILS(TCPX_ERR_SETTING, "65536", tcpx_batch(pair.client, pieces, 2, &options, &transfer));
    FAILS(TCPX_ERR_SETTING, "65536",
          tcpx_notify(pair.client, large, TCPX_NOTIFICATION_MAX + 1, &transfer));
    FAILS(TCPX_ERR_ARGUMENT, "data is NULL", tcpx_notify(pair.client, NULL, 1, &transfer));
    HOLDS(!transfer);

    /* After all that: two puts and a notification, which waits for room. */
    options.notification = "there";
    options.notification_bytes = 5;
    pieces[1].window_offset = 8;
    WORKS(tcpx_batch(pair.client, pieces, 2, &options, &transfer));
    finish(transfer);
    FAILS(TCPX_ERR_ARGUMENT, "do not fit", tcpx_notification(pair.server, LONG, heard, 4, &n));
    HOLDS(n == 5);
    FAILS(TCPX_ERR_ARGUMENT, "do not fit", tcpx_notification(pair.server, 0, NULL, 9, &n));
    WORKS(tcpx_notification(pair.server, 0, heard, sizeof heard, &n));
    HOLDS(n == 5 && !memcmp(heard, "there", 5));
    FAILS(TCPX_AGAIN, "call again", tcpx_notification(pair.server, 0, heard, sizeof heard, &n));
    FAILS(TCPX_AGAIN, "call again", tcpx_notification(pair.server, SHORT, heard, sizeof heard, &n));
    WORKS(tcpx_notify(pair.client, NULL, 0, &transfer));
    finish(transfer);
    WORKS(tcpx_notification(pair.server, LONG, NULL, 0, &n));
    HOLDS(n == 0);

    /* A window that was closed. */
    WORKS(tcpx_window_revoke(put, LONG));
    WORKS(tcpx_window_key(get, read_key, sizeof read_key, &n));
    WORKS(tcpx_put(pair.client, pair.source, 0, 8, key, n, 0, NULL, &transfer));
    FAILS(TCPX_ERR_TRANSFER, "", tcpx_transfer_wait(transfer, LONG, NULL));
    WORKS(tcpx_transfer_release(transfer));
    in_order(&pair);
    /* A window may outlive its connection. */
    pair_close(&pair);
    WORKS(tcpx_window_revoke(get, LONG));
}

struct waiting {
    struct pair *pair;
    tcpx_transfer *transfer;
    sem_t begun;
};

static void *accept_long(void *word)
{
    struct waiting *waiting = word;
    tcpx_connection *connection;
    sem_post(&waiting->begun);
    FAILS(TCPX_ERR_HANDLE, "has ended",
          tcpx_endpoint_accept(waiting->pair->endpoint, TCPX_FOREVER, &connection));
    return NULL;
}

static void *wait_long(void *word)
{
    struct waiting *waiting = word;
    sem_post(&waiting->begun);
    int code = tcpx_transfer_wait(waiting->transfer, TCPX_FOREVER, NULL);
    HOLDS(code == TCPX_ERR_CANCELLED || code == TCPX_ERR_HANDLE);
    return NULL;
}

static void *hear_long(void *word)
{
    struct waiting *waiting = word;
    size_t n;
    sem_post(&waiting->begun);
    int code = tcpx_notification(waiting->pair->server, TCPX_FOREVER, NULL, 0, &n);
    HOLDS(code == TCPX_ERR_HANDLE || code == TCPX_ERR_CLOSED);
    return NULL;
}

static void *poll_long(void *word)
{
    tcpx_completion_entry entry;
    size_t n;
    FAILS(TCPX_ERR_HANDLE, "has ended",
          tcpx_queue_poll((tcpx_queue *)word, &entry, 1, TCPX_FOREVER, &n));
    return NULL;
}

/* Ends under waits of other threads: the waits end too. */
static void ends_under_waits(void)
{
    struct pair pair;
    struct waiting waiting;
    tcpx_queue *queue;
    pthread_t threads[4];
    pair_open(&pair);
    waiting.pair = &pair;
    sem_init(&waiting.begun, 0, 0);
    WORKS(tcpx_queue_new(&queue));
    WORKS(tcpx_receive(pair.server, pair.spare, 0, 8, 1, NULL, &waiting.transfer));
    HOLDS(pthread_create(&threads[0], NULL, accept_long, &waiting) == 0);
    HOLDS(pthread_create(&threads[1], NULL, wait_long, &waiting) == 0);
    HOLDS(pthread_create(&threads[2], NULL, hear_long, &waiting) == 0);
    HOLDS(pthread_create(&threads[3], NULL, poll_long, queue) == 0);
    for (int i = 0; i < 3; i++)
        HOLDS(sem_wait(&waiting.begun) == 0);
    WORKS(tcpx_transfer_release(waiting.transfer));
    WORKS(tcpx_queue_close(queue));
    pair_close(&pair);
    for (int i = 0; i < 4; i++)
        HOLDS(pthread_join(threads[i], NULL) == 0);
}

#define SLOTS 16
static tcpx_transfer *shared_transfers[SLOTS];
static tcpx_region *shared_regions[SLOTS];

/* GCC and clang have these in every language. */
#define LOAD(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#define SWAP(place, value) __atomic_exchange_n(&(place), value, __ATOMIC_ACQ_REL)

/* Starts, waits, tests, cancels and releases whatever lies in a slot, ended or not. */
static void *hammer(void *word)
{
    struct pair *pair = word;
    static unsigned seeds;
    unsigned seed = 12345 + 7919 * __atomic_fetch_add(&seeds, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 3000; i++) {
        seed = seed * 1664525u + 1013904223u;
        unsigned slot = seed >> 8 & (SLOTS - 1);
        tcpx_transfer *transfer = NULL;
        tcpx_region *region = NULL;
        int ended;
        switch (seed >> 20 & 7) {
        case 0:
            if (tcpx_region_host(64, &region) == TCPX_OK) {
                tcpx_region *old = SWAP(shared_regions[slot], region);
                (void)tcpx_region_release(old);
            }
            break;
        case 1:
            if (tcpx_send(pair->client, LOAD(shared_regions[slot]), 0, 64, 9, NULL, &transfer) ==
                TCPX_OK)
                (void)tcpx_transfer_release(SWAP(shared_transfers[slot], transfer));
            break;
        case 2:
            if (tcpx_receive(pair->server, LOAD(shared_regions[slot]), 0, 64, 9, NULL, &transfer) ==
                TCPX_OK)
                (void)tcpx_transfer_release(SWAP(shared_transfers[slot], transfer));
            break;
        case 3:
            (void)tcpx_transfer_test(LOAD(shared_transfers[slot]), &ended, NULL);
            break;
        case 4:
            (void)tcpx_transfer_cancel(LOAD(shared_transfers[slot]));
            break;
        case 5:
            (void)tcpx_transfer_release(LOAD(shared_transfers[slot]));
            break;
        case 6:
            transfer = LOAD(shared_transfers[slot]);
            (void)tcpx_transfer_wait(transfer, 0, NULL);
            break;
        default:
            (void)tcpx_region_release(LOAD(shared_regions[slot]));
        }
    }
    return NULL;
}

static void many_threads(void)
{
    struct pair pair;
    pthread_t threads[4];
    pair_open(&pair);
    for (int i = 0; i < 4; i++)
        HOLDS(pthread_create(&threads[i], NULL, hammer, &pair) == 0);
    for (int i = 0; i < 4; i++)
        HOLDS(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < SLOTS; i++) {
        (void)tcpx_transfer_release(shared_transfers[i]);
        (void)tcpx_region_release(shared_regions[i]);
    }
    in_order(&pair);
    pair_close(&pair);
}

/* Numbers that look like handles, and addresses that do not: none is one, none is followed. */
static void wild_pointers(void)
{
    uint64_t number = 88172645463325252u;
    for (int i = 0; i < 20000; i++) {
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
        uint64_t bits = i & 1 ? (number | 1ull << 63) & ~15ull : number;
        void *wild = (void *)(uintptr_t)bits;
        HOLDS(tcpx_endpoint_close((tcpx_endpoint *)wild) == TCPX_ERR_HANDLE);
        HOLDS(tcpx_connection_close((tcpx_connection *)wild, 0) == TCPX_ERR_HANDLE);
        HOLDS(tcpx_region_release((tcpx_region *)wild) == TCPX_ERR_HANDLE);
        HOLDS(tcpx_window_revoke((tcpx_window *)wild, 0) == TCPX_ERR_HANDLE);
        HOLDS(tcpx_transfer_release((tcpx_transfer *)wild) == TCPX_ERR_HANDLE);
        HOLDS(tcpx_queue_close((tcpx_queue *)wild) == TCPX_ERR_HANDLE);
    }
}

static void lost_peer(void)
{
    struct pair pair;
    tcpx_transfer *transfer, *none;
    size_t n;
    pair_open(&pair);
    WORKS(tcpx_receive(pair.server, pair.spare, 0, 8, 1, NULL, &transfer));
    WORKS(tcpx_connection_close(pair.client, 0));
    FAILS(TCPX_ERR_CLOSED, "", tcpx_transfer_wait(transfer, LONG, NULL));
    WORKS(tcpx_transfer_release(transfer));
    FAILS(TCPX_ERR_CLOSED, "", tcpx_notification(pair.server, LONG, NULL, 0, &n));
    FAILS(TCPX_ERR_CLOSED, "", tcpx_send(pair.server, pair.source, 0, 1, 0, NULL, &none));
    WORKS(tcpx_connection_close(pair.server, 0));
    WORKS(tcpx_endpoint_close(pair.endpoint));
    WORKS(tcpx_region_release(pair.source));
    WORKS(tcpx_region_release(pair.target));
    WORKS(tcpx_region_release(pair.spare));
}

/* A fork's child is told so by every call, and its parent is not disturbed. */
static void forks(void)
{
    struct pair pair;
    tcpx_transfer *transfer;
    tcpx_region *region = NULL;
    tcpx_endpoint *endpoint;
    int status = 1;
    pair_open(&pair);
    WORKS(tcpx_receive(pair.server, pair.spare, 0, 8, 1, NULL, &transfer));
    pid_t child = fork();
    HOLDS(child >= 0);
    if (child == 0) {
        FAILS(TCPX_ERR_FORKED, "fork", tcpx_transfer_wait(transfer, TCPX_FOREVER, NULL));
        FAILS(TCPX_ERR_FORKED, "fork", tcpx_transfer_release(transfer));
        FAILS(TCPX_ERR_FORKED, "fork", tcpx_connection_close(pair.server, LONG));
        FAILS(TCPX_ERR_FORKED, "fork", tcpx_region_release(pair.target));
        FAILS(TCPX_ERR_FORKED, "fork", tcpx_region_host(8, &region));
        FAILS(TCPX_ERR_FORKED, "fork", tcpx_endpoint_listen("127.0.0.1:0", NULL, &endpoint));
        FAILS(TCPX_ERR_FORKED, "fork", tcpx_endpoint_close(pair.endpoint));
        HOLDS(tcpx_abi() == TCPX_ABI && !region);
        _exit(0);
    }
    HOLDS(waitpid(child, &status, 0) == child && status == 0);
    WORKS(tcpx_transfer_release(transfer));
    in_order(&pair);
    pair_close(&pair);
}

int main(void)
{
    versions();
    handles();
    where_answers_go();
    settings();
    memory();
    transfers();
    queues();
    one_sided();
    ends_under_waits();
    many_threads();
    wild_pointers();
    lost_peer();
    forks();
    puts("PASSED");
    return 0;
}
