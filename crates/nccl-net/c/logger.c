/* The variadic logger that a plugin receives. Rust cannot define a variadic function, so this one
 * formats into a bounded buffer and hands the text on. Symbols are hidden: a process may hold
 * several copies of this file. */
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#define TEXT_BYTES 1024

typedef int (*admit_fn)(int level, const char *format, unsigned long long *suppressed);
typedef void (*emit_fn)(int level, unsigned long flags, const char *file, int line,
                        const char *text, size_t len, unsigned long long suppressed);

/* Passed in with the first load, before any plugin can hold the logger. */
static admit_fn admit;
static emit_fn emit;

void nccl_net_logger_hooks(admit_fn admit_hook, emit_fn emit_hook)
{
    __atomic_store_n(&emit, emit_hook, __ATOMIC_RELEASE);
    __atomic_store_n(&admit, admit_hook, __ATOMIC_RELEASE);
}

void nccl_net_logger(int level, unsigned long flags, const char *file, int line, const char *fmt,
                     ...)
{
    char text[TEXT_BYTES];
    unsigned long long suppressed = 0;
    admit_fn may = __atomic_load_n(&admit, __ATOMIC_ACQUIRE);
    emit_fn out = __atomic_load_n(&emit, __ATOMIC_ACQUIRE);

    /* Asked before formatting: a plugin may log a million lines a minute. */
    if (may == NULL || out == NULL || fmt == NULL || !may(level, fmt, &suppressed))
        return;
    va_list args;
    va_start(args, fmt);
    int len = vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (len < 0)
        return;
    size_t kept = (size_t)len < sizeof text ? (size_t)len : sizeof text - 1;
    out(level, flags, file, line, text, kept, suppressed);
}
