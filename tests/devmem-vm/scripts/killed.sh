# What a killed process leaves is shown, and undone by a release or by the next start.
devmem_setup threshold dm1 128
settings >/tmp/before
# hold NAME QUEUE PORT: a process that has the queue until its input, descriptor 7 + QUEUE here,
# ends
hold() {
	input=$((7 + $2))
	rm -f "/tmp/in$2" && mkfifo "/tmp/in$2"
	# The last holder of the queue wrote that it is bound; this one empties the file only once it runs.
	: >"/tmp/out$2"
	devmem_setup hold dm1 "$2" "$3" <"/tmp/in$2" >"/tmp/out$2" 8>&- 9>&- &
	eval "$1=$!; exec $input>/tmp/in$2"
	tries=0
	until grep -q bound "/tmp/out$2"; do
		tries=$((tries + 1))
		[ $tries -lt 300 ] || fail "the process for queue $2 does not bind"
		usleep 100000
	done
}

echo "- released"
hold first 1 5201
settings >/tmp/during
cmp -s /tmp/before /tmp/during && fail "nothing was set"
tcpx devmem status | tee /tmp/status
grep -q 'queue 1' /tmp/status
kill -9 $first
wait $first || true
settings >/tmp/after
same /tmp/during /tmp/after
tcpx devmem status | tee /tmp/status
grep -q 'dead' /tmp/status
tcpx devmem release
settings >/tmp/after
same /tmp/before /tmp/after
tcpx devmem release | grep -q 'nothing'

echo "- undone by the next start, which binds the same queue"
hold first 1 5201
kill -9 $first
wait $first || true
hold second 1 5202
[ "$(ethtool -n dm1 | grep -c 'Filter:')" = 1 ] || fail "the dead process's rule is left"
exec 8>&-
wait $second
settings >/tmp/after
same /tmp/before /tmp/after

echo "- two processes, the first killed, the second alive"
hold first 1 5201
hold second 2 5202
kill -9 $first
wait $first || true
tcpx devmem release
[ "$(ethtool -n dm1 | grep -c 'Filter:')" = 1 ] || fail "one rule of the living process should be left"
exec 9>&-
wait $second
settings >/tmp/after
same /tmp/before /tmp/after
