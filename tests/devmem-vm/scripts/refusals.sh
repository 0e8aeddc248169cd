# Each refusal of the kernel is an error of its own.
settings >/tmp/before
devmem_setup refusals dm1
# The test itself turned the split on; what the bindings changed beyond that is undone.
ethtool -G dm1 tcp-data-split auto
settings >/tmp/now
same /tmp/before /tmp/now

cards queue_ops=0
devmem_setup refused dm1 NoQueueOperations
cards dma=0
devmem_setup refused dm1 NoDma
[ -z "$(ls /run/tcpx/devmem/*.json 2>/dev/null)" ] || fail "a record is left"
