/* An endpoint lets the clients of a folder in by name, until a client's file is gone.
 *
 *   key_ring FOLDER            (it holds server.key and alice.key)
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tcpx.h"

#define FINE TCPX_OK
#define WORDS tcpx_error_text
#include "check.h"

#define LONG 60000u

struct dial {
    char address[128], file[4096];
    tcpx_connection *made;
    int outcome;
};

static void *connect_there(void *word)
{
    struct dial *dial = word;
    tcpx_options options = {0};
    options.key_file = dial->file;
    dial->outcome = tcpx_connect(dial->address, &options, &dial->made);
    return NULL;
}

/* As whom the endpoint knows the client that has this key file. */
static void expect_name(tcpx_endpoint *endpoint, struct dial *dial, const char *expected)
{
    pthread_t thread;
    tcpx_connection *accepted;
    char name[64] = "?";
    HOLDS(pthread_create(&thread, NULL, connect_there, dial) == 0);
    WORKS(tcpx_endpoint_accept(endpoint, LONG, &accepted));
    HOLDS(pthread_join(thread, NULL) == 0);
    WORKS(dial->outcome);
    WORKS(tcpx_connection_client(accepted, name, sizeof name, NULL));
    HOLDS(!strcmp(name, expected));
    WORKS(tcpx_connection_client(dial->made, name, sizeof name, NULL));
    HOLDS(!strcmp(name, ""));
    WORKS(tcpx_connection_close(accepted, 0));
    WORKS(tcpx_connection_close(dial->made, LONG));
}

int main(int count, char **words)
{
    struct dial alice, server;
    tcpx_options options = {0};
    tcpx_endpoint *endpoint;
    HOLDS(count == 2);
    memset(&alice, 0, sizeof alice);
    options.key_file = words[1];
    WORKS(tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint));
    WORKS(tcpx_endpoint_address(endpoint, alice.address, sizeof alice.address, NULL));
    server = alice;
    snprintf(alice.file, sizeof alice.file, "%s/alice.key", words[1]);
    snprintf(server.file, sizeof server.file, "%s/server.key", words[1]);
    expect_name(endpoint, &alice, "alice");
    expect_name(endpoint, &server, "server");
    options.key = "a key";
    HOLDS(tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint) == TCPX_ERR_SETTING);
    options.key = NULL;
    options.insecure = 1;
    HOLDS(tcpx_endpoint_listen("127.0.0.1:0", &options, &endpoint) == TCPX_ERR_SETTING);
    options.insecure = 0;
    /* Without its file a client is a stranger. It reads it once more before. */
    options.key_file = alice.file;
    HOLDS(unlink(alice.file) == 0);
    HOLDS(tcpx_connect(alice.address, &options, &alice.made) == TCPX_ERR_SETTING);
    HOLDS(strstr(tcpx_error_text(), "alice.key"));
    expect_name(endpoint, &server, "server");
    WORKS(tcpx_endpoint_close(endpoint));
    puts("PASSED");
    return 0;
}
