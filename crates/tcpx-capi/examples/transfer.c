/* transfer: one message from a client to a server, in C.
 *
 *   transfer server ADDRESS:PORT [--out FILE] [--gpu N]
 *   transfer client HOST:PORT KEY [--in FILE | --bytes N] [--gpu N]
 *
 * The server prints where it listens (port 0 takes a free one) and the key that the client needs.
 * The client sends the length of the message under one tag and the message under another; both ends
 * compare checksums (level "verified"). With --gpu the message lies in memory of CUDA device N.
 *
 *   cc -std=c99 transfer.c $(pkg-config --cflags --libs tcpx) -o transfer
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tcpx.h"

#define TIMEOUT_MS 30000u /* for each step */
enum { TAG_LENGTH = 1, TAG_MESSAGE = 2 };

static void fail(const char *what)
{
    fprintf(stderr, "FAILED: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* Ends the program if a call of the library failed. */
static void check(int code)
{
    if (code == TCPX_OK)
        return;
    fprintf(stderr, "FAILED: %s\n  %s: %s\n", tcpx_error_text(), tcpx_error_name(code),
            tcpx_error_advice(code));
    exit(1);
}

/* Waits for a transfer and gives it up; returns the bytes that moved. */
static uint64_t finish(tcpx_transfer *transfer)
{
    tcpx_report report;
    check(tcpx_transfer_wait(transfer, TCPX_FOREVER, &report));
    check(tcpx_transfer_release(transfer));
    return report.bytes;
}

/* Eight bytes, the first one first on every host. */
static void length_to_bytes(uint64_t length, unsigned char bytes[8])
{
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(length >> (56 - 8 * i));
}

static uint64_t length_of_bytes(const unsigned char bytes[8])
{
    uint64_t length = 0;
    for (int i = 0; i < 8; i++)
        length = length << 8 | bytes[i];
    return length;
}

/* Memory for the message, on the host (gpu -1) or a GPU. */
static tcpx_region *allocate(size_t bytes, int gpu)
{
    tcpx_region *region;
    if (gpu < 0)
        check(tcpx_region_host(bytes, &region));
    else
        check(tcpx_region_cuda((uint32_t)gpu, bytes, &region));
    return region;
}

static tcpx_options settings(int gpu)
{
    tcpx_options options;
    memset(&options, 0, sizeof options); /* every zero is the default */
    if (gpu >= 0) {
        options.memory = TCPX_MEMORY_CUDA;
        options.device = (uint32_t)gpu;
    }
    return options;
}

static tcpx_transfer_options verified(void)
{
    tcpx_transfer_options options;
    memset(&options, 0, sizeof options);
    options.level = TCPX_LEVEL_VERIFIED;
    options.stall_ms = TIMEOUT_MS;
    return options;
}

/* Copies the bytes out of the region first: the processor cannot read a GPU's memory. */
static void save(const char *name, tcpx_region *region, size_t bytes)
{
    void *data = malloc(bytes + 1);
    FILE *file = fopen(name, "wb");
    if (!data)
        fail("memory for the message");
    check(tcpx_region_read(region, 0, data, bytes));
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file))
        fail(name);
    free(data);
}

static int server(const char *address, const char *out, int gpu)
{
    char text[128], key[TCPX_KEY_MAX];
    unsigned char length[8];
    tcpx_endpoint *endpoint;
    tcpx_connection *connection;
    tcpx_region *region;
    tcpx_transfer *transfer;
    tcpx_options options = settings(gpu);
    tcpx_transfer_options how = verified();

    check(tcpx_endpoint_listen(address, &options, &endpoint));
    check(tcpx_endpoint_address(endpoint, text, sizeof text, NULL));
    check(tcpx_endpoint_key(endpoint, key, sizeof key, NULL));
    printf("listening on %s, key %s\n", text, key);
    fflush(stdout);
    check(tcpx_endpoint_accept(endpoint, TIMEOUT_MS, &connection));

    check(tcpx_region_host(sizeof length, &region));
    check(tcpx_receive(connection, region, 0, sizeof length, TAG_LENGTH, &how, &transfer));
    finish(transfer);
    check(tcpx_region_read(region, 0, length, sizeof length));
    check(tcpx_region_release(region));

    size_t bytes = (size_t)length_of_bytes(length);
    region = allocate(bytes, gpu);
    check(tcpx_receive(connection, region, 0, bytes, TAG_MESSAGE, &how, &transfer));
    uint64_t received = finish(transfer);
    if (out)
        save(out, region, (size_t)received);
    check(tcpx_region_release(region));

    check(tcpx_connection_close(connection, TIMEOUT_MS));
    check(tcpx_endpoint_close(endpoint));
    printf("PASSED: received %llu bytes\n", (unsigned long long)received);
    return 0;
}

/* The message as memory of the program: a file, or bytes that are easy to recognise. */
static unsigned char *message(const char *in, size_t *bytes)
{
    FILE *file = in ? fopen(in, "rb") : NULL;
    if (in && (!file || fseek(file, 0, SEEK_END)))
        fail(in);
    if (file) {
        long end = ftell(file);
        if (end < 0 || fseek(file, 0, SEEK_SET))
            fail(in);
        *bytes = (size_t)end;
    }
    unsigned char *data = (unsigned char *)malloc(*bytes + 1);
    if (!data)
        fail("memory for the message");
    for (size_t i = 0; !file && i < *bytes; i++)
        data[i] = (unsigned char)(i * 131 >> 3);
    if (file && (fread(data, 1, *bytes, file) != *bytes || fclose(file)))
        fail(in);
    return data;
}

static int client(const char *address, const char *key, const char *in, size_t bytes, int gpu)
{
    unsigned char length[8];
    tcpx_options options = settings(gpu);
    tcpx_transfer_options how = verified();
    tcpx_connection *connection;
    tcpx_region *small, *region;
    tcpx_transfer *first, *second;
    tcpx_statistics statistics;
    unsigned char *data = message(in, &bytes);

    options.key = key;
    check(tcpx_connect(address, &options, &connection));

    if (gpu >= 0) {
        region = allocate(bytes, gpu);
        check(tcpx_region_write(region, 0, data, bytes));
        free(data);
    } else {
        /* Memory of the program becomes a region; free() gets it back when nothing needs it. */
        check(tcpx_region_wrap(data, bytes, TCPX_MEMORY_HOST, 0, free, data, &region));
    }
    check(tcpx_region_host(sizeof length, &small));
    length_to_bytes(bytes, length);
    check(tcpx_region_write(small, 0, length, sizeof length));
    check(tcpx_send(connection, small, 0, sizeof length, TAG_LENGTH, &how, &first));
    check(tcpx_send(connection, region, 0, bytes, TAG_MESSAGE, &how, &second));
    finish(first);
    uint64_t sent = finish(second);
    check(tcpx_connection_statistics(connection, &statistics));
    check(tcpx_region_release(small));
    check(tcpx_region_release(region));
    check(tcpx_connection_close(connection, TIMEOUT_MS));
    printf("PASSED: sent %llu bytes in %llu chunks\n", (unsigned long long)sent,
           (unsigned long long)statistics.chunks_sent);
    return 0;
}

static int usage(void)
{
    fputs("usage: transfer server ADDRESS:PORT [--out FILE] [--gpu N]\n"
          "       transfer client HOST:PORT KEY [--in FILE | --bytes N] [--gpu N]\n",
          stderr);
    return 2;
}

int main(int count, char **words)
{
    const char *file = NULL;
    size_t bytes = 23;
    int serves = count > 1 && !strcmp(words[1], "server"), at = serves ? 3 : 4, gpu = -1;
    if (tcpx_abi() != TCPX_ABI) {
        fprintf(stderr, "FAILED: libtcpx %s is not for this program\n", tcpx_version());
        return 1;
    }
    if (count < at || (!serves && strcmp(words[1], "client")))
        return usage();
    for (; at + 1 < count; at += 2) {
        if (!strcmp(words[at], serves ? "--out" : "--in"))
            file = words[at + 1];
        else if (!serves && !strcmp(words[at], "--bytes"))
            bytes = (size_t)strtoull(words[at + 1], NULL, 10);
        else if (!strcmp(words[at], "--gpu"))
            gpu = atoi(words[at + 1]);
        else
            return usage();
    }
    if (at != count)
        return usage();
    return serves ? server(words[2], file, gpu) : client(words[2], words[3], file, bytes, gpu);
}
