/* Ends amid transfers of GPU memory, in C: gpu_ends reset|return|exit
 *
 * Two processes on GPU 0. One exposes GPU memory; the other starts puts into it from memory of the
 * driver's and then, with the puts under way, resets the GPU (each must end, and some with an
 * error), returns from main, or calls exit with its handles open. scripts/gpu-torch.sh runs it: a
 * signal is a failure, and so is a wait that does not end.
 */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tcpx.h"

#define TIMEOUT_MS 20000u /* for each step */
#define BYTES ((size_t)16 << 20)
#define PUTS 100
enum { TAG_KEY = 1 };

static void fail(const char *what)
{
    fprintf(stderr, "FAILED: %s\n", what);
    exit(1);
}

static void check(int code)
{
    if (code == TCPX_OK)
        return;
    fprintf(stderr, "FAILED: %s (%s)\n", tcpx_error_text(), tcpx_error_name(code));
    exit(1);
}

/* A function of the driver. */
static void *driver(const char *name)
{
    static void *library;
    void *found;
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW);
    found = library ? dlsym(library, name) : NULL;
    if (!found)
        fail(name);
    return found;
}

/* 16 MiB as a CUDA program has them: in the primary context. */
static void *gpu_memory(void)
{
    int (*init)(unsigned) = (int (*)(unsigned))driver("cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))driver("cuDevicePrimaryCtxRetain");
    int (*set)(void *) = (int (*)(void *))driver("cuCtxSetCurrent");
    int (*allocate)(void **, size_t) = (int (*)(void **, size_t))driver("cuMemAlloc_v2");
    void *context, *memory = NULL;
    if (init(0) || retain(&context, 0) || set(context) || allocate(&memory, BYTES))
        fail("the driver gives no memory");
    return memory;
}

static void owner(int tell)
{
    char place[256];
    unsigned char key[TCPX_WINDOW_KEY_MAX];
    size_t used, bytes;
    tcpx_options options;
    tcpx_endpoint *endpoint;
    tcpx_connection *connection;
    tcpx_region *memory, *message;
    tcpx_window *window;
    tcpx_transfer *transfer;

    memset(&options, 0, sizeof options);
    options.memory = TCPX_MEMORY_CUDA;
    check(tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint));
    check(tcpx_endpoint_address(endpoint, place, sizeof place, &used));
    check(tcpx_endpoint_key(endpoint, place + used, sizeof place - used, NULL));
    if (write(tell, place, sizeof place) != (ssize_t)sizeof place)
        fail("cannot write to the pipe");
    check(tcpx_endpoint_accept(endpoint, TIMEOUT_MS, &connection));
    check(tcpx_region_cuda(0, PUTS * BYTES, &memory));
    check(tcpx_expose(connection, memory, 0, PUTS * BYTES, TCPX_RIGHT_PUT, &window));
    check(tcpx_window_key(window, key, sizeof key, &bytes));
    check(tcpx_region_host(sizeof key, &message));
    check(tcpx_region_write(message, 0, key, bytes));
    check(tcpx_send(connection, message, 0, bytes, TAG_KEY, NULL, &transfer));
    check(tcpx_transfer_wait(transfer, TIMEOUT_MS, NULL));
    /* Until the other process has ended, in whatever way. */
    tcpx_notification(connection, TIMEOUT_MS, key, sizeof key, &bytes);
}

int main(int count, char **words)
{
    char place[256];
    unsigned char key[TCPX_WINDOW_KEY_MAX];
    size_t got = 0;
    int between[2], failed = 0;
    tcpx_options options;
    tcpx_connection *connection;
    tcpx_region *message, *source;
    tcpx_transfer *transfer, *running[PUTS];
    tcpx_report report;
    pid_t child;

    if (count != 2 || pipe(between))
        fail("gpu_ends reset|return|exit");
    child = fork();
    if (child == 0) {
        owner(between[1]);
        return 0;
    }
    while (got < sizeof place) {
        ssize_t n = read(between[0], place + got, sizeof place - got);
        if (n <= 0)
            fail("the owner has ended");
        got += (size_t)n;
    }
    memset(&options, 0, sizeof options);
    options.memory = TCPX_MEMORY_CUDA;
    options.key = place + strlen(place) + 1;
    check(tcpx_connect(place, &options, &connection));
    check(tcpx_region_host(sizeof key, &message));
    check(tcpx_receive(connection, message, 0, sizeof key, TAG_KEY, NULL, &transfer));
    check(tcpx_transfer_wait(transfer, TIMEOUT_MS, &report));
    check(tcpx_region_read(message, 0, key, (size_t)report.bytes));
    check(tcpx_region_wrap(gpu_memory(), BYTES, TCPX_MEMORY_CUDA, 0, NULL, NULL, &source));
    for (int i = 0; i < PUTS; i++)
        check(tcpx_put(connection, source, 0, BYTES, key, (size_t)report.bytes,
                       (uint64_t)i * BYTES, NULL, &running[i]));
    check(tcpx_transfer_wait(running[0], TIMEOUT_MS, NULL));
    if (!strcmp(words[1], "return"))
        return 0;
    if (!strcmp(words[1], "exit"))
        exit(0);
    if (((int (*)(int))driver("cuDevicePrimaryCtxReset_v2"))(0))
        fail("the driver does not reset");
    check(tcpx_transfer_release(running[0]));
    for (int i = 1; i < PUTS; i++) {
        int code = tcpx_transfer_wait(running[i], TIMEOUT_MS, NULL);
        if (code == TCPX_ERR_TIMED_OUT)
            fail("a put does not end after the reset");
        failed += code != TCPX_OK;
        check(tcpx_transfer_release(running[i]));
    }
    if (!failed)
        fail("no put was under way at the reset");
    tcpx_connection_close(connection, 1000);
    check(tcpx_region_release(source));
    waitpid(child, NULL, 0);
    printf("%d of %d puts ended with an error\n", failed, PUTS);
    return 0;
}
