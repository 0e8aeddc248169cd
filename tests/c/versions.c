/* A peer that speaks other versions of the protocol is an error that names those of both.
 *
 *   versions
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

/* Listens, and says where and with which key. */
static void serve(int tell)
{
    char words[256];
    size_t used;
    tcpx_endpoint *endpoint;
    tcpx_connection *connection;
    memset(words, 0, sizeof words);
    HOLDS(setenv("TCPX_PROTOCOLS", "4-5", 1) == 0);
    WORKS(tcpx_endpoint_listen("127.0.0.1:0", NULL, &endpoint));
    WORKS(tcpx_endpoint_address(endpoint, words, sizeof words, &used));
    WORKS(tcpx_endpoint_key(endpoint, words + used, sizeof words - used, NULL));
    HOLDS(write(tell, words, sizeof words) == (ssize_t)sizeof words);
    /* Nobody gets in. */
    tcpx_endpoint_accept(endpoint, LONG, &connection);
}

int main(void)
{
    char words[256];
    int ends[2], status = 0;
    pid_t peer;
    tcpx_options options;
    tcpx_connection *connection = NULL;

    HOLDS(pipe(ends) == 0);
    /* Begins before this process uses the library. */
    peer = fork();
    HOLDS(peer >= 0);
    if (peer == 0) {
        serve(ends[1]);
        exit(1);
    }
    HOLDS(read(ends[0], words, sizeof words) == (ssize_t)sizeof words);
    memset(&options, 0, sizeof options);
    options.key = words + strlen(words) + 1;
    HOLDS(tcpx_connect(words, &options, &connection) == TCPX_ERR_CONNECT);
    HOLDS(strstr(tcpx_error_text(), "this side is tcpx "));
    HOLDS(strstr(tcpx_error_text(), "the peer is tcpx "));
    HOLDS(strstr(tcpx_error_text(), "protocol 3)"));
    HOLDS(strstr(tcpx_error_text(), "protocols 4 to 5)"));
    HOLDS(strstr(tcpx_error_text(), "this side is older"));
    HOLDS(kill(peer, SIGKILL) == 0);
    HOLDS(waitpid(peer, &status, 0) == peer && WIFSIGNALED(status));
    puts("PASSED");
    return 0;
}
