/* A plugin that fails at its start, in the way that the variable TCPX_BAD_PLUGIN names. With OLD defined it exports
 * only a table that is too old for anybody. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*logger_fn)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

static int is(const char *way)
{
    const char *asked = getenv("TCPX_BAD_PLUGIN");
    return asked && strcmp(asked, way) == 0;
}

static void hang(void)
{
    for (;;)
        pause();
}

__attribute__((constructor)) static void load(void)
{
    if (is("load-hangs"))
        hang();
}

static int bad_init(logger_fn log)
{
    log(2, 16, "bad_init", 1, "about to be bad");
    puts("a line of the plugin's own");
    fflush(stdout);
    if (is("init-hangs"))
        hang();
    if (is("init-forges"))
        puts("\x1e\"passed\"\n\"passed\"");
    if (is("init-redirects")) {
        int null = open("/dev/null", O_RDWR);
        for (int file = 0; file < 3; file++)
            dup2(null, file);
        return 3;
    }
    if (is("init-exits") || is("init-forges"))
        exit(0);
    if (is("init-crashes"))
        abort();
    return is("init-fails") ? 3 : 0;
}

static int bad_devices(int *count)
{
    *count = is("many-devices") ? INT32_MAX : 0;
    return 0;
}

static int never(void)
{
    return 3;
}

/* Version 8: the calls that these tests do not reach have any signature. */
__attribute__((visibility("default"))) struct {
    const char *name;
    int (*init)(logger_fn);
    int (*devices)(int *);
    int (*rest[16])(void);
}
#ifdef OLD
ncclNetPlugin_v4
#else
ncclNetPlugin_v8
#endif
    = {"bad", bad_init, bad_devices,
       {never, never, never, never, never, never, never, never, never, never, never, never, never, never, never, never}};
