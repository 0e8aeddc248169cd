/* put_get: one process writes into the memory of another and reads it back, in C.
 *
 *   put_get
 *
 * The program forks before it uses the library; the two processes then talk over loopback. The
 * owner of the memory exposes a window and sends its key as a message. The user puts pages there, in
 * one batch with a notification behind it, and gets them back; the owner only waits for the
 * notification.
 *
 *   cc -std=c99 put_get.c $(pkg-config --cflags --libs tcpx) -o put_get
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tcpx.h"

#define TIMEOUT_MS 30000u /* for each step */
#define PAGE ((size_t)65536)
#define PAGES 16
enum { TAG_KEY = 1 };

static const char DONE[] = "16 pages";

static void check(int code)
{
    if (code == TCPX_OK)
        return;
    fprintf(stderr, "FAILED: %s\n  %s: %s\n", tcpx_error_text(), tcpx_error_name(code),
            tcpx_error_advice(code));
    exit(1);
}

static void holds(int condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "FAILED: %s\n", what);
        exit(1);
    }
}

static void finish(tcpx_transfer *transfer)
{
    check(tcpx_transfer_wait(transfer, TCPX_FOREVER, NULL));
    check(tcpx_transfer_release(transfer));
}

static unsigned char pattern(size_t at)
{
    return (unsigned char)(at * 2654435761u >> 13);
}

/* The memory's owner: tells the other process where it listens, and waits to be told of the end. */
static int owner(int tell)
{
    char place[256];
    unsigned char key[TCPX_WINDOW_KEY_MAX], heard[sizeof DONE];
    size_t used, bytes;
    void *address;
    tcpx_endpoint *endpoint;
    tcpx_connection *connection;
    tcpx_region *memory, *message;
    tcpx_window *window;
    tcpx_transfer *transfer;

    check(tcpx_endpoint_listen("127.0.0.1:0", NULL, &endpoint));
    check(tcpx_endpoint_address(endpoint, place, sizeof place, &used));
    check(tcpx_endpoint_key(endpoint, place + used, sizeof place - used, NULL));
    holds(write(tell, place, sizeof place) == (ssize_t)sizeof place, "cannot write to the pipe");
    check(tcpx_endpoint_accept(endpoint, TIMEOUT_MS, &connection));

    check(tcpx_region_host(PAGES * PAGE, &memory));
    check(tcpx_expose(connection, memory, 0, PAGES * PAGE, TCPX_RIGHT_GET | TCPX_RIGHT_PUT,
                      &window));
    check(tcpx_window_key(window, key, sizeof key, &bytes));
    check(tcpx_region_host(sizeof key, &message));
    check(tcpx_region_write(message, 0, key, bytes));
    check(tcpx_send(connection, message, 0, bytes, TAG_KEY, NULL, &transfer));
    finish(transfer);

    /* It comes when every page is in place. */
    check(tcpx_notification(connection, TIMEOUT_MS, heard, sizeof heard, &bytes));
    holds(bytes == sizeof DONE && !memcmp(heard, DONE, bytes), "another notification");
    check(tcpx_region_address(memory, &address, NULL));
    for (size_t i = 0; i < PAGES * PAGE; i++)
        holds(((unsigned char *)address)[i] == pattern(i), "a byte is not in place");

    /* The other side says goodbye when it has read them back. */
    int code = tcpx_notification(connection, TIMEOUT_MS, heard, sizeof heard, &bytes);
    holds(code == TCPX_ERR_CLOSED, "the other side is not done");
    check(tcpx_window_revoke(window, TIMEOUT_MS));
    check(tcpx_connection_close(connection, 0));
    check(tcpx_region_release(message));
    check(tcpx_region_release(memory));
    check(tcpx_endpoint_close(endpoint));
    return 0;
}

/* Who uses the memory, and owns none there. */
static int user(int told)
{
    char place[256];
    unsigned char key[TCPX_WINDOW_KEY_MAX];
    void *address;
    size_t got = 0;
    tcpx_options options;
    tcpx_transfer_options behind;
    tcpx_connection *connection;
    tcpx_region *message, *pages, *back;
    tcpx_transfer *transfer;
    tcpx_report report;
    tcpx_piece pieces[PAGES];

    while (got < sizeof place) {
        ssize_t n = read(told, place + got, sizeof place - got);
        holds(n > 0, "the owner has ended");
        got += (size_t)n;
    }
    memset(&options, 0, sizeof options);
    options.key = place + strlen(place) + 1;
    check(tcpx_connect(place, &options, &connection));

    check(tcpx_region_host(sizeof key, &message));
    check(tcpx_receive(connection, message, 0, sizeof key, TAG_KEY, NULL, &transfer));
    check(tcpx_transfer_wait(transfer, TCPX_FOREVER, &report));
    check(tcpx_transfer_release(transfer));
    check(tcpx_region_read(message, 0, key, (size_t)report.bytes));

    check(tcpx_region_host(PAGES * PAGE, &pages));
    check(tcpx_region_address(pages, &address, NULL));
    for (size_t i = 0; i < PAGES * PAGE; i++)
        ((unsigned char *)address)[i] = pattern(i);
    /* All of them, last first, and a notification when they are there. */
    memset(pieces, 0, sizeof pieces);
    for (size_t i = 0; i < PAGES; i++) {
        size_t at = (PAGES - 1 - i) * PAGE;
        pieces[i].operation = TCPX_PUT;
        pieces[i].region = pages;
        pieces[i].offset = at;
        pieces[i].bytes = PAGE;
        pieces[i].key = key;
        pieces[i].key_bytes = (size_t)report.bytes;
        pieces[i].window_offset = at;
    }
    memset(&behind, 0, sizeof behind);
    behind.notification = DONE;
    behind.notification_bytes = sizeof DONE;
    check(tcpx_batch(connection, pieces, PAGES, &behind, &transfer));
    finish(transfer);

    check(tcpx_region_host(PAGES * PAGE, &back));
    check(tcpx_get(connection, back, 0, PAGES * PAGE, key, (size_t)report.bytes, 0, NULL,
                   &transfer));
    finish(transfer);
    check(tcpx_region_address(back, &address, NULL));
    for (size_t i = 0; i < PAGES * PAGE; i++)
        holds(((unsigned char *)address)[i] == pattern(i), "a byte came back changed");

    check(tcpx_connection_close(connection, TIMEOUT_MS));
    check(tcpx_region_release(message));
    check(tcpx_region_release(pages));
    check(tcpx_region_release(back));
    return 0;
}

int main(void)
{
    int ends[2], status = 0;
    if (pipe(ends))
        return 1;
    pid_t child = fork();
    if (child < 0)
        return 1;
    if (child == 0) {
        close(ends[1]);
        return user(ends[0]);
    }
    close(ends[0]);
    int code = owner(ends[1]);
    if (waitpid(child, &status, 0) != child || status != 0 || code != 0)
        return 1;
    printf("PASSED: %d pages of %zu bytes put and got back\n", PAGES, PAGE);
    return 0;
}
