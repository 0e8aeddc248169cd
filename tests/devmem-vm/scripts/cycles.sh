# Binding and undoing leaves nothing, however often.
settings >/tmp/before
devmem_setup cycles dm1 200
settings >/tmp/after
same /tmp/before /tmp/after
