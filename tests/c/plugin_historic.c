/* The calls in the shapes that sources for the historic header use: everything is `void *`.
 * Compiled as C and as C++, never run. */
#define TCPX_UNTYPED
#include "tcpx_plugin.h"

struct net_handle {
    char data[128];
};

int historic(void);

int historic(void)
{
    struct net_handle handle;
    void *listen_comm = NULL, *send_comm = NULL, *recv_comm = NULL;
    void *send_dev = NULL, *recv_dev = NULL;
    void *mhandle = NULL, *request = NULL;
    char buffer[4096];
    void *data[1];
    int sizes[1] = {4096}, tags[1] = {42}, done = 0, size = 0;
    void *mhandles[1];
    struct tcpx_net_properties properties;

    data[0] = buffer;
    if (tcpx_get_device_count() < 1 || tcpx_get_properties(0, &properties) ||
        tcpx_listen(0, &handle, &listen_comm) ||
        tcpx_connect_v5(0, &handle, &send_comm, &send_dev) ||
        tcpx_accept_v5(listen_comm, &recv_comm, &recv_dev) ||
        tcpx_reg_mr(recv_comm, buffer, sizeof buffer, TCPX_PTR_HOST, &mhandle))
        return 1;
    mhandles[0] = mhandle;
    return tcpx_isend(send_comm, buffer, 23, 42, mhandle, &request) ||
           tcpx_irecv(recv_comm, 1, data, sizes, tags, mhandles, &request) ||
           tcpx_test(request, &done, &size) || tcpx_irecv_consumed(recv_comm, 1, request) ||
           tcpx_dereg_mr(recv_comm, mhandle) || tcpx_close_send(send_comm) ||
           tcpx_close_recv(recv_comm) || tcpx_close_listen(listen_comm);
}
