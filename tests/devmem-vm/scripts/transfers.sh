# Engine transfers over the device-memory network, in both roles and all weathers; each byte is checked.
knob() { echo "$2" >"/sys/module/dmsim/parameters/$1"; }
# listening FILE PID: until the server says so
listening() {
	tries=0
	until grep -q listening "$1"; do
		tries=$((tries + 1))
		[ $tries -lt 300 ] && kill -0 "$2" 2>/dev/null || { cat "$1"; fail "no server"; }
		usleep 100000
	done
}
# pair NAME SERVER CLIENT: both ends with these arguments, the server at the receiver's card
pair() {
	echo "- $1"
	# The last server wrote that it listens; this one empties the file only once it runs.
	: >/tmp/server
	devmem_peer listen=5000 $2 >/tmp/server 2>&1 &
	server=$!
	listening /tmp/server $server
	sender devmem_peer connect=10.0.0.2:5000 $3 >/tmp/client 2>&1 || { cat /tmp/client /tmp/server; fail "$1: client"; }
	wait $server || { cat /tmp/client /tmp/server; fail "$1: server"; }
	grep -hE '^(Totals|moved)' /tmp/server /tmp/client
}
both="sizes=1,1447,1448,4097,100000,1048576,3145733 seed=3"
large="sizes=20000000 seed=4"
many="shuffled=150x200000 seed=5"
settings >/tmp/before

pair "into the pool, to the server" "interface=dm1 pool=16777216 one_way=yes expect=all $both" "one_way=yes $both"
pair "into the pool, both ways" "interface=dm1 pool=16777216 expect=all $both" "interface=dm0 pool=16777216 expect=all $both"
pair "into the pool, to the client" "expect=plain $both" "interface=dm0 pool=16777216 expect=all $both"
pair "many at once, two channels" "interface=dm1 pool=16777216 channels=2 expect=all $many" "interface=dm0 pool=16777216 channels=2 expect=all $many"
pair "large" "interface=dm1 pool=16777216 expect=all $large" "interface=dm0 pool=16777216 expect=all $large"

knob drop_every 50
pair "drops" "interface=dm1 pool=16777216 expect=all $both" "interface=dm0 pool=16777216 expect=all $both"
knob drop_every 0
knob pack 1
pair "packed pages" "interface=dm1 pool=16777216 expect=all $large" "interface=dm0 pool=16777216 expect=all $large"
knob pack 0
# GRO mixes small packets that are linear throughout with fragments, and the kernel can then hand out neither
# (ENODEV): without it, nothing but the pool and a few linear bytes is to be seen.
gro() {
	ethtool -K dm1 gro "$1"
	sender ethtool -K dm0 gro "$1"
}
knob hds_miss_bytes 100
knob hds_miss_every 7
gro off
pair "missed splits" "interface=dm1 pool=16777216 expect=pool $both" "interface=dm0 pool=16777216 expect=pool $both"
pair "missed splits, many" "interface=dm1 pool=16777216 expect=pool $many" "interface=dm0 pool=16777216 expect=pool $many"
gro on
pair "missed splits under GRO" "interface=dm1 pool=16777216 $both" "interface=dm0 pool=16777216 $both"
knob hds_miss_bytes 1400
pair "long missed splits, which the kernel cannot hand out: the rest comes over plain TCP" "interface=dm1 pool=16777216 expect=moved $large" "interface=dm0 pool=16777216 expect=moved $large"
knob hds_miss_every 0
pair "a pool that starves" "interface=dm1 pool=1048576 expect=all $both" "interface=dm0 pool=1048576 expect=all $both"

ip link set dm1 mtu 9000
sender ip link set dm0 mtu 9000
pair "jumbo frames" "interface=dm1 pool=16777216 expect=all $large" "interface=dm0 pool=16777216 expect=all $large"
ip link set dm1 mtu 1500
sender ip link set dm0 mtu 1500

echo "- two flows into two pools"
: >/tmp/second
devmem_peer listen=5001 interface=dm1 queue=2 pool=8388608 expect=all $large >/tmp/second 2>&1 &
second=$!
listening /tmp/second $second
sender devmem_peer connect=10.0.0.2:5001 interface=dm0 queue=2 pool=8388608 expect=all $large >/tmp/second-client 2>&1 &
second_client=$!
pair "and the first of them" "interface=dm1 queue=3 pool=8388608 expect=all $large" "interface=dm0 queue=3 pool=8388608 expect=all $large"
wait $second || { cat /tmp/second; fail "second server"; }
wait $second_client || { cat /tmp/second-client; fail "second client"; }

settings >/tmp/after
same /tmp/before /tmp/after
