# Engine transfers over the device-memory network, in both roles and all weathers; each byte is
# checked.
knob() { echo "$2" >"/sys/module/dmsim/parameters/$1"; }
both="sizes=1,1447,1448,4097,100000,1048576,3145733 seed=3"
large="sizes=40000000 seed=4"
medium="sizes=10000000 seed=6"
many="shuffled=150x200000 seed=5"
settings >/tmp/before
bindings >/tmp/bindings

pair "into the pool, to the server" "interface=dm1 pool=16777216 one_way=yes expect=all $both" "one_way=yes $both"
pair "into the pool, both ways" "interface=dm1 pool=16777216 expect=all $both" "interface=dm0 pool=16777216 expect=all $both"
pair "into the pool, to the client" "expect=plain $both" "interface=dm0 pool=16777216 expect=all $both"
pair "many at once, two channels" "interface=dm1 pool=16777216 channels=2 expect=all $many" "interface=dm0 pool=16777216 channels=2 expect=all $many"
pair "large" "interface=dm1 pool=16777216 expect=all $large" "interface=dm0 pool=16777216 expect=all $large"

knob drop_every 50
pair "drops" "interface=dm1 pool=16777216 expect=all $both" "interface=dm0 pool=16777216 expect=all $both"
pair "drops, large" "interface=dm1 pool=16777216 expect=all $medium" "interface=dm0 pool=16777216 expect=all $medium"
met dm0.lost dm1.lost
knob drop_every 0
knob pack 1
pair "packed pages" "interface=dm1 pool=16777216 expect=all $large" "interface=dm0 pool=16777216 expect=all $large"
met dm0.packed dm1.packed
knob pack 0
knob hds_miss_bytes 100
knob hds_miss_every 7
# Nothing but the pool and a few linear bytes is to be seen.
gro off
pair "missed splits" "interface=dm1 pool=16777216 expect=pool $both" "interface=dm0 pool=16777216 expect=pool $both"
met dm0.unsplit dm1.unsplit
pair "missed splits, large" "interface=dm1 pool=16777216 expect=pool $medium" "interface=dm0 pool=16777216 expect=pool $medium"
pair "missed splits, many" "interface=dm1 pool=16777216 expect=pool $many" "interface=dm0 pool=16777216 expect=pool $many"
met dm0.unsplit dm1.unsplit
gro on
pair "missed splits under GRO" "interface=dm1 pool=16777216 $both" "interface=dm0 pool=16777216 $both"
knob hds_miss_bytes 1400
pair "long missed splits, which the kernel cannot hand out: the rest comes over plain TCP" "interface=dm1 pool=16777216 expect=moved $large" "interface=dm0 pool=16777216 expect=moved $large"
met dm0.unsplit dm1.unsplit
knob hds_miss_every 0
pair "a small pool" "interface=dm1 pool=1048576 expect=all $medium" "interface=dm0 pool=1048576 expect=all $medium"
# Fewer bytes than a sender has under way at once.
pair "a pool that starves" "interface=dm1 pool=131072 expect=all $both" "interface=dm0 pool=131072 expect=all $both"
met dm0.nobufs dm1.nobufs

ip link set dm1 mtu 9000
sender ip link set dm0 mtu 9000
pair "jumbo frames" "interface=dm1 pool=16777216 expect=all $large" "interface=dm0 pool=16777216 expect=all $large"
met dm0.large dm1.large
ip link set dm1 mtu 1500
sender ip link set dm0 mtu 1500

echo "- two flows into two pools, at the same time"
# flow NUMBER QUEUE: starts one, with its ends in ends_NUMBER
flow() {
	: >"/tmp/server$1"
	: >"/tmp/client$1"
	devmem_peer listen=500$1 interface=dm1 queue=$2 pool=8388608 expect=all $large >"/tmp/server$1" 2>&1 &
	eval "server$1=$!"
	says listening "/tmp/server$1" $!
	sender devmem_peer connect=10.0.0.2:500$1 interface=dm0 queue=$2 pool=8388608 expect=all $large >"/tmp/client$1" 2>&1 &
	eval "client$1=$!"
}
mark
flow 1 2
flow 2 3
both_land() { [ "$(rose dm1.q2_devmem_frags)" -gt 0 ] && [ "$(rose dm1.q3_devmem_frags)" -gt 0 ]; }
tries=0
until both_land; do
	tries=$((tries + 1))
	[ $tries -lt 600 ] || { cat /tmp/server? /tmp/client?; fail "not both flows land"; }
	usleep 50000
done
for one in $server1 $server2 $client1 $client2; do
	kill -0 $one || fail "one flow ended before the other began"
done
for one in $server1 $server2 $client1 $client2; do
	wait $one || { cat /tmp/server? /tmp/client?; fail "one of two flows"; }
done
met dm0.q2_devmem_frags dm0.q3_devmem_frags dm1.q2_devmem_frags dm1.q3_devmem_frags
grep -hE '^(Totals|checked|tokens)' /tmp/server? /tmp/client?

echo "- the program: a file from one host to the other, out of device memory and into it"
head -c 5000000 /dev/urandom >/tmp/file
mkdir -p /tmp/out
afresh
mark
tcpx receive --out /tmp/out --insecure --host --network devmem --devmem-interface dm1 --devmem-pool 8MiB \
	>/tmp/server 2>&1 &
server=$!
says 12345 /tmp/server $server
sender tcpx send /tmp/file 10.0.0.2 --insecure --host --network devmem --devmem-interface dm0 --devmem-pool 8MiB \
	--devmem-send >/tmp/client 2>&1 || { cat /tmp/client /tmp/server; fail "the client"; }
wait $server || { cat /tmp/client /tmp/server; fail "the server"; }
cmp /tmp/file /tmp/out/file || fail "the file differs"
grep -hE '^(sent|received) ' /tmp/server /tmp/client
grep '^landed: \([0-9]*\) of \1 received bytes' /tmp/server || { cat /tmp/server; fail "it does not say where the bytes landed"; }
met dm1.devmem_frags dm0.sent_devmem

settings >/tmp/after
same /tmp/before /tmp/after
unbound /tmp/bindings
