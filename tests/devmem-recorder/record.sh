# Runs as root inside the machine that README.md describes; the recordings come out as text between
# BEGIN and END lines, because its console is all that leaves it.
knobs=/sys/module/dmsim/parameters
ethtool -G dm1 tcp-data-split on && ethtool -X dm1 equal 1 &&
	ethtool -N dm1 flow-type tcp4 dst-port 5201 action 1 || exit 1

# record NAME BYTES MODE [IOVEC_BYTES [RECORDS_OF_ROOM]]; pause_at holds the sender there
record() {
	name=$1 bytes=$2 mode=$3
	shift 3
	timeout 60 recorder receive dm1 5201 1 "$bytes" "$mode" "/tmp/$name" "$@" &
	receiver=$!
	/i/ip netns exec snd timeout 60 recorder send 10.0.0.2 5201 "$bytes" $pause_at || exit 2
	wait $receiver || exit 3
	gzip -9 -c "/tmp/$name" >"/tmp/$name.gz"
	echo "BEGIN $name"
	base64 "/tmp/$name.gz"
	echo "END $name"
}

record small 10000 each
record many-records 500000 late,hold,odd
record reused-tokens 100000 each 16384
record cut-by-iovec 20000 each 1000
record one-record-of-room 20000 each 1048576 1
record foreign-timestamp 20000 each,stamp 4000
record truncated-by-timestamp 5000 each,stamp 1048576 1
record no-room 5000 each 1048576 0
pause_at=15000
record plain-after-unbind 30000 each,unbind 8192
pause_at=
record many-fragments 1600000 late,hold
echo 1 >$knobs/pack
record packed-pages 60000 each 7001
echo 5 >$knobs/hds_miss_every
record linear-in-between 60000 each
record linear-cut-by-iovec 15000 each 1500
echo 0 >$knobs/hds_miss_every
echo 0 >$knobs/pack
/i/ip link set dm1 mtu 9000
/i/ip netns exec snd /i/ip link set dm0 mtu 9000
record jumbo-frames 60000 each
