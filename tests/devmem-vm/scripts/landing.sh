# Bytes of another host land in device memory, and the card is as before afterwards: in order, then with
# lost packets, packed pages, packets that the card does not split, and jumbo frames.
knobs=/sys/module/dmsim/parameters
tcpx devices | sed -n '/device-memory/,$p' | tee /tmp/devices
grep -q 'dm1 (dmsim): perhaps' /tmp/devices
settings >/tmp/before

# land BYTES: to the end of a self-test, with the bytes sent as its instructions say
land() {
	rm -f /tmp/land
	tcpx devmem self-test dm1 --wait 120s >/tmp/land &
	receiver=$!
	tries=0
	until grep -qs 'yes tcpx' /tmp/land; do
		kill -0 $receiver || { cat /tmp/land; fail "the self-test ended early"; }
		tries=$((tries + 1))
		[ $tries -lt 600 ] || fail "the self-test does not get ready"
		usleep 100000
	done
	yes tcpx | head -c "$1" | sender nc 10.0.0.2 12346
	wait $receiver || { cat /tmp/land; fail "self-test"; }
	grep -E 'landed|right' /tmp/land
	grep -q "self-test: PASSED" /tmp/land
	settings >/tmp/after
	same /tmp/before /tmp/after
}

echo "- in order"; land 10000000; cat /tmp/land
echo "- one packet in 50 lost"; mark; echo 50 >$knobs/drop_every; land 3000000; echo 0 >$knobs/drop_every; met dm0.lost
echo "- packed pages"; mark; echo 1 >$knobs/pack; land 5000000; met dm1.packed
echo "- packed, some packets not split off as a whole"; gro off; echo 5 >$knobs/hds_miss_every; land 3000000
grep -q ' 0 beside it' /tmp/land && fail "the card split every packet"
echo 0 >$knobs/hds_miss_every; gro on; echo 0 >$knobs/pack
echo "- jumbo frames"
ip link set dm1 mtu 9000; sender ip link set dm0 mtu 9000
mark; land 10000000; met dm1.large

echo "- steered past the queue, nothing lands and the test says so"
rm -f /tmp/land
tcpx devmem self-test dm1 --wait 120s --queue 2 --port 5000 >/tmp/land 2>&1 &
receiver=$!
tries=0
until grep -qs 'yes tcpx' /tmp/land; do
	tries=$((tries + 1))
	[ $tries -lt 600 ] || fail "the self-test does not get ready"
	usleep 100000
done
ethtool -N dm1 delete "$(ethtool -n dm1 | sed -n 's/^Filter: //p')"
yes tcpx | head -c 100000 | sender nc 10.0.0.2 5000
wait $receiver && fail "bytes that landed nowhere were taken for good"
grep -q 'no byte landed in device memory' /tmp/land
settings >/tmp/after
same /tmp/before /tmp/after
