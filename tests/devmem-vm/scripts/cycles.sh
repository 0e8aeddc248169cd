# What `tcpx devices` says of a card.
tcpx devices | sed -n '/device-memory/,$p' | tee /tmp/devices
grep -q 'dm1 (dmsim): perhaps' /tmp/devices

# Binding and undoing leaves nothing, however often.
settings >/tmp/before
devmem_setup cycles dm1 200
settings >/tmp/after
same /tmp/before /tmp/after
