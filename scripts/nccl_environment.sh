# shellcheck shell=bash disable=SC2034 # whoever sources it uses them
# For scripts that source it: NCCL between the GPUs of one host, every byte over sockets of the
# loopback interface.

export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 NCCL_NVLS_ENABLE=0
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
# Its own sockets by default, and as tuned best for large messages.
sockets=(NCCL_NET_PLUGIN=none NCCL_NET=Socket)
tuned=("${sockets[@]}" NCCL_SOCKET_NTHREADS=1 NCCL_NSOCKS_PERTHREAD=1 NCCL_MIN_NCHANNELS=16
  NCCL_NCHANNELS_PER_NET_PEER=16 NCCL_MIN_P2P_NCHANNELS=16)
