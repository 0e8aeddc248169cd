/* plugin_transfer: one message from a client to a server through a network plugin, in C.
 *
 *   plugin_transfer server PORT [--out FILE] [--device-memory]
 *   plugin_transfer client HOST PORT [--in FILE | --bytes N] [--device-memory]
 *
 * UCCL_TCPX_PLUGIN_PATH names the plugin. PORT 0 takes a free one, which the first line of output
 * names. With --device-memory the buffers are registered as CUDA memory: on a plugin that lets host
 * memory stand in for it, the message then arrives as fragments in the plugin's pool, and this
 * program unpacks them on the CPU.
 *
 * The two sides meet on a TCP connection (the bootstrap). The server sends the 128 bytes of
 * tcpx_listen; the client answers with the size of the message, and after it with a digest; the
 * server ends with a byte, 1 if every byte arrived and none beyond. A program that needs a trusted
 * peer must authenticate it there: this one does not.
 *
 *   cc -std=c99 plugin_transfer.c -ltcpx -o plugin_transfer
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "tcpx_plugin.h"

#define CHUNK (512u << 10) /* bytes of one request */
#define PAGE 4096u
#define GUARD PAGE        /* bytes behind the buffer that nobody may write */
#define POISON 0xEE
#define TIMEOUT_MS 30000u /* for each step */
#define TAG 42

struct options {
    const char *host;
    const char *port;
    const char *file;
    unsigned long long bytes;
    int memory;
};

static void fail(const char *what)
{
    fprintf(stderr, "FAILED: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* Ends the program if a call of the library failed. */
static void check(int rc)
{
    if (rc == TCPX_SUCCESS)
        return;
    fprintf(stderr, "FAILED: %s (%d: %s)\n", tcpx_last_error(), rc, tcpx_strerror(rc));
    exit(1);
}

static void refuse(const char *why)
{
    fprintf(stderr, "FAILED: %s\n", why);
    exit(1);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static double deadline(void)
{
    return now() + TIMEOUT_MS / 1000;
}

/* A moment before the next try. */
static void pause_before(double until, const char *why)
{
    struct timespec pause = {.tv_nsec = 1000000};
    if (now() > until)
        refuse(why);
    nanosleep(&pause, NULL);
}

/* ---- the bootstrap connection ---- */

static void put(int fd, const void *data, size_t len)
{
    const char *at = data;
    while (len > 0) {
        ssize_t n = send(fd, at, len, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            fail("sending on the bootstrap connection");
        at += n;
        len -= (size_t)n;
    }
}

static void get(int fd, void *data, size_t len)
{
    char *at = data;
    while (len > 0) {
        ssize_t n = recv(fd, at, len, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n == 0)
            refuse("the peer closed the bootstrap connection: see its messages");
        if (n < 0)
            fail("receiving on the bootstrap connection");
        at += n;
        len -= (size_t)n;
    }
}

static void put_number(int fd, uint64_t value)
{
    unsigned char bytes[8];
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(value >> (56 - 8 * i));
    put(fd, bytes, sizeof bytes);
}

static uint64_t get_number(int fd)
{
    unsigned char bytes[8];
    uint64_t value = 0;
    get(fd, bytes, sizeof bytes);
    for (int i = 0; i < 8; i++)
        value = value << 8 | bytes[i];
    return value;
}

static void bound(int fd)
{
    struct timeval limit = {.tv_sec = TIMEOUT_MS / 1000};
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) ||
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit))
        fail("bounding the bootstrap connection");
}

static int bootstrap_server(const char *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t len = sizeof address;
    int on = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    address.sin_port = htons((uint16_t)strtoul(port, NULL, 10));
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) ||
        bind(fd, (struct sockaddr *)&address, len) || listen(fd, 1) ||
        getsockname(fd, (struct sockaddr *)&address, &len))
        fail("listening for the bootstrap connection");
    bound(fd);
    printf("listening on port %u\n", (unsigned)ntohs(address.sin_port));
    fflush(stdout);
    int peer = accept(fd, NULL, NULL);
    if (peer < 0)
        fail("accepting the bootstrap connection");
    close(fd);
    bound(peer);
    return peer;
}

static int bootstrap_client(const char *host, const char *port)
{
    struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found;
    if (getaddrinfo(host, port, &hints, &found))
        refuse("the server's name has no address");
    int fd = socket(found->ai_family, found->ai_socktype, found->ai_protocol);
    if (fd < 0 || connect(fd, found->ai_addr, found->ai_addrlen))
        fail("connecting to the server");
    freeaddrinfo(found);
    bound(fd);
    return fd;
}

/* ---- memory ---- */

static unsigned char *pages(uint64_t bytes)
{
    void *memory;
    if (bytes > SIZE_MAX - 2 * PAGE || posix_memalign(&memory, PAGE, (size_t)bytes + 2 * PAGE))
        refuse("not enough memory for the message");
    memset(memory, POISON, (size_t)bytes + 2 * PAGE);
    return memory;
}

/* FNV-1a. */
static uint64_t digest(const unsigned char *data, uint64_t bytes)
{
    uint64_t hash = 14695981039346656037u;
    for (uint64_t i = 0; i < bytes; i++)
        hash = (hash ^ data[i]) * 1099511628211u;
    return hash;
}

static uint32_t chunk_at(uint64_t offset, uint64_t bytes)
{
    return bytes - offset < CHUNK ? (uint32_t)(bytes - offset) : CHUNK;
}

/* ---- the server ---- */

/* Moves the pieces of one received chunk to where they belong; returns its bytes. */
static uint64_t unpack(const tcpx_completion *done, unsigned char *to)
{
    for (size_t i = 0; i < done->count; i++) {
        const tcpx_descriptor *piece = &done->descriptors[i];
        memcpy(to + piece->dst_off, (const unsigned char *)done->pool + piece->src_off, piece->len);
    }
    return (uint64_t)done->size;
}

static uint64_t receive(tcpx_recv_comm *comm, tcpx_memory *memory, unsigned char *to,
                        uint64_t bytes)
{
    tcpx_request *window[TCPX_MAX_REQUESTS];
    uint64_t posted = 0, placed = 0, head = 0, tail = 0, pieces = 0;
    while (placed < bytes) {
        /* As many receives as a comm holds. */
        while (posted < bytes && tail - head < TCPX_MAX_REQUESTS) {
            void *data = to + posted;
            int size = (int)chunk_at(posted, bytes), tag = TAG;
            tcpx_request *request;
            check(tcpx_irecv(comm, 1, &data, &size, &tag, &memory, &request));
            if (!request)
                break;
            window[tail++ % TCPX_MAX_REQUESTS] = request;
            posted += (uint64_t)size;
        }
        tcpx_request *oldest = window[head++ % TCPX_MAX_REQUESTS];
        tcpx_completion done;
        uint32_t expected = chunk_at(placed, bytes);
        check(tcpx_wait_request(oldest, TIMEOUT_MS, &done));
        if (done.size != TCPX_SIZE_UNKNOWN && unpack(&done, to + placed) != expected)
            refuse("a chunk arrived with another size than the client announced");
        pieces += done.count;
        check(tcpx_irecv_consumed(comm, 1, oldest));
        placed += expected;
    }
    return pieces;
}

static int server(const struct options *options)
{
    tcpx_handle handle;
    tcpx_listen_comm *listener;
    tcpx_recv_comm *comm = NULL;
    check(tcpx_listen(0, &handle, &listener));
    int peer = bootstrap_server(options->port);
    put(peer, handle.bytes, sizeof handle.bytes);

    double until = deadline();
    for (check(tcpx_accept_v5(listener, &comm, NULL)); !comm;
         check(tcpx_accept_v5(listener, &comm, NULL)))
        pause_before(until, "the client does not connect through the plugin");
    check(tcpx_close_listen(listener));

    uint64_t bytes = get_number(peer), found = 0, pieces = 0;
    unsigned char *buffer = pages(bytes);
    if (bytes > 0) {
        tcpx_memory *memory;
        check(tcpx_reg_mr(comm, buffer, (size_t)bytes, options->memory, &memory));
        pieces = receive(comm, memory, buffer, bytes);
        check(tcpx_dereg_mr(comm, memory));
    }

    found = digest(buffer, bytes);
    unsigned char good = found == get_number(peer);
    for (uint64_t i = bytes; i < bytes + GUARD; i++)
        good = good && buffer[i] == POISON;
    put(peer, &good, 1);
    /* Some plugins close a comm only together with the peer's, which closes when it has the answer. */
    check(tcpx_close_recv(comm));
    close(peer);
    if (options->file) {
        FILE *file = fopen(options->file, "wb");
        if (!file || fwrite(buffer, 1, (size_t)bytes, file) != bytes || fclose(file))
            fail(options->file);
    }
    free(buffer);
    printf("%s: received %llu bytes in %llu fragments, digest %016llx\n",
           good ? "PASSED" : "FAILED", (unsigned long long)bytes, (unsigned long long)pieces,
           (unsigned long long)found);
    return !good;
}

/* ---- the client ---- */

static void send_all(tcpx_send_comm *comm, tcpx_memory *memory, unsigned char *from, uint64_t bytes)
{
    tcpx_request *window[TCPX_MAX_REQUESTS];
    uint64_t posted = 0, sent = 0, head = 0, tail = 0;
    while (sent < bytes) {
        while (posted < bytes && tail - head < TCPX_MAX_REQUESTS) {
            uint32_t size = chunk_at(posted, bytes);
            tcpx_request *request;
            check(tcpx_isend(comm, from + posted, (int)size, TAG, memory, &request));
            if (!request)
                break;
            window[tail++ % TCPX_MAX_REQUESTS] = request;
            posted += size;
        }
        check(tcpx_wait_request(window[head++ % TCPX_MAX_REQUESTS], TIMEOUT_MS, NULL));
        sent += chunk_at(sent, bytes);
    }
}

/* The message: a file, or fresh random bytes. */
static unsigned char *message(const struct options *options, uint64_t *bytes)
{
    const char *name = options->file ? options->file : "/dev/urandom";
    FILE *file = fopen(name, "rb");
    if (!file)
        fail(name);
    *bytes = options->bytes;
    if (options->file) {
        long end = fseek(file, 0, SEEK_END) ? -1 : ftell(file);
        if (end < 0 || fseek(file, 0, SEEK_SET))
            fail(name);
        *bytes = (uint64_t)end;
    }
    unsigned char *buffer = pages(*bytes);
    if (fread(buffer, 1, (size_t)*bytes, file) != *bytes)
        fail("reading the message");
    fclose(file);
    return buffer;
}

static int client(const struct options *options)
{
    uint64_t bytes;
    unsigned char *buffer = message(options, &bytes);
    int peer = bootstrap_client(options->host, options->port);
    tcpx_handle handle;
    tcpx_send_comm *comm = NULL;
    get(peer, handle.bytes, sizeof handle.bytes);

    check(tcpx_connect_v5(0, &handle, &comm, NULL));

    put_number(peer, bytes);
    if (bytes > 0) {
        tcpx_memory *memory;
        check(tcpx_reg_mr(comm, buffer, (size_t)bytes, options->memory, &memory));
        send_all(comm, memory, buffer, bytes);
        check(tcpx_dereg_mr(comm, memory));
    }
    put_number(peer, digest(buffer, bytes));
    /* A send that is done says nothing of the peer: close after its answer. */
    unsigned char good;
    get(peer, &good, 1);
    check(tcpx_close_send(comm));
    close(peer);
    free(buffer);
    printf("%s: sent %llu bytes\n", good ? "PASSED" : "FAILED", (unsigned long long)bytes);
    return !good;
}

static int usage(void)
{
    fputs("usage: plugin_transfer server PORT [--out FILE] [--device-memory]\n"
          "       plugin_transfer client HOST PORT [--in FILE | --bytes N] [--device-memory]\n",
          stderr);
    return 2;
}

int main(int count, char **words)
{
    struct options options = {.bytes = 23, .memory = TCPX_PTR_HOST};
    int serves = count > 1 && !strcmp(words[1], "server"), at = serves ? 3 : 4;
    if (count < at || (!serves && strcmp(words[1], "client")))
        return usage();
    options.host = words[2];
    options.port = words[at - 1];
    for (; at < count; at++) {
        if (!strcmp(words[at], "--device-memory"))
            options.memory = TCPX_PTR_CUDA;
        else if (!strcmp(words[at], serves ? "--out" : "--in") && at + 1 < count)
            options.file = words[++at];
        else if (!serves && !strcmp(words[at], "--bytes") && at + 1 < count)
            options.bytes = strtoull(words[++at], NULL, 10);
        else
            return usage();
    }
    signal(SIGPIPE, SIG_IGN); /* some plugins write to a peer that has gone */

    tcpx_net_properties properties;
    check(tcpx_load_plugin(NULL));
    int devices = tcpx_get_device_count();
    if (devices < 0)
        check(-devices);
    check(tcpx_get_properties(0, &properties));
    printf("%d devices; the first is %s at %d Mb/s, %s\n", devices, properties.name,
           properties.speed,
           properties.net_device_type ? "with a device queue" : "without a device queue");
    return serves ? server(&options) : client(&options);
}
