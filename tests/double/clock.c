/* A wall clock that goes back by an hour with every second look, for LD_PRELOAD; other clocks are the system's. */
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *time)
{
    static atomic_uint looks;
    int answer = (int)syscall(SYS_clock_gettime, clock, time);

    if (answer == 0 && clock == CLOCK_REALTIME && atomic_fetch_add(&looks, 1) % 2 == 1)
        time->tv_sec -= 3600;
    return answer;
}
